"""The work of one device and its steps, as what looks for defects sees them."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.diagnosis.ledger.soundness import SHORT
from flopwise.trace.families import communicates
from flopwise.trace.health import Sifted
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.steps import Steps
from flopwise.trace.table import Events, Ints, Mask


@dataclass(frozen=True, eq=False)
class Seen:
    """The work of one device and its steps."""

    events: Events  # all
    sifted: Sifted
    work: Launches
    marks: Steps
    first: int

    @property
    def usable(self) -> Events:
        """The events without those whose times cannot be true."""
        return self.sifted.events

    @property
    def names(self) -> list[str]:
        """What the numbers in `events.name` stand for."""
        return self.usable.names

    @property
    def calls(self) -> Mask:
        """Which of the device's work is communication."""
        named = self.usable.names_where(communicates) & self.usable.of(Kind.KERNEL)
        found: Mask = named[self.work.rows]
        return found

    def counted(self, rows: Ints) -> Mask:
        """Returns which rows of all events start in the steps that count."""
        at = self.events.start_ns[rows]
        bounds = self.marks.bounds_ns
        inside: Mask = (at >= int(bounds[self.first])) & (at < int(bounds[-1]))
        return inside


def calls_of(seen: Seen, rows: Ints) -> int:
    """Returns how many of these rows of all events are communication."""
    names = seen.events.name[rows[seen.events.kind[rows] == Kind.KERNEL]]
    return sum(communicates(seen.names[name]) for name in names.tolist())


def so_many_calls(calls: int) -> str:
    """Returns the end of a sentence that says how many of the things are communication, "" where none is."""
    return f"; communication among them: {calls}" if calls else ""


def steps_that(n: int) -> str:
    """Returns so many steps that count, in words."""
    return "1 step that counts" if n == 1 else f"{n} steps that count"


def called(name: str) -> str:
    """Returns a kernel's name, no longer than a line of text can hold."""
    return name if len(name) <= SHORT else name[: SHORT - 1] + "…"
