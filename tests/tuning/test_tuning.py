"""A whole tune: what stands after the proof, and what is said when a process does not come to its end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from flopwise import tuning
from flopwise.errors import NothingMeasuredError, RunFolderError, UsageError
from flopwise.records.verdict import Comparison, Trial

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
KEPT = [Trial("FW101", "loader-workers", "kept", "50 % less"), Trial("FW102", "fused-optimizer", "kept", "9 % less")]  # fmt: skip


def test_both_sides_are_those_of_the_proof(stage: Stage) -> None:
    stage.trials = [(KEPT, AA, [])]
    record = stage.tune()
    assert record.kept == ["FW101 loader-workers", "FW102 fused-optimizer"]
    assert record.baseline_step_s == pytest.approx(0.010, rel=0.02)
    assert record.baseline_mfu == pytest.approx(0.100, rel=0.02)  # and not the baseline's, 0.033
    assert record.final_mfu == pytest.approx(0.200, rel=0.02)


def test_a_fix_that_the_proof_left_out_is_in_no_claim(stage: Stage) -> None:
    stage.trials, stage.left_out = [(KEPT, AA, [])], {"FW102"}
    record = stage.tune()
    assert record.kept == ["FW101 loader-workers"]
    plan = (stage.folder / "plan.toml").read_text()
    assert "FW101" in plan
    assert "FW102" not in plan
    assert [t.verdict for t in record.trials] == ["kept", "not kept"]
    assert "left out in a process of the final proof" in record.trials[1].reason
    assert "planned fix FW102 x left out: why" in record.notes


def test_nothing_that_ran_is_no_plan(stage: Stage) -> None:
    stage.trials, stage.left_out = [(KEPT, AA, [])], {"FW101", "FW102"}
    record = stage.tune()
    assert (record.kept, record.plan, record.final_step_s, record.final_mfu) == (
        [],
        None,
        None,
        None,
    )
    assert "no fix was on in every process of the final proof: no plan was written" in record.notes


# ---------------------------------------------------------------------- processes that do not end well

ENDINGS = [
    (143, "the script ended with exit code 143 (as after SIGTERM) before it had imported torch"),
    (-signal.SIGTERM, "the script was ended by SIGTERM before it had imported torch"),
    (-signal.SIGKILL, "the script was ended by SIGKILL before it had imported torch"),
    (1, "the script ended with exit code 1; no Python process below this one imported torch"),
]


@pytest.mark.parametrize(("code", "words"), ENDINGS)
def test_a_process_of_the_proof_that_ends_before_a_step_is_said_with_how_and_where_its_output_is(
    stage: Stage, code: int, words: str
) -> None:
    stage.trials, stage.ends = [(KEPT, AA, [])], {"proof-2-old": code}
    record = stage.tune()
    (note,) = record.notes
    head = f"the final proof failed (proof 2 of 3, as it is): no training step was seen: {words}"
    assert note.startswith(head)
    assert note.endswith(f"Its output is in {stage.folder / 'proof-2-old' / 'output.txt'}")
    assert (record.proof, record.plan, record.kept) == (None, None, [])
    assert not (stage.folder / "plan.toml").exists()


@pytest.mark.parametrize(("code", "words"), ENDINGS)
def test_so_is_one_as_it_is(stage: Stage, code: int, words: str) -> None:
    stage.ends = {"baseline": code}
    with pytest.raises(NothingMeasuredError) as caught:
        stage.tune()
    assert str(caught.value).startswith(f"no training step was seen: {words}")
    assert str(caught.value).endswith(f"output is in {stage.folder / 'baseline' / 'output.txt'}")
    assert not (stage.folder / "tune.json").exists()


@pytest.mark.parametrize("name", ["baseline", "trials-1", "proof-1-old"])
def test_a_script_that_removes_the_folder_ends_the_tune_and_nothing_is_made_anew(
    stage: Stage, name: str, tmp_path: Path
) -> None:
    stage.folder = tmp_path / "out"
    stage.folder.mkdir()
    stage.trials, stage.removes = [(KEPT, AA, [])], {name: stage.folder}
    with pytest.raises(RunFolderError, match=f"{name} went away while the script ran: the tune"):
        stage.tune()
    assert not stage.folder.exists()


# ---------------------------------------------------------------------- processes that do not end


def test_processes_that_go_on_once_measured_are_ended_and_their_numbers_stand(stage: Stage) -> None:
    stage.trials, stage.goes_on = [(KEPT, AA, [])], ""
    record = stage.tune()
    assert (record.plan is not None, record.proof.exit_codes_equal) == (True, True)
    run = json.loads((stage.folder / "proof-1-new" / "run.json").read_text())
    assert (run["complete"], run["exit_code"]) == (True, None)


def test_a_script_in_which_several_threads_train_is_not_tuned(stage: Stage) -> None:
    stage.goes_on, stage.fields = "baseline", {"several": "several threads train at once (a, b)"}
    with pytest.raises(UsageError, match="several threads train at once in this script") as caught:
        stage.tune()
    assert str(caught.value).endswith(f"What was measured is in {stage.folder / 'baseline'}")
    assert list(stage.options) == ["baseline"]


# ---------------------------------------------------------------------- time


def test_the_time_is_kept_and_told(stage: Stage) -> None:
    stage.trials = [(KEPT, AA, [])]
    record = stage.tune()
    use = record.time
    # A process takes 10 s, 1.2 s of them steps; of the proof each is reckoned with 8.8 s + 40 steps of 30 ms.
    assert (use.budget_s, use.baseline_s, use.trials_s, use.proof_s) == (600, 10, 10, 60)
    assert use.reserved_s == pytest.approx(1.2 * 6 * 10 + 5 + 3 * 0.030, abs=0.02)
    assert record.wall_s == 80
    assert json.loads((stage.folder / "tune.json").read_text())["time"]["proof_s"] == 60
    # The trials had what was left when the proof was set aside, and may then take no more than a moment to end.
    given_s = stage.options["trials-1"]["trial"]["budget_s"]
    assert given_s == pytest.approx(600 - 10 - use.reserved_s)
    assert stage.limits_s["trials-1"] == pytest.approx(given_s + 5.09, abs=0.01)
    assert stage.limits_s["proof-1-old"] + stage.limits_s["proof-1-new"] == (580 + 570)


def test_a_budget_that_leaves_no_time_for_trials_is_an_error_that_says_what_would_do(
    stage: Stage,
) -> None:
    with pytest.raises(UsageError) as caught:
        stage.tune(budget_s=70)
    assert str(caught.value) == (
        "--budget 70s is too small: measuring the script as it is took 10 s, the final proof is reckoned to take 60 s "
        "(6 processes of 10 s) and has 77 s set aside, and trying 2 fixes takes 20 s at the very least. No fix was "
        f"tried; give --budget 120s or more, or fewer --proof-steps. What was measured is in {stage.folder / 'baseline'}"
    )
    assert list(stage.options) == ["baseline"]
    stage.folder = stage.folder / "again"
    stage.folder.mkdir()
    stage.now, stage.trials = 0.0, [(KEPT, AA, [])]
    assert stage.tune(budget_s=120).plan is not None  # as was promised


def test_a_budget_that_is_over_before_a_step_says_so(stage: Stage) -> None:
    stage.takes_s = {"baseline": 30}
    with pytest.raises(NothingMeasuredError) as caught:
        stage.tune(budget_s=20)
    assert str(caught.value).startswith(
        "--budget 20s is too small to measure the script as it is: no training step was seen: the script was ended "
        "by flopwise at its time limit of 20 s"
    )


def test_a_proof_for_which_no_time_is_left_is_not_begun(stage: Stage) -> None:
    slow = [Trial("FW101", "loader-workers", "kept", "9 % less", warmup_s=50.0), KEPT[1]]
    stage.trials = [(slow, AA, [])]
    record = stage.tune(budget_s=115)
    assert record.notes == [
        "the final proof was not run: it is reckoned to take 110 s, and 95 s of the budget of 115 s were left. "
        "--budget 3m would do"
    ]
    assert list(stage.options) == ["baseline", "trials-1"]
    assert (record.time.proof_s, record.plan) == (0, None)


def test_a_proof_that_the_budget_ends_is_none(stage: Stage) -> None:
    stage.trials, stage.takes_s = [(KEPT, AA, [])], {"proof-": 25.0}
    record = stage.tune(budget_s=110)
    assert record.wall_s == 110
    assert record.notes == [
        "the final proof was not finished: the budget of 110 s was over in process 4 of 6, which had run for 15 s "
        "(reckoned with: 10 s). --budget 3m would do"
    ]
    assert (record.proof, record.plan) == (None, None)


# ---------------------------------------------------------------------- the command


def test_the_command_lists_each_file_once(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.trials = [(KEPT, AA, [])]
    code = tuning.tune_command(stage.tuning(), json_path=None)
    assert code == 0
    text = capsys.readouterr().out
    saved = text[text.index("  saved") : text.index("  measured")]
    saved = "".join(line.strip() for line in saved.splitlines())  # long paths are wrapped
    assert saved.count("plan.toml") == 1
    assert saved.count("tune.json") == 1
