"""CUDA graphs that hold a whole training step: their replays are steps, and their FLOPs are counted at capture."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flopwise.meter.patches import Patches
from flopwise.records.rank import FlopCount

if TYPE_CHECKING:
    from flopwise.meter.session import Session

now = time.perf_counter_ns


class Graphs:
    """Watches capture and replay of CUDA graphs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.capturing = False
        self.seen = False  # any was captured, torch.compile's own included
        self.counts: dict[int, FlopCount] = {}  # of graphs with an optimizer step, by number
        self._numbers: dict[int, int] = {}  # id of a graph object -> its number
        self._holds_step = False
        self._counter: Any = None

    def install(self, patches: Patches) -> None:
        """Patches torch.cuda.CUDAGraph."""
        kind = torch.cuda.CUDAGraph
        if not isinstance(getattr(kind, "replay", None), Callable):  # type: ignore[arg-type]
            return
        for name, wrap in (
            ("capture_begin", self._begin),
            ("capture_end", self._end),
            ("replay", self._replay),
        ):
            patches.replace(kind, name, wrap(getattr(kind, name)), f"CUDAGraph.{name}")

    def saw_step(self) -> None:
        """An optimizer stepped while a graph was captured."""
        self._holds_step = True

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen = True
            if self._session.live and not _called_by_inductor():
                self._session.leave_sole()
                self.capturing = True
                self._holds_step = False
            result = original(graph, *args, **kwargs)
            if self.capturing and self._session.config.count:
                self._session.guard(self._start_count)
            return result

        return capture_begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.capturing:
                return original(graph, *args, **kwargs)
            self.capturing = False
            counter, self._counter = self._counter, None
            count = None
            if counter is not None:
                try:
                    count = counter.stop()
                except Exception as error:
                    self._session.note(f"the FLOPs of a CUDA graph were not counted: {error}")
            if self._holds_step:
                number = self._numbers[id(graph)] = len(self._numbers)
                if count is not None:
                    self.counts[number] = count
            return original(graph, *args, **kwargs)

        return capture_end

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        numbers = self._numbers

        def replay(graph: Any) -> Any:
            result = original(graph)
            if numbers and self._session.live and id(graph) in numbers:
                self._session.graph_replayed(graph, now())
            return result

        return replay

    def _start_count(self) -> None:
        from flopwise.meter.count import CaptureCounter

        counter = CaptureCounter("")
        counter.start()
        self._counter = counter


def _called_by_inductor() -> bool:
    """Whether the capture is one of torch.compile's own (reduce-overhead): those hold no optimizer step."""
    frame = sys._getframe(2)
    for _ in range(12):
        if "cudagraph_trees" in frame.f_code.co_filename:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
