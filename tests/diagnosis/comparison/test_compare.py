"""What becomes of lines, operators and kernels from one side to the other; differences sum to the step's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.comparison.compare import compare
from flopwise.diagnosis.comparison.sides import Measured, measured
from flopwise.records.comparison import Changed, ComparisonRecord
from flopwise.records.ledger import FAMILIES

Side = Callable[..., Measured]


def by_name(record: ComparisonRecord) -> dict[str, Any]:
    return {line.name: line for line in record.lines}


def test_the_line_that_changed_comes_first_and_is_shown(a_side: Side) -> None:
    record = compare(
        a_side(), a_side({"ideal": (4, 0), "memory_excess": (3.05, 0.1), "idle_input": (1, 0.1)})
    )
    assert [line.name for line in record.lines] == ["idle_input", "memory_excess", "ideal"]
    first, second, third = record.lines
    assert first.difference_s == pytest.approx(-2e-3)
    assert (first.shown, second.shown, third.shown) == (True, False, False)
    assert first.ci95 is not None
    assert first.ci95_all is not None
    assert first.ci95_all[0] < first.ci95[0] < -2e-3 < first.ci95[1] < first.ci95_all[1] < 0
    assert first.old_points == pytest.approx(30)
    assert first.new_points == pytest.approx(100 / 8.05)
    assert record.step.outcome == "faster"
    assert record.step.ratio == pytest.approx(0.805)
    assert record.rest_s == pytest.approx(0, abs=1e-15)
    assert record.mfu_difference == pytest.approx(4 / 8.05 - 0.4)
    assert [(f.name, f.difference_s) for f in record.families] == [
        ("pipeline", pytest.approx(-2e-3)),
        ("memory", pytest.approx(5e-5)),
        ("useful", 0),
    ]
    assert record.conditions == []


def test_a_side_against_itself_shows_nothing(a_side: Side) -> None:
    record = compare(a_side(), a_side())
    assert record.step.outcome == "not shown"
    assert (record.step.ratio, record.step.difference_s) == (1.0, 0.0)
    assert not any(line.shown for line in record.lines)
    assert record.failed is False


def test_time_that_is_in_no_line_is_told(a_side: Side) -> None:
    record = compare(a_side(), a_side(each_ms=[12.0, 12.2]))
    assert record.step.difference_s == pytest.approx(2.1e-3)
    assert record.rest_s == pytest.approx(2.1e-3)


LINES = st.dictionaries(
    st.sampled_from(sorted(FAMILIES)), st.tuples(st.floats(-5, 50), st.floats(0, 5)), min_size=1
)


@settings(max_examples=150)
@given(LINES, LINES)
def test_differences_sum_to_that_of_the_step(
    a_side: Side, old: dict[str, tuple[float, float]], new: dict[str, tuple[float, float]]
) -> None:
    a, b = (
        a_side(lines, each_ms=[max(1e-3, sum(ms for ms, _ in lines.values()))] * 3)
        for lines in (old, new)
    )
    record = compare(a, b)
    assert {line.name for line in record.lines} == {*old, *new}
    assert record.rest_s is not None
    summed = math.fsum(line.difference_s for line in record.lines)
    assert summed + record.rest_s == pytest.approx(record.step.difference_s, abs=1e-15)
    for which, total in ((old, record.step.old_s), (new, record.step.new_s)):
        if sum(ms for ms, _ in which.values()) >= 1e-3:  # its lines sum to its step
            assert total * 1e3 == pytest.approx(sum(ms for ms, _ in which.values()))
    if all(sum(ms for ms, _ in one.values()) >= 1e-3 for one in (old, new)):
        assert record.rest_s == pytest.approx(0, abs=1e-15)
    assert math.fsum(f.difference_s for f in record.families) == pytest.approx(summed, abs=1e-15)
    assert [abs(line.difference_s) for line in record.lines] == sorted(
        (abs(line.difference_s) for line in record.lines), reverse=True
    )
    for line in record.lines:
        assert line.new_s - line.old_s == line.difference_s
        assert line.ci95 is not None
        assert line.ci95[0] <= line.difference_s <= line.ci95[1]


def changes(record: list[Changed]) -> dict[str, tuple[str, float | None]]:
    return {
        one.name: (one.change, one.difference_s and round(one.difference_s * 1e3, 9))
        for one in record
    }


def test_operators_that_all_are_known(a_side: Side) -> None:
    old = a_side(operators={"mm": 4.0, "relu": 1.0, "same": 1.0, "gone": 0.5})
    new = a_side(operators={"mm": 5.0, "relu": 0.8, "same": 1.0, "new": 2.0})
    record = compare(old, new)
    assert changes(record.operators) == {
        "new": ("new", 2.0),
        "mm": ("slower", 1.0),
        "gone": ("gone", -0.5),
        "relu": ("faster", -0.2),
        "same": ("same", 0.0),
    }
    assert [one.name for one in record.operators] == ["new", "mm", "gone", "relu", "same"]
    new_one = record.operators[0]
    assert (new_one.old_s, new_one.old_calls, new_one.at_most_s) == (0.0, 0.0, None)


def test_what_a_full_list_leaves_out_may_be_just_below_it(a_side: Side) -> None:
    listed = {f"op{i}": 2.0 - 0.1 * i for i in range(12)}  # the smallest takes 0.9
    old = a_side(operators=listed)
    new = a_side(operators={**listed, "op11": 0.9, "more": 1.5})
    found = {one.name: one for one in compare(old, new).operators}["more"]
    assert (found.change, found.old_s, found.old_calls) == ("not listed before", None, None)
    assert found.at_most_s == pytest.approx(0.9e-3)
    assert found.difference_s == pytest.approx(0.6e-3)
    back = {one.name: one for one in compare(new, old).operators}["more"]
    assert (back.change, back.new_s) == ("not listed now", None)
    assert back.difference_s == pytest.approx(-0.6e-3)
    small = a_side(operators={**listed, "less": 0.2})
    found = {one.name: one for one in compare(old, small).operators}["less"]
    assert (found.change, found.difference_s) == ("not listed before", 0.0)


def test_kernels_are_told_by_their_operator_too(a_side: Side) -> None:
    record = compare(a_side(kernels={"gemm": 4.0}), a_side(kernels={"gemm": 3.0, "other": 1.0}))
    assert [(one.name, one.operator, one.change) for one in record.kernels] == [
        ("gemm", "aten::mm", "faster"),
        ("other", "aten::mm", "new"),
    ]


def test_a_side_that_lists_none_is_not_compared(a_side: Side) -> None:
    record = compare(a_side(), a_side(operators={"mm": 1.0}, kernels={"gemm": 1.0}))
    assert (record.operators, record.kernels) == ([], [])


def test_one_step_shows_nothing_and_says_why(a_side: Side) -> None:
    record = compare(a_side(), a_side({"ideal": (40, 0)}, each_ms=[40.0]))
    step = record.step
    assert (step.outcome, step.ci95, step.minimum_detectable_frac) == ("not shown", None, None)
    assert "the new side" in (step.reason or "")
    assert step.ratio == pytest.approx(4)
    assert all(line.ci95 is None and not line.shown for line in record.lines)


def test_unlike_sides_have_no_outcome(a_side: Side) -> None:
    record = compare(a_side(), a_side({"ideal": (40, 0)}, device_name="NVIDIA A100"))
    assert record.step.outcome == "not comparable"
    assert record.step.reason == "the sides are not alike: device"
    assert record.step.ci95 is not None
    assert record.mfu_difference is None


def test_lines_held_against_other_ceilings_are_not_shown(a_side: Side) -> None:
    old = a_side({"ideal": (4, 0), "ceiling": (1, 0), "gemm_excess": (5, 0.01)})
    new = a_side({"ideal": (4, 0), "ceiling": (2, 0), "gemm_excess": (4, 0.01)})
    record = compare(old, new)
    assert [one.code for one in record.conditions] == ["ceilings"]
    assert "differ by 0 ns together" in record.conditions[0].text
    assert not any(line.shown for line in record.lines)
    assert record.step.outcome == "not shown"


def test_two_traces_of_which_one_waits(training: Callable[..., Any]) -> None:
    """The second step of each pair is 400 us later on the device, and its host waits in a loader for it."""
    old = measured(training(6).write("old.json"))
    t = training(0)
    for event in t.events:
        if event["cat"] == "kernel":
            event["ts"] += 400 * ((event["ts"] - 20_000) // 1000)
    new = measured(t.write("new.json"))
    record = compare(old, new)
    assert record.step.difference_s == pytest.approx(4e-4)
    assert record.lines[0].name.startswith("idle_")
    assert record.lines[0].difference_s == pytest.approx(4e-4)
    assert math.fsum(line.difference_s for line in record.lines) == pytest.approx(4e-4)
    assert {one.name: one.change for one in record.operators} == {
        "aten::mm": "same",
        "aten::relu": "same",
        "aten::add_": "same",
    }
    assert by_name(record)["ideal"].difference_s == 0
