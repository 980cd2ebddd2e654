"""What our hooks cost where no clock inside them sees it: getting into them and out again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from flopwise.meter.watch import Watch

now = time.perf_counter_ns


def call_cost_ns() -> int:
    """Returns what it costs on average to pass one of our hooks: a part of our overhead that no clock inside sees.

    Five are passed in a step: a watched module, two optimizer hooks, and the wrappers of backward and of the loader.
    """

    def inner(*args: Any, **kwargs: Any) -> None:
        return None

    def outer(*args: Any, **kwargs: Any) -> None:
        return inner(*args, **kwargs)

    bare, watched = torch.nn.Identity(), torch.nn.Identity()
    Watch(watched, inner)
    wrapper = max(0, _quickest_ns(lambda: outer(None)) - _quickest_ns(lambda: inner(None)))
    hook = max(0, _quickest_ns(lambda: watched(None)) - _quickest_ns(lambda: bare(None)))
    return (hook + 4 * wrapper) // 5 + _clock_cost_ns()


def _clock_cost_ns() -> int:
    """Returns what one read of the clock costs here."""
    return _quickest_ns(now)


def _quickest_ns(function: Callable[[], Any]) -> int:
    """Returns the ns of one call, from the quickest of a few short loops: a preemption must not look like a cost."""
    loops = []
    for _ in range(5):
        started = now()
        for _ in range(50):
            function()
        loops.append((now() - started) // 50)
    return min(loops)
