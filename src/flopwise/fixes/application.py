"""From the meter's session to a scene, and from a plan to fixes that stay on for the whole run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from flopwise.fixes.interface import Applied, Declined, Facts, Scene
from flopwise.fixes.registry import FIXES
from flopwise.meter.found import compiled_parts, compiles_own_code
from flopwise.meter.rows import Row
from flopwise.meter.session import Session


def facts_of(session: Session, autocast: torch.dtype | None) -> Facts:
    """Returns what the script was seen to do by itself, given the autocast dtype around its forward."""
    return Facts(
        autocast=autocast is not None,
        grad_scaler=session.uses_scaler,
        compiles=compiles_own_code() or any(compiled_parts(root) for root in session.roots.found),
    )


def scene_of(session: Session, rows: Sequence[Row] = ()) -> Scene:
    """Returns the scene of a session. `rows` are steady steps that carry the length of the step in `end_ns`."""

    def share(value: Any) -> float | None:
        if not rows:
            return None
        return statistics.fmean(min(1.0, value(row) / max(row.end_ns, 1)) for row in rows)

    return Scene(
        roots=tuple(session.roots.found),
        optimizers=tuple(
            o for reference in session.optimizers.values() if (o := reference()) is not None
        ),
        loaders=tuple(session.loaders),
        device=session.device,
        step_s=statistics.fmean(row.end_ns for row in rows) * 1e-9 if rows else None,
        data_frac=share(lambda row: row.data_ns),
        compute_frac=share(lambda row: row.forward_ns + row.backward_ns),
        optimizer_frac=share(lambda row: row.optimizer_ns),
        facts=facts_of(session, session.roots.autocast),
    )


class Plan:
    """Applies planned fixes once the modules are known, and leaves them on."""

    def __init__(self, session: Session, codes: Sequence[str]) -> None:
        self._session = session
        self._codes = list(codes)
        self.applied: list[Applied] = []

    def apply(self) -> None:
        """Applies what fits; what does not is noted, and the run goes on without it."""
        session = self._session
        on = []
        for kind in FIXES:
            if kind.code not in self._codes:
                continue
            fix = kind()
            scene = scene_of(session)
            answer = fix.check(_trusting(scene))
            if isinstance(answer, Declined):
                session.note(f"planned fix {fix.code} {fix.name} left out: {answer.reason}")
                continue
            try:
                applied = fix.apply(scene)
                applied.enable()
            except Exception as error:
                session.note(
                    f"planned fix {fix.code} {fix.name} failed: {type(error).__name__}: {error}"
                )
                continue
            self.applied.append(applied)
            on.append(f"{fix.code} {fix.name}")
            if fix.code == "FW104":
                session.autocast = torch.bfloat16
        session.note(f"applied by the plan: {', '.join(on) or 'nothing'}")
        session.roots.watch_again()


def _trusting(scene: Scene) -> Scene:
    """Returns the scene with shares that pass any threshold: a plan's causes were measured when it was made."""
    from dataclasses import replace

    return replace(scene, data_frac=1.0, compute_frac=1.0, optimizer_frac=1.0)


def install(session: Session, codes: Sequence[str]) -> None:
    """Makes `session` apply a plan at the first moment when the modules are known."""
    session.plan = Plan(session, codes)
