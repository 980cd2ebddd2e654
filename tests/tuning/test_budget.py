"""The arithmetic of a tune's time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.records.verdict import Trial
from flopwise.tuning.budget import MARGIN, Budget, rounded_up


def budget(given_s: float, now: Callable[[], float] = lambda: 0.0, **baseline: float) -> Budget:
    made = Budget(given_s, processes=3, proof_steps=40, clock=now)
    run: Any = SimpleNamespace(
        step_s=SimpleNamespace(mean=baseline.get("step_s", 0.1)), steps=SimpleNamespace(timed=50)
    )
    made.learn(run, baseline.get("wall_s", 12.0))
    return made


def test_a_process_of_the_proof_starts_as_the_baseline_did_and_times_its_own_steps() -> None:
    subject = budget(600)
    assert subject.start_s == pytest.approx(7.0)  # 12 s less 50 steps of 0.1 s
    assert subject.process_s == pytest.approx(11.0)
    assert subject.proof_s() == pytest.approx(66.0)
    assert subject.reserved_s == pytest.approx(MARGIN * 66 + 5.3)
    assert subject.trials_s() == pytest.approx(600 - subject.reserved_s)


def test_the_parts_are_booked() -> None:
    now = [0.0]
    subject = budget(600, lambda: now[0])
    for name, took_s in (("trials", 3.0), ("proof", 5.0), ("trials", 4.0)):
        with subject.part(name):
            now[0] += took_s
    use = subject.use()
    assert (use.baseline_s, use.trials_s, use.proof_s) == (0.0, 7.0, 5.0)
    assert subject.left_s() == 588


@given(
    given_s=st.floats(1, 1e5),
    step_s=st.floats(1e-4, 100),
    start_s=st.floats(0, 1000),
    fixes=st.integers(1, 5),
)
def test_what_is_not_too_small_has_room_for_a_trial_and_the_proof(
    given_s: float, step_s: float, start_s: float, fixes: int
) -> None:
    def with_budget(given_s: float) -> Budget:
        return budget(given_s, step_s=step_s, wall_s=start_s + 50 * step_s)

    subject = with_budget(given_s)
    said = subject.too_small(fixes)
    if said is None:
        assert subject.trials_s() + subject.grace_s + subject.proof_s() <= given_s + 1e-6
        assert subject.trials_s() >= subject.least_trials_s(1)
    else:
        enough = said.split("No fix was tried; give --budget ")[1].split(" ")[0]
        factor = {"s": 1, "m": 60}[enough[-1]]
        assert with_budget(float(enough[:-1]) * factor).too_small(fixes) is None


@pytest.mark.parametrize(
    ("seconds", "typed"), [(1, "10s"), (60, "60s"), (111, "120s"), (121, "3m"), (3600, "60m")]
)
def test_a_time_is_named_as_it_is_typed(seconds: float, typed: str) -> None:
    assert rounded_up(seconds) == typed


def slow(warmup_s: float, code: str = "FW105") -> Trial:
    return Trial(code, "compile-model", "kept", "", warmup_s=warmup_s)


def test_a_warm_up_is_set_aside_once_until_a_process_has_shown_what_it_takes_with_the_cache() -> (
    None
):
    subject = budget(600)
    assert subject.proof_s([slow(60.0)]) == pytest.approx(66 + 60)
    # A process of 40 steps of 0.1 s after a start of 7 s took 17 s: 6 s are left for the warm-up.
    run: Any = SimpleNamespace(step_s=SimpleNamespace(mean=0.1), steps=SimpleNamespace(timed=40))
    subject.ran([slow(60.0)], 17.0, run)
    assert subject.cached["FW105"] == pytest.approx(6.0)
    assert subject.proof_s([slow(60.0)]) == pytest.approx(66 + 3 * 6)
    subject.ran([slow(60.0)], 18.0, run)  # the longest counts
    assert subject.proof_s([slow(60.0)]) == pytest.approx(66 + 3 * 7)


def test_what_several_take_is_divided_as_it_was_without_the_cache_and_never_more_than_that() -> (
    None
):
    subject = budget(600)
    both = [slow(40.0), slow(20.0, "FW115"), Trial("FW104", "bf16-autocast", "kept", "")]
    run: Any = SimpleNamespace(step_s=SimpleNamespace(mean=0.1), steps=SimpleNamespace(timed=40))
    subject.ran(both, 11.0 + 9.0, run)
    assert subject.cached == pytest.approx({"FW105": 6.0, "FW115": 3.0})
    subject.ran(both, 500.0, run)
    assert subject.cached == pytest.approx({"FW105": 40.0, "FW115": 20.0})
    subject.ran([], 500.0, run)
    assert "FW104" not in subject.cached
