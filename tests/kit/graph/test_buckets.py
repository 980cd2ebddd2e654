"""Few sizes instead of many, and little padding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopwise.errors import GraphError
from flopwise.kit.graph.buckets import Buckets, suggest_buckets


def padding(chosen: list[int], sizes: dict[int, int]) -> float:
    padded = sum(times * min(b for b in chosen if b >= n) for n, times in sizes.items())
    return 1 - sum(n * times for n, times in sizes.items()) / padded


@given(
    st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([0.0, 0.05, 0.2, 0.9]),
)
def test_the_fewest_buckets_within_the_share(sizes: dict[int, int], share: float) -> None:
    chosen = suggest_buckets(sizes, share)
    assert chosen[-1] == max(sizes)
    assert padding(chosen, sizes) <= share + 1e-12
    fewer = itertools.combinations(sorted(sizes)[:-1], max(0, len(chosen) - 2))
    if len(chosen) > 1:
        assert all(padding([*c, max(sizes)], sizes) > share for c in fewer)


def test_multiples_and_wrong_sizes() -> None:
    assert suggest_buckets([5, 6, 7, 30], 0.3, multiple=8) == [8, 32]
    for wrong in ([], [0]):
        with pytest.raises(GraphError, match="sizes of 1 or more"):
            suggest_buckets(wrong)
    with pytest.raises(GraphError, match="sizes of 1 or more"):
        Buckets(())


def test_batches_are_padded_by_name() -> None:
    buckets = Buckets((8, 4), dim=1, fill={"labels": -100})
    assert buckets.sizes == (4, 8)
    batch = {
        "x": torch.ones(2, 3, 5),
        "labels": torch.ones(2, 3, dtype=torch.long),
        "n": torch.ones(2),
    }
    out = buckets(batch)
    assert out["x"].shape == (2, 4, 5)
    assert out["x"][:, 3].eq(0).all()
    assert out["labels"][:, 3].eq(-100).all()
    assert out["n"] is batch["n"]
    assert buckets({"x": torch.ones(2, 9)})["x"].shape == (2, 9)  # larger than all: as it is
    full = [torch.ones(2, 8)]
    assert buckets(full) is full
    assert buckets("nothing") == "nothing"


@pytest.mark.parametrize("size", ["a", None, float("nan"), float("inf"), 1.5])
def test_a_size_that_is_no_number_is_told(size: Any) -> None:
    with pytest.raises(GraphError, match="both are whole numbers"):
        suggest_buckets([3, size], 0.1)


def test_sizes_may_be_those_of_tensors() -> None:
    assert suggest_buckets(list(torch.tensor([3, 5])), 0.0) == [3, 5]
