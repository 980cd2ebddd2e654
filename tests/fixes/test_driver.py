"""The trials of one process: what is switched on together, taken out, kept, and left behind."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.fixes import candidates, driver
from flopwise.fixes.interface import Eligible
from flopwise.meter import ending
from flopwise.records.verdict import Comparison, Parity

SOUND = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
HELD = Parity("reordered", True, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, "", "")
APART = dataclasses.replace(HELD, passed=False, detail="0.01 apart")


def test_a_fix_that_another_bottleneck_hides_is_kept(tmp_path: Any, world: Any) -> None:
    def step_s(on: set[str]) -> float:  # the slower of two stages makes the step
        return max(0.10 * (0.5 if "A" in on else 1), 0.09 * (0.6 if "B" in on else 1))

    training = world(step_s)
    training.fixes(A={}, B={})
    trials = training.tune(tmp_path)
    assert {code: trial.verdict for code, trial in trials.items()} == {"A": "kept", "B": "kept"}
    # Each against all others on: 0.054 without A would be 0.1.
    assert trials["A"].ratio == pytest.approx(0.54, rel=0.02)
    assert trials["B"].ratio == pytest.approx(0.6, rel=0.02)
    assert training.on == {"A", "B"}


def test_of_two_that_do_the_same_one_stays(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1 if not on & {"A", "B"} else 0.05)
    training.fixes(A={"findings": ("L104",)}, B={})
    trials = training.tune(tmp_path, findings={"L104": 0.4})
    assert (
        trials["B"].verdict == "not kept"
    )  # nothing was promised of it, so it was taken out first
    assert trials["A"].verdict == "kept"
    assert trials["A"].predicted_ratio == pytest.approx(0.6)
    assert trials["B"].predicted_ratio is None
    assert training.on == {"A"}
    assert all(s.undone for s in training.switches if s.fix.code == "B")


def test_a_fix_that_makes_steps_slower_is_taken_out_and_named(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1 * (0.5 if "A" in on else 1) * (1.2 if "B" in on else 1))
    training.fixes(A={}, B={})
    trials = training.tune(tmp_path)
    assert trials["B"].verdict == "not kept"
    assert trials["B"].comparison.outcome == "slower"
    assert training.on == {"A"}


def test_what_breaks_beside_another_is_declined_and_the_rest_goes_on(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * (0.5 if "A" in on else 1))
    training.fixes(A={}, B={"breaks_beside": "A"})
    trials = training.tune(tmp_path)
    assert (trials["B"].verdict, trials["B"].reason) == ("declined", "beside the others: it broke")
    assert trials["A"].verdict == "kept"


def test_fixes_that_exclude_each_other_are_not_on_together(tmp_path: Any, world: Any) -> None:
    seen: list[set[str]] = []

    def step_s(on: set[str]) -> float:
        seen.append(set(on))
        return 0.1 * 0.5 ** len(on)

    training = world(step_s)
    training.fixes(A={}, B={"conflicts": ("A",)})
    trials = training.tune(tmp_path)
    assert trials["A"].verdict == "kept"
    assert trials["B"].reason == "it cannot be on together with A fix-a"
    assert {"A", "B"} not in seen


def test_numbers_that_hold_apart_and_not_together_cost_the_less_promising(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, world: Any
) -> None:
    def together(applied: list[Any], snapshot: Any) -> Parity:
        return APART if {"A", "C"} <= {a.fix.code for a in applied} else HELD

    monkeypatch.setattr(driver, "parity_together", together)
    training = world(lambda on: 0.1 * 0.8 ** len(on))
    training.fixes(
        A={"findings": ("L1",), "unit_roundoff": 2.0**-24},
        B={"unit_roundoff": 2.0**-24},
        C={"findings": ("L2",), "unit_roundoff": 2.0**-9},
    )
    trials = training.tune(tmp_path, findings={"L1": 0.1, "L2": 0.3})
    assert trials["A"].verdict == "not kept"
    assert trials["A"].reason == "parity failed together with fix-c: 0.01 apart"
    assert {trials["B"].verdict, trials["C"].verdict} == {"kept"}


def test_one_whose_numbers_do_not_hold_is_never_switched_on(tmp_path: Any, world: Any) -> None:
    seen: list[set[str]] = []

    def step_s(on: set[str]) -> float:
        seen.append(set(on))
        return 0.1 * 0.5 ** len(on)

    training = world(step_s)
    training.fixes(A={"parity": APART}, B={})
    trials = training.tune(tmp_path)
    assert trials["A"].reason == "parity failed: 0.01 apart"
    assert not any("A" in on for on in seen)


def test_what_compiles_comes_on_top_of_what_was_kept(tmp_path: Any, world: Any) -> None:
    first: list[set[str]] = []

    def step_s(on: set[str]) -> float:
        if "A" in on and not first:
            first.append(set(on))
        return 0.1 * 0.7 ** len(on)

    training = world(step_s)
    training.fixes(A={"late": True}, B={}, C={"parity": APART})
    trials = training.tune(tmp_path)
    assert list(trials) == ["C", "B", "A"]
    assert first == [{"A", "B"}]
    assert trials["A"].ratio == pytest.approx(0.7, rel=0.02)
    assert training.on == {"A", "B"}


def test_a_drift_that_looks_like_a_gain_is_not_kept(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1)
    clock = training.step_s
    training.step_s = lambda on: (
        clock(on) * max(0.5, 1 - (training.now - 1000) / 600)
    )  # clocks rise
    training.fixes(A={})
    trials = training.tune(tmp_path)
    assert trials["A"].verdict == "not kept"
    assert trials["A"].comparison.outcome == "not shown"


def test_half_a_percent_at_a_noise_of_a_third_of_a_percent_is_found(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * (0.995 if "A" in on else 1))
    training.noise = 0.003
    training.fixes(A={}, B={})
    trials = training.tune(tmp_path, per_fix_s=600)
    assert trials["A"].verdict == "kept"
    assert trials["A"].ci95[0] < 0.995 < trials["A"].ci95[1] < 1
    assert trials["B"].verdict == "not kept"


@pytest.mark.parametrize("seed", range(8))
def test_at_a_noise_of_a_fifth_nothing_is_kept_that_gains_nothing(
    tmp_path: Any, world: Any, seed: int
) -> None:
    training = world(lambda on: 0.1 * (0.5 if "A" in on else 1))
    training.noise, training.random = 0.2, random.Random(seed)
    training.fixes(A={}, B={}, C={})
    trials = training.tune(tmp_path, seed=100 * seed)
    assert trials["A"].verdict == "kept"
    assert trials["A"].ci95[0] < 0.5 < trials["A"].ci95[1]
    # Of eight tunes with two such fixes each, 2.5 % of tunes may err: here none does.
    assert {trials[code].verdict for code in "BC"} == {"not kept"}


def test_when_the_time_is_over_the_rest_is_declined_with_that_reason(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * 0.5 ** len(on))
    training.fixes(A={}, B={})
    trials = training.tune(tmp_path, budget_s=11)
    assert [t.reason for t in trials.values() if t.verdict == "declined"]
    assert all("time" in t.reason for t in trials.values() if t.verdict == "declined")
    assert not training.on - {code for code, t in trials.items() if t.verdict == "kept"}


def test_what_is_kept_has_its_warm_up_set_aside_once_for_the_proof(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * 0.5 ** len(on))
    training.fixes(A={"late": True, "compile_s": 7.0})
    training.tune(tmp_path, processes=3)
    assert training.subject.races.deadline == pytest.approx(1000 + 3600 - 7, abs=0.3)


def test_the_end_of_the_trials_is_silent_in_a_thread_that_trains(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(ending, "say_if_it_waits", watched.append)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # Python's, not pytest's
    session: Any = SimpleNamespace(
        config=SimpleNamespace(folder=str(tmp_path)), trainers=SimpleNamespace(thread=-1),
        detach=lambda: None, device=torch.device("cpu"), plan=None,
    )  # fmt: skip
    subject = driver.Driver(session, {"budget_s": 60, "per_fix_s": 30, "fixes": []})

    def one_step() -> Generator[None, Any, None]:
        yield

    monkeypatch.setattr(subject, "_all", one_step)
    went_on: list[Any] = []

    def train() -> None:
        went_on.append("before")
        subject(session, None)  # type: ignore[arg-type]
        went_on.append("after")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert (went_on, watched) == (["before"], [str(tmp_path)])
    assert capfd.readouterr().err == ""
    assert json.loads((tmp_path / "trials.json").read_text())["status"] == "complete"


def test_a_control_of_an_earlier_process_is_not_run_again(tmp_path: Any, world: Any) -> None:
    for stored in (SOUND, None):
        training = world(lambda on: 0.1)
        training.fixes()
        aa = None if stored is None else {**dataclasses.asdict(stored), "ci95": [0.99, 1.01]}
        began = training.now
        training.tune(tmp_path, aa=aa)
        assert (training.now - began > 6) == (stored is None)  # eight pairs of blocks
        assert training.subject.races.control is not None
        assert (training.subject.races.control == SOUND) == (stored is not None)
        assert training.subject.notes == []


def test_a_control_with_too_few_pairs_is_said_so(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1)
    training.fixes()
    training.tune(tmp_path, budget_s=4)
    assert len(training.subject.notes) == 1
    assert "too few pairs" in training.subject.notes[0]


def test_predicted_gains_are_the_fixs_own_or_that_of_its_first_finding() -> None:
    fix: Any = SimpleNamespace(findings=("L1", "L2", "L3"))
    findings = {"L1": None, "L2": 0.2, "L3": 0.3}
    assert candidates.predicted_gain(fix, Eligible(), findings) == 0.2
    assert candidates.predicted_gain(fix, Eligible(predicted_gain_frac=0.1), findings) == 0.1
    assert candidates.predicted_gain(fix, Eligible(), {}) is None


def test_what_shows_from_the_start_of_a_process_only_is_verified_and_handed_over(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * (0.5 if "B" in on else 1))
    training.fixes(A={"in_processes": True}, B={}, C={"in_processes": True, "parity": APART})
    trials = training.tune(tmp_path)
    assert {code: t.verdict for code, t in trials.items()} == {"B": "kept", "C": "not kept"}
    (handed,) = training.subject.handed
    assert (handed.fix, handed.parity) == ("A", HELD)
    assert all(s.undone for s in training.switches if s.fix.code == "A")
    training.subject.write()
    written = json.loads((tmp_path / "trials.json").read_text())
    assert [t["fix"] for t in written["handed"]] == ["A"]


@pytest.mark.parametrize("starts", [True, False])
def test_so_is_what_a_plan_can_put_in_first_and_does_not_settle_in_a_running_process(
    tmp_path: Any, world: Any, starts: bool
) -> None:
    training = world(lambda on: 5.0 if "A" in on else 0.1)
    own = {"at_start": classmethod(lambda cls, setting: None)} if starts else {}
    training.fixes(A=own)
    trials = training.tune(tmp_path, per_fix_s=10)
    assert ("A" in trials) is not starts
    words = [t.reason for t in training.subject.handed] if starts else [trials["A"].reason]
    assert words[0].startswith(("not settled after", "the 10 s for one fix ended"))


def test_what_excludes_one_that_is_on_from_the_start_is_declined(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1)
    training.fixes(A={}, B={"conflicts": ("A",)})
    trials = training.tune(tmp_path, fixes=["B"], kept=["A"])
    assert trials["B"].reason == "it cannot be on together with A fix-a"


def test_the_error_probability_is_divided_among_those_that_are_compared(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * (0.5 if "A" in on else 1))
    training.fixes(A={}, **{f"X{n}": {"parity": APART} for n in range(7)})
    training.tune(tmp_path, comparisons=9)
    assert training.subject.races.comparisons == 2


def test_with_little_time_the_least_promising_go_without(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.5 * 0.8 ** len(on))
    training.fixes(A={"findings": ("L1",)}, B={}, C={"findings": ("L2",)}, L={"late": True})
    trials = training.tune(tmp_path, budget_s=330, findings={"L1": 0.4, "L2": 0.2})
    assert trials["B"].reason.startswith("the time for trials does not do for all fixes")
    assert [trials[code].verdict for code in "AL"] == ["kept", "kept"]


def test_blocks_that_have_not_settled_are_compared_again_with_a_longer_wash_out(
    tmp_path: Any, world: Any
) -> None:
    since = [0]

    def step_s(on: set[str]) -> float:  # with it on, the first five steps are slow
        since[0] = since[0] + 1 if "A" in on else 0
        return 0.1 * (1.0 if not since[0] else 0.98 if since[0] < 6 else 0.8)

    training = world(step_s)
    training.noise = 0.001
    training.fixes(A={})
    trials = training.tune(tmp_path, per_fix_s=120)
    assert trials["A"].verdict == "kept"
    assert trials["A"].ratio == pytest.approx(0.8, rel=0.01)
