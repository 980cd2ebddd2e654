"""Watches ring buffers that others fill and read: the loop over `buffers[i % 3]` with two streams and no fence is caught."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from flopwise.errors import ConsistencyError, InputError
from flopwise.kit.input.checksum import device_checksum, host_checksum
from flopwise.kit.input.findings import Inconsistency
from flopwise.kit.nested import tensors_in

#: Steps whose checksums are kept, to say whose data a buffer holds instead.
_REMEMBERED = 256


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
        InputError: there is no tensor in the buffers.
    """

    def __init__(self, buffers: Sequence[Any], *, raising: bool = False) -> None:
        self._tensors = [list(tensors_in(buffer)) for buffer in buffers]
        if not self._tensors or not all(self._tensors):
            raise InputError("Watch: every buffer holds at least one tensor")
        self.findings: list[Inconsistency] = []
        self.checked = 0
        self._raising = raising
        self._raised = 0
        self._lock = threading.Lock()
        self._written: OrderedDict[int, tuple[int, _Sum]] = OrderedDict()
        self._read: list[tuple[int, int, _Sum, bool]] = []  # buffer, step, sum, after use
        self._next = 0

    def wrote(self, index: int, step: int, source: Any = None) -> None:
        """Notes that the copy for a step was queued into a buffer; with its host source that is held against it, too."""
        made = _Sum(self._tensors[index])
        with self._lock:
            self._written[step] = (index, made)
            if len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)
        if source is not None:
            wanted = host_checksum(tensors_in(source))
            with self._lock:
                self._read.append((index, step, _Known(wanted), False))

    def reading(self, index: int, step: int) -> None:
        """Notes that a step is about to use a buffer."""
        self._note(index, step, after=False)

    def done(self, index: int, step: int) -> None:
        """Notes that a step has queued its last use of a buffer."""
        self._note(index, step, after=True)

    def _note(self, index: int, step: int, after: bool) -> None:
        made = _Sum(self._tensors[index])
        with self._lock:
            self._read.append((index, step, made, after))

    def check(self, wait: bool = False) -> list[Inconsistency]:
        """Returns what is wrong among the results that have come; `wait` waits for all.

        Raises:
            ConsistencyError: something new was found, and `raising` is on.
        """
        with self._lock:
            noted, self._read = self._read, []
        later = []
        for index, step, made, after in noted:
            written = self._written.get(step)
            ready = made.ready() and (written is None or written[1].ready())
            if ready or wait:
                self._judge(index, step, made, after, written)
            else:
                later.append((index, step, made, after))
        with self._lock:
            self._read = later + self._read
        new = self.findings[self._raised :]
        self._raised = len(self.findings)
        if new and self._raising:
            raise ConsistencyError(f"{new[0]} ({len(new)} in all)")
        return self.findings

    def _judge(self, index: int, step: int, made: _Sum, after: bool, written: Any) -> None:
        self.checked += 1
        if written is None:
            said = "nothing was written for this step, or more than 256 steps ago"
            self.findings.append(Inconsistency(step, "lost", index, said))
            return
        found, wanted = made.value(), written[1].value()
        if written[0] != index:
            said = f"the step was written to buffer {written[0]} and read from buffer {index}"
            self.findings.append(Inconsistency(step, "out of order", index, said))
        elif found != wanted:
            self.findings.append(self._different(index, step, found, after))

    def _different(self, index: int, step: int, found: int, after: bool) -> Inconsistency:
        holds = [
            s for s, (i, made) in self._written.items() if i == index and made.value() == found
        ]
        when = "when the step was done with it" if after else "when the step read it"
        if not holds:
            return Inconsistency(
                step, "overwritten", index, f"{when} it held parts of several batches"
            )
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
        result = torch.empty((), dtype=torch.int64, pin_memory=True)
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
