"""How much memory a step holds while each of its blocks runs forward and backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.checkpointed import Checkpointed
from flopwise.kit.memory.modules import in_backward
from flopwise.kit.memory.timeline import memory_timeline
from flopwise.kit.memory.undisturbed import device_of, undisturbed
from flopwise.kit.nested import tensors_in


@dataclass
class StepMemory:
    """Bytes over one step, by how many of its n blocks have kept their activations then.

    Blocks are numbered in the order in which they run forward; backward goes through them in reverse.
    """

    #: n + 1: the most while the first k blocks are done and none of them runs backward.
    with_blocks: list[int]
    #: n: the most from the beginning of the block's backward to the next block's.
    backward: list[int]
    #: n: at the beginning of the block's backward.
    backward_start: list[int]
    #: n: by how much the block's forward raises memory, at most.
    working: list[int]
    #: n: of blocks that were computed again: what that kept for their backward, at most, and the time it took.
    again_bytes: list[int] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    #: Whether backward was called inside of autocast, which keeps its copies of parameters for so long.
    autocast_in_backward: bool = False

    @property
    def peak_bytes(self) -> int:
        """Returns the largest of all."""
        return max([*self.with_blocks, *self.backward])


def step_memory(module: nn.Module, step: Callable[[], object], blocks: Sequence[str]) -> StepMemory:
    """Runs the step once and returns the memory that it holds at the borders of its blocks and between them.

    On CUDA what the allocator has given out; elsewhere the sum over the storages of tensors.

    Args:
        step: forward and backward; gradients, buffers and random numbers are put back.
        blocks: names of modules, in the order of their forward passes.
    """
    n = len(blocks)
    found = StepMemory(
        [0] * (n + 1), [0] * n, [0] * n, [0] * n, again_bytes=[0] * n, again_s=[0.0] * n
    )
    modules = dict(module.named_modules())
    with undisturbed(module), _tally(module) as tally, contextlib.ExitStack() as stack:
        borders = _Borders(found, tally)
        for index, name in enumerate(blocks):
            for hook in borders.hooks(modules[name], index):
                stack.callback(hook.remove)
            checkpointed = modules[name].__dict__.get("forward")
            if isinstance(checkpointed, Checkpointed):
                checkpointed.around_again = borders.around_again(index)
                stack.callback(setattr, checkpointed, "around_again", None)
        step()
        borders.close()
    return found


class _Borders:
    """Books the peak since the last border to whatever ran since."""

    def __init__(self, found: StepMemory, tally: _Tally) -> None:
        self._found, self._tally = found, tally
        self._done = 0  # blocks whose activations are kept, if they run in order
        self._in_backward: int | None = None
        self._starts: dict[int, int] = {}

    def hooks(self, block: nn.Module, index: int) -> list[Any]:
        def enter(*_: Any) -> None:
            if in_backward():
                return  # it is computed again
            self.close()
            self._in_backward, self._done = None, index
            self._starts[index] = self._tally.now()

        def leave(_: nn.Module, args: Any, out: Any) -> None:
            if in_backward():
                return
            peak = self.close()
            raised = peak - self._starts.get(index, peak)
            self._found.working[index] = max(self._found.working[index], raised)
            self._done = index + 1
            first = next((t for t in tensors_in(out) if t.requires_grad), None)
            if first is not None:
                first.register_hook(lambda _: self._backward(index))

        return [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]

    def _backward(self, index: int) -> None:
        self.close()
        self._in_backward = index
        self._found.autocast_in_backward |= torch.is_autocast_enabled(self._tally.device.type)
        start = self._found.backward_start
        start[index] = max(start[index], self._tally.now())

    def around_again(self, index: int) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Returns what a block is computed again in, to see what that takes."""

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            self.close()
            start, start_s = self._tally.now(), time.perf_counter()
            try:
                yield
            finally:  # a checkpoint ends it by an exception where it has all that it needs
                self._tally.wait()
                found = self._found
                found.again_s[index] += time.perf_counter() - start_s
                found.again_bytes[index] = max(found.again_bytes[index], self._tally.now() - start)
                found.working[index] = max(found.working[index], self.close() - start)

        return around

    def close(self) -> int:
        """Books what has run until now and returns its peak."""
        peak = self._tally.peak()
        into, at = (
            (self._found.with_blocks, self._done)
            if self._in_backward is None
            else (self._found.backward, self._in_backward)
        )
        into[at] = max(into[at], peak)
        return peak


class _Tally:
    """Bytes that are held now, and the most since the last question."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int:
        raise NotImplementedError

    def peak(self) -> int:
        raise NotImplementedError

    def wait(self) -> None:
        """Waits for a device that works on its own."""


class _CudaTally(_Tally):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.reset_peak_memory_stats(device)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


class _StorageTally(_Tally):
    """Counts the events of a memory time line."""

    def __init__(self, device: torch.device, events: Sequence[tuple[Any, int]]) -> None:
        super().__init__(device)
        self._events, self._read, self._held = events, 0, 0

    def now(self) -> int:
        return self._held + sum(change for _, change in self._events[self._read :])

    def peak(self) -> int:
        most = self._held
        for _, change in self._events[self._read :]:
            self._held += change
            most = max(most, self._held)
        self._read = len(self._events)
        return most


@contextlib.contextmanager
def _tally(module: nn.Module) -> Iterator[_Tally]:
    device = device_of(module)
    if device.type == "cuda":
        yield _CudaTally(device)
        return
    with memory_timeline(module) as recorder:
        yield _StorageTally(device, recorder.timeline.events)
