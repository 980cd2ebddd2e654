"""How much each op weighs in the coverage: its time on the device, on the CPU, or the bytes it touches.

CUDA events are recorded around an op and read once at the end, so no op waits for the device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from flopwise.meter.count_ops import Op, first_tensor, touched_bytes

HOST, DEVICE, BYTES = "host", "device", "bytes"
BASIS = {
    HOST: "op time (host clock around each op)",
    DEVICE: "op time (CUDA events around each op, launch gaps included)",
    BYTES: "bytes touched by each op, as no op was timed",
}


#: Ops timed on a device; more events would cost memory, and a step of so many ops repeats itself.
EVENTS = 100_000


class Sample:
    """One executed op: whether it is covered, and its weight by some clock."""

    __slots__ = ("covered", "kind", "name", "weight")

    def __init__(self, name: str, kind: str, weight: Any) -> None:
        self.name = name
        self.kind = kind
        self.weight = weight  # nanoseconds, bytes, or a pair of CUDA events
        self.covered = False


class Clock:
    """Times ops: `begin` before an op, `end` after it."""

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self._cuda = timed and torch.cuda.is_available() and _initialised()
        self._left = EVENTS

    def begin(self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `end` needs; None for an op that no device runs."""
        if not self._timed:
            return None
        if self._cuda:
            device = _cuda_device(args, kwargs)
            if device is not None:
                if op.view or self._left <= 0 or capturing():
                    return None
                self._left -= 1
                stream = torch.cuda.current_stream(device)
                start = torch.cuda.Event(enable_timing=True)
                start.record(stream)
                return start, stream
        return time.perf_counter_ns()

    def end(
        self, op: Op, mark: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Sample:
        """Returns the op's sample."""
        if isinstance(mark, int):
            return Sample(op.name, HOST, time.perf_counter_ns() - mark)
        if mark is not None:
            start, stream = mark
            stop = torch.cuda.Event(enable_timing=True)
            stop.record(stream)
            return Sample(op.name, DEVICE, (start, stop))
        weigh = not self._timed and not op.view
        return Sample(op.name, BYTES, touched_bytes(args, kwargs, out) if weigh else 0)


def shares(samples: list[Sample]) -> tuple[float, dict[str, float], str]:
    """Returns the covered share, the shares of the ops that are not, largest first, and what they are shares of.

    Where ops ran on a GPU only those weigh; what the CPU did beside it is another clock.
    """
    kinds = {s.kind for s in samples}
    kind = DEVICE if DEVICE in kinds else HOST if HOST in kinds else BYTES
    if kind == DEVICE:
        torch.cuda.synchronize()
    total, covered = 0.0, 0.0
    missing: dict[str, float] = {}
    for sample in samples:
        weight = _weight(sample) if sample.kind == kind else 0.0
        total += weight
        if sample.covered:
            covered += weight
        else:
            missing[sample.name] = missing.get(sample.name, 0.0) + weight
    if not total:
        return (0.0 if missing else 1.0), missing, BASIS[kind]
    ranked = sorted(missing.items(), key=lambda item: -item[1])
    return covered / total, {name: w / total for name, w in ranked}, BASIS[kind]


class Launches:
    """Notices Triton kernels that Python launches itself, past torch's dispatcher.

    Their work is invisible to a dispatch mode: left unsaid, the coverage would be too good.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.inside = 0  # ops being executed; kernels that they launch are theirs
        self._open: list[tuple[str, Any]] = []
        self._chains: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Hooks Triton's launches where Triton is loaded and has the hooks (3.4 and later)."""
        if "triton" not in sys.modules:
            return
        try:
            from triton import knobs  # type: ignore[import-not-found,unused-ignore]

            enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            enter.add(self._enter)
            leave.add(self._leave)
            self._chains = (enter, leave)
        except Exception:
            self._chains = None

    def remove(self) -> None:
        """Takes the hooks off."""
        if self._chains is not None:
            enter, leave = self._chains
            enter.remove(self._enter)
            leave.remove(self._leave)
            self._chains = None

    def _enter(self, metadata: Any) -> None:
        try:
            if self.inside or capturing():
                return
            name = f"triton::{metadata.get().get('name', 'unnamed')}"
            start = torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream())
            self._open.append((name, start))
        except Exception:
            self._open.clear()

    def _leave(self, _metadata: Any) -> None:
        try:
            if self._open:
                name, start = self._open.pop()
                stop = torch.cuda.Event(enable_timing=True)
                stop.record(torch.cuda.current_stream())
                self.samples.append(Sample(name, DEVICE, (start, stop)))
        except Exception:
            self._open.clear()


def capturing() -> bool:
    """Returns whether a CUDA graph is being captured: an event, a copy or a read would break the capture."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _weight(sample: Sample) -> float:
    if sample.kind != DEVICE:
        return float(sample.weight)
    start, stop = sample.weight
    try:
        stop.synchronize()  # on a device other than the current one
        return float(start.elapsed_time(stop)) * 1e6
    except Exception:  # a lost context: the script has other worries
        return 0.0


def _initialised() -> bool:
    return bool(torch.cuda.is_initialized())


def _cuda_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    tensor = first_tensor(args, kwargs)
    if tensor is not None:
        return tensor.device if tensor.is_cuda else None
    device = kwargs.get("device")
    return device if isinstance(device, torch.device) and device.type == "cuda" else None
