"""Small batches in great number under random delays: each comes once, in order, and to the last bit as it was sent.

The benchmark `benchmarks/gpu/kit_input.py --only correctness` sends 100,000 through every path; here those that need
processes are sent fewer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flopwise.errors import ConsistencyError
from flopwise.kit.input import PinnedPool, Prefetcher, collate_into

BASE = torch.arange(32, dtype=torch.int32)


class Items(Dataset[Any]):
    """Item i is BASE + i, in one of 32 lengths; now and then it comes late."""

    def __init__(self, n: int, late_frac: float = 0.002) -> None:
        self.n, self.late_frac = n, late_frac

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if random.random() < self.late_frac:
            time.sleep(random.random() * 1e-3)
        return BASE[: 1 + i % 32] + i


def expected(i: int) -> torch.Tensor:
    return (BASE[: 1 + i % 32] + i)[None]


class Again:
    """An iterable that is none of torch's."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return (self.items[i][None] for i in range(len(self.items)))


def count_wrong(batches: Any, late_frac: float = 0.001) -> tuple[int, int]:
    """Returns how many batches came and how many were another than expected; the loop, too, is late now and then."""
    came = wrong = 0
    for batch in batches:
        if random.random() < late_frac:
            time.sleep(random.random() * 1e-3)
        wrong += not torch.equal(batch, expected(came))
        came += 1
    return came, wrong


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("thread", [True, False])
def test_any_iterable(thread: bool, depth: int) -> None:
    n = 50_000  # with both depths 100,000
    batches = Prefetcher(Again(Items(n)), "cpu", depth, thread=thread, consistency=True)
    assert count_wrong(batches) == (n, 0)
    assert batches.findings == []
    assert batches.judge is not None
    assert batches.judge.checked == 2 * n


@pytest.mark.parametrize(
    ("workers", "pooled", "n"),
    [(0, False, 20_000), (0, True, 20_000), (2, False, 5_000), (2, True, 5_000)],
)
def test_loaders_of_torch_with_and_without_workers_and_pool(
    workers: int, pooled: bool, n: int
) -> None:
    pool = PinnedPool(128, 16, checksums=True)
    options: dict[str, Any] = {
        "num_workers": workers,
        "collate_fn": collate_into(pool) if pooled else None,
    }
    if workers:
        options["prefetch_factor"] = 4
    batches = Prefetcher(DataLoader(Items(n), batch_size=1, **options), "cpu", consistency=True)
    assert count_wrong(batches) == (n, 0)
    assert batches.findings == []
    assert pool.counts.placed == (n if pooled else 0)
    assert pool.counts.fallbacks == {}
    assert pool.held == 0


KINDS = {"overwritten", "duplicated", "out of order"}


def test_a_broken_fence_is_caught() -> None:
    """Slots are given back to the workers while the loop still reads them."""
    pool = PinnedPool(128, 4, checksums=True)  # fewer than batches under way
    loader = DataLoader(
        Items(2000), batch_size=1, num_workers=1, prefetch_factor=4, collate_fn=collate_into(pool)
    )
    batches = Prefetcher(loader, "cpu", consistency="report", _break_fence=True)
    _, wrong = count_wrong(batches, late_frac=0.1)
    assert wrong > 0
    assert len(batches.findings) > 0
    # A slot that was written whole by then holds another batch, which the loop has or will get: that one is twice there
    assert "overwritten" in {f.kind for f in batches.findings} <= KINDS
    raising = Prefetcher(loader, "cpu", consistency=True, _break_fence=True)
    with pytest.raises(
        ConsistencyError, match=r"step \d+, buffer \d+: (overwritten|duplicated|out of order)"
    ):
        count_wrong(raising, late_frac=0.1)
