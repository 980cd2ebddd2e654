"""A look at a running training: which fixes may be tried on it, and why the others not. Nothing is applied.

For fixes that are only tried in processes of their own, and for a dry run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flopwise.fixes.application import scene_of
from flopwise.fixes.candidates import predicted_gain
from flopwise.fixes.interface import Declined, Fix, Scene
from flopwise.fixes.racing import UNSTEADY
from flopwise.fixes.registry import FIXES
from flopwise.meter import agreement, ending, finish
from flopwise.meter.replay import error_words
from flopwise.meter.rows import Row
from flopwise.meter.session import Session
from flopwise.records.store import write_text

SCHEMA = "flopwise.survey/1"
#: Where it is in the run folder.
NAME = "survey.json"
#: Steady steps that are looked at.
STEPS = 8
#: Steps after which it is taken as it is.
MOST_STEPS = 200
#: Several ranks must end at one step, and agree on none but its number.
OF_RANKS = 40


class Survey:
    """Asks fixes whether they may be tried, once a few steady steps were seen."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self._path = Path(str(session.config.folder)) / NAME
        self._kinds = [kind for kind in FIXES if kind.code in options["fixes"]]
        self._findings: dict[str, float | None] = dict(options.get("findings") or {})
        self._ends = bool(options.get("ends"))
        self._rows: list[Row] = []
        self._before: Row | None = None
        self._seen = 0

    def __call__(self, session: Session, row: Row) -> None:
        """Takes one step end from the meter."""
        before, self._before = self._before, row
        self._seen += 1
        known = session.boundaries_known() and session.roots.settled and len(session.rows) >= 5
        if known and before is not None and not row.flags & UNSTEADY:
            self._rows.append(row._replace(end_ns=row.end_ns - before.end_ns))
        rank, world, _ = finish.identity()
        enough = self._seen >= OF_RANKS if world > 1 else len(self._rows) >= STEPS
        if not enough and self._seen < MOST_STEPS:
            return
        session.observers.remove(self)
        if rank == 0:
            self._write(session)
        if self._ends:
            session.detach()
            agreement.leave_together(session)
            ending.end_script(session.trainers.thread, session.config.folder)

    def _write(self, session: Session) -> None:
        """Writes what the fixes answered; without it nothing is lost but the answer."""
        try:
            scene = dataclasses.replace(scene_of(session, self._rows), findings=self._findings)
            write_text(self._path, self._text(scene))
        except Exception as error:
            session.note(f"the fixes could not be asked: {error_words(error)}")

    def _text(self, scene: Scene) -> str:
        fixes = [asked(kind(), scene, self._findings) for kind in self._kinds]
        return json.dumps({"schema": SCHEMA, "fixes": fixes}, indent=1) + "\n"


def asked(fix: Fix, scene: Scene, findings: Mapping[str, float | None]) -> dict[str, Any]:
    """Returns what a fix answers, as it is stored."""
    answer = {
        "code": fix.code,
        "name": fix.name,
        "numerics": fix.numerics,
        "opt_in": fix.opt_in,
        "causes": list(fix.causes),
        "findings": [code for code in fix.findings if code in findings],
        "conflicts": list(fix.conflicts),
        "eligible": False,
        "reason": "",
        "predicted_gain_frac": None,
        "environment": {},
    }
    try:
        said = fix.check(scene)
        environment = fix.environment({})
    except Exception as error:
        return {**answer, "reason": f"could not be asked: {error_words(error)}"}
    if isinstance(said, Declined):
        return {**answer, "reason": said.reason}
    gain = predicted_gain(fix, said, findings)
    return {
        **answer, "eligible": True, "reason": said.note, "predicted_gain_frac": gain, "environment": environment,
    }  # fmt: skip


def install(session: Session, options: Mapping[str, Any]) -> None:
    """Makes `session` look at what fixes say of this training."""
    session.observers.append(Survey(session, options))
