"""The processes of a tune: each runs the unmodified script apart from the user's files, and ends when its time is over."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwise.errors import NothingMeasuredError, RunFolderError
from flopwise.launch import folder as folders
from flopwise.launch.apart import Apart
from flopwise.launch.command import Job
from flopwise.measurement import Measurement
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Trial, Write
from flopwise.reports.figures import duration
from flopwise.tuning.budget import Budget

#: What a process prints, in its folder.
OUTPUT = "output.txt"


@dataclass
class Processes:
    """Starts the processes of one tune, one after another."""

    job: Job
    folder: Path
    budget: Budget
    quiet: bool = False
    allowed: Sequence[str] = ()  # folders of the user's in which the script may write as ever
    writes: list[list[Write]] = field(default_factory=list)  # of each process so far
    starts: Callable[[str], None] = lambda name: None  # is told of each process before it starts
    price_usd_per_hour: float | None = None

    def start(
        self,
        name: str,
        options: dict[str, Any],
        doing: str,
        limit_s: float,
        *,
        env: dict[str, str] | None = None,
        look: Callable[[Path], None] | None = None,
        kept: Sequence[Trial] = (),
        runs: int | None = None,
        to_go_s: float | None = None,
    ) -> Measurement:
        """Runs a process to its end, or to that of its time, and returns what is known of it.

        Args:
            name: of its folder; one that was cut off in an earlier session keeps its own.
            options: what the meter is to do there.
            doing: what the user is told.
            limit_s: after this long it is ended.
            env: variables that it has besides.
            look: called with its folder, again and again while it runs.
            kept: the fixes so far, and
            runs: how many processes of the proof are left, this one included, for the time that is left.
            to_go_s: that time, where it is known otherwise.

        Raises:
            RunFolderError: its folder cannot be made, or went away while it ran.
            UsageError: it cannot be started.
        """
        if to_go_s is None:
            to_go_s = self.budget.to_go_s(kept, runs=runs)
        self.say(doing if to_go_s is None else f"{doing} (at most {duration(to_go_s)} to go)")
        path = self._free(name)
        self.starts(path.name)
        command = {"command": ["flopwise", "run", *self.job.typed]}
        folder = folders.create(str(path), self.job.script, {**command, **options})
        price = self.price_usd_per_hour
        measurement = Measurement(self.job, folder, command, None, price, quiet=True)
        if look is not None:
            measurement.look = lambda: look(folder)
        script = [os.path.dirname(os.path.abspath(self.job.file))] if self.job.file else []
        apart = Apart(folder, self.folder, self.allowed, guarded=script)
        with (
            open(folder / OUTPUT, "wb") as output,
            apart.process({**self._cache(), **os.environ, **(env or {})}) as (variables, first),
        ):
            measurement.run(timeout_s=max(limit_s, 1.0), output=output, env=variables, first=first)
        self.writes.append(apart.writes)
        if folders.gone(folder):
            raise RunFolderError(
                f"the run folder {folder} went away while the script ran: the tune ends here, without a plan. "
                "Give --out a folder that the script leaves alone"
            )
        return measurement

    def _free(self, name: str) -> Path:
        """Returns the folder of a process: the name, with a number where an earlier session has begun it."""
        names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        return next(path for one in names if not (path := self.folder / one).exists())

    def _cache(self) -> dict[str, str]:
        """Returns where what fixes compile is kept, so that the processes of the proof need not compile it anew."""
        return {"FLOPWISE_COMPILE_CACHE": str(self.folder.absolute() / "compile-cache")}

    def conclude(self, measurement: Measurement) -> RunRecord:
        """Returns the run record of a process.

        Raises:
            NothingMeasuredError: no training step was timed.
            RunFolderError: the record cannot be written.
        """
        try:
            return measurement.conclude()
        except NothingMeasuredError as error:
            raise NothingMeasuredError(
                f"{error}. Its output is in {output_of(measurement)}{_refused(measurement)}"
            ) from error

    def say(self, text: str) -> None:
        """Tells the user what is going on."""
        if not self.quiet:
            at = int(self.budget.used_s())
            print(f"flopwise tune [{at // 60}:{at % 60:02d}] {text}", file=sys.stderr, flush=True)


def output_of(measurement: Measurement) -> Path:
    """Returns the file that holds what a process printed."""
    return measurement.folder / OUTPUT


def _refused(measurement: Measurement) -> str:
    """Returns what is to be said where the script seems to have been refused a write, else nothing."""
    try:
        end = output_of(measurement).read_bytes()[-20_000:]
    except OSError:
        return ""
    if b"Permission denied" not in end:
        return ""
    return (
        '. "Permission denied" stands in it: what the script writes with other means than Python is refused in a tune. '
        "--allow-writes DIR lets it write below a folder"
    )
