"""The lines about the losses of longer runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flopwise.records.quality import Curve, Gap, Quality
from flopwise.reports.terminal import render


def curve(offset: int, level: float, step_s: float) -> Curve:
    steps = list(range(10, 121, 10))
    return Curve(offset, steps, [level + 1 / n for n in steps], [n * step_s for n in steps])


@pytest.fixture
def found() -> Quality:
    return Quality(
        verdict="same", reason="the losses differ by so much", asked=120, steps=120, seeds=3, seeding="so and so",
        fixes=["FW102 fused-optimizer"],
        equal_steps=Gap("same", 2.1966, 2.1971, 0.0005, -0.0011, 0.0019, 0.013, 24),
        equal_time=Gap("lower", 2.31, 2.1971, -0.1129, -0.13, -0.1, 0.013, 24), time_s=6.0, time_ratio=0.52,
        old=[curve(k, 2.0 + k / 100, 0.1) for k in range(3)], new=[curve(k, 2.0 + k / 100, 0.05) for k in range(3)],
    )  # fmt: skip


def lines(record: Any, quality: Quality | None, worse: Quality | None = None) -> list[str]:
    told = dataclasses.replace(record, quality=quality, worse=worse)
    return render(told, width=160, color=False).splitlines()


def test_both_comparisons_and_the_yardstick_are_said(sample: Any, found: Quality) -> None:
    text = "\n".join(lines(sample("tune"), found))
    assert "  quality     same · the losses differ by so much · 3 runs of 120 steps an arm" in text
    assert (
        "  equal steps mean loss of the last 24 of 120 steps · 2.197 as it is, 2.197 with the plan · difference +0.0005 "
        "(-0.0011 to +0.0019)" in text
    )
    assert "seeds alone differ by 0.013" in text
    assert "  equal time  after 6 s · 2.31 as it is, 2.197 with the plan" in text
    assert "the loss at which the bare script ends is reached in 52 % of its time" in " ".join(
        text.split()
    )


def test_the_table_has_six_steps_of_both_curves(sample: Any, found: Quality) -> None:
    shown = lines(sample("tune"), found)
    at = next(i for i, text in enumerate(shown) if "loss up to step" in text)
    rows = [text.split() for text in shown[at + 1 : at + 7]]
    assert [row[0] for row in rows] == ["20", "40", "60", "80", "100", "120"]
    assert (
        rows[-1][1:] == ["2.018", "±", "0.01", "2.018", "±", "0.01", "12.0", "s", "6.00", "s"]
        or rows[-1][1] == "2.018"
    )


def test_without_longer_runs_nothing_is_said(sample: Any) -> None:
    assert not any(text.startswith("  quality") for text in lines(sample("tune"), None))


def test_what_came_out_worse_before_is_said(sample: Any, found: Quality) -> None:
    worse = dataclasses.replace(
        found, verdict="worse", reason="the loss is higher", fixes=["FW104 bf16-autocast"]
    )
    text = "\n".join(lines(sample("tune"), found, worse))
    said = "  quality     at first, with FW104 bf16-autocast: worse, the loss is higher; fixes were taken out\n"
    assert said in text
    assert "with FW104" in "\n".join(lines(sample("tune"), None, worse))


def test_a_script_that_ended_before_is_said(sample: Any, found: Quality) -> None:
    text = " ".join("\n".join(lines(sample("tune"), dataclasses.replace(found, asked=500))).split())
    assert "500 steps were asked for: the script ended before" in text


def test_nothing_compared_is_one_line(sample: Any) -> None:
    bare = Quality("not shown", "a run made 3 steps", 3, 3, 3, "", [])
    shown = [
        text for text in lines(sample("tune"), bare) if "steps" in text and "not shown" in text
    ]
    assert shown == ["  quality     not shown · a run made 3 steps · 3 runs of 3 steps an arm"]
