"""Page-locked host memory by exact registration, and what the caching host allocator would take instead."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

#: Any context of the process may use the memory. Source: CUDA Runtime API, cudaHostRegisterPortable = 0x01.
PORTABLE = 1


@dataclass(frozen=True)
class PinnedPlan:
    """What page-locked buffers of these sizes take, in bytes."""

    asked: tuple[int, ...]
    taken: tuple[int, ...]  # each as the caching host allocator rounds it

    @property
    def asked_bytes(self) -> int:
        """Returns the sum of what is asked for: what exact registration takes, to the page."""
        return sum(self.asked)

    @property
    def taken_bytes(self) -> int:
        """Returns the sum of what `pin_memory()` and `pin_memory=True` take."""
        return sum(self.taken)

    @property
    def factor(self) -> float:
        """Returns how many times more the caching host allocator takes."""
        return self.taken_bytes / self.asked_bytes if self.asked_bytes else 1.0

    def __str__(self) -> str:
        rounded = " + ".join(_gib(n) for n in self.taken)
        return (
            f"{_gib(self.asked_bytes)} GiB asked for; the caching host allocator takes {rounded} = "
            f"{_gib(self.taken_bytes)} GiB, factor {self.factor:.2f}; registered exactly: {_gib(self.asked_bytes)} GiB"
        )


def plan_pinned(sizes: Iterable[int]) -> PinnedPlan:
    """Returns what page-locked buffers of these sizes (bytes) take by `pin_memory()`, and by exact registration.

    Source: ATen/core/CachingHostAllocator.h rounds each block up to a power of two (`llvm::PowerOf2Ceil`); seen as
    2.25 GiB taking 4 GiB in pytorch/pytorch#95823.
    Ignores: blocks that the allocator has free already, and its optional limit for rounding
    (`pinned_max_round_threshold_mb`).
    """
    asked = tuple(int(n) for n in sizes)
    return PinnedPlan(asked, tuple(caching_allocator_bytes(n) for n in asked))


def caching_allocator_bytes(nbytes: int) -> int:
    """Returns the bytes that the caching host allocator takes for a block: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


class Registration:
    """Page-locked memory that was there before. `error` says why it is not page-locked, "" if it is.

    It is unlocked when `owner` is gone; `memory` is what holds the bytes, and stays until then.
    """

    def __init__(self, pointer: int, nbytes: int, owner: Any, memory: Any) -> None:
        self.error = _register(pointer, nbytes)
        self._release = (
            None
            if self.error
            else weakref.finalize(owner, _unregister, pointer, os.getpid(), memory)
        )

    @property
    def locked(self) -> bool:
        """Returns whether the copy engine may read the memory in place."""
        return not self.error

    def release(self) -> None:
        """Gives the pages back; call it when no transfer reads them any more."""
        if self._release is not None:
            self._release()


def _register(pointer: int, nbytes: int) -> str:
    """Returns why the memory could not be page-locked; "" where it is."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if nbytes <= 0:
        return "there is nothing to register"
    try:
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(pointer, nbytes, PORTABLE)
        code = int(status)
    except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if code == 0:
        return ""
    _forget_last_error()
    return f"cudaHostRegister of {nbytes / 2**20:.0f} MiB: {_text(runtime, status)} ({code}){_locked_limit(nbytes)}"


def _unregister(pointer: int, process: int, memory: Any) -> None:
    """Unregisters while the memory is still there, unless this is a fork of the process that registered."""
    if process != os.getpid():
        return
    try:
        torch.cuda.cudart().cudaHostUnregister(pointer)
    except (RuntimeError, AssertionError, AttributeError):  # the driver is shutting down
        return


def _text(runtime: Any, status: Any) -> str:
    try:
        return str(runtime.cudaGetErrorString(status))
    except (RuntimeError, AttributeError, TypeError):
        return "refused"


def _forget_last_error() -> None:
    """Takes the refused call's error out of the runtime, where the next kernel launch would report it as its own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


def _locked_limit(nbytes: int) -> str:
    """Returns a hint where `ulimit -l` is below what was asked for; "" elsewhere."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, ValueError, OSError):
        return ""
    if limit == resource.RLIM_INFINITY or limit >= nbytes:
        return ""
    return f"; ulimit -l is {limit >> 10} KiB"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f}".rstrip("0").rstrip(".")
