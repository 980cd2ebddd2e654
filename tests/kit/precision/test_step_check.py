"""What one step did to weights: lost to rounding, or broken by the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionWarning
from flopwise.kit.precision import check_step


def parameter(values: list[float], grads: list[float], dtype: torch.dtype) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=dtype))
    made.grad = torch.tensor(grads, dtype=dtype)
    return made


def test_updates_below_half_a_step_of_the_dtype_are_counted() -> None:
    # bfloat16 has steps of 2**-7 above 1: 1e-3 is lost there, and moves 0.1
    weight = parameter([1.0, 1.0, 0.1, 5.0], [1.0, 1.0, 1.0, 0.0], torch.bfloat16)
    with pytest.warns(PrecisionWarning, match="bfloat16 without float32 master copies"):
        seen = check_step(torch.optim.SGD([weight], 1e-3))
    (row,) = seen.tensors
    assert (row.dtype, row.entries, row.unmoved, row.broken) == ("bfloat16", 3, 2, 0)
    assert seen.unmoved_frac == pytest.approx(2 / 3)
    assert str(seen).startswith(
        "66.7% of the updates were lost to rounding: parameter 0.0 (bfloat16) 66.7%. Such a loss curve looks flat"
    )


def test_float32_weights_move_and_nothing_is_said() -> None:
    weight = parameter([1.0, 1.0], [1.0, 0.0], torch.float32)
    seen = check_step(torch.optim.SGD([weight], 1e-3))
    assert (seen.tensors[0].entries, seen.unmoved_frac) == (1, 0.0)
    assert str(seen) == "every entry with a gradient moved, and all are finite"


def test_entries_that_the_optimizer_breaks_are_its_own() -> None:
    model = nn.Module()
    model.weight = parameter([1.0, 1.0, float("nan")], [1.0, float("inf"), 1.0], torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), float("inf"))
    seen = check_step(optimizer, model)
    assert seen.broken == 1  # the other two were not finite, or had such a gradient, before
    assert "SGD made 1 weights non-finite (most in weight, float32)" in str(seen)


def test_a_learning_rate_of_0_is_no_loss() -> None:
    seen = check_step(torch.optim.SGD([parameter([1.0], [1.0], torch.float32)], 0.0))
    assert (seen.tensors[0].entries, seen.unmoved_frac) == (0, 0.0)


def test_another_way_to_step_is_taken_and_its_result_given() -> None:
    weight = parameter([1.0], [1.0], torch.float32)
    optimizer = torch.optim.SGD([weight], 0.5)

    def step() -> str:
        optimizer.step()
        return "done"

    assert check_step(optimizer, step=step).result == "done"
    assert weight.item() == 0.5
