"""The schedule by magnitude: what a review chooses from rows of updates."""

from __future__ import annotations

import math

import pytest
import torch

from flopwise.errors import PrecisionError
from flopwise.kit.precision.schedule import CEILING_REVIEWS, MagnitudeSchedule


def review(
    schedule: MagnitudeSchedule, rows: list[list[float]], scale: float
) -> tuple[float, list[float]]:
    """Returns the chosen scale and the review's numbers."""
    tensor = torch.tensor(scale)
    numbers = schedule.review(torch.tensor(rows), tensor, 0.5)
    return tensor.item(), numbers.tolist()


def test_the_largest_true_gradient_decides() -> None:
    schedule = MagnitudeSchedule(100, 16.0, 2.0**-24, 2.0**24)
    # rows hold scaled gradients: 0.5 and 2 unscaled, 65504 / 16 / 2 = 2047
    chosen, numbers = review(schedule, [[512.0, 1024.0], [1024.0, 512.0]], 512.0)
    assert chosen == 1024.0
    assert numbers[:2] == [2.0, 1024.0]
    assert all(math.isnan(n) for n in numbers[2:])  # nothing was looked at


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_a_ceiling_for_some_reviews_and_no_gradient(bad: float) -> None:
    schedule = MagnitudeSchedule(100, 16.0, 2.0**-24, 2.0**24)
    assert review(schedule, [[bad, 64.0], [16.0, 32.0]], 32.0) == (
        32.0,
        [0.5, 32.0, *[pytest.approx(math.nan, nan_ok=True)] * 3],
    )
    for _ in range(CEILING_REVIEWS - 1):
        assert review(schedule, [[16.0, 32.0]], 32.0)[0] == 32.0
    assert review(schedule, [[16.0, 32.0]], 32.0)[0] == 4096.0  # 65504 / 16 / 0.5 = 8188


def test_bad_batches_now_and_then_do_not_take_the_scale_down_for_good() -> None:
    schedule = MagnitudeSchedule(100, 16.0, 2.0**-24, 2.0**24)
    scale = 1024.0
    for _ in range(60):  # one bad batch between any two reviews
        scale = review(
            schedule, [[1.0 * scale, scale], [math.nan, scale], [scale / 2, scale / 2]], scale / 2
        )[0]
    # gradients of 1 allow 2048; 256 times less is as far as ceilings take it
    assert scale == 8.0


def test_nothing_but_skipped_steps_or_zeros_leave_the_scale() -> None:
    schedule = MagnitudeSchedule(100, 16.0, 2.0**-24, 2.0**24)
    assert review(schedule, [[0.0, 8.0]], 8.0)[0] == 8.0
    assert review(schedule, [[math.inf, 16.0]], 8.0)[0] == 8.0


def test_shares_are_looked_at_once() -> None:
    schedule = MagnitudeSchedule(1, 16.0, 2.0**-24, 2.0**24)
    schedule.look([torch.tensor([1.0, 0.0])], torch.tensor(1.0), scaled=True)
    assert review(schedule, [[1.0, 1.0]], 1.0)[1][2:] == [0.0, 0.0, 0.5]
    assert all(math.isnan(n) for n in review(schedule, [[1.0, 1.0]], 1.0)[1][2:])


def test_it_is_due_every_so_many_updates() -> None:
    schedule = MagnitudeSchedule(3, 1.0, 1.0, 2.0)
    assert [schedule.due(n) for n in range(1, 7)] == [False, False, True] * 2


@pytest.mark.parametrize(
    "bad", [(0, 1.0, 1.0, 2.0), (1, 3.0, 1.0, 2.0), (1, 1.0, 2.0, 1.0), (1, 1.0, 0.0, 1.0)]
)
def test_arguments_out_of_range_are_refused(bad: tuple[int, float, float, float]) -> None:
    with pytest.raises(PrecisionError):
        MagnitudeSchedule(*bad)


@pytest.mark.parametrize(
    ("review_steps", "looked"),
    [(1, 10), (10, 10), (19, 19), (20, 10), (25, 12), (100, 10), (1000, 10)],
)
def test_at_least_ten_updates_of_a_long_window_are_looked_at(
    review_steps: int, looked: int
) -> None:
    schedule = MagnitudeSchedule(review_steps, 16.0, 2.0**-24, 2.0**24)
    window = max(review_steps, 10)
    assert sum(schedule.looks(update) for update in range(1, window + 1)) == looked
    assert schedule.looks(100 * review_steps)
