"""Waits for every stream that batches go through, and says what that cost."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Barrier:
    """What a `Prefetcher.barrier()` took."""

    cost_s: float
    streams: int

    def __str__(self) -> str:
        return f"input barrier: {self.streams} streams waited for, {self.cost_s * 1e3:.3f} ms"


def wait_for_all(reader: Any, link: Any, say: bool) -> Barrier:
    """Returns the barrier after every batch sent so far is there and the loop's stream is through; prints it if told."""
    begun = time.perf_counter()
    streams: list[Any] = []
    if reader is not None and link is not None:
        with reader.sending:
            streams = link.streams()
            for stream in streams:
                stream.synchronize()
    took = Barrier(time.perf_counter() - begun, len(streams))
    if say:
        print(took, file=sys.stderr)
    return took
