from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.kit.input.layout import (
    ALIGNMENT,
    Layout,
    aligned,
    block_bytes,
    dense_stride,
    is_plain,
)

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
]


@settings(max_examples=60, deadline=None)
@given(
    forms=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_tensors_of_a_block_are_aligned_apart_and_come_back_to_the_bit(forms: Any) -> None:
    tensors = [
        torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for dtype, shape in forms
    ]
    layout = Layout()
    places = [layout.place_like(t) for t in tensors]
    block = torch.zeros(layout.used, dtype=torch.uint8)
    end = 0
    for place, tensor in zip(places, tensors, strict=True):
        assert place is not None
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= end
        end = place.offset + place.nbytes
        place.view(block).copy_(tensor)
    assert end == layout.used
    assert block_bytes(tensors) == block_bytes(tensors[::-1]) == aligned(end)
    for place, tensor in zip(places, tensors, strict=True):
        assert place is not None
        assert torch.equal(place.view(block), tensor)
        assert place.view(block).dtype == tensor.dtype


def test_memory_format_is_kept_as_to_keeps_it() -> None:
    x = (
        torch.arange(2 * 3 * 4 * 5)
        .reshape(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last)
    )
    place = Layout().place_like(x)
    assert place is not None
    assert place.stride == x.stride()
    assert torch.equal(place.view(torch.zeros(place.nbytes, dtype=torch.uint8).copy_(_bytes(x))), x)
    holes = torch.zeros(4, 10)[:, ::2]
    assert dense_stride(holes) == tuple(holes.to(torch.float64).stride())


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).clone().view(torch.uint8)


def test_a_full_block_takes_nothing_more() -> None:
    layout = Layout(room=300)
    assert layout.place((10,), (1,), torch.uint8) is not None
    assert layout.place((45,), (1,), torch.uint8) is None  # 256 + 45 > 300
    assert layout.place((44,), (1,), torch.uint8) is not None
    assert aligned(257) == 512
    assert aligned(0) == 0


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (torch.zeros(2), True),
        (torch.zeros(2, requires_grad=True), False),
        (torch.zeros(2, 2).to_sparse(), False),
        (torch.zeros(2, dtype=torch.complex64).conj(), False),
        (torch.nn.Parameter(torch.zeros(2), requires_grad=False), False),
        (torch.empty(2, device="meta"), False),
    ],
)
def test_only_tensors_that_are_nothing_but_bytes_are_plain(tensor: Any, plain: bool) -> None:
    assert is_plain(tensor) is plain
