"""How far a precision moves results, and that looking leaves the module as it was."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionError, PrecisionWarning
from flopwise.kit.precision import MixedPrecision
from flopwise.kit.precision.difference import Difference, difference


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 2))


def x() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def test_equal_calls_differ_by_nothing() -> None:
    model = net()
    assert difference(model, model, model, (x(),), {}) == Difference(0.0, 0.0)


def test_differences_are_relative() -> None:
    model = nn.Linear(4, 4)
    plain = model.forward

    def more(value: torch.Tensor) -> torch.Tensor:
        return plain(value) * 1.01

    found = difference(model, plain, more, (torch.ones(2, 4),), {})
    assert found.outputs == pytest.approx(0.01, rel=1e-3)
    assert found.gradients == pytest.approx(0.01, rel=1e-3)
    assert found.largest == max(found.outputs, found.gradients)
    assert str(found) == "1.0e-02 in the outputs, 1.0e-02 in the gradients"


@pytest.mark.parametrize(("a", "b"), [(math.nan, 0.0), (0.0, math.nan)])
def test_what_is_not_a_number_is_the_largest(a: float, b: float) -> None:
    assert math.isnan(Difference(a, b).largest)


def test_the_module_is_left_as_it_was() -> None:
    model = net()
    mixed = MixedPrecision(model)
    model[2].eval()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.random.get_rng_state()
    mixed.verify(x(), tolerance=1.0)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model] == [True, True, False, True]
    assert all(p.grad is None for p in model.parameters())


def test_within_the_tolerance_it_stays() -> None:
    model = net()
    mixed = MixedPrecision(model)
    found = mixed.verify(x(), tolerance=0.05)
    # bfloat16 has steps of 2**-8 relative to the value
    assert 1e-4 < found.largest < 0.05
    assert mixed.active
    assert mixed.declined is None


def test_beyond_it_is_taken_back() -> None:
    model = net()
    mixed = MixedPrecision(model)
    with pytest.warns(
        PrecisionWarning,
        match=r"bfloat16 is taken back: it moves results by .* and 1e-05 is allowed",
    ):
        mixed.verify(x(), tolerance=1e-5)
    assert not mixed.active
    assert "it moves results by" in str(mixed)
    with pytest.raises(PrecisionError, match="not in use"):
        mixed.verify(x(), tolerance=1e-5)


def test_an_overflow_is_beyond_any_tolerance() -> None:
    model = nn.Linear(4, 4)
    mixed = MixedPrecision(model, "float16")
    with pytest.warns(PrecisionWarning, match="taken back"):
        mixed.verify(torch.full((1, 4), 1e6), tolerance=1e9)
    assert not mixed.active
