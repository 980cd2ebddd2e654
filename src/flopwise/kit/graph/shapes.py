"""The shapes that a captured step has met: how often, which has a graph, and what would make them fewer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from flopwise.kit.graph.buckets import suggest_buckets
from flopwise.kit.graph.guards import Guards
from flopwise.kit.graph.surface import Graph
from flopwise.units import percent


@dataclass(frozen=True)
class StepReport:
    """What became of the steps so far."""

    graphs: int  # captured and trusted
    replays: int  # steps that were replayed from a trusted graph
    eager: int  # steps that ran eagerly, those that only checked a graph among them
    captures: int
    capture_s: float  # seconds spent on capturing
    graph_bytes: int  # memory that the allocator holds for graphs beyond what it held before
    noise: (
        float | None
    )  # how far the weights of two eager runs of a step were apart; None: not needed
    shapes: dict[tuple[tuple[int, ...], ...], int]  # how often each combination of shapes came
    reason: str | None  # why steps run eagerly; None while they are captured

    def __str__(self) -> str:
        state = f"eager: {self.reason}" if self.reason else f"{self.graphs} graphs"
        return f"{state}; {self.replays} steps replayed, {self.eager} eager, {self.captures} captures in {self.capture_s:.1f} s, {len(self.shapes)} shapes"


@dataclass
class Shape:
    """One combination of shapes, and its graph when there is one."""

    sizes: tuple[tuple[int, ...], ...]
    read: dict[str, Any]  # plain values that the step's code reads
    seen: int = 0
    looked: bool = False
    graph: Graph | None = None
    inputs: Any = None
    output: Any = None
    grads: list[torch.Tensor | None] = field(default_factory=list)
    guards: Guards | None = None
    deferred: list[Any] = field(default_factory=list)  # what its replays leave to the host
    left: int = 0  # verifications to come

    def forget(self) -> None:
        """Drops the graph."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = self.guards = self.output = self.inputs = None
        self.grads, self.deferred = [], []


def advice(shapes: Collection[Shape]) -> str:
    """Returns the buckets that would make the shapes few, in words."""
    by_place: dict[tuple[int, int], dict[int, int]] = {}
    for shape in shapes:
        for i, size in enumerate(shape.sizes):
            for dim, n in enumerate(size):
                counts = by_place.setdefault((i, dim), {})
                counts[n] = counts.get(n, 0) + shape.seen
    varying = {d: c for (_, d), c in by_place.items() if len(c) > 1 and min(c) > 0}
    if not varying:
        reads = [s.read for s in shapes]
        names = [n for n in reads[0] if len({repr(r.get(n)) for r in reads}) > 1] if reads else []
        if names:
            return f"; the step reads {', '.join(names[:3])}, which changes from step to step: pass it as a tensor"
        if len(shapes) > 1:
            return "; a number among the arguments changes from step to step: pass it as a tensor"
        return ""
    dim, counts = max(varying.items(), key=lambda item: len(item[1]))
    chosen = suggest_buckets(counts, multiple=8)
    padded = sum(times * min(b for b in chosen if b >= n) for n, times in counts.items())
    share = 1 - sum(n * times for n, times in counts.items()) / padded
    return (
        f"; {len(counts)} sizes of dimension {dim} were seen, and buckets={tuple(chosen)} would make "
        f"{len(chosen)} of them, with {percent(share)} of padding"
    )
