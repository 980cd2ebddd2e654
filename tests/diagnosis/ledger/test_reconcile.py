"""The undisturbed step is divided to the nanosecond, and what cannot be told is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.reconcile import CLOSE_FRAC, block_means, idle_of
from flopwise.diagnosis.ledger.windows import Busy
from flopwise.trace.idle import CAUSES


def light(
    busy: float = 700.0,
    *,
    input: float = 0.0,
    sync: float = 0.0,
    launch: float = 0.0,
    device: float = 0.0,
    other: float = 0.0,
) -> Busy:
    """One step: its idle time by cause, and the rest of it busy."""
    idle = {"input": input, "sync": sync, "launch": launch, "device": device, "other": other}
    total = busy + sum(idle.values())
    return Busy(
        np.array([total]),
        np.array([[busy, 0.0, 0.0]]),
        {cause: np.array([ns]) for cause, ns in idle.items()},
    )


def test_a_window_close_to_the_undisturbed_step_tells_its_idle_time_and_leaves_a_residual() -> None:
    window = light(700, input=100, sync=50, launch=80, device=70)
    found = idle_of(1010.0, window, input_ns=3.0)
    assert found.by_cause == {"input": 100, "sync": 50, "launch": 80, "device": 70, "other": 0}
    assert found.residual_ns == 10.0
    assert (found.estimated, found.divided) == (False, True)
    assert idle_of(990.0, window, None).residual_ns == -10.0


@pytest.mark.parametrize(
    ("step", "estimated"), [(980.5, False), (979.5, True), (1020.3, False), (1020.6, True)]
)
def test_close_is_two_percent(step: float, estimated: bool) -> None:
    assert CLOSE_FRAC == 0.02
    found = idle_of(step, light(700, launch=300), None)
    assert found.estimated is estimated
    assert found.residual_ns == pytest.approx(0.0 if estimated else step - 1000)


def test_a_stretched_window_only_tells_the_busy_time() -> None:
    found = idle_of(900.0, light(700, sync=100, launch=300), None)
    assert found.by_cause == {"input": 0, "sync": 50, "launch": 150, "device": 0, "other": 0}
    assert found.residual_ns == 0.0
    assert found.estimated


def test_what_a_slower_host_does_not_make_longer_keeps_its_length() -> None:
    window = light(700, input=100, launch=400, device=50)
    found = idle_of(1000.0, window, None)
    assert found.by_cause == {"input": 100, "sync": 0, "launch": 150, "device": 50, "other": 0}
    scarce = idle_of(820.0, window, None)
    assert scarce.by_cause == {"input": 100, "sync": 0, "launch": 0, "device": 20, "other": 0}


@pytest.mark.parametrize(("waited", "told"), [(30.0, 30.0), (500.0, 100.0), (0.0, 0.0)])
def test_input_is_no_more_than_the_host_waited_undisturbed(waited: float, told: float) -> None:
    found = idle_of(1000.0, light(700, input=100, launch=400), waited)
    assert found.by_cause["input"] == told
    assert found.by_cause["launch"] == 300 - told


def test_less_than_a_percent_is_not_divided() -> None:
    found = idle_of(1000.0, light(995, sync=5), None)
    assert found.by_cause == {"input": 0, "sync": 0, "launch": 0, "device": 0, "other": 5}
    assert not found.divided
    assert found.residual_ns == 0


def test_a_window_busier_than_the_undisturbed_step_leaves_a_residual_that_fails() -> None:
    found = idle_of(600.0, light(700, launch=100), None)
    assert sum(found.by_cause.values()) == 0
    assert found.residual_ns == -100.0


def test_idle_time_without_any_cause_in_the_window_has_none() -> None:
    found = idle_of(1000.0, light(700), None)
    assert found.by_cause == {"input": 0, "sync": 0, "launch": 0, "device": 0, "other": 300}


ns = st.floats(0, 1e9)


@given(ns, ns, ns, ns, ns, ns, st.floats(1, 1e9), st.none() | ns)
def test_the_parts_sum_to_the_undisturbed_step(
    busy: float,
    input: float,
    sync: float,
    launch: float,
    device: float,
    other: float,
    step: float,
    waited: float | None,
) -> None:
    window = light(busy, input=input, sync=sync, launch=launch, device=device, other=other)
    found = idle_of(step, window, waited)
    assert found.by_cause.keys() == set(CAUSES)
    total = busy + sum(found.by_cause.values()) + found.residual_ns
    assert total == pytest.approx(step, rel=1e-9, abs=1e-9 * window.step_ns)
    assert min(found.by_cause.values()) >= 0
    if found.estimated:
        assert found.residual_ns <= 0
        if waited is not None:
            assert found.by_cause["input"] <= waited


def test_blocks_keep_neighbours_together() -> None:
    coin = np.random.default_rng(0)
    series = np.repeat([0.0, 10.0], 500)  # a drift: steps are not independent
    spread = float(np.std(block_means(series, coin, 400)))
    alone = float(np.std(series)) / np.sqrt(len(series))
    assert spread > 2 * alone
    assert block_means(np.full(7, 3.0), coin, 5).tolist() == [3.0] * 5
    assert block_means(np.array([4.0]), coin, 3).tolist() == [4.0] * 3
    assert float(block_means(series, coin, 400).mean()) == pytest.approx(5.0, abs=0.5)
