"""A tune whose processes are played: each leaves what it is told to, takes its time, and ends as it is told."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flopwise import tuning
from flopwise.launch import process
from flopwise.launch.command import RUN
from flopwise.measurement import ceilings
from flopwise.records import ceilings as ceilings_records
from flopwise.records import store
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling
from flopwise.records.pool import Shares, Turn
from flopwise.records.rank import RankRecord
from flopwise.records.verdict import Comparison, Trial, TuneRecord
from flopwise.tuning import state as states
from flopwise.tuning.budget import Budget
from flopwise.tuning.state import Asked

CEILINGS = CeilingsRecord(
    schema=ceilings_records.SCHEMA, flopwise="0", created="2026-01-01T00:00:00+00:00", device_type="cpu",
    device_name="a CPU", torch="2.13.0+cpu", cuda=None, driver=None, threads=1, cores=4, wall_s=1.0,
    gemm=[GemmCeiling("fp32", 1e12, "512x512x512 nt")], copy_bytes_per_s=None, copy_size_bytes=None,
    dispatch_s=None, launch_s=None, link=None,
)  # fmt: skip


@dataclass
class Stage:
    """What the processes of a tune are to do, and what they were told."""

    make_rank: Callable[..., RankRecord]
    folder: Path
    now: float = 0.0
    trials: list[tuple[list[Trial], Comparison | None, list[str]]] = field(default_factory=list)
    #: Pairs that trial processes leave, one list a process; one that leaves some ends before its trials are complete.
    turns: list[list[Turn]] = field(default_factory=list)
    handed: list[Trial] = field(default_factory=list)  # by each trial process
    left_out: set[str] = field(default_factory=set)  # fixes that a plan does not switch on
    takes_s: dict[str, float] = field(default_factory=dict)  # by the beginning of a name; else 10 s
    ends: dict[str, int] = field(default_factory=dict)  # by name: codes of what ends before a step
    removes: dict[str, Path] = field(default_factory=dict)  # by name: a folder that it removes
    goes_on: str | None = None  # beginning of the names of those that go on once measured
    fields: dict[str, Any] = field(default_factory=dict)  # of the rank records
    cuts: dict[str, BaseException] = field(default_factory=dict)  # by name: what ends us, too
    looks: Callable[[str], object] = lambda name: None  # is told what begins
    envs: Callable[[str, dict[str, str]], object] = lambda name, env: (
        None
    )  # and in which environment
    surveys: list[dict[str, Any]] = field(
        default_factory=list
    )  # what fixes answer in trial processes
    new_ms: dict[str, float] = field(default_factory=dict)  # by fix: its steps; else 5 with fixes
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    limits_s: dict[str, float] = field(default_factory=dict)

    def run(self, argv: list[str], env: dict[str, str], **how: Any) -> int:
        """Stands in for `process.run`."""
        folder = Path(env[RUN])
        name, limit_s = folder.name, how["timeout_s"]
        options = self.options[name] = json.loads((folder / "launch.json").read_text())
        self.limits_s[name] = limit_s
        self.looks(name)
        self.envs(name, env)
        takes_s = next((s for n, s in self.takes_s.items() if name.startswith(n)), 10.0)
        self.now += min(takes_s, limit_s)
        if name in self.removes:
            shutil.rmtree(self.removes[name])
            return 0
        if takes_s > limit_s:
            how["on_timeout"]()
            return -signal.SIGTERM
        if self.ends.get(name):
            return self.ends[name]
        if "survey" in options:
            survey = {"schema": "flopwise.survey/1", "fixes": self.surveys}
            (folder / "survey.json").write_text(json.dumps(survey))
        if name == "survey":
            return 0
        if name in self.cuts and not name.startswith("trials-"):
            raise self.cuts[name]
        if not name.startswith("trials-"):
            rank = self.rank(name, options)
            store.write(folder / "ranks" / "r.json", rank)
            if self.goes_on is not None and name.startswith(self.goes_on):
                assert not how["watch"]()
                (folder / "goes-on-1.txt").write_text("why\n")
                assert how["watch"]()
                return -signal.SIGTERM
        elif self.trials or self.turns:
            trials, aa, notes = self.trials.pop(0) if self.trials else ([], None, [])
            turns = self.turns.pop(0) if self.turns else None
            content = {
                "torch": "2.13.0", "trials": [dataclasses.asdict(t) for t in trials],
                "aa": dataclasses.asdict(aa) if aa else None, "notes": notes,
                "status": "complete" if turns is None else "running",
                "pools": [dataclasses.asdict(t) for t in turns or []],
                "handed": [dataclasses.asdict(t) for t in self.handed],
                "shares": dataclasses.asdict(Shares(step_s=0.01)), "comparisons": 3,
            }  # fmt: skip
            (folder / "trials.json").write_text(json.dumps(content))
        if name in self.cuts:
            raise self.cuts[name]
        return 0

    def rank(self, name: str, options: dict[str, Any]) -> RankRecord:
        """Returns what a measured process leaves: 30 ms a step first, then 10 as it is and 5 with fixes."""
        fixes = [fix["code"] for fix in options.get("apply", [])]
        notes = [f"planned fix {code} x left out: why" for code in fixes if code in self.left_out]
        on = [f"{code} x" for code in fixes if code not in self.left_out]
        notes += [f"applied by the plan: {', '.join(on) or 'nothing'}"] if fixes else []
        with_ms = min((self.new_ms.get(code, 5.0) for code in fixes), default=10.0)
        step_ms = {"baseline": 30}.get(name, with_ms) + len(self.options) / 100
        return self.make_rank(steps=40, step_ns=int(step_ms * 1e6), notes=notes, **self.fields)

    def asked(self, budget_s: float = 600, **changes: Any) -> Asked:
        """Returns a tune of two fixes, three processes an arm in its proof."""
        script = self.folder.parent / "script" / "train.py"
        script.parent.mkdir(exist_ok=True)
        if not script.exists():
            script.write_text("")
        given: dict[str, Any] = {
            "command": ["flopwise", "tune", "train.py"], "argv": ["python", str(script)], "script": "train.py",
            "file": str(script), "typed": ["train.py"], "codes": ["FW101", "FW102"], "budget_s": budget_s,
            "per_fix_s": 30, "processes": 3, "proof_steps": 40, **changes,
        }  # fmt: skip
        return Asked(**given)

    def tuning(self, budget_s: float = 600, **changes: Any) -> tuning.Tuning:
        """Returns such a tune, about to begin."""
        budget = Budget(budget_s, processes=3, proof_steps=40, clock=lambda: self.now)
        begun = states.begin(self.asked(budget_s, **changes))
        return tuning.Tuning(begun, self.folder, budget, quiet=True)

    def tune(self, budget_s: float = 600, **changes: Any) -> TuneRecord:
        """Returns the record of such a tune."""
        return self.tuning(budget_s, **changes).run()


@pytest.fixture
def stage(
    make_rank: Callable[..., RankRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    made = Stage(make_rank, tmp_path / "tune")
    made.folder.mkdir()
    monkeypatch.setattr(process, "run", made.run)
    monkeypatch.setattr(ceilings, "of_rank", lambda *_, **__: CEILINGS)
    return made
