"""How far a tune has come, on disk after each of its parts, so that it can be taken up again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from flopwise import plans
from flopwise.errors import PlanError, RecordError, UsageError
from flopwise.launch.command import Job
from flopwise.records import store
from flopwise.records.pool import Shares, Turn
from flopwise.records.verdict import Comparison, Trial, Write

SCHEMA = "flopwise.tune-state/1"
NAME = "state.json"


@dataclass(frozen=True)
class Asked:
    """What the user asked for."""

    command: list[str]  # as typed
    argv: list[str]
    script: str
    file: str | None
    typed: list[str]
    codes: list[str]
    budget_s: float
    per_fix_s: float
    processes: int
    proof_steps: int
    steps_remaining: int | None = None
    allowed: list[str] = field(default_factory=list)
    cwd: str = ""  # where it was begun

    def job(self) -> Job:
        """Returns the job."""
        return Job(list(self.argv), self.script, self.file, list(self.typed))


@dataclass(frozen=True)
class Baseline:
    """The script as it is, measured."""

    wall_s: float  # of its process, without what was profiled after the timed steps


@dataclass
class State:
    """How far a tune has come."""

    schema: str
    asked: Asked
    script_sha256: str
    torch: str | None
    device: str
    used_s: float = 0.0  # by all sessions so far
    spent: dict[str, float] = field(default_factory=dict)  # of it, by part
    sessions: int = 1
    baseline: Baseline | None = None
    running: str | None = None  # the folder of the process under way; still set: it was cut off
    attempts: int = 0  # trial processes that were started
    trials: list[Trial] = field(default_factory=list)
    aa: Comparison | None = None
    trial_torch: str | None = None
    notes: list[str] = field(default_factory=list)
    tried: bool = False  # nothing is left to try in one process
    turns: list[Turn] = field(default_factory=list)  # pairs of blocks of what has no verdict
    short: bool = False  # the script ends before all has been tried
    shares: Shares | None = None
    handed: list[Trial] = field(default_factory=list)  # fixes that are to be compared in processes
    why_untried: str | None = None
    #: Runs of pairs: by what is compared ("proof", or a fix) and arm, their folders.
    runs: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    cached: dict[str, float] = field(default_factory=dict)  # by fix: warm-up with the compile cache
    counts: dict[str, int] = field(
        default_factory=dict
    )  # by fix: how many pairs of processes it has
    writes: list[list[Write]] = field(default_factory=list)  # of each process

    def runs_of(self, what: str) -> dict[str, list[str]]:
        """Returns the folders of the runs of `what`, by arm."""
        return self.runs.setdefault(what, {"old": [], "new": []})


def begin(asked: Asked) -> State:
    """Returns the state of a tune that begins."""
    job = asked.job()
    return State(SCHEMA, asked, plans.sha256_of(job), plans.torch_version(), plans.device_name())


def save(folder: Path, state: State) -> None:
    """Writes the state in one piece.

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    store.write(folder / NAME, state)


def load(folder: Path) -> State:
    """Returns the state of a tune that was begun in `folder`.

    Raises:
        UsageError: there is none.
        RecordError: it is damaged, or of another version.
    """
    path = folder / NAME
    if not path.exists():
        done = (folder / "tune.json").exists()
        raise UsageError(
            f"--resume {folder}: "
            + ("that tune is complete" if done else f"no tune was begun there (it has no {NAME})")
            + ". Nothing was started"
        )
    try:
        return store.read(path, State, SCHEMA)
    except RecordError as error:
        raise RecordError(
            f"{error}. It cannot be taken up again; start a new tune with another --out. Nothing was started"
        ) from error


def changes(state: State) -> list[str]:
    """Returns what is no longer as it was when the tune began."""
    job, found = state.asked.job(), []
    if state.asked.cwd and os.path.realpath(state.asked.cwd) != os.path.realpath(os.getcwd()):
        found.append(f"the working folder is {os.getcwd()}, it was {state.asked.cwd}")
    if plans.sha256_of(job) != state.script_sha256:
        found.append(f"{job.script} has changed since")
    torch, device = plans.torch_version(), plans.device_name()
    if torch != state.torch:
        found.append(f"torch is {torch}, it was {state.torch}")
    if device != state.device:
        found.append(f"the device is {device}, it was {state.device}")
    return found


def check(state: State, *, force: bool) -> list[str]:
    """Returns what has changed, which is allowed only with `force`.

    Raises:
        PlanError: something has, and `force` was not given.
    """
    found = changes(state)
    if found and not force:
        raise PlanError(
            f"the tune cannot be taken up: {'; '.join(found)}. What was measured before does not hold any more. "
            "Nothing was started; tune anew, or give --force"
        )
    return found


def again(state: State, budget_s: float | None) -> State:
    """Returns the state of the next session, which has the given time, or that of the first one."""
    asked = state.asked if budget_s is None else replace(state.asked, budget_s=budget_s)
    state.asked, state.sessions = asked, state.sessions + 1
    return state
