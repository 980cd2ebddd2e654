"""Sizes that vary, made few: a list of buckets that keeps padding small, and batches padded to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from flopwise.errors import GraphError
from flopwise.kit.graph.arguments import check_whole
from flopwise.kit.nested import map_tensors, tensors_in


def suggest_buckets(
    sizes: Mapping[int, int] | Iterable[int], most_padding_frac: float = 0.1, multiple: int = 1
) -> list[int]:
    """Returns the fewest sizes to which all others can be padded up with at most this share of padding.

    Args:
        sizes: the sizes seen, or a mapping from size to how often it was seen.
        most_padding_frac: share of the padded elements that are padding, over all that was seen, 0 to 1.
        multiple: buckets are multiples of it (8 suits tensor cores).

    Raises:
        GraphError: no size was given, one is below 1, or another argument is out of range.
    """
    check_whole(multiple, "multiple", 1)
    if not isinstance(most_padding_frac, (int, float)) or not 0 <= most_padding_frac <= 1:
        raise GraphError(f"most_padding_frac={most_padding_frac!r}: it is a share, 0 to 1")
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise GraphError(f"buckets need sizes of 1 or more, not {sizes!r}")
    counts: dict[int, int] = {}
    pairs = sizes.items() if isinstance(sizes, Mapping) else ((size, 1) for size in sizes)
    for size, times in pairs:
        try:
            fits = int(size) == size and times >= 0
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            raise GraphError(f"size {size!r}, seen {times!r} times: both are whole numbers")
        counts[int(size)] = counts.get(int(size), 0) + times
    if not counts or min(counts) < 1:
        raise GraphError("buckets need sizes of 1 or more")
    tops = sorted({-(-size // multiple) * multiple for size in counts})
    groups = [
        sum(n for s, n in counts.items() if low < s <= top)
        for low, top in zip([0, *tops], tops, strict=False)
    ]
    real = sum(size * times for size, times in counts.items())
    for number in range(1, len(tops) + 1):
        chosen, padded = _best(tops, groups, number)
        if padded == 0 or 1 - real / padded <= most_padding_frac:
            return chosen
    return tops


def _best(tops: Sequence[int], groups: Sequence[int], number: int) -> tuple[list[int], int]:
    """Returns the `number` of tops that pad least, and the elements after padding (dynamic programming)."""
    n = len(tops)
    best: list[list[int | None]] = [[None] * n for _ in range(number)]
    back = [[-1] * n for _ in range(number)]
    summed = [0]
    for times in groups:
        summed.append(summed[-1] + times)
    for j in range(n):
        best[0][j] = tops[j] * summed[j + 1]
    for k in range(1, number):
        for j in range(k, n):
            for i in range(k - 1, j):
                before = best[k - 1][i]
                assert before is not None
                cost = before + tops[j] * (summed[j + 1] - summed[i + 1])
                known = best[k][j]
                if known is None or cost < known:
                    best[k][j], back[k][j] = cost, i
    chosen, j = [], n - 1
    for k in range(number - 1, -1, -1):
        chosen.append(tops[j])
        j = back[k][j]
    total = best[number - 1][n - 1]
    assert total is not None
    return chosen[::-1], total


@dataclass(frozen=True)
class Buckets:
    """Pads a batch up to the next of a few sizes, so that a graph for each of them is enough.

    Args:
        sizes: the buckets, ascending. A batch larger than all of them is left as it is.
        dim: the dimension that varies.
        fill: what the padding is made of, for every tensor, or by name where the batch is a mapping (labels: -100, say).
            That padding does not change the loss is the caller's to see to.
    """

    sizes: tuple[int, ...]
    dim: int = 1
    fill: float | Mapping[str, float] = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.sizes, (str, bytes)) or not isinstance(self.sizes, Iterable):
            raise GraphError(f"buckets need several sizes of 1 or more, not {self.sizes!r}")
        sizes = tuple(self.sizes)
        if not sizes or not all(isinstance(s, int) and s >= 1 for s in sizes):
            raise GraphError(f"buckets need whole sizes of 1 or more, not {sizes!r}")
        object.__setattr__(self, "sizes", tuple(sorted(sizes)))
        check_whole(self.dim, "dim", 0)
        fills = self.fill.values() if isinstance(self.fill, Mapping) else (self.fill,)
        if not all(isinstance(f, (int, float)) for f in fills):
            raise GraphError(f"fill={self.fill!r}: it is a number, or numbers by name")

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with every tensor that has the varying size padded to its bucket."""
        size = self._size(batch)
        top = next((s for s in self.sizes if size is not None and s >= size), None)
        if top is None or size is None or top == size:
            return batch
        if isinstance(batch, Mapping) and isinstance(self.fill, Mapping):
            fills = self.fill
            padded = {k: self._padded(v, size, top, fills.get(k, 0.0)) for k, v in batch.items()}
            return padded if type(batch) is dict else type(batch)(padded)  # type: ignore[call-arg]
        fill = 0.0 if isinstance(self.fill, Mapping) else self.fill
        return self._padded(batch, size, top, fill)

    def _size(self, batch: Any) -> int | None:
        for tensor in tensors_in(batch):
            if tensor.dim() > self.dim:
                return int(tensor.shape[self.dim])
        return None

    def _padded(self, tree: Any, size: int, top: int, fill: float) -> Any:
        def pad(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != size:
                return tensor
            after = [0, 0] * (tensor.dim() - 1 - self.dim) + [0, top - size]
            return F.pad(tensor, after, value=fill)

        return map_tensors(tree, pad)
