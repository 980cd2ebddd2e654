"""Reads all gradients by one kernel, where Triton can make it; else torch's kernels do, with the same results."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.kit.precision.arguments import LEAST, MOST
from flopwise.kit.precision.tables import BLOCK, Described, Tables, described

#: Warps of a program, and programs on a multiprocessor at once, by the registers that the kernel takes (56 a thread for
#: float32 in Triton 3.6, compute capability 9.0, of 65,536).
WARPS = 8
PROGRAMS = 4
#: Type of the devices that the kernels are for.
DEVICE = "cuda"
#: Streams whose tables are kept.
STREAMS = 8
_TRACKER_MOST = 2**31 - 1


@dataclass(frozen=True)
class Stream:
    """What belongs to one stream: its tables, and two int32 that are 0 between kernels."""

    tables: Tables
    state: torch.Tensor


class OnePass:
    """The kernels of one scaler, and what they need on each device.

    They are compiled at their first use. If that fails, `declined` says why, and nothing is tried again.

    Args:
        wanted: False for torch's kernels only.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self.declined: str | None = None
        self.used = False
        self._streams: OrderedDict[tuple[torch.device, int], Stream] = OrderedDict()

    def check(
        self, grads: Sequence[torch.Tensor], home: torch.device, look: bool
    ) -> tuple[dict[torch.device, torch.Tensor], list[torch.Tensor]] | None:
        """Returns found_inf by device and the largest magnitudes, as `checking.check` does; None if it has to.

        That is on other devices than CUDA's, for tensors that `described` cannot say, and while a CUDA graph is captured:
        the addresses would have to stay.
        """
        if not self._usable() or not grads:
            return None
        per_device: list[tuple[torch.device, Described]] = []
        devices = dict.fromkeys([grad.device for grad in grads])
        for device in devices:
            numbers = None
            if device.type == DEVICE and not _capturing(device):
                one = len(devices) == 1
                numbers = described(grads if one else [g for g in grads if g.device == device])
            if numbers is None:
                return None
            per_device.append((device, numbers))
        founds: dict[torch.device, torch.Tensor] = {}
        amaxes = []
        for device, numbers in per_device:
            read = self._read(device, numbers, look)
            if read is None:
                return None
            founds[device], amax = read
            amaxes.append(amax.to(home, non_blocking=True))
        return founds, amaxes

    def largest(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """Returns the largest magnitude of tensors on one device; None if torch's kernels have to."""
        checked = self.check(tensors, device, True)
        return None if checked is None else checked[1][0]

    def end_update(
        self,
        scale: torch.Tensor,
        tracker: torch.Tensor,
        found: torch.Tensor,
        amax: torch.Tensor,
        ring: torch.Tensor,
        row: int,
        factors: tuple[float, float, float],
        interval: int,
    ) -> bool:
        """Writes a row of the ring, backs off or grows the scale and bounds it from below, all by one kernel.

        Returns whether it did; if not, nothing was changed.

        Args:
            scale: a power of two, as each of the factors must be.
            factors: of growth, of backoff, and the least scale.
        """
        single = (scale, tracker, found, amax)
        if not self._usable() or scale.device.type != DEVICE or _capturing(scale.device):
            return False
        if any(t.device != scale.device for t in single) or ring.device != scale.device:
            return False
        if any(t.dtype is not torch.float32 for t in (scale, found, amax, ring)):
            return False
        if tracker.dtype is not torch.int32 or any(t.numel() != 1 for t in single):
            return False
        if not all(LEAST <= f <= MOST for f in factors) or not 0 < interval <= _TRACKER_MOST:
            return False
        arguments = (scale, tracker, found, amax, ring, row, *factors, interval)
        if not self._launched("end_update", scale.device, 1, arguments, num_warps=1):
            return False
        torch.autograd.graph.increment_version((scale, tracker))  # as torch's own kernels do
        return True

    # -- inside ---------------------------------------------------------------------------------------------------

    def _usable(self) -> bool:
        return self._wanted and self.declined is None and not torch.compiler.is_compiling()

    def _read(
        self, device: torch.device, numbers: Described, look: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns found_inf and the largest magnitude of what the numbers describe."""
        stream = self._stream(device)
        table = stream.tables.of(numbers)
        plan = table.plan
        found = torch.empty((), dtype=torch.float32, device=device)
        amax = torch.empty((), dtype=torch.float32, device=device)
        arguments = (
            table.places, plan.extents, plan.spans, stream.state, found, amax,
            plan.count, plan.blocks, int(look), plan.mixed, BLOCK,
        )  # fmt: skip
        programs = min(plan.count, _most_programs(device))
        if not self._launched("read", device, programs, arguments, num_warps=WARPS):
            return None
        return found, amax

    def _stream(self, device: torch.device) -> Stream:
        key = device, _stream_id(device)
        stream = self._streams.get(key)
        if stream is None:
            state = torch.zeros(2, dtype=torch.int32, device=device)
            stream = self._streams[key] = Stream(Tables(device), state)
            if len(self._streams) > STREAMS:
                self._streams.popitem(last=False)
        else:
            self._streams.move_to_end(key)
        return stream

    def _launched(
        self,
        name: str,
        device: torch.device,
        programs: int,
        arguments: tuple[Any, ...],
        **options: Any,
    ) -> bool:
        """Returns whether a kernel was launched; the first failure is kept as the reason why none is from then on."""
        try:
            kernel = kernel_of(name)
            with _on(device):
                kernel[(programs,)](*arguments, **options)
        except Exception as error:  # whatever a compiler, or what it calls, may raise
            said = str(error).strip().splitlines() or [""]
            self.declined = f"{type(error).__name__}: {said[-1]}"[:300]
            return False
        self.used = True
        return True


def kernel_of(name: str) -> Any:
    """Returns a kernel of `kernels` by its name.

    Raises:
        ImportError: there is no Triton.
        RuntimeError: the device is not NVIDIA's: the kernels were not tried on others.
    """
    if torch.version.hip is not None:
        raise RuntimeError("the kernels were not tried on this make of device")
    return getattr(importlib.import_module("flopwise.kit.precision.kernels"), name)


def _on(device: torch.device) -> Any:
    """Returns what makes a device the current one: kernels go to that."""
    return torch.cuda.device(device)


def _capturing(device: torch.device) -> bool:
    """Returns whether the current stream of a device is captured in a CUDA graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream_id(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _most_programs(device: torch.device) -> int:
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
