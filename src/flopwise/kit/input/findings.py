"""What the consistency mode finds, with the step at which it was."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from flopwise.errors import ConsistencyError

#: Batches whose checksums are remembered, to say which batch a buffer holds instead.
REMEMBERED = 64
#: The number in the header of a slot that a worker has filled and no loop was given yet.
UNSENT = -1


@dataclass(frozen=True)
class Inconsistency:
    """One batch that is not what was sent.

    kind: `overwritten` (its bytes changed after they were sent), `out of order`, `duplicated` or `lost`.
    """

    step: int  # batches handed out before it
    kind: str
    buffer: int  # which of the ring, or slot of the pool
    said: str

    def __str__(self) -> str:
        return f"step {self.step}, buffer {self.buffer}: {self.kind}: {self.said}"


@dataclass(frozen=True)
class Stamp:
    """What is known of a batch when it is sent; its header carries it along."""

    number: int
    sent_ns: int
    checksum: int

    def words(self) -> torch.Tensor:
        """Returns the header: three int64."""
        return torch.tensor([self.number, self.sent_ns, self.checksum], device="cpu")


class Judge:
    """Compares what arrived with what was sent; `raising` makes each finding an error at the next step."""

    def __init__(self, raising: bool) -> None:
        self.found: list[Inconsistency] = []
        self.checked = 0  # comparisons made
        self.raising = raising
        self._recent: deque[Stamp] = deque(maxlen=REMEMBERED)
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._raised = 0
        self._lock = threading.Lock()  # batches are sent by one thread and handed over by another

    def begin(self) -> None:
        """Begins a pass over the loader: batches are numbered from 0 again."""
        with self._lock:
            self._recent.clear()
            self._seen.clear()

    def sent(self, stamp: Stamp) -> None:
        """Remembers a batch, so that a buffer which holds it in another's place can be named."""
        with self._lock:
            self._recent.append(stamp)

    def order(self, step: int, buffer: int, number: int, wanted: int) -> None:
        """Checks that the batch handed over is the one whose turn it is."""
        if number != wanted:
            kind = "lost" if number > wanted else "out of order"
            if number in self._seen:
                kind = "duplicated"
            said = f"batch {number} was handed over where batch {wanted} was to come"
            self._add(step, kind, buffer, said)
        self._seen.append(number)

    def arrived(self, step: int, buffer: int, wanted: Stamp, found: Stamp, checksum: int) -> None:
        """Compares the header and the checksum found in a buffer at a step with what was sent for that step."""
        self.checked += 1
        if found != wanted:
            self._add(step, *self._another(wanted, found, buffer))
        elif checksum != wanted.checksum:
            self._add(step, "overwritten", buffer, self._holds(wanted, checksum))

    def kept(self, step: int, buffer: int, wanted: Stamp, found: Stamp, checksum: int) -> None:
        """Compares a batch with itself after the step that used it."""
        self.checked += 1
        if found != wanted or checksum != wanted.checksum:
            said = f"its bytes changed while the step used it; {self._holds(wanted, checksum)}"
            self._add(step, "overwritten", buffer, said)

    def raise_new(self) -> None:
        """Raises what was found since the last call, if findings are to be errors.

        Raises:
            ConsistencyError: with every new finding in its text.
        """
        new = self.found[self._raised :]
        self._raised = len(self.found)
        if new and self.raising:
            more = "" if len(new) == 1 else f" (and {len(new) - 1} more)"
            raise ConsistencyError(
                f"{new[0]}{more}. The results of this step and later ones are not to be trusted"
            )

    def _another(self, wanted: Stamp, found: Stamp, buffer: int) -> tuple[str, int, str]:
        """Returns what it means that a buffer's header is another batch's."""
        if found.number == UNSENT:
            said = "a worker had filled its slot again before this step read it"
            return "overwritten", buffer, said
        apart = f"batch {found.number}, sent {(found.sent_ns - wanted.sent_ns) / 1e6:+.3f} ms from batch {wanted.number}"
        if found.sent_ns > wanted.sent_ns:
            return "overwritten", buffer, f"it held {apart}, already when this step read it"
        kind = "duplicated" if found.number in self._seen else "out of order"
        said = f"it still held {apart}, when this step read it: the copy was not waited for"
        return kind, buffer, said

    def _holds(self, wanted: Stamp, checksum: int) -> str:
        with self._lock:
            recent = list(self._recent)
        other = next((s for s in recent if s.checksum == checksum), None)
        if other is not None and other.number != wanted.number:
            apart_ms = (other.sent_ns - wanted.sent_ns) / 1e6
            return (
                f"it holds batch {other.number}, sent {apart_ms:+.3f} ms from batch {wanted.number}"
            )
        return f"checksum {checksum & (2**64 - 1):016x}, sent as {wanted.checksum & (2**64 - 1):016x}: parts of several batches"

    def _add(self, step: int, kind: str, buffer: int, said: str) -> None:
        self.found.append(Inconsistency(step, kind, buffer, said))
