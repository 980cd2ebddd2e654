"""The ledger before and after: one more process, with what was kept, profiled as the first one was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flopwise import plans
from flopwise.diagnosis.comparison.compare import compare
from flopwise.diagnosis.comparison.sides import ComparisonError, of_run
from flopwise.errors import NothingMeasuredError, RecordError
from flopwise.records import run as run_records
from flopwise.records import store
from flopwise.records.comparison import Condition
from flopwise.records.ledger import FAMILIES
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Ledgers, Trial
from flopwise.trials.proof import applied_by
from flopwise.tuning.processes import Processes
from flopwise.tuning.trying import to_apply

AFTER = "after"
#: The lines that a fix takes time from, by the cause that it names. What it does to others is not credited to it.
LINES_OF = {
    "input-wait": ("idle_input",),
    "pageable-copy": ("exposed_copy", "idle_sync"),
    "exposed-copy": ("exposed_copy",),
    "garbage-collection": ("idle_launch",),
    "threads-exceed-cores": ("preempted",),
    "remote-memory": (),
    "launch-bound": ("idle_launch",),
    "host-read": ("idle_sync",),
    "fp32-compute": ("precision",),
    "slow-products": ("gemm_excess",),
    "odd-shape": ("gemm_excess",),
    "convolution-algorithm": ("gemm_excess",),
    "conv-layout": ("gemm_excess", "memory_excess"),
    "needless-mask": ("gemm_excess",),
    "unlabelled-logits": ("ideal", "memory_bound", "memory_excess"),
    "logits-in-memory": ("memory_bound", "memory_excess"),
    "memory-bound": ("memory_bound", "memory_excess"),
    "unfused-attention": ("memory_bound", "memory_excess"),
    "optimizer-step": ("optimizer",),
    "padding": ("padding",),
    "recompute": ("recompute",),
    "allocator-retries": (),
    "memory-fragmentation": (),
}


def profile_after(
    processes: Processes, kept: Sequence[Trial], done: list[str], save: Callable[[], None]
) -> RunRecord | str:
    """Returns the run of the script with what was kept, its last windows profiled, or why there is none.

    Args:
        processes: of the tune.
        kept: the fixes of the plan.
        done: the folder of that run, if an earlier session has made it; else it is added.
        save: called when it has been made.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
    """
    if done:
        return _checked(_stored(processes, done[0]), kept)
    budget = processes.budget
    no_time = budget.no_after(kept)
    if no_time:
        return no_time
    options = {"stop_after": True, "steps": None, "profile": True, "apply": to_apply(kept)}
    doing = "profiling it with what was kept"
    with budget.part(AFTER):
        measurement = processes.start(
            AFTER, options, doing, budget.left_s(), env=plans.environment(kept), kept=kept
        )
        if measurement.overdue:
            return "the budget was over while it was profiled with what was kept"
        try:
            record = processes.conclude(measurement)
        except NothingMeasuredError as error:
            return f"it was not measured once more with what was kept: {error}"
    done.append(measurement.folder.name)
    save()
    return _checked(record, kept)


def _stored(processes: Processes, folder: str) -> RunRecord | str:
    try:
        return store.read(processes.folder / folder / "run.json", RunRecord, run_records.SCHEMA)
    except RecordError as error:
        return str(error)


def _checked(record: RunRecord | str, kept: Sequence[Trial]) -> RunRecord | str:
    if isinstance(record, str):
        return record
    left_out = [t.name for t in kept if t.fix not in applied_by(record.notes)]
    if left_out:
        return f"{', '.join(left_out)} was left out when it was profiled with what was kept"
    return record


def ledgers(
    before: RunRecord, after: RunRecord | str, kept: Sequence[Trial], proven: Comparison | None
) -> tuple[Ledgers | None, str | None]:
    """Returns the ledger before and after, line by line, or why there is none.

    Args:
        before: the run of the script as it is.
        after: that with what was kept, or why there is none.
        kept: the fixes.
        proven: what the final proof says of them: where these two processes say otherwise, that is a doubt.
    """
    if isinstance(after, str):
        return None, after
    for which, run in (("as it is", before), ("with what was kept", after)):
        if run.ledger is None:
            return None, f"{which} it has no ledger: {run.ledger_reason or 'no reason is given'}"
    assert before.ledger is not None
    assert after.ledger is not None
    try:
        found = compare(of_run(before, "as it is"), of_run(after, "with what was kept"))
    except ComparisonError as error:
        return None, str(error)
    except Exception as error:  # a ledger that nobody has seen yet must not cost the report
        return None, f"they could not be compared ({type(error).__name__}: {error})"
    order = list(FAMILIES)
    lines = sorted(
        found.lines, key=lambda line: order.index(line.name) if line.name in order else len(order)
    )
    return Ledgers(
        old_s=before.ledger.step_s,
        new_s=after.ledger.step_s,
        old_trusted=before.ledger.trusted,
        new_trusted=after.ledger.trusted,
        lines=lines,
        credits=credits([line.name for line in lines], kept),
        doubts=[*_apart(found.step.ratio, proven), *_doubts(found.conditions)],
    ), None


def _apart(ratio: float, proven: Comparison | None) -> list[str]:
    """Returns that the steps of two ledgers are not those of the proof, where they are not."""
    if proven is None or proven.ci95[0] <= ratio <= proven.ci95[1]:
        return []
    low, high = proven.ci95
    return [
        f"steps of these two processes have the ratio {ratio:.3g}, those of the proof {proven.ratio:.3g} ({low:.3g} to "
        f"{high:.3g}): the proof stands, and lines that another load on the machine made longer are no work of the fixes"
    ]


def _doubts(conditions: Sequence[Condition]) -> list[str]:
    """Returns in what two ledgers are not alike, or are not to be trusted.

    That a step computes other FLOPs is what some fixes are for: the work that was asked for is the same.
    """
    return [
        one.text.replace("the old side", "the ledger before").replace(
            "the new side", "the ledger after"
        )
        for one in conditions
        if one.code != "flops"
    ]


def credits(lines: Sequence[str], kept: Sequence[Trial]) -> dict[str, list[str]]:
    """Returns, by line, the kept fixes whose cause takes its time from there."""
    found: dict[str, list[str]] = {}
    for trial in kept:
        named = dict.fromkeys(line for cause in trial.causes for line in LINES_OF.get(cause, ()))
        for line in named:
            if line in lines:
                found.setdefault(line, []).append(trial.name)
    return found
