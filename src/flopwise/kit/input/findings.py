"""What the consistency mode finds, with the step at which it was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flopwise.errors import ConsistencyError

#: Batches whose checksums are remembered, to say which batch a buffer holds instead.
REMEMBERED = 64


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
    """What is known of a batch when it is sent."""

    number: int
    sent_ns: int
    checksum: int


class Judge:
    """Compares what arrived with what was sent; `raising` makes each finding an error at the next step."""

    def __init__(self, raising: bool) -> None:
        self.found: list[Inconsistency] = []
        self.checked = 0  # comparisons made
        self._raising = raising
        self._recent: deque[Stamp] = deque(maxlen=REMEMBERED)
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._raised = 0

    def sent(self, stamp: Stamp) -> None:
        """Remembers a batch, so that a buffer which holds it in another's place can be named."""
        self._recent.append(stamp)

    def arrived(self, step: int, buffer: int, wanted: Stamp, number: int, checksum: int) -> None:
        """Compares the header and checksum found on the device at a step with what was sent for that step."""
        self.checked += 1
        if number != wanted.number:
            self._misplaced(step, buffer, wanted, number)
        elif checksum != wanted.checksum:
            self._add(step, "overwritten", buffer, self._holds(wanted, checksum))
        if number not in self._seen:
            self._seen.append(number)

    def kept(self, step: int, buffer: int, wanted: Stamp, checksum: int) -> None:
        """Compares a batch with itself after the step that used it."""
        self.checked += 1
        if checksum != wanted.checksum:
            said = f"its bytes changed while the step used it; {self._holds(wanted, checksum)}"
            self._add(step, "overwritten", buffer, said)

    def raise_new(self) -> None:
        """Raises what was found since the last call, if findings are to be errors.

        Raises:
            ConsistencyError: with every new finding in its text.
        """
        new = self.found[self._raised :]
        self._raised = len(self.found)
        if new and self._raising:
            more = "" if len(new) == 1 else f" (and {len(new) - 1} more)"
            raise ConsistencyError(
                f"{new[0]}{more}. The results of this step and later ones are not to be trusted"
            )

    def _misplaced(self, step: int, buffer: int, wanted: Stamp, number: int) -> None:
        ahead = number > wanted.number
        kind = "duplicated" if number in self._seen else "lost" if ahead else "out of order"
        said = f"batch {number} arrived where batch {wanted.number} was to come"
        if ahead:
            said += (
                f"; {number - wanted.number} of the batches before it did not come, or come later"
            )
        self._add(step, kind, buffer, said)

    def _holds(self, wanted: Stamp, checksum: int) -> str:
        other = next((s for s in self._recent if s.checksum == checksum), None)
        if other is not None and other.number != wanted.number:
            return f"it holds batch {other.number}, sent {(other.sent_ns - wanted.sent_ns) / 1e6:+.3f} ms from batch {wanted.number}"
        return f"checksum {checksum & (2**64 - 1):016x}, sent as {wanted.checksum & (2**64 - 1):016x}: parts of several batches"

    def _add(self, step: int, kind: str, buffer: int, said: str) -> None:
        self.found.append(Inconsistency(step, kind, buffer, said))
