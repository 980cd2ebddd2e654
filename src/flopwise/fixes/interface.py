"""The interface of a fix: four facts, two verbs, and what it is applied to.

Facts: `code`, `name` (the cure), the `causes` it treats, its `numerics` class, and how it is tried. Verbs: `check(scene)` says whether it
may be tried here and why not, `apply(scene)` gives something that can be switched on and off inside the running
process. The docstring of the class, with its four fixed headings, is also the documentation.

Numerics classes:

- identical: every number is the same to the bit.
- reordered: the same mathematics with other rounding. The error against a float64 reference stays within what the
  script already had, or within what one rounding of the arithmetic in use makes of this very step
  (`flopwise.meter.parity`); nothing else may change.
- lossy: it gives up more than rounding, and is judged by the quality of what was trained. Never on by default.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from flopwise.hardware.limits import usable_cores
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

Numerics = Literal["identical", "reordered", "lossy"]

HEADINGS = ("What it does", "Why it helps", "When it declines", "What can change")


@dataclass(frozen=True)
class Facts:
    """What the script was seen to do by itself."""

    autocast: bool = False  # it enters torch.autocast
    grad_scaler: bool = False
    compiles: bool = False  # torch.compile or Module.compile, anywhere
    custom_functions: tuple[
        str, ...
    ] = ()  # its own autograd Functions, without a declared autocast policy


def cores_of_this_rank() -> int:
    """Returns the cores that this process may use, its share where a launcher started several ranks on the host."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cores() // (int(ranks) if ranks.isdigit() and int(ranks) else 1))


@dataclass(frozen=True)
class Scene:
    """What was found and measured in a training process. A share is None where it was not measured."""

    roots: Sequence[
        nn.Module
    ] = ()  # the outermost modules with trained parameters that are called as modules
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()  # loaders that were seen iterating for training
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    step_s: float | None = None
    data_frac: float | None = None  # share of a step inside next(loader)
    compute_frac: float | None = None  # forward and backward
    optimizer_frac: float | None = None
    steps_left: int | None = None
    time_left_s: float | None = None  # for trials, this fix's and all that follow
    cores: int = field(default_factory=cores_of_this_rank)
    facts: Facts = field(default_factory=Facts)
    #: Findings of the baseline by code, with the gain that each predicted (None: it carried none).
    findings: Mapping[str, float | None] = field(default_factory=dict)
    #: By loader: seconds that one of its workers takes to load a batch, and of these how many it computes.
    loads: Mapping[Any, tuple[float, float]] = field(default_factory=dict)
    batches_per_step: float = 1.0


@dataclass(frozen=True)
class Eligible:
    """The fix may be tried."""

    note: str = ""
    predicted_gain_frac: float | None = (
        None  # 1 - t_new / t_old, where the fix knows better than findings
    )


@dataclass(frozen=True)
class Declined:
    """The fix is not for this script, and why."""

    reason: str


class Applied(ABC):
    """A fix inside the process: off at first, switched on and off between steps, undone at the end.

    `enable` and `disable` may be called in any order and number; between two steps only. After a switch the first
    steps do not count: until `settled()`, and whatever the driver drops besides.
    """

    setting: dict[str, str]  # what was chosen, for the plan
    compile_s: float = 0.0  # spent compiling so far
    #: Of the least precise arithmetic that it brings into the forward; 0: it touches it and changes no number;
    #: None: it does not touch the forward.
    unit_roundoff: float | None = None

    @abstractmethod
    def enable(self) -> None:
        """Switches the fix on."""

    @abstractmethod
    def disable(self) -> None:
        """Switches the fix off."""

    @abstractmethod
    def undo(self) -> None:
        """Switches the fix off and removes every trace of it."""

    @abstractmethod
    def verify(self, snapshot: Snapshot) -> Parity:
        """Returns whether the numbers held, on one snapshot; leaves the fix off. May take seconds."""

    def rehearse(self, snapshot: Snapshot) -> str | None:
        """Makes ready for the fixes that are on now, so that no timed step has to; returns what went wrong.

        Call it while this fix is on, before the combination is timed; nothing is changed by it. May take seconds.
        """
        return None

    def ready(self) -> bool:
        """Whether `verify` has what it needs; loader-workers must see a batch or two go by first."""
        return True

    def settled(self) -> bool:
        """Whether the steps since the last switch have reached the new steady state."""
        return True

    def failure(self) -> str | None:
        """Returns what went wrong while the fix was on (it has switched itself off), or None."""
        return None


class StartUp(ABC):
    """A fix that is there before the script builds anything, and stays for the whole run."""

    name: str  # of what it replaces, for the record of the run

    @abstractmethod
    def install(self) -> None:
        """Puts it in."""

    @abstractmethod
    def trouble(self) -> str | None:
        """Returns why it does nothing ("left out: ..."), asked once the first steps have run; None: it works."""


class Fix(ABC):
    """A fix of the catalog."""

    code: ClassVar[str]
    name: ClassVar[str]
    causes: ClassVar[tuple[str, ...]]
    numerics: ClassVar[Numerics]
    #: Codes of docs/findings.md whose cure it is: the gain that the first of them predicts is the fix's own.
    findings: ClassVar[tuple[str, ...]] = ()
    #: Only when asked for by name: it changes more than time and rounding (see "What can change").
    opt_in: ClassVar[bool] = False
    #: Of an opt-in: what else it changes, in one sentence for plan and reports.
    changes: ClassVar[str] = ""
    #: Tried on top of all that was kept, and not together with the others: it compiles what it finds.
    late: ClassVar[bool] = False
    #: What it changes shows from the start of a process only: it is verified in a running one, and compared in fresh ones.
    in_processes: ClassVar[bool] = False
    #: Codes of fixes that must not be on together with it; of two, the one that gains more alone stays.
    conflicts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether the fix may be tried on this scene. Changes nothing."""

    @abstractmethod
    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Installs the fix, switched off. Only after `check` found the scene eligible.

        `setting` is what an earlier trial chose (`Applied.setting`, from a plan); without it the fix chooses.
        """

    @classmethod
    def at_start(cls, setting: Mapping[str, str]) -> StartUp | None:
        """Returns what a plan installs before the script builds anything; None: the fix waits until modules are known.

        Raises:
            ValueError: the setting is not one of this fix.
        """
        return None

    @classmethod
    def starts(cls) -> bool:
        """Returns whether a plan can put it in before the script builds anything."""
        return cls.at_start.__func__ is not Fix.at_start.__func__  # type: ignore[attr-defined]

    @classmethod
    def environment(cls, setting: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables that a plan sets for the process before it starts."""
        return {}

    @classmethod
    def sections(cls) -> dict[str, str]:
        """Returns the docstring's sections by heading, and its first line under "".

        Raises:
            ValueError: a heading is missing, doubled, out of order or empty.
        """
        text = inspect.cleandoc(cls.__doc__ or "")
        found: dict[str, str] = {}
        heading = ""
        for line in text.splitlines():
            title = line.removesuffix(":")
            if line.endswith(":") and title in HEADINGS:
                if title in found:
                    raise ValueError(f"{cls.__name__}: heading {title!r} twice")
                heading = title
                found[heading] = ""
            else:
                found[heading] = f"{found.get(heading, '')}{line.strip()}\n"
        found = {title: body.strip() for title, body in found.items()}
        if tuple(found) != ("", *HEADINGS) or not all(found.values()):
            raise ValueError(f"{cls.__name__}: the docstring needs a first line and {HEADINGS}")
        return found


def unless_failed(parity: Parity, applied: Applied) -> Parity:
    """Returns the parity, not passed if the fix failed while it was compared: it had switched itself off."""
    reason = applied.failure()
    return parity if reason is None else replace(parity, passed=False, detail=reason)


def share_reason(share: float | None, least: float, what: str) -> str | None:
    """Returns why a share of the step is no cause for a fix, or None if it is one."""
    if share is None:
        return f"the share of a step spent {what} was not measured"
    if share < least:
        return f"only {100 * share:.1f} % of a step is spent {what}: nothing to win that a trial could show"
    return None
