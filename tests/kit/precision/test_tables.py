"""Tables of tensors: every entry is in one span, whatever its address, and nothing is uploaded again unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flopwise.kit.precision import tables
from flopwise.kit.precision.tables import BLOCK, KEPT, Tables, described, spans_of

CPU = torch.device("cpu")


def test_a_tensor_is_its_address_and_extent() -> None:
    held = torch.zeros(100)
    assert held.data_ptr() % 64 == 0  # as torch's allocators give it
    half = torch.zeros(8, dtype=torch.bfloat16)
    found = described([held, torch.empty(0), held[3:10], held[4:], half[1:]])
    assert found is not None
    assert found.places == (held.data_ptr(),) * 2 + (held.data_ptr() + 16, half.data_ptr())
    assert found.extents == ((0, 100, 0), (3, 10, 0), (0, 96, 0), (1, 8, 2))


def test_memory_that_is_filled_is_read_in_any_order() -> None:
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    found = described([torch.zeros(3, 7).t(), image, nn.Parameter(torch.ones(2, dtype=torch.half))])
    assert found is not None
    assert found.extents == ((0, 21, 0), (0, 120, 0), (0, 2, 1))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(10)[::2],
        torch.zeros(4, 6)[:, :3],
        torch.zeros(1).expand(5),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2).as_subclass(Subclass),
    ],
)
def test_what_the_kernel_cannot_read_is_left_to_torch(other: torch.Tensor) -> None:
    assert described([torch.ones(3), other]) is None


def test_nothing_is_nothing() -> None:
    assert described([]) is None
    assert described([torch.empty(0), torch.empty(0, 3)]) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 50),
)
def test_every_block_of_every_tensor_is_in_one_span(
    sizes: list[tuple[int, int]], block: int, most: int
) -> None:
    extents = [(low, low + n, 0) for low, n in sizes]
    before, tables.MOST_SPANS = tables.MOST_SPANS, most
    try:
        spans, blocks = spans_of(extents, block)
    finally:
        tables.MOST_SPANS = before
    covered = [
        (tensor, first + i)
        for tensor, first in spans.tolist()
        for i in range(blocks)
        if (first + i) * block < extents[tensor][1]  # what the kernel reads of a span
    ]
    assert covered
    assert len(set(covered)) == len(covered)
    wanted = {(t, b) for t, (_, end, _) in enumerate(extents) for b in range(-(-end // block))}
    assert set(covered) == wanted
    assert len(spans) <= most + len(extents)
    assert spans.tolist() == sorted(spans.tolist(), reverse=True)  # the last first
    assert spans.is_contiguous()


def test_spans_of_large_models_are_longer_so_that_the_table_stays_small() -> None:
    assert spans_of([(0, 3 * BLOCK, 0)])[1] == 1
    spans, blocks = spans_of([(0, 7_000_000_000, 0)])
    assert blocks == 14
    assert len(spans) == -(-7_000_000_000 // (14 * BLOCK)) <= 2**17
    assert spans[0].tolist() == [0, (len(spans) - 1) * 14]


def test_only_what_has_changed_is_uploaded() -> None:
    held = Tables(CPU)
    grads = [torch.ones(5000), torch.ones(3)]

    def table(tensors: list[torch.Tensor]) -> Any:
        numbers = described(tensors)
        assert numbers is not None
        return held.of(numbers)

    first = table(grads)
    assert held.uploads == 3  # places, extents, spans
    assert table(grads) is first
    assert held.uploads == 3
    moved = table([torch.ones(5000), torch.ones(3)])
    assert held.uploads == 4  # addresses only
    assert moved.plan is first.plan
    assert moved.places.tolist() != first.places.tolist()
    assert table(grads) is first
    assert table([grads[0]]).plan is not first.plan
    assert held.uploads == 7


def test_a_table_in_use_is_never_written_again() -> None:
    held, tensors, before = Tables(CPU), [], []
    for n in range(1, 3 * KEPT):
        tensors.append(torch.ones(n))
        numbers = described([tensors[-1]])
        assert numbers is not None
        table = held.of(numbers)
        before.append((table, table.places.clone(), table.plan.extents.clone()))
    for table, places, extents in before:
        assert torch.equal(table.places, places)
        assert torch.equal(table.plan.extents, extents)
    assert len(held._tables) == len(held._plans) == KEPT


def test_tables_are_made_on_the_host_whatever_the_default_device_is() -> None:
    numbers = described([torch.ones(5)])
    assert numbers is not None
    with torch.device("meta"):
        table = Tables(CPU).of(numbers)
    assert table.places.device == table.plan.spans.device == table.plan.extents.device == CPU
