"""The final proof of a tune: fresh processes, bare and with what was kept, within what the budget has left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from flopwise.errors import NothingMeasuredError
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Trial
from flopwise.trials.proof import Conclusion, conclude
from flopwise.tuning.processes import Processes
from flopwise.tuning.trying import to_apply


def prove(processes: Processes, kept: Sequence[Trial], notes: list[str]) -> Conclusion | None:
    """Returns what fresh processes say of the fixes that were kept, in random order within each pair.

    None where the proof came to no end; a note then says why.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
    """
    budget = processes.budget
    no_time = budget.no_proof(kept)
    if no_time:
        notes.append(no_time)
        return None
    with budget.part("proof"):
        try:
            runs = _runs(processes, to_apply(kept))
        except NothingMeasuredError as error:
            notes.append(str(error))
            return None
    codes = [trial.fix for trial in kept]
    concluded = conclude(runs["old"], runs["new"], codes, budget.proof_steps)
    notes += concluded.notes
    return concluded


def _runs(processes: Processes, fixes: list[dict[str, Any]]) -> dict[str, list[RunRecord]]:
    """Returns the runs of both arms, in the order of their pairs.

    Raises:
        NothingMeasuredError: one of them measured nothing, or the budget was over before its end.
    """
    budget = processes.budget
    coin = random.Random(0)
    runs: dict[str, list[RunRecord]] = {"old": [], "new": []}
    for n in range(1, budget.processes + 1):
        arms = ["old", "new"]
        coin.shuffle(arms)
        for arm in arms:
            options: dict[str, Any] = {"stop_after": True, "steps": budget.proof_steps}
            if arm == "new":
                options["apply"] = fixes
            doing = f"proof {n} of {budget.processes}, {'with the fixes' if arm == 'new' else 'as it is'}"
            number = len(runs["old"]) + len(runs["new"]) + 1
            runs[arm].append(_run(processes, f"proof-{n}-{arm}", options, doing, number))
    return runs


def _run(
    processes: Processes, name: str, options: dict[str, Any], doing: str, number: int
) -> RunRecord:
    """Returns one run of the proof.

    Raises:
        NothingMeasuredError: nothing was measured, or the budget was over before its end.
    """
    budget = processes.budget
    began = budget.clock()
    measurement = processes.start(name, options, doing, budget.left_s())
    if measurement.overdue:
        raise NothingMeasuredError(budget.unfinished(number, budget.clock() - began))
    try:
        return processes.conclude(measurement)
    except NothingMeasuredError as error:
        raise NothingMeasuredError(f"the final proof failed ({doing}): {error}") from error
