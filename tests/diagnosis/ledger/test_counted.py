"""What is left of the FLOPs of a step once its operators have theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.counted import Counted, left
from flopwise.records.rank import FlopCount


def test_of_a_live_runs_count() -> None:
    count = FlopCount(
        shape="8x16", method="fake tensors", needed={"bf16": 100, "fp32": 5}, needed_causal={"bf16": 90, "fp32": 5},
        executed={"bf16": 150, "fp32": 5}, recomputed=50, coverage_frac=1.0, coverage_basis="op time", uncovered=[], by_op={},
        cross_check=None, repeated={"bf16": 30},
    )  # fmt: skip
    found = Counted.of(count, times=2)
    assert found.needed == {"bf16": 200, "fp32": 10}
    assert found.needed_causal == {"bf16": 180, "fp32": 10}
    assert found.repeated == {"bf16": 60}  # of the 50 more that ran, 20 are a fused backward's own
    assert found.source == "counted in the live run (fake tensors)"


def test_without_a_forward_that_ran_again() -> None:
    assert Counted({"bf16": 100}, {"bf16": 100}).repeated == {}
    assert Counted({"bf16": 100}, {"bf16": 100}, {"bf16": 90}).repeated == {}


@pytest.mark.parametrize(
    ("counted", "mapped", "expected"),
    [
        ({"bf16": 100}, {}, {"bf16": 100}),
        ({"bf16": 100}, {"bf16": 40}, {"bf16": 60}),
        ({"bf16": 100}, {"bf16": 130}, {}),
        ({"bf16": 100, "fp32": 10}, {"bf16": 100}, {"fp32": 10}),
        ({"fp32": 100}, {"tf32": 100}, {}),  # one of both took the dtype for another: none is left
        ({"fp32": 100, "bf16": 50}, {"tf32": 75}, {"fp32": 50, "bf16": 25}),
        ({}, {"bf16": 1}, {}),
    ],
)
def test_what_is_left(counted: dict, mapped: dict, expected: dict) -> None:
    assert left(counted, mapped) == pytest.approx(expected)


flops = st.dictionaries(st.sampled_from(["bf16", "fp32", "fp8"]), st.floats(0, 1e15))


@given(flops, flops)
def test_never_below_zero_nor_more_than_the_difference(counted: dict, mapped: dict) -> None:
    found = left(counted, mapped)
    difference = sum(counted.values()) - sum(mapped.values())
    assert all(n > 0 for n in found.values())
    assert sum(found.values()) == pytest.approx(max(0.0, difference), rel=1e-9, abs=1)
