"""Where steps are captured: streams and CUDA graphs, behind an interface so narrow that a test can stand in for it."""

from __future__ import annotations

import gc
import linecache
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

#: Graphs whose capture failed. The allocator of page-locked memory may ask them for ever which memory is theirs.
#: Source: `create_allocate_filter` in aten/src/ATen/cuda/CUDAGraph.cpp.
_FAILED: list[Any] = []


class Graph(Protocol):
    """One captured step."""

    def replay(self) -> None:
        """Runs the captured work again, on the current stream."""

    def reset(self) -> None:
        """Gives the graph and its memory back."""


class Surface(Protocol):
    """What CapturedStep asks of a device."""

    device: torch.device

    def problem(self) -> str | None:
        """Returns why nothing can be captured here, or None."""

    def aside(self) -> AbstractContextManager[None]:
        """Runs a block on the stream of captures, after and before all else on the current one."""

    def capture(
        self, run: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, T]:
        """Returns the graph of what `run` launches, and its (static) result; nothing of it has been executed.

        After an error the device is as it was before.
        """

    def syncs(self, run: Callable[[], T]) -> tuple[T, list[str]]:
        """Returns what `run` returns, and where it made the host wait for the device."""

    def free_bytes(self) -> int:
        """Returns the memory that nobody holds, the allocator's cache not counted."""

    def reserved_bytes(self) -> int:
        """Empties the allocator's cache; returns the memory that it still holds."""


class NoSurface:
    """A device without graphs; all but `problem` is never asked for.

    Args:
        expected: that there are none needs no message.
    """

    def __init__(self, device: torch.device, reason: str, expected: bool = False) -> None:
        self.device, self.expected = device, expected
        self._reason = reason

    def problem(self) -> str | None:
        """Returns why nothing can be captured."""
        return self._reason

    def aside(self) -> AbstractContextManager[None]:
        """Does nothing to a block."""
        return nullcontext()

    def capture(
        self, run: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, T]:
        """Refuses.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(self._reason)

    def syncs(self, run: Callable[[], T]) -> tuple[T, list[str]]:
        """Returns what `run` returns; nothing waits."""
        return run(), []

    def free_bytes(self) -> int:
        """Returns 0."""
        return 0

    def reserved_bytes(self) -> int:
        """Returns 0."""
        return 0


class _CudaGraph:
    def __init__(
        self, graph: torch.cuda.CUDAGraph, device: torch.device, released: Callable[[], None]
    ) -> None:
        self._graph, self._device = graph, device
        self._released: Callable[[], None] | None = released

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        if self._released is not None:
            torch.cuda.synchronize(self._device)
            self._graph.reset()
            self._released()
            self._released = None


class CudaSurface:
    """CUDA graphs of one device, with one stream and one memory pool for all of them.

    The stream is the same for warm-up and capture: cuBLAS keeps a workspace, and autograd its accumulation, for each
    stream. Graphs may share the pool because each is replayed to its end before another one starts, and what has to
    outlive a replay (outputs, gradients) stays referenced.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", device.index if device.index is not None else torch.cuda.current_device()
        )
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._users: dict[Any, int] = {}  # graphs in each pool

    def problem(self) -> str | None:
        if torch.version.hip is not None:
            return "graphs are not tested on ROCm"
        if torch.cuda.is_current_stream_capturing():
            return "a capture is under way already"
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return f"the allocator is {backend}, with which graphs are not tested"
        return None

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    @contextmanager
    def aside(self) -> Iterator[None]:
        side, current = self._side(), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)

    def capture(
        self, run: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[Graph, T]:
        torch.cuda.synchronize(self.device)
        torch.clear_autocast_cache()  # a weight cast before the capture would never be cast again
        gc.collect()
        torch.cuda.empty_cache()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._side()):
                for generator in generators:
                    if generator.device.type == "cuda":
                        graph.register_generator_state(generator)
                # Threads that load or copy batches may go on calling CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException:
                    self._end(graph)
                    raise
                graph.capture_end()
        except BaseException:
            self._recover(graph, generators)
            raise
        finally:
            torch.clear_autocast_cache()
        pool = self._pool
        self._users[pool] = self._users.get(pool, 0) + 1
        return _CudaGraph(graph, self.device, lambda: self._leave(pool)), result

    def _leave(self, pool: Any) -> None:
        """Counts a graph out; a pool that all have left is not used again.

        The allocator refuses a pool that no graph uses any more while memory of it is still held (gradients).
        Source: `create_or_incref_pool` and `releasePool` in c10/cuda/CUDACachingAllocator.cpp.
        """
        self._users[pool] -= 1
        if not self._users[pool]:
            del self._users[pool]
            if self._pool == pool:
                self._pool = None

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed; what that raises is a consequence of the first error."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the graph may be empty
                graph.capture_end()
        except Exception:
            pass

    def _recover(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """Puts allocator and generators back in order after a capture that did not end well.

        `CUDAGraph.capture_end` leaves both in the state of capturing when the capture was invalidated.
        Source: aten/src/ATen/cuda/CUDAGraph.cpp, and pytorch/pytorch#171265.
        """
        graph.reset()
        _FAILED.append(graph)
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)
        except Exception:
            pass  # it had ended
        self._pool = None
        own = [g for g in generators if g.device.type == "cuda"]
        for generator in (torch.cuda.default_generators[self.device.index], *own):
            state = generator.get_state()
            try:
                torch.empty(1, device=self.device).uniform_(generator=generator)
            except RuntimeError:
                generator.graphsafe_set_state(generator.clone_state())
            generator.set_state(state)
        gc.collect()
        torch.cuda.empty_cache()

    def syncs(self, run: Callable[[], T]) -> tuple[T, list[str]]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                result = run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        found = []
        for w in caught:
            text = str(w.message)
            if "synchronizing CUDA operation" in text:
                found.append(f"{w.filename}:{w.lineno}")
            elif "Synchronization debug mode is a prototype" not in text:
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return result, list(dict.fromkeys(found))

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def reserved_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)


def is_move(place: str) -> bool:
    """Whether the line of code at a place (file:line) moves something to a device."""
    name, _, line = place.rpartition(":")
    text = linecache.getline(name, int(line)) if line.isdigit() else ""
    return re.search(r"\.(to|cuda)\(", text) is not None


def is_optimizers(place: str) -> bool:
    """Whether a place (file:line) is in one of torch's optimizers."""
    return os.path.dirname(place) == os.path.dirname(torch.optim.__file__)
