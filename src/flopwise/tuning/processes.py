"""The processes of a tune: each runs the unmodified script in a folder of its own, and ends when its time is over."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwise.errors import NothingMeasuredError, RunFolderError
from flopwise.launch import folder as folders
from flopwise.launch.command import Job
from flopwise.measurement import Measurement
from flopwise.records.run import RunRecord
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

    def start(self, name: str, options: dict[str, Any], doing: str, limit_s: float) -> Measurement:
        """Runs a process to its end, or to that of its time, and returns what is known of it.

        Args:
            name: of its folder.
            options: what the meter is to do there.
            doing: what the user is told.
            limit_s: after this long it is ended.

        Raises:
            RunFolderError: its folder cannot be made, or went away while it ran.
            UsageError: it cannot be started.
        """
        self.say(doing)
        command = {"command": ["flopwise", "run", *self.job.typed]}
        folder = folders.create(str(self.folder / name), self.job.script, {**command, **options})
        measurement = Measurement(self.job, folder, command, quiet=True)
        with open(folder / OUTPUT, "wb") as output:
            env = _environment(self.folder)
            measurement.run(timeout_s=max(limit_s, 1.0), output=output, env=env)
        if folders.gone(folder):
            raise RunFolderError(
                f"the run folder {folder} went away while the script ran: the tune ends here, without a plan. "
                "Give --out a folder that the script leaves alone"
            )
        return measurement

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
                f"{error}. Its output is in {output_of(measurement)}"
            ) from error

    def say(self, text: str) -> None:
        """Tells the user what is going on."""
        if not self.quiet:
            at = int(self.budget.used_s())
            print(f"flopwise tune [{at // 60}:{at % 60:02d}] {text}", file=sys.stderr, flush=True)


def output_of(measurement: Measurement) -> Path:
    """Returns the file that holds what a process printed."""
    return measurement.folder / OUTPUT


def _environment(folder: Path) -> dict[str, str]:
    """Returns an environment in which experiment trackers stay offline: a trial is not an experiment.

    What fixes compile is kept in the tune's folder, so that the processes of the proof need not compile it anew.
    """
    env = {"FLOPWISE_COMPILE_CACHE": str(folder.absolute() / "compile-cache"), **os.environ}
    env.update(WANDB_MODE="offline", HF_HUB_OFFLINE="1", COMET_START_OFFLINE="1", DO_NOT_TRACK="1")
    return env
