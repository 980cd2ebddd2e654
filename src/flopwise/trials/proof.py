"""The final proof: what fresh processes, the bare script and the script with the fixes, say together.

Only what ran is proven: a fix that the processes left out is no part of the claim, and every figure is a mean over the
processes of its own arm.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.records.run import RunRecord
from flopwise.records.verdict import Proof
from flopwise.trials.compare import compare_runs

#: How a run's notes begin that name the fixes which a plan has switched on, and those it has not.
APPLIED, NOT_APPLIED = "applied by the plan: ", "planned fix "

#: The step whose losses are compared: a plan is applied some steps after the first, when the modules are known, and
#: every loss up to the end of the warm-up is kept.
LATER_STEP = 7


@dataclass(frozen=True)
class Conclusion:
    """A proof, and what it is a proof of."""

    proof: Proof
    applied: list[str]  # codes of the fixes that were on in every process of the new arm
    doubt: str | None  # why it carries no plan, None if it does
    notes: list[str]


def conclude(
    old: Sequence[RunRecord],
    new: Sequence[RunRecord],
    planned: Sequence[str],
    steps: int,
    comparisons: int = 1,
) -> Conclusion:
    """Returns what the runs of the two arms prove about the fixes with the codes `planned`.

    Args:
        old: runs of the bare script, in the order of their pairs, at least 3.
        new: runs with the fixes, likewise.
        planned: codes of the fixes that the new arm was told to apply.
        steps: timed steps that were asked of each process.
        comparisons: among which the error probability is divided.

    Raises:
        ValueError: fewer than 3 runs an arm, or unequal numbers.
    """
    timed = min(run.steps.timed for run in (*old, *new))
    on = [_applied(run) for run in new]
    applied = [code for code in planned if all(code in codes for codes in on)]
    left_out = [note for run in new for note in run.notes if note.startswith(NOT_APPLIED)]
    notes = list(dict.fromkeys(left_out))
    if timed < steps:
        notes.append(
            f"a process of the final proof timed {timed} of the {steps} steps that were asked for: the script ended before, "
            "or leading steps were slow and are left out"
        )
    proof = Proof(
        comparison=compare_runs(
            [run.step_s.mean for run in old],
            [run.step_s.mean for run in new],
            timed,
            comparisons=comparisons,
        ),
        processes_per_arm=len(old),
        first_loss_old=_first_loss(old[0]),
        first_loss_new=_first_loss(new[0]),
        exit_codes_equal=len({run.exit_code for run in (*old, *new)}) == 1,
        mfu_old=_mean_mfu(old),
        mfu_new=_mean_mfu(new),
        losses=compare_losses([_later_loss(run) for run in old], [_later_loss(run) for run in new]),
    )
    return Conclusion(proof, applied, _doubt(proof, on, applied, planned), notes)


def compare_losses(old: Sequence[float | None], new: Sequence[float | None]) -> str | None:
    """Returns in words how the losses of step 7 differ between two arms, None where they are not all known.

    Equal arms of a script without a seed differ, too: by how much is said beside it.
    """
    before = [loss for loss in old if loss is not None]
    after = [loss for loss in new if loss is not None]
    if len(before) < len(old) or len(after) < len(new) or not before or not after:
        return None
    if len({*before, *after}) == 1:
        return f"losses of step {LATER_STEP} identical in all processes"
    scale = max(abs(statistics.fmean(before)), 1e-30)
    apart = abs(statistics.fmean(after) - statistics.fmean(before)) / scale
    within = (max(before) - min(before)) / scale
    own = (
        f"processes of the bare script differ by {within:.1e} themselves (no fixed seed?)"
        if within
        else "processes of the bare script do not differ"
    )
    return f"losses of step {LATER_STEP} differ by {apart:.1e} (relative); {own}"


def _applied(run: RunRecord) -> list[str]:
    """Returns the codes of the fixes that a run says it has switched on."""
    return [
        part.split()[0]
        for note in run.notes
        if note.startswith(APPLIED)
        for part in note.removeprefix(APPLIED).split(", ")
        if part
    ]


def _doubt(
    proof: Proof, on: Sequence[Sequence[str]], applied: Sequence[str], planned: Sequence[str]
) -> str | None:
    """Returns why a proof carries no plan, None if it does."""
    if not applied:
        return "no fix was on in every process of the final proof"
    if any(set(codes) & set(planned) != set(applied) for codes in on):
        return "the processes of the final proof did not all run with the same fixes"
    if not proof.exit_codes_equal:
        return "the processes of the final proof did not end with one exit code"
    if proof.comparison.outcome != "faster":
        return "the final proof did not show the gain again in fresh processes"
    return None


def _later_loss(run: RunRecord) -> float | None:
    return run.losses[LATER_STEP - 1] if len(run.losses) >= LATER_STEP else None


def _first_loss(run: RunRecord) -> float | None:
    return run.losses[0] if run.losses else None


def _mean_mfu(runs: Sequence[RunRecord]) -> float | None:
    values = [run.mfu.value for run in runs if run.mfu.value is not None]
    return statistics.fmean(values) if len(values) == len(runs) else None
