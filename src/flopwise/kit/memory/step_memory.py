"""How much memory a step holds while each of its blocks runs forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.timeline import memory_timeline
from flopwise.kit.memory.undisturbed import device_of, undisturbed
from flopwise.kit.nested import tensors_in


@dataclass
class StepMemory:
    """Bytes over one step, by how many of its n blocks have kept their activations then.

    Blocks are numbered in the order in which they run forward; backward goes through them in reverse.
    """

    with_blocks: list[
        int
    ]  # n + 1: largest while the first k blocks are done, none of them runs backward
    backward: list[int]  # n: largest from the beginning of the block's backward to the next block's
    backward_start: list[int]  # n: at the beginning of the block's backward
    working: list[int] = field(
        default_factory=list
    )  # n: by how much the block's forward raises memory, at most

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
    found = StepMemory([0] * (n + 1), [0] * n, [0] * n, [0] * n)
    modules = dict(module.named_modules())
    with undisturbed(module), _tally(module) as tally, contextlib.ExitStack() as stack:
        borders = _Borders(found, tally)
        for index, name in enumerate(blocks):
            for hook in borders.hooks(modules[name], index):
                stack.callback(hook.remove)
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
            if self._tally.is_in_backward():
                return  # it is computed again
            self.close()
            self._in_backward, self._done = None, index
            self._starts[index] = self._tally.now()

        def leave(_: nn.Module, args: Any, out: Any) -> None:
            if self._tally.is_in_backward():
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
        start = self._found.backward_start
        start[index] = max(start[index], self._tally.now())

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

    def now(self) -> int:
        raise NotImplementedError

    def peak(self) -> int:
        raise NotImplementedError

    @staticmethod
    def is_in_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)


class _CudaTally(_Tally):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class _StorageTally(_Tally):
    """Counts the events of a memory time line."""

    def __init__(self, events: Sequence[tuple[Any, int]]) -> None:
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
        yield _StorageTally(recorder.timeline.events)
