"""What a tune's report says, in words: the same on a terminal and on a page."""

from __future__ import annotations

import shlex

from flopwise.records.verdict import (
    Comparison,
    Predicted,
    Proof,
    Savings,
    Trial,
    TuneRecord,
    Work,
)
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Piece

#: Counts of FLOPs that differ by less are the same work counted twice.
SAME_FRAC = 0.001


def side(
    step_s: float | None, mfu: float | None, work: Work | None = None, per_s: float | None = None
) -> list[Piece]:
    """Returns a step time, an MFU, and work a second, in words."""
    if step_s is None:
        return ["not measured"]
    share = "MFU not given" if mfu is None else f"{percent(mfu)} MFU"
    items: list[Piece] = [(figures.duration(step_s), "bold"), share]
    if work is not None and per_s is not None and work.unit != "steps":
        items.append(figures.number(per_s, f"{work.unit}/s"))
        if work.tokens_per_unit is not None:
            items.append(figures.number(per_s * work.tokens_per_unit, "tokens/s"))
    return items


def before(record: TuneRecord) -> list[Piece]:
    """Returns what the script does as it is."""
    work = record.proof.work if record.proof is not None else None
    rate = work.old_per_s if work is not None else None
    return side(record.baseline_step_s, record.baseline_mfu, work, rate)


def after(record: TuneRecord) -> list[Piece]:
    """Returns what it does with the plan."""
    work = record.proof.work if record.proof is not None else None
    rate = work.new_per_s if work is not None else None
    return side(record.final_step_s, record.final_mfu, work, rate)


def work(record: TuneRecord) -> list[Piece]:
    """Returns what MFU before and after is made of; nothing where there was no proof."""
    found = record.proof.work if record.proof is not None else None
    if found is None:
        return []
    items: list[Piece] = []
    if found.model_flops_per_step is not None:
        flops = figures.quantity(found.model_flops_per_step, "FLOP")
        at_least = "at least " if found.padding_frac else ""
        items.append(
            f"before and after of the same work: {at_least}{flops} a step, as the script as it is needs them"
        )
    if found.padding_frac:
        counted = _flops(found.old_counted_flops_per_step)
        with_it = f"; {counted} with what it computes" if counted else ""
        items.append(f"{percent(found.padding_frac)} of the positions are padding: not counted{with_it}")  # fmt: skip
    computed = _computed(found)
    if computed:
        items.append(computed)
    for doubt in (found.mfu_reason, found.note):
        if doubt:
            items.append((doubt, WARN))
    return items


def _computed(found: Work) -> str | None:
    """Returns that the plan makes a step compute other FLOPs, where it does."""
    old, new = found.old_counted_flops_per_step, found.new_counted_flops_per_step
    if not old or not new or abs(new - old) <= SAME_FRAC * old:
        return None
    more = percent(abs(new / old - 1))
    how = f"{more} {'more' if new > old else 'less'} for the same work"
    return f"with the fixes a step computes {_flops(new)}, {how}"


def _flops(value: float | None) -> str:
    return "" if value is None else figures.quantity(value, "FLOP")


def proof(record: TuneRecord) -> list[Piece]:
    """Returns what fresh processes prove, or why there is no proof."""
    found = record.proof
    if found is None:
        if not any(trial.verdict == "kept" for trial in record.trials):
            return ["none: no fix was kept"]
        begun = record.time is not None and record.time.proof_s > 0
        return ["came to no end, see the notes" if begun else "not run"]
    sure = found.comparison.outcome == "faster"
    return [
        (outcome(found.comparison), "bold green" if sure else "bold yellow"),
        f"{figures.counted(found.processes_per_arm, 'fresh process', 'fresh processes')} an arm",
        *_losses(found),
        "exit codes equal" if found.exit_codes_equal else ("exit codes differ", "bold red"),
    ]


def outcome(comparison: Comparison) -> str:
    """Returns a comparison in one breath: outcome, ratio with interval, and what it means."""
    ratio = f"t_new / t_old {figures.ratio(comparison.ratio, comparison.ci95)}"
    if comparison.outcome in ("faster", "slower"):
        return f"{comparison.outcome}: {figures.speed(comparison.ratio)}, {ratio}"
    return f"{comparison.outcome}: {ratio}"


def _losses(found: Proof) -> list[Piece]:
    if found.first_loss_old is None or found.first_loss_new is None:
        return []
    first = f"first loss {found.first_loss_old:.6g} -> {found.first_loss_new:.6g}"
    return [first, *([found.losses] if found.losses else [])]


def control(record: TuneRecord) -> list[Piece]:
    """Returns what the A/A control says."""
    if record.aa is None:
        return ["not run"]
    false_alarm = record.aa.outcome in ("faster", "slower")
    items: list[Piece] = [(outcome(record.aa), "bold red" if false_alarm else "")]
    if false_alarm:
        items.append(("two equal arms differ: the verdicts below are not trusted", "bold red"))
    return items


def together(record: TuneRecord) -> list[Piece]:
    """Returns why the kept fixes do not give what their single ratios multiply to; nothing for fewer than two."""
    if record.multiplied is None or record.proof is None or len(record.kept) < 2:
        return []
    found = record.proof.comparison
    product, whole = record.multiplied, found.ratio
    words = f"the ratios of the {len(record.kept)} kept fixes multiply to {figures.ratio(product)}"
    items: list[Piece] = [f"{words}, together they give {figures.ratio(whole)} ({figures.speed(whole)})"]  # fmt: skip
    if found.ci95[0] <= product <= found.ci95[1]:
        items.append("the interval of the proof holds both")
        return items
    why = (
        "each was taken out with all others on, so what two of them could both save is in neither ratio"
        if product > whole
        else "each was taken out with all others on, so what one makes possible for another is in both ratios"
    )
    return [*items, why]


def opt_in(trial: Trial) -> list[Piece]:
    """Returns what a fix that was allowed changes beside time and rounding; nothing for one that changes nothing."""
    if not trial.changes:
        return []
    does = "changes" if trial.verdict == "kept" else "would change, and is not in the plan:"
    return [f"{trial.name} was allowed: it {does} {trial.changes}"]


def predicted(found: Predicted) -> list[Piece]:
    """Returns how far the ledger's predictions were from what was measured."""
    gains = figures.counted(found.trials, "measured gain", "measured gains")
    words: list[Piece] = []
    if found.median_error_frac is not None:
        error = percent(found.median_error_frac)
        words.append(f"predicted against measured: median error {error} of {gains}")
    if found.optimistic:
        words.append(f"{found.optimistic} predicted above the interval")
    if found.pessimistic:
        words.append(f"{found.pessimistic} less than half of its lower end")
    if found.unshown:
        none = f"{found.unshown} predicted where no gain was shown"
        above = found.unshown_optimistic
        words.append(none + (f" ({above} above the interval)" if above else ""))
    return words


def saved(record: TuneRecord) -> list[Piece]:
    """Returns how sure the time that is saved is; nothing where there was no proof."""
    if record.proof is None:
        return []
    low, high = record.proof.comparison.ci95
    return [
        f"{percent(1 - high)} to {percent(1 - low)} of the time of a step, by the interval of the proof"
    ]


def energy(found: Savings) -> list[Piece]:
    """Returns what the joules cover, or why they were not measured."""
    known = found.old_j is not None and found.new_j is not None
    return [found.energy, "what warming up takes is not in it"] if known else [found.energy]


def money(found: Savings) -> list[Piece]:
    """Returns at which price money was reckoned, or how to give one."""
    if found.usd_per_device_hour is None:
        return ["not reckoned: no price was given (--price USD, of a device-hour)"]
    price = f"{figures.money(found.usd_per_device_hour)} a device-hour (--price)"
    if found.devices is None:
        return [(f"not reckoned at {price}: not all ranks were measured", WARN)]
    times = f"{found.devices} x " if found.devices != 1 else ""
    return [f"at {times}{price}"]


def break_even(record: TuneRecord) -> list[Piece]:
    """Returns after how many steps the warm-up, and the tune itself, have paid."""
    words: list[Piece] = []
    pays, found = record.break_even, record.savings
    if pays is not None:
        warm_up = f"the warm-up of {figures.duration(pays.warmup_s)} a run"
        words.append(f"{warm_up} has paid after {_steps(pays.steps)}")
        if pays.cached_s is not None and pays.cached_s < pays.warmup_s:
            words.append(f"{figures.duration(pays.cached_s)} where the compile cache has it")
    if found is not None and found.tune_steps is not None:
        cost = "" if found.tune_usd is None else f", {figures.money(found.tune_usd)}"
        tune = f"the tune itself ({figures.duration(record.wall_s)}{cost})"
        words.append(
            f"with {tune} after {_steps(found.tune_steps)}"
            if words
            else f"{tune} has paid after {_steps(found.tune_steps)}"
        )
    if pays is not None and pays.steps_remaining is not None:
        words.append(f"{pays.steps_remaining:,} steps remain")
    return words


def _steps(steps: float) -> str:
    text = figures.whole(steps)
    return f"{text} step{'' if text == '1' else 's'}"


def writes(record: TuneRecord) -> list[Piece]:
    """Returns what the script wrote in copies of its own, in one breath; the record lists it."""
    spite = [w for w in record.writes if w.what not in ("written", "removed")]
    apart = len(record.writes) - len(spite) + record.more_writes
    words: list[Piece] = []
    if spite:
        names = ", ".join(w.path for w in spite[:3]) + (", ..." if len(spite) > 3 else "")
        words.append((f"changed although the script ran apart: {names}", WARN))
    if apart:
        files = figures.counted(apart, "file", "files")
        words.append(
            f"the script wrote or removed {files} in copies of its own; yours are as they were"
        )
    return words


def time(record: TuneRecord) -> list[Piece]:
    """Returns what the time went into."""
    use = record.time
    if use is None:
        return []
    left_s = use.budget_s - record.wall_s
    rest: Piece = "used up"
    if left_s >= 1:
        rest = f"{figures.duration(left_s)} of it left"
    elif left_s <= -1:
        rest = (f"{figures.duration(-left_s)} over it", WARN)
    done = f"proof {figures.duration(use.proof_s)}" if use.proof_s else "no proof"
    return [
        f"budget {figures.duration(use.budget_s)}: as it is {figures.duration(use.baseline_s)}",
        f"trials {figures.duration(use.trials_s)}",
        f"{done} ({figures.duration(use.reserved_s)} were set aside)",
        *([f"profile with the plan {figures.duration(use.after_s)}"] if use.after_s else []),
        rest,
        *([f"in {record.sessions} sessions"] if record.sessions > 1 else []),
    ]


def take_home(record: TuneRecord) -> list[str]:
    """Returns the commands that use the plan; nothing where there is none."""
    if record.plan is None:
        return []
    plan = shlex.join(["flopwise", "run", "--plan", record.plan])
    return [f"{plan} {shlex.join(_script_words(record))}"]


def _script_words(record: TuneRecord) -> list[str]:
    """Returns the script with its own arguments, as they stood on the command line."""
    if record.script not in record.command:
        return [record.script]
    at = record.command.index(record.script)
    return record.command[at - 1 if at and record.command[at - 1] == "-m" else at :]


def go_on(record: TuneRecord) -> list[str]:
    """Returns the command that goes on with a tune which a longer time would have taken further."""
    if record.resume is None:
        return []
    return [f"{shlex.join(['flopwise', 'tune', '--resume', record.resume])} --budget TIME"]
