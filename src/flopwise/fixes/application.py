"""From the meter's session to a scene, and from a plan to fixes that stay on for the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flopwise.fixes import canary
from flopwise.fixes.interface import Applied, Declined, Facts, Fix, Scene, StartUp
from flopwise.fixes.registry import FIXES
from flopwise.fixes.slot import script_compiles
from flopwise.meter import finish
from flopwise.meter.found import compiles_own_code
from flopwise.meter.rows import Row
from flopwise.meter.session import Session


def facts_of(session: Session, autocast: torch.dtype | None) -> Facts:
    """Returns what the script was seen to do by itself, given the autocast dtype around its forward."""
    return Facts(
        autocast=autocast is not None or session.roots.autocast_within is not None,
        grad_scaler=session.uses_scaler,
        compiles=compiles_own_code() or any(script_compiles(root) for root in session.roots.found),
    )


def scene_of(session: Session, rows: Sequence[Row] = ()) -> Scene:
    """Returns the scene of a session. `rows` are steady steps that carry the length of the step in `end_ns`."""

    def share(value: Any) -> float | None:
        if not rows:
            return None
        return float(sum(min(1.0, value(row) / max(row.end_ns, 1)) for row in rows) / len(rows))

    return Scene(
        roots=tuple(session.roots.forwards),
        optimizers=tuple(
            o for reference in session.optimizers.values() if (o := reference()) is not None
        ),
        loaders=tuple(session.loaders),
        device=session.device,
        step_s=sum(row.end_ns for row in rows) / len(rows) * 1e-9 if rows else None,
        data_frac=share(lambda row: row.data_ns),
        compute_frac=share(lambda row: row.forward_ns + row.backward_ns),
        optimizer_frac=share(lambda row: row.optimizer_ns),
        facts=facts_of(session, session.roots.autocast),
        loads=session.surroundings.loads(),
        batches_per_step=sum(max(1, row.micro_batches) for row in rows) / len(rows)
        if rows
        else 1.0,
    )


class Plan:
    """Applies planned fixes and leaves them on: some before the script builds anything, the rest once modules are known."""

    def __init__(
        self,
        session: Session,
        fixes: Sequence[Mapping[str, Any]],
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        self._session = session
        self._expected = expected
        # Without step times to hold it against it is not watched: a trial, or the proof itself.
        self._post = None if expected is None else canary.Post(session.config.folder)
        self._settings = {fix["code"]: dict(fix.get("setting") or {}) for fix in fixes}
        self._started: dict[str, StartUp] = {}
        self.applied: list[Applied] = []
        self._on: list[canary.Watched] = []

    def attach(self) -> None:
        """Installs what must be there before the script builds anything."""
        if self._post is not None:
            self._post.install()
        kinds = {kind.code: kind for kind in FIXES}
        for code, setting in list(self._settings.items()):
            kind = kinds.get(code)
            if kind is None:
                self._session.note(f"planned fix {code} left out: this flopwise does not know it")
                continue
            try:
                start_up = kind.at_start(setting)
                if start_up is not None:
                    start_up.install()
            except ValueError as error:
                self._session.note(f"planned fix {code} left out: {error}")
                del self._settings[code]
                continue
            if start_up is not None:
                self._started[code] = start_up
                self._session.patches.names.append(start_up.name)

    def apply(self) -> None:
        """Applies what fits; what does not is noted, and the run goes on without it."""
        on = []
        self._session.roots.look_away()
        for kind in FIXES:
            if kind.code not in self._settings:
                continue
            started = self._started.get(kind.code)
            trouble = self._switch_on(kind()) if started is None else started.trouble()
            if trouble is None:
                on.append(f"{kind.code} {kind.name}")
                applied = self.applied[-1] if started is None else None
                self._on.append(canary.Watched(kind.code, kind.name, applied, kind.late))
            else:
                self._session.note(f"planned fix {kind.code} {kind.name} {trouble}")
        self._session.note(f"applied by the plan: {', '.join(on) or 'nothing'}")
        self._session.roots.watch_again()
        if self._post is not None and self._on:
            self._post.canary = canary.Canary(
                self._on,
                self._expected or {},
                self._post.say,
                events_per_step=len(self._session.boundaries.cycle) or 1,
                alone=finish.identity()[1] == 1,
            )

    def compile_s(self) -> dict[str, float]:
        """Returns what compiling has taken in this run, by fix: little, where the cache had it."""
        on = [(one.code, one.applied) for one in self._on if one.applied is not None]
        return {code: applied.compile_s for code, applied in on if applied.compile_s}

    def _switch_on(self, fix: Fix) -> str | None:
        """Returns why a fix is not on, None if it is."""
        scene = scene_of(self._session)
        answer = fix.check(_trusting(scene))
        if isinstance(answer, Declined):
            return f"left out: {answer.reason}"
        try:
            applied = fix.apply(scene, self._settings[fix.code])
            applied.enable()
        except Exception as error:
            return f"failed: {type(error).__name__}: {error}"
        self.applied.append(applied)
        if fix.code == "FW104":
            self._session.autocast = torch.bfloat16
        return None


def _trusting(scene: Scene) -> Scene:
    """Returns the scene with shares that pass any threshold, and every finding: a plan's causes were measured when it was made."""
    findings: dict[str, float | None] = {code: None for kind in FIXES for code in kind.findings}
    return replace(
        scene,
        data_frac=1.0,
        compute_frac=1.0,
        optimizer_frac=1.0,
        findings=findings | dict(scene.findings),
    )


def install(
    session: Session,
    fixes: Sequence[Mapping[str, Any]],
    expected: Mapping[str, Any] | None = None,
) -> None:
    """Makes `session` apply a plan. Call it before the session attaches and before the script builds its loaders.

    Args:
        session: of this process.
        fixes: each with its `code` and its `setting`, as a plan or an earlier trial chose it.
        expected: step times of the plan's proof (`Canary`), where it is to be watched in production.
    """
    plan = Plan(session, fixes, expected)
    plan.attach()
    session.plan = plan
