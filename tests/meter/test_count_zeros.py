"""Forward-mode gradients multiply by zeros: executed, and not the model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.func
from torch import nn

from flopwise.meter.count import StepCounter
from flopwise.records.rank import FlopCount

ROWS, WIDTH = 8, 16
ONE = 2 * ROWS * WIDTH * WIDTH


def counted(step: Callable[[], object]) -> FlopCount:
    counter = StepCounter("test")
    counter.start()
    try:
        step()
    except BaseException:
        counter.abandon()
        raise
    return counter.stop()


def x() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def test_a_tangent_of_one_operand_is_one_more_product() -> None:
    w = torch.randn(WIDTH, WIDTH)
    count = counted(lambda: torch.func.jvp(lambda z: z @ w, (x(),), (x(),)))
    assert count.needed == {"fp32": 2 * ONE}
    assert count.executed == {"fp32": 3 * ONE}
    assert any("known to be zero" in note for note in count.notes)


def test_tangents_of_both_are_two_more() -> None:
    w = torch.randn(WIDTH, WIDTH)
    count = counted(lambda: torch.func.jvp(torch.mm, (x(), w), (x(), torch.randn_like(w))))
    assert count.needed == count.executed == {"fp32": 3 * ONE}


@pytest.mark.parametrize("functional", [False, True])
def test_training_on_a_directional_derivative(functional: bool) -> None:
    """As mean flows do: the derivative along the input is a target, and only the output is trained."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def step() -> None:
        if functional:
            result = torch.func.jvp(net, (x(),), (x(),))
            out, target = result[0], result[1].detach()
        else:
            with forward_ad.dual_level():
                out, derivative = forward_ad.unpack_dual(net(forward_ad.make_dual(x(), x())))
                target = derivative.detach()
        (out - target).square().mean().backward()

    count = counted(step)
    # Forward 2 and derivative 2; backward 3, as the data want no gradient. Each derivative has a product with zeros.
    assert count.needed == {"fp32": 7 * ONE}
    assert count.executed == {"fp32": 9 * ONE}
    assert count.coverage_frac == 1.0


def test_expanded_ones_of_an_ordinary_backward_are_no_zeros() -> None:
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    count = counted(lambda: (x() @ w).sum().backward())
    assert count.needed == count.executed == {"fp32": 2 * ONE}


def test_a_scalar_that_was_written_is_no_zero() -> None:
    def step() -> None:
        with forward_ad.dual_level():
            scalar = torch.zeros(())
            scalar += 1
            torch.mm(x(), scalar.expand(WIDTH, WIDTH))

    count = counted(step)
    assert count.needed == count.executed == {"fp32": ONE}


def test_convolutions() -> None:
    net, image = nn.Conv1d(3, 4, 3), torch.randn(2, 3, 8)
    count = counted(lambda: torch.func.jvp(net, (image,), (image,)))
    one = 2 * 2 * 4 * 6 * 9
    assert (count.needed, count.executed) == ({"fp32": 2 * one}, {"fp32": 3 * one})
