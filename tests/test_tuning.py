"""How a tune goes on: what a restarted trial process is told, what stands after the proof."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise import tuning
from flopwise.hardware.accelerators import Peak
from flopwise.launch.command import Job
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Trial, TuneRecord
from flopwise.summary import Context, summarise

AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
KEPT = [Trial("FW101", "loader-workers", "kept", "50 % less"), Trial("FW102", "fused-optimizer", "kept", "9 % less")]  # fmt: skip


class Stage:
    """Stands in for the processes that a tune starts: each leaves what it is told to."""

    def __init__(self, make_rank: Callable[..., RankRecord], folder: Path) -> None:
        self.make_rank, self.folder = make_rank, folder
        self.options: dict[str, dict[str, Any]] = {}
        self.trials: list[tuple[list[Trial], Comparison | None, list[str]]] = []
        self.left_out: set[str] = set()

    def start(self, tune: tuning.Tuning, name: str, options: dict[str, Any], doing: str) -> None:
        self.options[name] = json.loads(json.dumps(options))
        if name.startswith("trials-"):
            trials, aa, notes = self.trials.pop(0)
            content = {
                "torch": "2.13.0", "trials": [dataclasses.asdict(t) for t in trials],
                "aa": dataclasses.asdict(aa) if aa else None, "notes": notes,
            }  # fmt: skip
            (self.folder / name).mkdir()
            (self.folder / name / "trials.json").write_text(json.dumps(content))

    def measure(
        self, tune: tuning.Tuning, name: str, options: dict[str, Any], doing: str
    ) -> RunRecord:
        self.options[name] = options
        fixes = [fix["code"] for fix in options.get("apply", [])]
        notes = [f"planned fix {code} x left out: why" for code in fixes if code in self.left_out]
        on = [f"{code} x" for code in fixes if code not in self.left_out]
        notes += [f"applied by the plan: {', '.join(on) or 'nothing'}"] if fixes else []
        step_ms = {"baseline": 30}.get(name, 5 if fixes else 10) + len(self.options) / 100
        rank = self.make_rank(steps=40, step_ns=int(step_ms * 1e6), notes=notes)
        peak = Peak(1e12, "fp32", "--peak", "given")
        return summarise([rank], Context([], "train.py", exit_code=0, peak=peak))


@pytest.fixture
def stage(
    make_rank: Callable[..., RankRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    made = Stage(make_rank, tmp_path)
    monkeypatch.setattr(tuning.Tuning, "_start", lambda tune, *a: made.start(tune, *a))
    monkeypatch.setattr(tuning.Tuning, "_measure", lambda tune, *a: made.measure(tune, *a))
    return made


def tune(folder: Path) -> TuneRecord:
    script = folder / "train.py"
    script.write_text("")
    job = Job(["python", str(script)], "train.py", str(script), ["train.py"])
    return tuning.Tuning(job, folder, ("FW101", "FW102"), 600, 30, 3, 40, quiet=True).run()


def test_the_control_goes_along_to_a_process_that_starts_again(
    stage: Stage, tmp_path: Path
) -> None:
    stage.trials = [(KEPT[:1], AA, ["said"]), (KEPT[1:], AA, [])]
    record = tune(tmp_path)
    first, second = (stage.options[f"trials-{n}"]["trial"] for n in (1, 2))
    assert first["aa"] is None
    assert second["aa"] == json.loads(json.dumps(dataclasses.asdict(AA)))
    assert record.aa == AA
    assert record.notes == ["said"]


def test_both_sides_are_those_of_the_proof(stage: Stage, tmp_path: Path) -> None:
    stage.trials = [(KEPT, AA, [])]
    record = tune(tmp_path)
    assert record.kept == ["FW101 loader-workers", "FW102 fused-optimizer"]
    assert record.baseline_step_s == pytest.approx(0.010, rel=0.02)
    assert record.baseline_mfu == pytest.approx(0.100, rel=0.02)  # and not the baseline's, 0.033
    assert record.final_mfu == pytest.approx(0.200, rel=0.02)


def test_a_fix_that_the_proof_left_out_is_in_no_claim(stage: Stage, tmp_path: Path) -> None:
    stage.trials, stage.left_out = [(KEPT, AA, [])], {"FW102"}
    record = tune(tmp_path)
    assert record.kept == ["FW101 loader-workers"]
    plan = (tmp_path / "plan.toml").read_text()
    assert "FW101" in plan
    assert "FW102" not in plan
    assert [t.verdict for t in record.trials] == ["kept", "not kept"]
    assert "left out in a process of the final proof" in record.trials[1].reason
    assert "planned fix FW102 x left out: why" in record.notes


def test_nothing_that_ran_is_no_plan(stage: Stage, tmp_path: Path) -> None:
    stage.trials, stage.left_out = [(KEPT, AA, [])], {"FW101", "FW102"}
    record = tune(tmp_path)
    assert (record.kept, record.plan, record.final_step_s, record.final_mfu) == (
        [],
        None,
        None,
        None,
    )
    assert "no fix was on in every process of the final proof: no plan was written" in record.notes
