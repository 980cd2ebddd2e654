"""What became of each fix of a plan: written into the script, or not and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.patching.edits import Edits
from flopwise.patching.script import Script
from flopwise.patching.training import Training
from flopwise.records.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """One fix of the plan."""

    code: str
    name: str
    written: bool
    lines: tuple[int, ...] = ()  # of the script as it is, from 1
    note: str = ""  # what to know of what was written, or why nothing was
    by_hand: tuple[str, ...] = ()  # lines or flags that would bring it


@dataclass(frozen=True)
class View:
    """What a rule sees: the script, where it trains, and the edits that it may add to."""

    plan: Plan
    script: Script
    training: Training
    edits: Edits
    frameworks: tuple[str, ...] = field(default=())  # that train in place of the script


@dataclass(frozen=True)
class Written:
    """What a rule has written."""

    lines: tuple[int, ...]
    note: str = ""


class Left(Exception):
    """A fix that cannot be placed with certainty."""

    def __init__(self, reason: str, *by_hand: str) -> None:
        super().__init__(reason)
        self.reason, self.by_hand = reason, by_hand


def only(setting: dict[str, str], *known: str) -> None:
    """Does nothing where a setting holds known entries only.

    Raises:
        Left: it holds more, which a script cannot be given.
    """
    more = sorted(set(setting) - set(known))
    if more:
        raise Left(f"its setting ({', '.join(more)}) has no form in a script")
