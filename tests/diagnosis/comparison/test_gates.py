"""Limits: how they are written, and when they failed, passed or cannot be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flopwise.diagnosis.comparison.compare import compare
from flopwise.diagnosis.comparison.gates import Gate, parse_gate
from flopwise.diagnosis.comparison.sides import Measured
from flopwise.errors import UsageError

Side = Callable[..., Measured]


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("5%", ("step", 0.05, None)),
        ("0%", ("step", 0.0, None)),
        ("2.5 %", ("step", 0.025, None)),
        ("step=5%", ("step", 0.05, None)),
        ("2ms", ("step", None, 2e-3)),
        ("idle_input=10%", ("idle_input", 0.1, None)),
        ("gemm_excess=500us", ("gemm_excess", None, 5e-4)),
        ("residual=0.1s", ("residual", None, 0.1)),
    ],
)
def test_a_limit_is_read(text: str, gate: tuple[str, float | None, float | None]) -> None:
    found = parse_gate(text)
    assert (found.subject, found.frac, found.s) == pytest.approx(gate)
    assert found.text == text


@pytest.mark.parametrize(
    "text",
    ["", "5", "-5%", "%", "5%%", "1e3%", "nan%", "inf%", "a=b=5%", "9" * 99 + "%", "5min", "=5%"],
)
def test_what_is_no_limit_is_one_message(text: str) -> None:
    with pytest.raises(UsageError, match="not a limit"):
        parse_gate(text)


def test_a_line_that_there_is_not_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no line 'idle'.*idle_input"):
        parse_gate("idle=5%")


def outcomes(old: Measured, new: Measured, *texts: str, **options: Any) -> list[str]:
    record = compare(old, new, [parse_gate(text) for text in texts], **options)
    assert [result.gate for result in record.gates] == list(texts)
    assert all(result.evidence for result in record.gates)
    return [result.outcome for result in record.gates]


def test_the_step_by_its_interval(a_side: Side) -> None:
    new = a_side({"ideal": (4, 0), "memory_excess": (4, 0.1), "idle_input": (3, 0.2)})
    # 10 to 11 ms, each known to 0.09 ms or so
    assert outcomes(a_side(), new, "5%", "10%", "15%") == ["failed", "unclear", "passed"]
    assert outcomes(a_side(), new, "0.5ms", "1ms", "1500us") == ["failed", "unclear", "passed"]
    assert outcomes(new, a_side(), "5%", "0%", "1us") == ["passed", "passed", "passed"]


def test_no_difference_passes_only_as_far_as_it_is_known(a_side: Side) -> None:
    assert outcomes(a_side(), a_side(), "0%", "2%") == ["unclear", "passed"]


def test_a_line_by_its_interval(a_side: Side) -> None:
    new = a_side({"ideal": (4, 0), "memory_excess": (4, 0.1), "idle_input": (3, 0.2)})
    gates = ("memory_excess=10%", "memory_excess=35%", "memory_excess=60%")
    assert outcomes(a_side(), new, *gates) == ["failed", "unclear", "passed"]
    assert outcomes(a_side(), new, "memory_excess=0.5ms", "memory_excess=2ms") == [
        "failed",
        "passed",
    ]
    assert outcomes(a_side(), new, "optimizer=0%") == ["passed"]  # neither has it


def test_a_line_that_is_new_is_more_than_any_share_of_nothing(a_side: Side) -> None:
    new = a_side({"ideal": (4, 0), "memory_excess": (3, 0.1), "exposed_copy": (3, 0.2)})
    assert outcomes(a_side(), new, "exposed_copy=1000%") == ["failed"]


def test_a_share_of_less_than_nothing_says_nothing(a_side: Side) -> None:
    old = a_side({"ideal": (11, 0), "residual": (-1, 0.1)})
    record = compare(old, a_side(), [parse_gate("residual=5%")])
    assert record.gates[0].outcome == "unclear"
    assert "give a limit in ms" in record.gates[0].evidence


def test_unlike_sides_are_unclear_and_fail_where_that_is_asked_for(a_side: Side) -> None:
    slow = {"ideal": (40, 0.0), "idle_input": (1, 0.0)}
    other = a_side(slow, device_name="NVIDIA A100")
    assert outcomes(a_side(), other, "5%", "idle_input=5%") == ["unclear", "unclear"]
    assert not compare(a_side(), other, [parse_gate("5%")]).failed
    assert compare(a_side(), other, [parse_gate("5%")], fail_unclear=True).failed
    assert compare(a_side(), a_side(slow), [parse_gate("5%")]).failed
    assert not compare(a_side(), a_side(slow)).failed


def test_lines_that_are_not_trusted_are_unclear_and_the_step_stands(a_side: Side) -> None:
    slow = {"ideal": (40, 0.0), "idle_input": (1, 0.0)}
    doubted = a_side(slow, trusted=False, untrusted_because=["why: so"])
    assert outcomes(a_side(), doubted, "5%", "ideal=5%") == ["failed", "unclear"]


def test_lines_of_other_ceilings_or_peaks_are_unclear(a_side: Side) -> None:
    old = a_side({"ideal": (4, 0), "ceiling": (1, 0), "gemm_excess": (5, 0.01)})
    new = a_side({"ideal": (4, 0), "ceiling": (2, 0), "gemm_excess": (4, 0.01)})
    assert outcomes(old, new, "ceiling=5%", "ideal=5%") == ["unclear", "passed"]
    other = a_side({"ideal": (4, 0), "ceiling": (2, 0)}, peak_flops_per_s=2e15)
    assert outcomes(old, other, "ideal=5%", "optimizer=5%") == ["unclear", "passed"]


def test_one_step_is_unclear(a_side: Side) -> None:
    one = a_side({"ideal": (40, 0)}, each_ms=[40.0])
    assert outcomes(a_side(), one, "5%", "5ms", "ideal=5%", "ideal=5ms") == ["unclear"] * 4


def test_a_limit_keeps_its_words() -> None:
    assert parse_gate("5%") == Gate("5%", "step", 0.05, None)
