"""The lines of a run report, part by part, from a run record."""

from __future__ import annotations

import shlex
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from flopwise.records.run import Env, Mfu, Phases, RunRecord, Steps
from flopwise.reports import figures
from flopwise.reports.screen import Column, Piece, Screen, bar

LOW_COVERAGE_FRAC = 0.98  # below this share of covered work, MFU is a lower bound worth a warning
TABLE_ROWS = 8  # longer tables are cut, and say so
NAMES = 3  # longer lists inside a line are cut, and say so

_WARN = "yellow"
_PEAK_KINDS = {"datasheet": "data sheet", "measured": "measured", "given": "given"}


def draw(screen: Screen, record: RunRecord, next_command: str | None, saved: Sequence[str]) -> None:
    """Draws the whole report."""
    _head(screen, record)
    screen.blank()
    _results(screen, record)
    screen.blank()
    _basis(screen, record)
    screen.blank()
    _host(screen, record)
    screen.blank()
    _strata(screen, record.steps)
    screen.blank()
    _ranks(screen, record)
    screen.blank()
    _surroundings(screen, record)
    screen.blank()
    for note in record.notes:
        screen.flow("note", [note])
    screen.blank()
    _ways_on(screen, record, next_command, saved)


def command_line(command: Sequence[str], verb: str) -> str:
    """Returns the command as typed, with `flopwise <verb>` in front where it lacks that."""
    words = list(command)
    if words and PurePath(words[0]).name == "flopwise":
        return shlex.join(["flopwise", *words[1:]])
    return shlex.join(["flopwise", verb, *words])


def _head(screen: Screen, record: RunRecord) -> None:
    steps = record.steps
    facts: list[Piece] = [_devices(record.env), f"torch {record.env.torch}"]
    if len(record.ranks) > 1:
        facts.append(f"{len(record.ranks)} ranks")
    facts.append(f"{figures.counted(steps.timed, 'step')} timed of {steps.total}")
    dropped = _dropped(steps)
    if dropped:
        facts.append(f"dropped: {dropped}")
    screen.heading((command_line(record.command, "run"), "bold"), facts)
    for warning in _ending(record):
        screen.line((warning, "bold red"))
    if record.plan is not None:
        screen.line(f"with the plan {record.plan}")


def _devices(env: Env) -> str:
    if env.gpus:
        return ", ".join(f"{n} x {name}" for name, n in Counter(env.gpus).items())
    if env.device_type != "cpu":
        return env.device_type
    return f"{env.cpu}, {figures.counted(env.cpu_threads, 'thread')} on {env.cpu_cores} cores"


def _dropped(steps: Steps) -> str:
    parts = [
        (steps.dropped_warmup, "warm-up (set by hand)" if steps.by_hand else "warm-up"),
        (steps.dropped_compile, "compiling"),
        (steps.dropped_counted, "counting FLOPs"),
        (steps.dropped_pause, "with a pause"),
    ]
    return ", ".join(f"{n} {why}" for n, why in parts if n)


def _ending(record: RunRecord) -> list[str]:
    code = record.exit_code
    if not record.complete and code is None:
        return ["first report: the script still runs"]
    lines = [] if record.complete else ["partial: the run ended before all steps were timed"]
    if code is not None and code < 0:
        lines.append(f"the script was ended by {_signal(-code)}")
    elif code:
        lines.append(f"the script ended with exit code {code}")
    return lines


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _results(screen: Screen, record: RunRecord) -> None:
    mfu, time = record.mfu, record.step_s
    screen.flow("MFU", _mfu(mfu), style="bold")
    if mfu.value is None:
        screen.flow("", [*_mask_aware(mfu), *_rate(mfu)])
    screen.flow(
        "step",
        [
            (_interval(record), "bold"),
            f"median {figures.duration(time.median)}",
            f"p10 {figures.duration(time.p10)}, p90 {figures.duration(time.p90)}",
            time.source,
        ],
    )
    screen.flow("throughput", _throughput(record))
    screen.flow("energy", _energy(record))
    screen.flow("cost", _cost(record))


def _mfu(mfu: Mfu) -> list[Piece]:
    if mfu.value is None:
        return [(f"not given: {mfu.reason or 'the record has no reason'}", _WARN)]
    items: list[Piece] = [(figures.percent(mfu.value), "bold cyan"), "attention counted full"]
    if mfu.value_causal is not None:
        same = mfu.value_causal == mfu.value
        items.append("mask-aware the same" if same else f"{_p(mfu.value_causal)} mask-aware")
    if mfu.hfu is not None and _p(mfu.hfu) != _p(mfu.value):
        items.append(f"HFU {_p(mfu.hfu)} (recomputation included)")
    if mfu.dtype_weighted is not None and _p(mfu.dtype_weighted) != _p(mfu.value):
        items.append(f"{_p(mfu.dtype_weighted)} of the peaks of the dtypes that ran")
    covered = 1.0 if mfu.coverage_frac is None else mfu.coverage_frac
    if covered < LOW_COVERAGE_FRAC and not mfu.reason:
        items.append((f"only {_p(covered)} of the work is covered, see below", _WARN))
    if mfu.reason:
        items.append((mfu.reason, _WARN))
    return items


def _mask_aware(mfu: Mfu) -> list[Piece]:
    """Returns the mask-aware MFU where it stands although the one with attention full does not."""
    if mfu.value_causal is None:
        return []
    return [(f"mask-aware {_p(mfu.value_causal)}", "bold cyan")]


def _rate(mfu: Mfu) -> list[Piece]:
    """Returns the achieved rate and the measured ceiling beside it, where they are known."""
    if mfu.achieved_flops_per_s is None:
        return []
    items: list[Piece] = [
        f"achieved {figures.quantity(mfu.achieved_flops_per_s, 'FLOP/s')} a device"
    ]
    if mfu.of_measured_ceiling:
        ceiling = mfu.achieved_flops_per_s / mfu.of_measured_ceiling
        items.append(
            f"{_p(mfu.of_measured_ceiling)} of the measured ceiling, "
            f"{figures.quantity(ceiling, 'FLOP/s')}"
        )
    return items


def _interval(record: RunRecord) -> str:
    time = record.step_s
    if time.ci95 is None:
        return f"{figures.duration(time.mean)}, one step, so no interval"
    if time.ci95 is None:
        return f"{figures.duration(time.mean)} (one step: no interval)"
    return f"{figures.plus_minus(time.mean, time.ci95)} (95 %)"


def _throughput(record: RunRecord) -> list[Piece]:
    work = record.throughput
    items: list[Piece] = []
    if work.samples_per_s is not None:
        items.append(figures.number(work.samples_per_s, "samples/s"))
    if work.tokens_per_s is not None:
        items.append(figures.number(work.tokens_per_s, "tokens/s"))
    if work.real_tokens_per_s is not None:
        items.append(figures.number(work.real_tokens_per_s, "real tokens/s"))
    if work.padding_frac is not None:
        items.append(f"{_p(work.padding_frac)} padding")
    items.append(figures.number(work.steps_per_s, "steps/s"))
    if work.samples_per_step is not None:
        items.append(figures.number(work.samples_per_step, "samples a step"))
    if work.counted_from:
        items.append(f"counted from the {work.counted_from}")
    elif work.samples_per_s is None:
        items.append("samples were not visible")
    return items


def _energy(record: RunRecord) -> list[Piece]:
    energy = record.energy
    items: list[Piece] = []
    if energy.j_per_sample is not None:
        items.append(f"{figures.quantity(energy.j_per_sample, 'J')}/sample")
    if energy.j_per_step is not None:
        items.append(f"{figures.quantity(energy.j_per_step, 'J')}/step")
    if energy.watts is not None:
        items.append(figures.quantity(energy.watts, "W"))
    if not items:
        return [f"not measured: {energy.reason or 'the record has no reason'}"]
    if energy.window_s is not None:
        items.append(f"over {figures.duration(energy.window_s)}")
    items.append(energy.boundary)
    if energy.reason:
        items.append((energy.reason, _WARN))
    return items


def _cost(record: RunRecord) -> list[Piece]:
    cost = record.cost
    if cost.usd_per_device_hour is None:
        return []
    shown = [
        (cost.usd_per_m_tokens, "a million tokens"),
        (cost.usd_per_m_samples, "a million samples"),
        (cost.usd_per_1k_steps, "a thousand steps"),
    ]
    items: list[Piece] = [f"{figures.money(usd)} {of}" for usd, of in shown if usd is not None]
    price = figures.money(cost.usd_per_device_hour)
    return [*items, f"at {price} a device hour ({cost.price_source})"]


def _basis(screen: Screen, record: RunRecord) -> None:
    """Draws what the MFU stands on: peak, FLOPs, coverage, and what we cost."""
    mfu, own = record.mfu, record.overhead
    if mfu.peak_flops_per_s is not None:
        screen.flow("peak", _peak(mfu))
    screen.flow("FLOPs", _flops(record))
    screen.flow("coverage", _coverage(mfu))
    screen.flow(
        "overhead",
        [
            f"{_p(record.overhead_frac)} of the step is our own",
            f"{figures.duration(own.host_us_per_step * 1e-6)} a step",
            f"attached in {figures.duration(own.attach_s)}",
            own.method,
        ],
    )
    screen.flow("steps", _steps(record.steps))


def _peak(mfu: Mfu) -> list[Piece]:
    rate = figures.quantity(mfu.peak_flops_per_s or 0.0, "FLOP/s")
    dense = " dense" if mfu.peak_kind == "datasheet" else ""
    items: list[Piece] = [f"{rate} {mfu.peak_dtype or 'unknown dtype'}{dense} a device"]
    kind = _PEAK_KINDS.get(mfu.peak_kind or "", mfu.peak_kind)
    items.append(": ".join(part for part in (kind, mfu.peak_source) if part) or "no source")
    apart = mfu.value is not None and mfu.peak_kind != "measured"
    if apart and mfu.of_measured_ceiling is not None:
        items.append(f"{_p(mfu.of_measured_ceiling)} of the measured ceiling")
    return items


def _flops(record: RunRecord) -> list[Piece]:
    mfu, samples = record.mfu, record.throughput.samples_per_step
    if mfu.model_flops_per_step is None:
        return ["not counted"]
    items: list[Piece] = [f"{figures.quantity(mfu.model_flops_per_step, 'FLOP')} a step"]
    if samples:
        items.append(f"{figures.quantity(mfu.model_flops_per_step / samples, 'FLOP')} a sample")
    causal, executed = mfu.model_flops_per_step_causal, mfu.hardware_flops_per_step
    if causal is not None and causal != mfu.model_flops_per_step:
        items.append(f"mask-aware {figures.quantity(causal, 'FLOP')} a step")
    if executed is not None and executed != mfu.model_flops_per_step:
        items.append(f"executed {figures.quantity(executed, 'FLOP')} a step")
    total = sum(mfu.flops_by_dtype.values())
    if total > 0:
        largest = sorted(mfu.flops_by_dtype.items(), key=lambda item: -item[1])
        items.append(", ".join(f"{_p(flops / total)} in {dtype}" for dtype, flops in largest))
    if mfu.value is not None:
        items += _rate(mfu)[:1]
    if mfu.counted_by:
        items.append(f"counted by {mfu.counted_by}")
    if mfu.cross_check:
        items.append(mfu.cross_check)
    return items


def _coverage(mfu: Mfu) -> list[Piece]:
    if mfu.coverage_frac is None:
        return []
    low = mfu.coverage_frac < LOW_COVERAGE_FRAC
    items: list[Piece] = [
        (f"{_p(mfu.coverage_frac)} of {mfu.coverage_basis or 'the work'}", _WARN if low else "")
    ]
    if mfu.uncovered:
        items.append((f"no rule for {_few(mfu.uncovered)}", _WARN if low else ""))
    return items


def _steps(steps: Steps) -> list[Piece]:
    items: list[Piece] = [f"a step ends with: {steps.boundary}"]
    if steps.micro_batches != 1:
        items.append(figures.number(steps.micro_batches, "micro-batches a step"))
    if steps.skipped_by_scaler:
        skipped = f"{steps.skipped_by_scaler} skipped by the GradScaler: time, but no FLOPs"
        items.append((skipped, _WARN))
    items.append(f"warm-up: {steps.warmup_rule}")
    if steps.note:
        items.append((steps.note, _WARN))
    return items


def _host(screen: Screen, record: RunRecord) -> None:
    phases = record.phases
    screen.line(("where the host spends the step", "bold"))
    cells = min(max(screen.width - 46, 6), 40)
    whole_s = sum(seconds or 0.0 for _, seconds in _phases(phases))
    rows: list[list[Piece]] = []
    for name, seconds in _phases(phases):
        if seconds is None:
            rows.append([name, ("inside other", "dim"), "", ""])
            continue
        frac = seconds / whole_s if whole_s > 0 else 0.0
        rows.append([name, (bar(frac, cells), "blue"), figures.duration(seconds), _p(frac)])
    rows.append(["together", "", figures.duration(whole_s), ""])
    screen.table(
        [Column(""), Column(""), Column("a step", right=True), Column("share", right=True)], rows
    )
    if record.env.device_type != "cpu":
        screen.line(("times to issue the work to the device, not to do it", "dim"))
    if phases.device_idle_at_data_frac is not None:
        dry = f"the device had run dry at the end of {_p(phases.device_idle_at_data_frac)}"
        screen.line((f"{dry} of the waits for data", "dim"))
    screen.flow("verdict", [(phases.verdict, "bold yellow")] if phases.verdict else [])


def _phases(phases: Phases) -> list[tuple[str, float | None]]:
    return [
        ("data wait", phases.data_s),
        ("forward", phases.forward_s),
        ("backward", phases.backward_s),
        ("optimizer", phases.optimizer_s),
        ("other", phases.other_s),
    ]


def _strata(screen: Screen, steps: Steps) -> None:
    if len(steps.strata) < 2:
        return
    largest = sorted(steps.strata, key=lambda stratum: -stratum.share_frac)
    rows: list[list[Piece]] = [
        [
            stratum.shape or "unknown",
            str(stratum.steps),
            figures.duration(stratum.mean_s),
            _p(stratum.share_frac),
            "not counted"
            if stratum.model_flops_per_step is None
            else figures.quantity(stratum.model_flops_per_step, "FLOP"),
        ]
        for stratum in largest[:TABLE_ROWS]
    ]
    columns = [
        Column("input shape"),
        Column("steps", right=True),
        Column("mean step", right=True),
        Column("of the time", right=True),
        Column("a step", right=True, drop=1),
    ]
    screen.line(("by input shape", "bold"))
    screen.table(columns, rows)
    _cut(screen, len(largest), "shape")


def _ranks(screen: Screen, record: RunRecord) -> None:
    ranks = record.ranks
    if len(ranks) < 2 and all(rank.status == "complete" for rank in ranks):
        return
    troubled = [rank for rank in ranks if rank.status != "complete"]
    fine = [rank for rank in ranks if rank.status == "complete"]
    shown = sorted([*troubled, *fine][:TABLE_ROWS], key=lambda rank: rank.rank)
    rows: list[list[Piece]] = [
        [
            str(rank.rank),
            rank.host,
            rank.device,
            str(rank.pid),
            str(rank.steps),
            figures.duration(rank.step_s_mean) if rank.steps else "-",
            figures.duration(rank.data_s) if rank.steps else "-",
            (rank.status, "" if rank.status == "complete" else _WARN),
        ]
        for rank in shown
    ]
    columns = [
        Column("rank", right=True),
        Column("host", drop=3),
        Column("device", drop=2),
        Column("pid", right=True, drop=4),
        Column("steps", right=True),
        Column("mean step", right=True),
        Column("data wait", right=True, drop=1),
        Column("status", tail=True),
    ]
    screen.line(("by rank", "bold"))
    screen.table(columns, rows)
    _cut(screen, len(ranks), "rank")


def _cut(screen: Screen, total: int, noun: str) -> None:
    rest = total - TABLE_ROWS
    if rest > 0:
        screen.line((f"{figures.counted(rest, f'more {noun}')} in the JSON", "dim"))


def _surroundings(screen: Screen, record: RunRecord) -> None:
    """Draws what was kept out of the step time, and the state of memory and device."""
    for at, pause in enumerate(record.steps.pauses):
        times = f"{pause.kind.replace('_', ' ')}, {pause.count} x"
        total = f"{figures.duration(pause.total_s)} in all"
        screen.flow("" if at else "kept apart", [times, total, pause.evidence])
    screen.flow("memory", _memory(record))
    screen.flow("clocks", _clocks(record))
    if record.patches:
        attached = not record.complete and record.exit_code is None
        state = "still in place" if attached else "all undone"
        screen.flow("hooks", [f"{_few(record.patches, 6)} ({state})"])


def _memory(record: RunRecord) -> list[Piece]:
    memory = record.memory
    items: list[Piece] = []
    if memory.allocated_peak_bytes is not None:
        items.append(f"peak allocated {figures.size(memory.allocated_peak_bytes)}")
    if memory.reserved_peak_bytes is not None:
        items.append(f"reserved {figures.size(memory.reserved_peak_bytes)}")
    if memory.device_total_bytes is not None:
        items.append(f"device {figures.size(memory.device_total_bytes)}")
    return [*items, f"host process {figures.size(memory.host_rss_peak_bytes)}"]


def _clocks(record: RunRecord) -> list[Piece]:
    clocks = record.clocks
    items: list[Piece] = []
    if clocks.sm_mhz is not None:
        limit = "" if clocks.sm_max_mhz is None else f" of {clocks.sm_max_mhz:.0f}"
        items.append(f"SM {clocks.sm_mhz:.0f}{limit} MHz")
    if clocks.memory_mhz is not None:
        items.append(f"memory {clocks.memory_mhz:.0f} MHz")
    if clocks.temperature_c is not None:
        items.append(f"{clocks.temperature_c:.0f} °C")
    if clocks.power_limit_w is not None:
        default = clocks.power_limit_default_w
        lowered = default is not None and default != clocks.power_limit_w
        usual = f" (default {default:.0f} W)" if lowered else ""
        items.append((f"limit {clocks.power_limit_w:.0f} W{usual}", _WARN if lowered else ""))
    if clocks.throttle:
        items.append((f"held back by {', '.join(clocks.throttle)}", _WARN))
    if clocks.note:
        items.append(clocks.note)
    return items


def _ways_on(
    screen: Screen, record: RunRecord, next_command: str | None, saved: Sequence[str]
) -> None:
    if next_command:
        screen.flow("next", [next_command])
    screen.flow("saved", list(saved))
    screen.flow("measured", [f"{record.created} by flopwise {record.flopwise}", record.env.host])


def _few(names: Sequence[str], limit: int = NAMES) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _p(frac: float) -> str:
    return figures.percent(frac)
