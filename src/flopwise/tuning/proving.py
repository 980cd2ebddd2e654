"""The final proof of a tune: fresh processes, bare and with what was kept, within what the budget has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flopwise.errors import NothingMeasuredError
from flopwise.records.verdict import BreakEven, Trial
from flopwise.trials.proof import Conclusion, conclude
from flopwise.tuning.pairs import Pairs, run_pairs
from flopwise.tuning.processes import Processes

#: Less than this is no warm-up: it is within what starts differ by.
NO_WARMUP_S = 0.1


def prove(
    processes: Processes,
    kept: Sequence[Trial],
    notes: list[str],
    done: dict[str, list[str]],
    save: Callable[[], None] = lambda: None,
) -> Conclusion | None:
    """Returns what fresh processes say of the fixes that were kept, in random order within each pair.

    None where the proof came to no end; a note then says why.

    Args:
        processes: of the tune.
        kept: the fixes.
        notes: what is to be said is added.
        done: folders of the runs that there are already, by arm; what is run is added.
        save: called after each process.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
        RecordError: a run of an earlier session is damaged.
    """
    budget = processes.budget
    no_time = budget.no_proof(kept, done=sum(map(len, done.values())))
    if no_time:
        notes.append(no_time)
        return None
    with budget.part("proof"):
        try:
            pairs = Pairs("proof", "proof", "final proof", (), kept)
            runs = run_pairs(processes, pairs, done, save)
        except NothingMeasuredError as error:
            notes.append(str(error))
            return None
    codes = [trial.fix for trial in kept]
    concluded = conclude(runs["old"], runs["new"], codes, budget.proof_steps)
    notes += concluded.notes
    return concluded


def break_even(
    concluded: Conclusion,
    kept: Sequence[Trial],
    steps_remaining: int | None,
    cached: Mapping[str, float],
) -> BreakEven | None:
    """Returns after how many steps the warm-up of a plan has paid, None where nothing has to warm up or nothing is saved.

    Args:
        concluded: the proof.
        kept: the fixes.
        steps_remaining: of the job.
        cached: by fix, its warm-up in a process that found the cache.
    """
    found = concluded.proof.comparison
    warmup_s = sum(trial.warmup_s or 0.0 for trial in kept if trial.fix in concluded.applied)
    saved_s = found.old_s - found.new_s
    if warmup_s < NO_WARMUP_S or saved_s <= 0:
        return None
    slow = [t for t in kept if t.fix in concluded.applied and t.warmup_s]
    known = all(trial.fix in cached for trial in slow)
    cached_s = sum(cached[trial.fix] for trial in slow) if known else None
    return BreakEven(warmup_s, saved_s, warmup_s / saved_s, steps_remaining, cached_s)
