"""The trial processes of a tune: what one that starts again is told, and why a fix has no result."""

from __future__ import annotations

import dataclasses
import json
import signal
from typing import Any

import pytest

from flopwise.records.verdict import Comparison, Trial
from flopwise.tuning.trying import findings_of, too_dear

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
LOADER = Trial("FW101", "loader-workers", "kept", "50 % less", warmup_s=2.0)
FUSED = Trial("FW102", "fused-optimizer", "kept", "9 % less")


def test_the_control_and_what_is_kept_go_along_to_a_process_that_starts_again(stage: Stage) -> None:
    stage.trials = [([LOADER], AA, ["said"]), ([FUSED], AA, [])]
    record = stage.tune()
    first, second = (stage.options[f"trials-{n}"] for n in (1, 2))
    assert first["trial"]["aa"] is None
    assert second["trial"]["aa"] == json.loads(json.dumps(dataclasses.asdict(AA)))
    assert second["apply"] == [{"code": "FW101", "setting": {}}]
    assert (first["trial"]["fixes"], second["trial"]["fixes"]) == (["FW101", "FW102"], ["FW102"])
    assert record.aa == AA
    assert record.notes == ["said"]
    # The proof warms up again: as long as the trial did in one of its processes, and a margin.
    spent_s = first["trial"]["budget_s"] - second["trial"]["budget_s"]
    assert spent_s == pytest.approx(10 + 1.2 * 2)


def last_reason(stage: Stage) -> tuple[str, list[str]]:
    record = stage.tune(budget_s=200)
    assert record.trials[-1].verdict == "declined"
    return record.trials[-1].reason, record.notes


def test_a_script_that_ends_before_all_has_been_tried_is_said_to(stage: Stage) -> None:
    nothing: list[Trial] = []
    stage.trials = [(nothing, AA, [])]
    assert last_reason(stage) == ("the script ended before it could be tried", [])


def test_one_that_has_no_time_left_too(stage: Stage) -> None:
    stage.takes_s = {"trials-": 1000.0}
    reason, notes = last_reason(stage)
    assert reason == "the time for trials was used up before it could be tried, or while it was"
    (note,) = notes
    assert note.startswith(
        "a trial process: the script was ended by flopwise at its time limit of 1"
    )
    assert note.endswith(f"and left no result. Its output is in {stage.folder}/trials-1/output.txt")


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (137, "ended with exit code 137 (as after SIGKILL)"),
        (3, "ended with exit code 3"),
    ],
)
def test_one_that_fails_is_said_to_with_where_its_output_is(
    stage: Stage, code: int, ending: str
) -> None:
    stage.ends = {f"trials-{n}": code for n in (1, 2, 3)}
    reason, notes = last_reason(stage)
    assert reason == f"the script {ending} before it could be tried, or while it was"
    assert notes == [
        f"a trial process: the script {ending} and left no result. "
        f"Its output is in {stage.folder}/trials-{n}/output.txt"
        for n in (1, 2, 3)
    ]


def test_of_several_fixes_the_one_that_ends_the_process_is_found_and_the_others_are_tried(
    stage: Stage,
) -> None:
    stage.ends = {"trials-1": -signal.SIGKILL, "trials-2": -signal.SIGKILL}
    stage.trials = [([FUSED], AA, [])]
    record = stage.tune()
    assert [(t.fix, t.verdict) for t in record.trials] == [("FW101", "declined"), ("FW102", "kept")]
    assert "was ended by SIGKILL" in record.trials[0].reason
    tried = [stage.options[f"trials-{n}"]["trial"]["fixes"] for n in (1, 2, 3)]
    assert tried == [["FW101", "FW102"], ["FW101"], ["FW102"]]


def test_the_findings_of_the_baseline_go_along_with_what_they_predict(stage: Stage) -> None:
    stage.trials = [([LOADER, FUSED], AA, [])]
    stage.tune(steps_remaining=5000)
    assert stage.options["baseline"]["profile"]
    trial = stage.options["trials-1"]["trial"]
    assert trial["steps_remaining"] == 5000
    assert trial["findings"] == {}


def test_of_findings_with_one_code_the_largest_gain_counts() -> None:
    def finding(code: str, gain: float | None) -> Any:
        return dataclasses.make_dataclass("F", ["code", "predicted_gain_frac"])(code, gain)

    findings = [finding("L101", 0.1), finding("L101", 0.3), finding("L101", None), finding("D1", None), finding("L2", None), finding("L2", 0.2)]  # fmt: skip
    run = dataclasses.make_dataclass("R", ["findings"])(findings)
    assert findings_of(run) == {"L101": 0.3, "D1": None, "L2": 0.2}


@pytest.mark.parametrize(
    ("remaining", "verdict"), [(None, "kept"), (5000, "kept"), (4999, "not kept")]
)
def test_a_warm_up_that_does_not_pay_in_the_steps_that_remain_is_not_kept(
    remaining: int | None, verdict: str
) -> None:
    found = dataclasses.replace(AA, outcome="faster", ratio=0.8, old_s=0.010, new_s=0.008)
    trial = Trial("FW105", "compile-model", "kept", "20 % less", comparison=found, warmup_s=10.0)
    judged = too_dear(trial, remaining)
    assert judged.verdict == verdict
    if verdict == "not kept":
        assert judged.reason == (
            "20 % less; but its warm-up of 10 s pays back after 5000 steps only, and the job has 4999 left (--steps-remaining)"
        )


def test_break_even_is_in_the_record_and_a_plan_that_does_not_pay_is_none(stage: Stage) -> None:
    slow = dataclasses.replace(FUSED, warmup_s=1.0)
    stage.trials = [([slow], AA, [])]
    record = stage.tune(codes=["FW102"], steps_remaining=1000)
    assert record.break_even is not None
    assert record.break_even.steps == pytest.approx(1.0 / 0.005, rel=0.02)
    assert (record.break_even.warmup_s, record.break_even.steps_remaining) == (1.0, 1000)
    assert record.plan is not None
    stage.folder = stage.folder / "again"
    stage.folder.mkdir()
    stage.trials = [([slow], AA, [])]
    record = stage.tune(codes=["FW102"], steps_remaining=100)
    assert record.plan is None
    assert any("pays back after 2" in note and "100 left: no plan" in note for note in record.notes)


def test_each_trial_is_told_as_soon_as_it_is_there(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.trials = [([LOADER, FUSED], AA, [])]
    tune = stage.tuning()
    tune.processes.quiet = False
    tune.run()
    said = capsys.readouterr().err
    assert "flopwise tune [0:00] measuring it as it is\n" in said
    assert "trying loader-workers, fused-optimizer (at most 9 min" in said
    assert said.count("  loader-workers: kept. 50 % less\n") == 1
    assert "proof 1 of 3, with the fixes (at most " in said
