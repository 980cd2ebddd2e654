"""Predictions against measured gains, over any number of tunes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.records.verdict import Predicted, Trial
from flopwise.trials.predictions import agreement, gains

GAINED = Trial("FW102", "x", "kept", "", 0.8, (0.78, 0.82))
NONE = Trial("FW103", "y", "not kept", "", 0.99, (0.97, 1.01))


def trial(one: Trial, predicted_gain: float | None) -> Trial:
    ratio = None if predicted_gain is None else 1 - predicted_gain
    return dataclasses.replace(one, predicted_ratio=ratio)


@pytest.mark.parametrize(
    ("one", "predicted", "expected"),
    [
        (GAINED, 0.20, Predicted(1, 0.0, 0, 0)),
        (GAINED, 0.30, Predicted(1, 0.5, 1, 0)),  # 30 % promised, 20 % found (18 to 22)
        (GAINED, 0.08, Predicted(1, 0.6, 0, 1)),  # 8 % promised, at least 18 % found
        (GAINED, 0.10, Predicted(1, 0.5, 0, 0)),  # more than half of 18 %
        (NONE, 0.02, Predicted(0, None, 0, 0, 1, 0)),  # inside of what can have been gained
        (NONE, 0.20, Predicted(0, None, 0, 0, 1, 1)),
    ],
)
def test_predictions_are_held_against_measured_gains(
    one: Trial, predicted: float, expected: Predicted
) -> None:
    found = agreement(gains({"a": [trial(one, predicted)]}))
    assert found is not None
    assert dataclasses.replace(found, median_error_frac=None) == dataclasses.replace(
        expected, median_error_frac=None
    )
    assert found.median_error_frac == pytest.approx(expected.median_error_frac)


def test_what_has_not_both_is_none_of_them() -> None:
    declined = Trial("FW101", "z", "declined", "", predicted_ratio=0.8)
    assert gains({"a": [trial(GAINED, None), declined]}) == []
    assert agreement([]) is None


def test_all_tunes_count_together() -> None:
    found = gains({"a": [trial(GAINED, 0.2), trial(NONE, 0.3)], "b": [trial(GAINED, 0.3)]})
    assert [(g.tune, g.fix) for g in found] == [("a", "FW102"), ("a", "FW103"), ("b", "FW102")]
    assert agreement(found) == Predicted(2, pytest.approx(0.25), 1, 0, 1, 1)


@given(
    ratio=st.floats(0.05, 1.5),
    half=st.floats(0.001, 0.04),
    predicted=st.floats(-0.5, 0.99),
)
def test_what_lies_in_the_interval_is_neither_above_nor_below(
    ratio: float, half: float, predicted: float
) -> None:
    one = dataclasses.replace(GAINED, ratio=ratio, ci95=(ratio - half, ratio + half))
    (gain,) = gains({"a": [trial(one, predicted)]})
    assert not (gain.above and gain.below)
    if gain.low <= gain.predicted <= gain.high:
        assert not gain.above
        assert not gain.below
    assert (gain.error_frac is None) == (ratio + half >= 1)
