"""Longer runs after the proof: what is compared, and what becomes of a plan with which losses are worse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans, tuning
from flopwise.records import store, verdict
from flopwise.records.verdict import Comparison, Parity, Trial
from flopwise.tuning.quality import suspects

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)


def kept(code: str, name: str, numerics: str) -> Trial:
    parity = Parity(numerics, True, None, None, None, None, None, 0.0, "so", "so")
    return Trial(code, name, "kept", "50 % less", parity=parity)


KEPT = [kept("FW101", "loader-workers", "identical"), kept("FW102", "fused-optimizer", "reordered")]


def test_losses_are_compared_from_several_seeds_after_the_proof(stage: Stage) -> None:
    stage.trials = [(KEPT, AA, [])]
    record = stage.tune(quality_steps=100)
    found = record.quality
    assert (found.verdict, found.seeds, found.steps, found.asked) == ("same", 3, 100, 100)
    assert found.fixes == ["FW101 loader-workers", "FW102 fused-optimizer"]
    assert (
        found.seeding
        == "run k of each arm has the script's own seeds plus 100003 (k - 1), at torch.manual_seed"
    )
    assert record.kept == found.fixes
    names = [name for name in stage.options if name.startswith("quality-")]
    assert sorted(names) == [f"quality-{k}-{arm}" for k in (1, 2, 3) for arm in ("new", "old")]
    for name in names:
        options = stage.options[name]
        assert options["quality"] == {"steps": 100, "offset": 100_003 * (int(name[8]) - 1)}
        assert [fix["code"] for fix in options["apply"]] == (
            ["FW101", "FW102"] if "new" in name else []
        )
    assert found.equal_time.verdict == "lower"
    assert found.time_s == pytest.approx(0.5)
    assert plans.load(stage.folder / "plan.toml").quality.startswith("same: the losses are equal")


def test_both_curves_are_in_the_record(stage: Stage) -> None:
    stage.trials = [(KEPT, AA, [])]
    stage.tune(quality_steps=100)
    data = (stage.folder / "tune.json").read_bytes()
    record = store.decode(data, verdict.TuneRecord, verdict.SCHEMA, "tune.json")
    assert [curve.offset for curve in record.quality.old] == [0, 100_003, 200_006]
    assert (record.quality.new[1].steps[-1], record.quality.new[1].losses[-1]) == (
        100,
        pytest.approx(1.02),
    )
    assert (stage.folder / record.quality.new[1].folder / "curve-0-1.json").exists()


def test_without_being_asked_for_there_are_none(stage: Stage) -> None:
    stage.trials = [(KEPT, AA, [])]
    record = stage.tune()
    assert record.quality is None
    assert not any(name.startswith("quality") for name in stage.options)
    assert plans.load(stage.folder / "plan.toml").quality is None


def test_the_fixes_that_round_are_taken_out_where_losses_are_worse_and_the_rest_is_proven_anew(
    stage: Stage,
) -> None:
    stage.trials, stage.worse = [(KEPT, AA, [])], {"FW102": 0.5}
    record = stage.tune(quality_steps=100)
    assert record.kept == ["FW101 loader-workers"]
    assert [t.verdict for t in record.trials] == ["kept", "not kept"]
    assert "longer runs with it are worse: the loss is higher by +0.5" in record.trials[1].reason
    assert (record.quality.verdict, record.worse.verdict) == ("same", "worse")
    assert record.worse.fixes == ["FW101 loader-workers", "FW102 fused-optimizer"]
    plan = plans.load(stage.folder / "plan.toml")
    assert [fix.code for fix in plan.fixes] == ["FW101"]
    again = [name for name in stage.options if name.startswith("second-")]
    assert sorted(again) == sorted(
        [f"second-proof-{n}-{arm}" for n in (1, 2, 3) for arm in ("old", "new")]
        + [f"second-quality-{k}-new" for k in (1, 2, 3)]  # the bare script's runs stand
    )


def test_lossy_fixes_are_the_first_to_go(stage: Stage) -> None:
    lossy = kept("FW103", "channels-last", "lossy")
    assert suspects([*KEPT, lossy]) == [lossy]
    assert suspects(KEPT) == [KEPT[1]]
    assert suspects(KEPT[:1]) == KEPT[:1]
    bare = dataclasses.replace(KEPT[0], parity=None)
    assert suspects([bare]) == [bare]


def test_no_plan_is_written_where_nothing_is_left(stage: Stage) -> None:
    stage.trials, stage.worse = [([KEPT[1]], AA, [])], {"FW102": 0.5}
    record = stage.tune(quality_steps=100, codes=["FW102"])
    assert (record.plan, record.kept, record.quality.verdict) == (None, [], "worse")
    assert not (stage.folder / "plan.toml").exists()
    (note,) = [note for note in record.notes if "no plan was written" in note]
    assert note.startswith("longer runs with the plan are worse: the loss is higher by +0.5")
    assert [t.verdict for t in record.trials] == ["not kept"]
    assert record.resume is None


def test_nor_where_what_is_left_is_worse_too(stage: Stage) -> None:
    stage.trials, stage.worse = [(KEPT, AA, [])], {"FW101": 0.3, "FW102": 0.5}
    record = stage.tune(quality_steps=100)
    assert (record.plan, record.kept) == (None, [])
    assert [t.verdict for t in record.trials] == ["not kept", "not kept"]
    assert (record.quality.verdict, record.worse.verdict) == ("worse", "worse")


def test_runs_in_which_a_fix_was_not_on_show_nothing(stage: Stage) -> None:
    stage.trials = [(KEPT, AA, [])]
    stage.looks = lambda name: stage.left_out.add("FW102") if name.startswith("quality") else None
    record = stage.tune(quality_steps=100)
    assert record.quality.verdict == "not shown"
    assert record.quality.reason.startswith("not all fixes were on in every longer run")


def test_one_that_ends_before_a_step_is_said_and_the_plan_stands(stage: Stage) -> None:
    stage.trials, stage.ends = [(KEPT, AA, [])], {"quality-2-new": 1}
    record = stage.tune(quality_steps=100)
    assert (record.quality.verdict, record.quality.complete) == ("not shown", False)
    assert "with the plan the script ended with exit code 1" in record.quality.reason
    assert record.plan is not None
    assert record.resume == str(stage.folder)


def test_the_budget_holds_them_and_they_go_on_when_it_is_resumed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.trials, stage.takes_s = [(KEPT, AA, [])], {"quality": 60.0}
    record = stage.tune(budget_s=280, quality_steps=100)
    # Each is reckoned with 8.8 s and 100 steps of 30 ms.
    assert record.time.reserved_s == pytest.approx(1.2 * (6 * 10 + 6 * 11.8) + 5.09, abs=0.1)
    found = record.quality
    assert (found.verdict, found.complete) == ("not shown", False)
    assert "the longer runs came to no end: they are reckoned to take" in found.reason
    assert record.plan is not None
    assert record.resume == str(stage.folder)
    done = [name for name in stage.options if name.startswith("quality")]
    again = tuning.resume(stage.folder, budget_s=600, force=True, quiet=True)
    assert (again.budget.quality_steps, again.budget.quality_seeds) == (100, 3)
    again.budget.clock = lambda: stage.now
    again.budget.started = stage.now
    whole = again.run()
    assert (whole.quality.verdict, whole.quality.complete, whole.resume) == ("same", True, None)
    assert not (Path(stage.folder) / "state.json").exists()
    names = [name for name in stage.options if name.startswith("quality")]
    assert len(names) == 6
    assert names[: len(done)] == done
    assert json.loads((stage.folder / "tune.json").read_text())["quality"]["verdict"] == "same"


def test_a_budget_that_is_too_small_for_them_says_what_would_do(stage: Stage) -> None:
    with pytest.raises(
        Exception, match=r"longer runs 71 s \(6 of 12 s\), which have 162 s set aside"
    ) as caught:
        stage.tune(budget_s=100, quality_steps=100)
    assert "or fewer --proof-steps or --quality-steps" in str(caught.value)
