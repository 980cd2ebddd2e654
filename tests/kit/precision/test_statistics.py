"""Statistics of gradients: exact, and on whatever dtype and layout gradients have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flopwise.kit.precision.statistics import (
    FLOAT16_MAX,
    FLOAT16_NORMAL,
    FLOAT16_ZERO,
    by_device,
    gradients,
    largest,
    power_of_two_below,
    scale_for,
    underflow,
)


def test_the_limits_are_those_of_float16() -> None:
    limits = torch.finfo(torch.float16)
    assert (limits.max, limits.smallest_normal) == (FLOAT16_MAX, FLOAT16_NORMAL)
    around = torch.tensor([FLOAT16_ZERO, math.nextafter(FLOAT16_ZERO, 1) * (1 + 1e-6)])
    assert (around.half() == 0).tolist() == [True, False]


@given(st.floats(2.0**-120, 2.0**120, allow_nan=False))
def test_a_power_of_two_below_is_exact(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float32)
    below = power_of_two_below(value).item()
    assert math.frexp(below)[0] == 0.5
    assert below <= value.item() < 2 * below


@given(st.floats(2.0**-100, 2.0**100), st.sampled_from([1.0, 2.0, 16.0, 256.0]))
def test_the_scale_is_the_largest_that_keeps_the_headroom(amax: float, headroom: float) -> None:
    size = torch.tensor(amax, dtype=torch.float32)
    scale = scale_for(size, headroom, 2.0**-140, 2.0**120).item()
    assert math.frexp(scale)[0] == 0.5
    assert size.item() * scale * headroom <= FLOAT16_MAX
    assert size.item() * scale * 2 * headroom > FLOAT16_MAX or scale == 2.0**120


def test_the_scale_has_bounds() -> None:
    assert scale_for(torch.tensor(1e-20), 16.0, 1.0, 2.0**24).item() == 2.0**24
    assert scale_for(torch.tensor(1e20), 16.0, 0.25, 2.0**24).item() == 0.25


def test_the_largest_is_over_dtypes_and_empty_tensors() -> None:
    groups = [[torch.tensor([1.0, -7.0]), torch.empty(0)], [torch.tensor([3.0]).half()]]
    found = largest(groups)
    assert found is not None
    assert (found.item(), found.dtype) == (7.0, torch.float32)
    assert largest([[torch.empty(0)]]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_largest_is_not_finite_if_any_entry_is_not(bad: float) -> None:
    found = largest([[torch.tensor([1.0, bad]), torch.tensor([2.0])]])
    assert found is not None
    assert not math.isfinite(found.item())


def test_gradients_are_plain_and_share_memory() -> None:
    dense, table = nn.Parameter(torch.ones(2)), nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD([dense, *table.parameters(), nn.Parameter(torch.ones(1))], 0.1)
    (dense.sum() + table(torch.tensor([1, 1])).sum()).backward()
    found = gradients(optimizer)
    assert [tuple(g.shape) for g in found] == [(2,), (2, 2)]  # uncoalesced: no wait for the device
    for grad in found:
        grad.mul_(3)
    assert dense.grad is not None
    assert table.weight.grad is not None
    assert dense.grad.tolist() == [3.0, 3.0]
    assert table.weight.grad.to_dense()[1].tolist() == [6.0, 6.0]


def test_tensors_are_grouped_by_device_and_dtype() -> None:
    a, b, c = torch.ones(1), torch.ones(1).half(), torch.ones(2)
    groups = by_device([a, b, c])
    assert {k: [id(t) for t in v] for k, v in groups[torch.device("cpu")].items()} == {
        torch.float32: [id(a), id(c)],
        torch.float16: [id(b)],
    }


def test_shares_are_of_what_float16_would_hold() -> None:
    grads = [torch.tensor([1.0, -1e-5, 1e-9]), torch.tensor([[0.0, float("nan")]])]
    one = torch.tensor(1.0)
    assert underflow(grads, one, scaled=True).tolist() == pytest.approx([0.2, 0.2, 0.2])
    # times 2**15, the small one is normal and the lost one subnormal
    assert underflow(grads, one * 2**15, scaled=False).tolist() == pytest.approx([0.2, 0.0, 0.2])
    assert underflow([torch.tensor([1e-9])], one * 2**8, scaled=False).tolist() == [1.0, 0.0, 0.0]


def test_a_sample_of_many_gives_their_shares() -> None:
    many = torch.ones(2**20)
    many[: 2**19] = 0
    assert underflow([many], torch.tensor(1.0), scaled=True).tolist() == [0.0, 0.0, 0.5]
