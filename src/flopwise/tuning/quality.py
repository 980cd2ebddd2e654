"""Longer runs after the proof: the bare script and the script with the plan, from several seeds, for their losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from flopwise import plans
from flopwise.errors import RecordError
from flopwise.records import store
from flopwise.records.curve import PATTERN, SCHEMA, RecordedCurve
from flopwise.records.quality import Quality
from flopwise.records.verdict import Trial
from flopwise.trials.proof import applied_by
from flopwise.trials.quality import judge, together
from flopwise.tuning.pairs import ARMS
from flopwise.tuning.processes import Processes, output_of
from flopwise.tuning.trying import to_apply

#: Seeds of the k-th run of each arm are moved by k times this, a prime: scripts add ranks, workers and epochs to a seed.
STRIDE = 100_003


def compare_quality(
    processes: Processes,
    kept: Sequence[Trial],
    done: dict[str, list[str]],
    save: Callable[[], None] = lambda: None,
    *,
    name: str = "quality",
) -> Quality:
    """Returns what longer runs say of the losses with these fixes.

    Args:
        processes: of the tune, its budget with the number and the length of the runs.
        kept: the fixes.
        done: folders of the runs that there are already, by arm; what is run is added.
        save: called after each process.
        name: how the folders of new runs begin.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
    """
    budget = processes.budget
    seeds, steps = budget.quality_seeds, budget.quality_steps
    fixes = [f"{trial.fix} {trial.name}" for trial in kept]

    def unfinished(why: str) -> Quality:
        reason = f"the longer runs came to no end: {why}"
        return Quality("not shown", reason, steps, 0, seeds, "", fixes, complete=False)

    with budget.part("quality"):
        coin = random.Random(len(kept))
        for k in range(seeds):
            arms = list(ARMS)
            coin.shuffle(arms)
            for arm in arms:
                if len(done[arm]) > k:
                    continue
                left = 2 * seeds - sum(map(len, done.values()))
                no_time = budget.no_quality(kept, left)
                if no_time:
                    return unfinished(no_time)
                why = _run(
                    processes,
                    f"{name}-{k + 1}-{arm}",
                    kept if arm == "new" else (),
                    k,
                    done[arm],
                    left,
                )
                save()
                if why:
                    return unfinished(why)
    return _judged(processes.folder, kept, done, steps, fixes)


def _run(
    processes: Processes,
    name: str,
    fixes: Sequence[Trial],
    k: int,
    done: list[str],
    left: int,
) -> str | None:
    """Runs one of them and adds its folder to `done`; returns why it is none, None if it is one."""
    budget = processes.budget
    options = {
        "quality": {"steps": budget.quality_steps, "offset": k * STRIDE},
        "apply": to_apply(fixes),
    }
    seed = "its own seed" if k == 0 else f"seeds moved by {k * STRIDE}"
    what = "with the plan" if fixes else "as it is"
    measurement = processes.start(
        name,
        options,
        f"{budget.quality_steps} steps {what}, {seed}",
        budget.left_s(),
        env=plans.environment(fixes),
        to_go_s=left * budget.quality_run_s,
    )
    if measurement.overdue:
        return f"the budget of {budget.given_s:.0f} s was over in one {what}"
    if not _curves(measurement.folder):
        how = measurement.ending() or "ended before a step"
        return f"{what} the script {how}. Its output is in {output_of(measurement)}"
    done.append(measurement.folder.name)
    return None


def _judged(
    folder: Path, kept: Sequence[Trial], done: dict[str, list[str]], steps: int, fixes: list[str]
) -> Quality:
    curves = {arm: [_curves(folder / name) for name in done[arm]] for arm in ARMS}
    lost = [
        name
        for arm in ARMS
        for name, ranks in zip(done[arm], curves[arm], strict=True)
        if not ranks
    ]
    trouble = [one.trouble for arm in ARMS for ranks in curves[arm] for one in ranks if one.trouble]
    seeds = len(done["new"])
    seeding = _seeding([one for arm in ARMS for ranks in curves[arm] for one in ranks])
    codes = {trial.fix for trial in kept}
    unlike = [
        ranks
        for ranks in curves["new"]
        if any(set(applied_by(one.notes)) != codes for one in ranks)
    ]
    reason = None
    if lost or trouble:
        reason = f"what was recorded is damaged: {', '.join(lost) or trouble[0]}"
    elif unlike:
        left_out = [
            note
            for one in unlike[0]
            for note in one.notes
            if "left out" in note or "failed" in note
        ]
        reason = f"not all fixes were on in every longer run: {(left_out or ['no word why'])[0]}"
    if reason is not None:
        return Quality("not shown", reason, steps, 0, seeds, seeding, fixes)
    runs = {
        arm: [together(ranks, name) for ranks, name in zip(curves[arm], done[arm], strict=True)]
        for arm in ARMS
    }
    return judge(runs["old"], runs["new"], asked=steps, seeding=seeding, fixes=fixes)


def _seeding(curves: Sequence[RecordedCurve]) -> str:
    """Returns how the seeds of the runs were changed, in words."""
    moved = sorted({name for one in curves for name in one.moved})
    if moved:
        return f"run k of each arm has the script's own seeds plus {STRIDE} (k - 1), at {', '.join(moved)}"
    return (
        f"the script seeds no global generator: in run k of each arm they begin at 1 + {STRIDE} (k - 1); what it seeds "
        "otherwise is as it is"
    )


def _curves(folder: Path) -> list[RecordedCurve]:
    """Returns what the ranks of a process have recorded, the longest of each; nothing where it cannot be read."""
    found: dict[int, RecordedCurve] = {}
    for path in sorted(folder.glob(PATTERN)):
        try:
            one = store.read(path, RecordedCurve, SCHEMA)
        except RecordError:
            continue
        if one.rank not in found or len(one.losses) > len(found[one.rank].losses):
            found[one.rank] = one
    return [found[rank] for rank in sorted(found)]


def suspects(kept: Sequence[Trial]) -> list[Trial]:
    """Returns the fixes that are taken out where the plan's losses are worse: the coarsest class of numerics among them.

    Lossy ones, else those that round otherwise. Where these are all there are, or none is either, nothing is left to keep.
    """
    for numerics in ("lossy", "reordered"):
        found = [
            trial
            for trial in kept
            if trial.parity is not None and trial.parity.numerics == numerics
        ]
        if found:
            return found
    return list(kept)
