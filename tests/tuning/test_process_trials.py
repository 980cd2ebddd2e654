"""Fixes that are variables of the environment: asked about in a trial process, then tried in pairs of processes of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flopwise import plans
from flopwise.records.verdict import Comparison, Trial
from flopwise.tuning.process_trials import losses_parity

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
FUSED = Trial("FW102", "fused-optimizer", "kept", "9 % less")
NAME = "PYTORCH_CUDA_ALLOC_CONF"
ANSWER = {
    "code": "FW116", "name": "allocator-settings", "numerics": "identical", "opt_in": False, "findings": [], "conflicts": [],
    "eligible": True, "reason": "", "predicted_gain_frac": 0.5, "environment": {NAME: "expandable_segments:True"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    fixes = [*(f for f in plans.FIXES if f[0] != "FW116"), ("FW116", "allocator-settings")]
    monkeypatch.setattr(plans, "FIXES", tuple(fixes))
    monkeypatch.setattr("flopwise.tuning.trying.FIXES", tuple(fixes))
    monkeypatch.setattr("flopwise.tuning.process_trials.FIXES", tuple(fixes))


def tune(stage: Stage, answer: dict[str, Any] | None = None, **how: Any) -> Any:
    stage.trials = [([FUSED], AA, [])]
    stage.surveys = [] if answer is None else [answer]
    stage.new_ms = {"FW102": 5.0, "FW116": 2.5, **stage.new_ms}
    return stage.tune(codes=["FW102", "FW116"], **how)


def test_it_is_asked_in_the_trial_process_and_tried_on_top_of_what_is_kept(stage: Stage) -> None:
    stage.fields = {"losses": [1.0] * 10}
    record = tune(stage, ANSWER)
    first = stage.options["trials-1"]
    assert first["trial"]["fixes"] == ["FW102"]
    assert first["survey"] == {"fixes": ["FW116"], "findings": first["trial"]["findings"]}
    pairs = [name for name in stage.options if name.startswith("pairs-FW116")]
    assert len(pairs) == 12  # six an arm: there is time for so many
    assert pairs != sorted(pairs)  # in random order within a pair
    for name in pairs:
        codes = [fix["code"] for fix in stage.options[name]["apply"]]
        assert codes == (["FW102"] if name.endswith("old") else ["FW102", "FW116"])
    trial = record.trials[1]
    assert (trial.verdict, trial.predicted_ratio) == ("kept", 0.5)
    assert trial.reason.endswith("% less time a step in 6 fresh processes an arm")
    assert trial.ratio == pytest.approx(0.5, abs=0.02)
    assert trial.parity is not None
    assert trial.parity.passed
    assert record.predicted is not None
    assert record.predicted.trials == 1


def test_its_processes_and_the_plan_have_the_variables_and_no_other(stage: Stage) -> None:
    seen: dict[str, str | None] = {}
    stage.envs = lambda name, env: seen.update({name: env.get(NAME)})
    record = tune(stage, ANSWER)
    value = ANSWER["environment"][NAME]
    for name, has in seen.items():
        with_it = name.endswith("new") and name != "trials-1"
        assert has == (value if with_it else None), name
    assert record.plan is not None
    plan = plans.load(stage.folder / "plan.toml")
    assert plans.environment(plan.fixes) == {NAME: value}
    assert [f.code for f in plan.fixes] == ["FW102", "FW116"]
    assert (plan.step_s, plan.bare_step_s) == (record.final_step_s, record.baseline_step_s)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({**ANSWER, "eligible": False, "reason": "no CUDA device"}, "no CUDA device"),
        (None, "the script ended before it could be asked whether it fits"),
        ({**ANSWER, "conflicts": ["FW102"]}, "it cannot be on together with FW102 fused-optimizer"),
        ({**ANSWER, "environment": {"LD_PRELOAD": "x.so"}}, "FW116 sets 'LD_PRELOAD' to 'x.so', which it may not"),
    ],
)  # fmt: skip
def test_where_it_does_not_fit_nothing_is_started(
    stage: Stage, answer: dict[str, Any] | None, reason: str
) -> None:
    record = tune(stage, answer)
    assert record.trials[1].verdict == "declined"
    assert record.trials[1].reason.startswith(reason)
    assert not any(name.startswith("pairs-") for name in stage.options)
    assert record.kept == ["FW102 fused-optimizer"]


def test_alone_it_is_asked_in_a_process_of_its_own(stage: Stage) -> None:
    stage.surveys, stage.new_ms = [ANSWER], {"FW116": 2.5}
    record = stage.tune(codes=["FW116"])
    assert list(stage.options)[:2] == ["baseline", "survey"]
    assert stage.options["survey"]["survey"]["ends"]
    assert record.kept == ["FW116 allocator-settings"]


def test_no_gain_is_not_kept_and_says_what_would_have_shown(stage: Stage) -> None:
    stage.new_ms = {"FW116": 5.0}
    trial = tune(stage, ANSWER).trials[1]
    assert trial.verdict == "not kept"
    assert trial.reason.startswith("no gain shown: a gain of ")
    assert trial.comparison is not None


def test_one_whose_processes_end_is_declined_and_the_tune_goes_on(stage: Stage) -> None:
    stage.ends = {"pairs-FW116-1-new": 1}
    record = tune(stage, ANSWER)
    assert record.trials[1].verdict == "declined"
    assert "the trial of allocator-settings failed" in record.trials[1].reason
    assert record.kept == ["FW102 fused-optimizer"]


def test_one_that_a_process_leaves_out_is_declined(stage: Stage) -> None:
    stage.left_out = {"FW116"}
    trial = tune(stage, ANSWER).trials[1]
    assert (trial.verdict, trial.reason) == ("declined", "planned fix FW116 x left out: why")


def test_without_time_for_its_pairs_it_is_declined_for_that(stage: Stage) -> None:
    record = tune(stage, ANSWER, budget_s=130)
    assert record.trials[1].verdict == "declined"
    assert record.trials[1].reason.startswith("the time for trials was used up")
    assert record.trials[1].reason.endswith("it takes 6 processes of about 10 s")


@pytest.mark.parametrize(
    ("old", "new", "passed"),
    [
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], True),
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0001], False),  # a deterministic script
        ([2.0, 2.1, 2.2], [2.3, 2.1, 2.2], True),
        ([2.0, 2.1, 2.2], [2.6, 2.1, 2.2], False),
    ],
)
def test_losses_are_held_against_the_spread_of_processes_without_it(
    stage: Stage, old: list[float], new: list[float], passed: bool
) -> None:
    def runs(losses: list[float]) -> list[Any]:
        return [dataclasses.make_dataclass("R", ["losses"])([1.0] * 6 + [x]) for x in losses]

    parity = losses_parity("identical", runs(old), runs(new))
    assert parity is not None
    assert parity.passed is passed
    assert losses_parity("identical", runs(old), [*runs(new)[:-1], dataclasses.make_dataclass("R", ["losses"])([])]) is None  # fmt: skip


# ---------------------------------------------------------------------- handed over by a trial process

HANDED = Trial("FW114", "cudnn-benchmark", "declined", "", setting={"benchmark": "True"})


def test_what_is_handed_over_is_compared_in_processes_with_its_setting(stage: Stage) -> None:
    stage.handed, stage.new_ms = [HANDED], {"FW114": 8.0}
    stage.trials = [([], AA, [])]
    record = stage.tune(codes=["FW114"])
    pairs = [name for name in stage.options if name.startswith("pairs-FW114")]
    assert len(pairs) == 12
    assert stage.options["pairs-FW114-1-new"]["apply"] == [{"code": "FW114", "setting": {"benchmark": "True"}}]  # fmt: skip
    assert "apply" not in stage.options["pairs-FW114-1-old"]
    (trial,) = record.trials
    assert (trial.verdict, record.kept) == ("kept", ["FW114 cudnn-benchmark"])


def test_why_it_could_not_be_compared_in_a_running_process_is_said(stage: Stage) -> None:
    stage.handed = [dataclasses.replace(HANDED, reason="not settled after 30 s")]
    stage.trials, stage.new_ms = [([], AA, [])], {"FW114": 10.0}
    (trial,) = stage.tune(codes=["FW114"]).trials
    assert trial.verdict == "not kept"
    assert trial.reason.endswith(
        "in a running process it could not be compared: not settled after 30 s"
    )


def test_with_little_time_there_are_three_pairs_and_with_none_the_reason_is_time(
    stage: Stage,
) -> None:
    stage.handed, stage.trials = [HANDED], [([], AA, [])]
    stage.tune(codes=["FW114"], budget_s=170)
    assert len([name for name in stage.options if name.startswith("pairs-FW114")]) == 6
    stage.folder = stage.folder / "again"
    stage.folder.mkdir()
    stage.now, stage.trials = 0.0, [([], AA, [])]
    (trial,) = stage.tune(codes=["FW114"], budget_s=140).trials
    assert trial.reason.startswith("the time for trials was used up")
