"""How much a call launches and moves: operations that compute, their bytes, and kernels on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

#: Operations that give memory and write nothing to it.
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class Operations(TorchDispatchMode):
    """Counts the operations that compute, and the bytes of the tensors that each reads and writes.

    Views, allocations and detaching launch nothing and do not count. An operation that launches several kernels
    counts once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_view(func) or func._schema.name.partition("::")[2] in _EMPTY:
            return out
        self.names[func._schema.name.partition("::")[2]] += 1
        read = {id(t): t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        written = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        self.moved_bytes += sum(_bytes(t) for t in read.values()) + sum(_bytes(t) for t in written)
        return out


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the elements that a tensor has in memory (an expanded one has fewer than it shows)."""
    real = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        real *= size if stride else 1
    return real * tensor.element_size()


def _is_view(func: Any) -> bool:
    """Whether an operation returns its argument's memory without writing to it."""
    schema = func._schema
    if schema.is_mutable:
        return False
    return any(a.alias_info is not None for a in schema.arguments)


def count_operations(run: Callable[[], object]) -> tuple[int, int]:
    """Returns how many operations a call computes, and the bytes that they read and write."""
    with Operations() as seen:
        run()
    return sum(seen.names.values()), seen.moved_bytes


def count_kernels(run: Callable[[], object], device: torch.device) -> int:
    """Returns how many kernels a call launches on a GPU, by the profiler; on a CPU, how many operations compute."""
    if device.type != "cuda":
        return count_operations(run)[0]
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize(device)
    both = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=both, acc_events=True) as seen:  # without it torch 2.11 and later warn
        run()
        torch.cuda.synchronize(device)
    events = seen.events() or ()
    kernels = [e for e in events if str(e.device_type).endswith("CUDA")]
    return sum(not e.name.startswith(("Memcpy", "Memset")) for e in kernels)
