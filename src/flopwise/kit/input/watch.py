"""Watches ring buffers that others fill and read: the loop over `buffers[i % 3]` with two streams and no fence is caught."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.errors import ConsistencyError, InputError
from flopwise.kit.input.arguments import is_count
from flopwise.kit.input.checksum import device_checksum, host_checksum
from flopwise.kit.input.findings import Inconsistency
from flopwise.kit.nested import tensors_in

#: Steps whose checksums are kept, to say whose data a buffer holds instead. What was noted of an older step is judged
#: before its checksum goes, so the loop may ask for findings as seldom as it likes.
_REMEMBERED = 256


#: When a buffer was summed, and how a finding says it.
_COPIED, _READ, _DONE = (
    "right after its copy it did not hold what the source holds",
    "when the step read it",
    "when the step was done with it",
)


@dataclass(frozen=True)
class _Noted:
    index: int
    step: int
    made: _Sum
    when: str


class Watch:
    """Checks that what a step reads from a ring buffer is what was written there for that step.

    Three calls in the loop, each on the stream that does the work: `wrote(i, step)` after the copy into `buffers[i]`
    was queued, `reading(i, step)` before the step uses it, `done(i, step)` after. Each queues one sum over the buffer
    on the current stream and waits for nothing; results are compared when they have come, by `check()`.

    The sums are work of their own on the streams: a race that is seen with them is real, one that is not seen may
    need more steps.

    Args:
        buffers: the ring: tensors, or nested batches of them, all on one device.
        raising: `check()` raises what it finds, instead of only keeping it in `findings`.

    Raises:
        InputError: a buffer without a tensor, or no buffers.
    """

    def __init__(self, buffers: Sequence[Any], *, raising: bool = False) -> None:
        if isinstance(buffers, torch.Tensor) or not isinstance(buffers, Iterable):
            raise InputError("Watch: a list of buffers is meant, the ring in its order")
        self._tensors = [list(tensors_in(buffer)) for buffer in buffers]
        if not self._tensors or not all(self._tensors):
            raise InputError("Watch: every buffer holds at least one tensor")
        self.findings: list[Inconsistency] = []
        self.checked = 0
        self._raising = raising
        self._raised = 0
        self._lock = threading.Lock()  # copies may be queued by one thread and steps by another
        self._written: OrderedDict[int, tuple[int, _Sum]] = OrderedDict()
        self._noted: list[_Noted] = []

    def wrote(self, index: int, step: int, source: Any = None) -> None:
        """Notes that the copy for a step was queued into a buffer; it is held against its host source, if given."""
        made = _Sum(self._of(index))
        wanted = None if source is None else host_checksum(tensors_in(source))
        with self._lock:
            self._written[step] = (index, made)
            if len(self._written) > _REMEMBERED:
                self._forget(next(iter(self._written)))
            if wanted is not None:
                self._noted.append(_Noted(index, step, _Known(wanted), _COPIED))

    def reading(self, index: int, step: int) -> None:
        """Notes that a step is about to use a buffer."""
        self._note(index, step, _READ)

    def done(self, index: int, step: int) -> None:
        """Notes that a step has queued its last use of a buffer."""
        self._note(index, step, _DONE)

    def _of(self, index: int) -> list[torch.Tensor]:
        last = len(self._tensors) - 1
        if not is_count(index) or index > last:
            raise InputError(f"Watch: there is no buffer {index!r}, they are 0 to {last}")
        return self._tensors[index]

    def _note(self, index: int, step: int, when: str) -> None:
        noted = _Noted(index, step, _Sum(self._of(index)), when)
        with self._lock:
            self._noted.append(noted)

    def _forget(self, step: int) -> None:
        """Judges what was noted of the oldest step, which the device was through with long ago, and drops it."""
        of_step = [noted for noted in self._noted if noted.step == step]
        if of_step:
            self._noted = [noted for noted in self._noted if noted.step != step]
            for noted in of_step:
                self._judge(noted)
        del self._written[step]

    def check(self, wait: bool = False) -> list[Inconsistency]:
        """Returns what is wrong among the results that have come; `wait` waits for all.

        Raises:
            ConsistencyError: something new was found, and `raising` is on.
        """
        with self._lock:  # all the while: no step is forgotten meanwhile
            later = []
            for noted in self._noted:
                of_step = self._written.get(noted.step)
                ready = noted.made.ready() and (of_step is None or of_step[1].ready())
                if ready or wait:
                    self._judge(noted)
                else:
                    later.append(noted)
            self._noted = later
            new = self.findings[self._raised :]
            self._raised = len(self.findings)
        if new and self._raising:
            raise ConsistencyError(f"{new[0]} ({len(new)} in all)")
        return self.findings

    def _judge(self, noted: _Noted) -> None:
        self.checked += 1
        written = self._written
        step, index = noted.step, noted.index
        if step not in written:
            said = "nothing was written for this step, or more than 256 steps ago"
            self.findings.append(Inconsistency(step, "lost", index, said))
            return
        to, made = written[step]
        if to != index:
            said = f"the step was written to buffer {to} and read from buffer {index}"
            self.findings.append(Inconsistency(step, "out of order", index, said))
        elif noted.made.value() != made.value():
            self.findings.append(_different(noted, written))


def _different(noted: _Noted, written: Mapping[int, tuple[int, _Sum]]) -> Inconsistency:
    """Returns what a buffer held instead of its step's batch."""
    step, index, when = noted.step, noted.index, noted.when
    if when is _COPIED:
        said = f"{when}: the source was changed before the copy had read it, or the copy by another"
        return Inconsistency(step, "overwritten", index, said)
    found = noted.made.value()
    holds = [s for s, (i, made) in written.items() if i == index and made.value() == found]
    if not holds:
        return Inconsistency(step, "overwritten", index, f"{when} it held parts of several batches")
    other = min(holds, key=lambda s: abs(s - step))
    if other < step:
        said = f"{when} it still held the batch of step {other}: the copy was not waited for"
        return Inconsistency(step, "lost", index, said)
    said = f"{when} it held the batch of step {other} already: the copy did not wait for the reader"
    return Inconsistency(step, "overwritten", index, said)


class _Sum:
    """A checksum on its way from the device; known at once on the host."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        self._event: Any = None
        self._result: torch.Tensor | None = None
        self._value = 0
        if device.type != "cuda":
            self._value = host_checksum(tensors)
            return
        result = torch.empty((), dtype=torch.int64, pin_memory=True, device="cpu")
        result.copy_(device_checksum(tensors, device), non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))
        self._result = result

    def ready(self) -> bool:
        """Returns whether the value has come."""
        return self._event is None or bool(self._event.query())

    def value(self) -> int:
        """Returns the checksum, waited for if need be."""
        if self._event is not None and self._result is not None:
            self._event.synchronize()
            self._value, self._event = int(self._result.item()), None
        return self._value


class _Known(_Sum):
    """A checksum of the host's source."""

    def __init__(self, value: int) -> None:
        super().__init__([])
        self._value = value
