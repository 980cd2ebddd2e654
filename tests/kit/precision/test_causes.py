"""From events to causes: which event matters, why, and what cures it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.kit.precision.causes import Event, Range, explain, fills, uninitialised


def event(op: str, value: str = "inf", dtype: str = "float16", **more: Any) -> Event:
    ins = more.pop("ins", [torch.tensor([1.0, 2.0])])
    fields: dict[str, Any] = {
        "phase": "forward", "value": value, "op": op, "module": "block", "line": "model.py:7", "dtype": dtype,
        "ranges": tuple(Range.of(t) for t in ins), "node": None, "ins": ins, "args": (), **more,
    }  # fmt: skip
    return Event(**fields)


def test_a_range_is_of_finite_values_and_counts_the_rest() -> None:
    found = Range.of(torch.tensor([1.0, -2.5, float("nan"), float("inf"), float("-inf")]))
    assert (found.least, found.most, found.nan, found.inf) == (-2.5, 1.0, 1, 2)
    assert str(found) == "float32[5] -2.5 to 1, 1 NaN, 2 inf"
    assert str(Range.of(torch.empty(0))) == "float32[0] 0 to 0"
    assert str(Range.of(torch.tensor([float("nan")]))) == "float32[1] 0 to 0, 1 NaN"


@pytest.mark.parametrize(
    ("seen", "cause", "cure"),
    [
        (event("sqrt", "NaN", "float32"), "sqrt of a negative number", "Clamp the input of sqrt"),
        (event("log", "-inf", "float32"), "log of 0", "add an epsilon inside"),
        (event("div", "NaN", "float32"), "0/0 or inf/inf", "divisor safe"),
        (event("div", "inf", "float32"), "Division by 0", "divisor safe"),
        (
            event("to_copy"),
            "A value of up to 2 does not fit float16",
            "Keep this tensor in float32",
        ),
        (event("sum"), "beyond 65504, the largest float16", "Compute this sum in float32"),
        (event("exp", "inf", "float32"), "beyond the range of float32", "how large its inputs"),
    ],
)
def test_an_op_of_forward_has_its_cause(seen: Event, cause: str, cure: str) -> None:
    found, why, what = explain([seen], None)
    assert found is seen
    assert cause in why
    assert cure in what


def test_masks_alone_are_no_finding() -> None:
    assert explain([event("add", "-inf")], True) == (None, "", "")
    assert explain([], None) == (None, "", "")


def test_the_first_event_of_forward_is_the_one() -> None:
    first, second = event("sum"), event("div", "NaN")
    assert explain([first, second], False)[0] is first


def test_a_gradient_beyond_float16_is_the_scales_matter() -> None:
    found, why, what = explain([event("mm", phase="backward", node="MmBackward0")], True)
    assert found is not None
    assert found.op == "backward of mm"
    assert "The gradient is beyond 65504" in why
    assert "A smaller loss scale cures it" in what


def test_scores_that_reach_inf_are_told_from_masks() -> None:
    scores = torch.tensor([[float("inf"), 1.0]])
    seen = event("softmax", "NaN", ins=[scores], args=(scores, -1, False))
    _, why, what = explain([seen], False)
    assert why.startswith("The scores reach +inf before the softmax")
    assert what.startswith("Scale the scores")


def test_what_is_written_is_meant_and_what_is_empty_means_nothing() -> None:
    assert fills("masked_fill")
    assert not fills("add")
    assert uninitialised("empty_like")
    assert not uninitialised("zeros")
