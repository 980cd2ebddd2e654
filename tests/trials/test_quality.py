"""Verdicts on the losses of longer runs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.records.curve import SCHEMA, RecordedCurve
from flopwise.trials.interval import student_t_quantile
from flopwise.trials.quality import Run, judge, together


def run(level: float, *, n: int = 100, step_s: float = 1.0, **more: Any) -> Run:
    """Returns a run whose loss falls from 3 to `level` and stays there in its second half."""
    losses = [level + (3 - level) * max(0.0, 1 - 2 * i / n) for i in range(n)]
    return Run(losses, [(i, i * step_s) for i in range(1, n + 1)], **more)


def said(old: list[Run], new: list[Run], asked: int = 100) -> Any:
    return judge(old, new, asked=asked, seeding="so", fixes=["FW102 fused-optimizer"])


BARE = [1.00, 1.02, 1.04]  # a spread of 0.02


def test_losses_that_are_equal_to_the_bit_are_the_same() -> None:
    found = said([run(x) for x in BARE], [run(x) for x in BARE])
    assert (found.verdict, found.reason) == (
        "same",
        "the losses are equal to the bit in every step",
    )
    assert (found.equal_steps.difference, found.equal_steps.high) == (0, 0)
    assert found.equal_steps.spread == pytest.approx(0.02)


def test_differences_well_within_the_spread_of_seeds_are_the_same() -> None:
    found = said(
        [run(x) for x in BARE], [run(x + d) for x, d in zip(BARE, (1e-3, -1e-3, 2e-3), strict=True)]
    )
    assert found.verdict == "same"
    gap = found.equal_steps
    assert (gap.old, gap.new) == (pytest.approx(1.02), pytest.approx(1.02 + 2e-3 / 3))
    error = math.sqrt(7 / 3) * 1e-3 / math.sqrt(3)  # variance of the differences: 7/3 * 1e-6
    assert gap.high == pytest.approx(2e-3 / 3 + student_t_quantile(0.95, 2) * error)
    assert gap.low == pytest.approx(2e-3 / 3 - student_t_quantile(0.975, 2) * error)
    assert gap.window == 20


def test_a_loss_that_is_higher_in_every_pair_is_worse() -> None:
    found = said(
        [run(x) for x in BARE], [run(x + d) for x, d in zip(BARE, (0.1, 0.11, 0.09), strict=True)]
    )
    assert found.verdict == "worse"
    assert found.reason.startswith("the loss is higher by +0.1 (")
    assert found.reason.endswith("and seeds alone by 0.02")


def test_one_that_is_higher_by_less_than_seeds_differ_is_not_called_worse() -> None:
    found = said([run(x) for x in BARE], [run(x + 0.005) for x in BARE])
    assert found.verdict == "same"
    assert found.equal_steps.low > 0


def test_pairs_that_scatter_show_nothing() -> None:
    found = said(
        [run(x) for x in BARE], [run(x + d) for x, d in zip(BARE, (0.1, -0.1, 0.05), strict=True)]
    )
    assert found.verdict == "not shown"
    assert found.reason.endswith("more steps or seeds would tell")


def test_a_lower_loss_is_no_worse() -> None:
    found = said(
        [run(x) for x in BARE], [run(x - d) for x, d in zip(BARE, (0.1, 0.11, 0.09), strict=True)]
    )
    assert (found.verdict, found.equal_steps.verdict) == ("same", "lower")


def test_without_a_yardstick_nothing_is_shown() -> None:
    found = said([run(1.0)] * 3, [run(1.0 + 1e-7)] * 3)
    assert found.verdict == "not shown"
    assert "there is no yardstick" in found.reason


def test_runs_that_learn_nothing_cannot_tell() -> None:
    flat = [Run([x] * 100, [(i, float(i)) for i in range(1, 101)]) for x in BARE]
    near = [Run([x + 1e-6] * 100, flat[0].stamps) for x in BARE]
    found = said(flat, near)
    assert found.verdict == "not shown"
    assert "too short to tell" in found.reason


def test_a_loss_that_is_no_number_with_the_plan_only_is_worse() -> None:
    found = said([run(x) for x in BARE], [run(1.0), run(1.02, diverged=41), run(1.04)])
    assert (found.verdict, found.reason) == (
        "worse",
        "with the plan the loss is no number from step 41 on in a run",
    )
    both = said([run(1.0, diverged=7), run(1.02), run(1.04)], [run(x, diverged=41) for x in BARE])
    assert both.verdict == "not shown"


def test_losses_that_could_not_be_seen_are_not_judged() -> None:
    blind = [Run([None] * 100, [(100, 1.0)]) for _ in BARE]
    found = said(blind, blind)
    assert (found.verdict, found.equal_steps) == ("not shown", None)
    assert found.reason.startswith("the loss of 100 of 100 steps could not be seen")


def test_runs_of_different_length_are_compared_over_what_all_made() -> None:
    found = said([run(x, n=100) for x in BARE], [run(x, n=60) for x in BARE])
    assert (found.steps, found.asked) == (60, 100)
    assert found.old[0].steps[-1] == 60
    assert said([run(x, n=10) for x in BARE], [run(x, n=10) for x in BARE]).reason.startswith(
        "a run made 10 steps"
    )


def test_at_equal_time_a_faster_plan_is_ahead() -> None:
    old = [run(x) for x in BARE]
    new = [run(x, step_s=0.5) for x in BARE]
    found = said(old, new)
    assert found.verdict == "same"
    assert found.time_s == 50.0
    gap = found.equal_time
    assert gap.verdict == "lower"
    # Bare runs have made 50 steps by then: the mean over the last 20 of them is on the slope still.
    assert gap.old == pytest.approx(
        sum(x + (3 - x) * sum(1 - i / 50 for i in range(30, 50)) / 20 for x in BARE) / 3
    )
    assert gap.new == pytest.approx(1.02)
    # Losses are flat from step 50 on, so the last fifth of the bare script's is met at step 70, after 35 s of 100.
    assert found.time_ratio == pytest.approx(0.35)


def test_a_plan_that_never_comes_to_the_loss_has_no_time() -> None:
    assert said([run(x) for x in BARE], [run(x + 0.1) for x in BARE]).time_ratio is None


def test_curves_in_the_record_are_means_of_stretches() -> None:
    runs = [
        Run([float(i) for i in range(1, 401)], [(1, 1.0), (400, 400.0)], offset=k) for k in range(3)
    ]
    found = said(runs, runs)
    curve = found.new[2]
    assert (len(curve.steps), curve.offset) == (100, 2)
    assert (curve.steps[0], curve.losses[0], curve.times_s[0]) == (4, 2.5, 4.0)
    assert (curve.steps[-1], curve.losses[-1], curve.times_s[-1]) == (400, 398.5, 400.0)


def test_fewer_than_three_runs_an_arm_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 2 runs"):
        said([run(1.0)] * 2, [run(1.0)] * 2)


def recorded(rank: int, losses: list[float | None], **more: Any) -> RecordedCurve:
    given: dict[str, Any] = {"diverged": None, "stamps": [(1, 1.0 + rank), (2, 2.0 + rank)], **more}
    return RecordedCurve(schema=SCHEMA, rank=rank, asked=2, losses=losses, **given)


def test_a_job_of_several_ranks_has_their_mean_and_the_times_of_the_first() -> None:
    found = together([recorded(1, [2.0, 4.0, 5.0]), recorded(0, [1.0, None])], "f")
    assert found.losses == [1.5, None]
    assert found.stamps == [(1, 1.0), (2, 2.0)]
    assert together([recorded(0, [1.0], diverged=9), recorded(1, [1.0], diverged=4)]).diverged == 4
    with pytest.raises(ValueError, match="without ranks"):
        together([])


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=6, unique=True),
    st.floats(0.1, 10),
    st.floats(-1, 1),
)
def test_the_verdict_does_not_depend_on_the_unit_of_the_loss(
    levels: list[float], scale: float, shift: float
) -> None:
    coin = random.Random(1)
    moved = [shift * 0.01 + coin.gauss(0, 0.01) for _ in levels]

    def arm(by: float, extra: list[float]) -> list[Run]:
        plain = [run(x + e) for x, e in zip(levels, extra, strict=True)]
        return [Run([by * x for x in one.losses if x is not None], one.stamps) for one in plain]

    zero = [0.0] * len(levels)
    one = said(arm(1.0, zero), arm(1.0, moved))
    other = said(arm(scale, zero), arm(scale, moved))
    assert one.verdict == other.verdict
    assert one.equal_steps.difference * scale == pytest.approx(
        other.equal_steps.difference, rel=1e-6, abs=1e-12
    )
