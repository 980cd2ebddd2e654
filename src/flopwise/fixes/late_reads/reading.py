"""Reads of a loss, answered with the value that the same place read one step before.

The value of now is copied to the host meanwhile, and waited for by nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from flopwise.fixes.late_reads.uses import uses_problem
from flopwise.kit.stand_in import StandIn
from flopwise.meter.replay import is_replaying
from flopwise.meter.where import frames, is_installed, is_torch, is_users, place

#: Places kept apart; more are left as they are.
MOST_PLACES = 64
#: Frames of the script that tell one place from another.
FRAMES = 12


@dataclass
class Copy:
    """A value on its way to the host."""

    host: torch.Tensor
    event: Any  # of its arrival; None: it is there
    step: int

    def value(self) -> Any:
        """Returns the value; waits until it has arrived, which it has long done."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.item()


@dataclass
class Place:
    """Where the script reads a loss, told by the lines that led there."""

    where: str
    problem: str | None  # why what is read there may do more than be shown
    seen: int = 0
    in_a_row: int = 0  # reads each one step after the other
    step: int | None = None  # of the last read
    on_the_way: Copy | None = None
    spare: list[torch.Tensor] = field(default_factory=list)  # pinned memory, in turns

    def see(self, step: int) -> None:
        """Takes note of a read in this step."""
        apart = None if self.step is None else step - self.step
        if apart == 0:
            self.problem = self.problem or "it is read several times a step"
        self.in_a_row = self.in_a_row + 1 if apart == 1 else 0
        self.step = step
        self.seen += 1


class Reads:
    """The reads of losses on one kind of device, in the script's own lines.

    Args:
        kind: of device, "cuda".
        step: returns the number of the optimizer's steps so far.
        is_last: returns whether this is known to be the last step of an epoch.
    """

    def __init__(self, kind: str, step: Callable[[], int], is_last: Callable[[], bool]) -> None:
        self._kind, self._step, self._is_last = kind, step, is_last
        self.places: dict[Hashable, Place] = {}
        self.late = False  # whether values are given late, or places only looked for
        self.answered = 0  # reads that were answered late
        self._originals: dict[str, Any] = {}

    # ------------------------------------------------------------------ the patch

    def install(self) -> None:
        """Has `Tensor.item`, `float(tensor)` and formats of tensors pass through here."""
        if self._originals:
            return
        for name in ("item", "__float__", "__format__"):
            kind = _Formatting if name == "__format__" else _Reading
            self._originals[name] = vars(torch.Tensor).get(name)
            setattr(torch.Tensor, name, kind(getattr(torch.Tensor, name), self))

    def uninstall(self) -> None:
        """Takes that out; what is on its way is dropped: the next read is exact."""
        for name, original in self._originals.items():
            mine = vars(torch.Tensor).get(name)
            if not isinstance(mine, _Reading) or mine.reads is not self:
                continue  # somebody has put another there since, which may call ours: it passes everything on
            if original is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)
        self._originals.clear()
        self.forget()

    def forget(self) -> None:
        """Drops what is on its way, so that the next read of each place is exact."""
        for place_ in self.places.values():
            place_.on_the_way = None
            place_.step = None

    # ------------------------------------------------------------------ one read

    def read(self, tensor: Any, method: Any) -> Any:
        """Returns what a read gives: `method` is torch's own."""
        place_ = self._place(tensor) if self._originals else None
        if place_ is None:
            return method(tensor)
        step = self._step()
        place_.see(step)
        if not self.late or place_.problem is not None:
            return method(tensor)
        before, place_.on_the_way = place_.on_the_way, None
        if self._is_last():
            place_.step = None
            return method(tensor)
        if before is None or before.step != step - 1:
            value = method(tensor)  # the first one, or of a step after a gap
            place_.on_the_way = self._sent(tensor, place_, step)
            return value
        place_.on_the_way = self._sent(tensor, place_, step)
        self.answered += 1
        return before.value()

    def _place(self, tensor: Any) -> Place | None:
        """Returns the place of a read; None where it is none of a loss, or not the script's."""
        if type(tensor) is not torch.Tensor or tensor.device.type != self._kind:
            return None
        if not _is_loss(tensor) or is_replaying() or torch.compiler.is_compiling():
            return None
        if self._kind == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        key, reader = [], None
        for frame in frames(sys._getframe(3)):
            file = frame.f_code.co_filename
            if reader is None and is_torch(file):
                continue  # a format, which reads the value
            if reader is None and (not is_users(file) or is_installed(file)):
                return None
            reader = reader or frame
            key.append((frame.f_code, frame.f_lasti))
            if len(key) == FRAMES:
                break
        if reader is None:
            return None
        known = self.places.get(tuple(key))
        if known is None and len(self.places) < MOST_PLACES:
            try:
                problem = uses_problem(reader.f_code, reader.f_lasti)
            except Exception as error:
                problem = f"its line could not be understood ({type(error).__name__})"
            known = self.places[tuple(key)] = Place(place(reader), problem)
        return known

    def _sent(self, tensor: torch.Tensor, place_: Place, step: int) -> Copy:
        """Returns a copy of the value on its way."""
        value = tensor.detach()
        if value.device.type != "cuda":
            return Copy(value.clone(), None, step)
        while len(place_.spare) < 2:
            place_.spare.append(torch.empty((), dtype=value.dtype, pin_memory=True))
        host = place_.spare.pop(0)
        if host.dtype != value.dtype:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
        place_.spare.append(host)
        host.copy_(value.reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        return Copy(host, event, step)


def _is_loss(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one number of the differentiable part of a step: a loss, or a part of one."""
    return tensor.grad_fn is not None and tensor.numel() == 1 and tensor.is_floating_point()


class _Reading(StandIn):
    """Stands in for a method of `torch.Tensor`, equal to it."""

    def __init__(self, method: Any, reads: Reads) -> None:
        super().__init__(method)
        self.reads = reads

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self._method(tensor, *args, **kwargs)
        return self.reads.read(tensor, self._method)


class _Text(str):
    """A format that torch has made."""

    __slots__ = ()


class _Formatting(_Reading):
    """Stands in for `Tensor.__format__`, which reads a detached copy where there is one number."""

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or type(tensor) is not torch.Tensor or tensor.dim():
            return self._method(tensor, *args, **kwargs)
        found = self.reads.read(tensor, lambda t: _Text(self._method(t, *args)))
        return str(found) if isinstance(found, _Text) else format(found, *args)
