"""Pairs of fresh processes, one of each arm in random order, within what the budget has left."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwise import plans
from flopwise.errors import NothingMeasuredError, RecordError
from flopwise.records import run as run_records
from flopwise.records import store
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Trial
from flopwise.tuning.processes import Processes
from flopwise.tuning.trying import to_apply

ARMS = ("old", "new")


@dataclass(frozen=True)
class Pairs:
    """What is compared."""

    name: str  # their folders are called NAME-1-old and so on
    short: str  # for the user's progress lines
    words: str  # what it is called elsewhere
    old: Sequence[Trial]  # the fixes of each arm
    new: Sequence[Trial]
    seed: int = 0
    count: int = 0  # of pairs; 0: as many as the proof has

    def arm(self, arm: str) -> list[Trial]:
        """Returns the fixes of an arm."""
        return list(self.new if arm == "new" else self.old)


def run_pairs(
    processes: Processes, pairs: Pairs, done: Mapping[str, list[str]], save: Callable[[], None]
) -> dict[str, list[RunRecord]]:
    """Returns the runs of both arms, in the order of their pairs.

    Args:
        processes: of the tune.
        pairs: what is compared.
        done: folders of the runs that an earlier session has made, by arm; what is run is added.
        save: called after each process.

    Raises:
        NothingMeasuredError: one of them measured nothing, or the budget was over before its end.
        RunFolderError: the folder cannot be written, or went away.
        RecordError: a run of an earlier session is damaged.
    """
    coin = random.Random(pairs.seed)
    runs: dict[str, list[RunRecord]] = {arm: [] for arm in ARMS}
    count = pairs.count or processes.budget.processes
    total = 2 * count
    for n in range(1, count + 1):
        arms = list(ARMS)
        coin.shuffle(arms)
        for arm in arms:
            if len(done[arm]) >= n:
                runs[arm].append(_stored(processes.folder / done[arm][n - 1]))
                continue
            number = len(runs["old"]) + len(runs["new"]) + 1
            with_ = "with the fixes" if arm == "new" else "as it is"
            doing = f"{pairs.short} {n} of {count}, {with_}"
            name = f"{pairs.name}-{n}-{arm}"
            folder, record = _run(processes, name, pairs.arm(arm), doing, number, total, pairs)
            done[arm].append(folder)
            runs[arm].append(record)
            save()
    return runs


def _stored(folder: Path) -> RunRecord:
    try:
        return store.read(folder / "run.json", RunRecord, run_records.SCHEMA)
    except RecordError as error:
        raise RecordError(
            f"{error}. An earlier session's run is needed to go on; start a new tune with another --out"
        ) from error


def _run(
    processes: Processes,
    name: str,
    fixes: Sequence[Trial],
    doing: str,
    number: int,
    total: int,
    pairs: Pairs,
) -> tuple[str, RunRecord]:
    budget = processes.budget
    options: dict[str, Any] = {"stop_after": True, "steps": budget.proof_steps}
    if fixes:
        options["apply"] = to_apply(fixes)
    began = budget.clock()
    measurement = processes.start(
        name,
        options,
        doing,
        budget.left_s(),
        env=plans.environment(fixes),
        kept=pairs.new,
        runs=total - number + 1,
    )
    if measurement.overdue:
        raise NothingMeasuredError(
            budget.unfinished(pairs.words, number, budget.clock() - began, total)
        )
    took_s = budget.clock() - began
    try:
        record = processes.conclude(measurement)
        budget.ran(fixes, took_s, record)
        return measurement.folder.name, record
    except NothingMeasuredError as error:
        raise NothingMeasuredError(f"the {pairs.words} failed ({doing}): {error}") from error
