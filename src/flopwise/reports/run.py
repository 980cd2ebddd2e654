"""A run report, part by part, from a run record."""

from __future__ import annotations

import shlex
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from flopwise.records.run import Env, RunRecord, Steps
from flopwise.reports import figures, ledger, run_findings, run_mfu, run_tables
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Piece, Screen

#: How notes begin that say that a hook, or another part of the meter, is still there.
NOT_UNDONE = ("a patch could not be undone", "could not be taken out")

#: Pipes that are left to the JSON where they hardly ran.
PIPES = ("FP16", "FP32", "FP64")
LEAST_PIPE_FRAC = 0.005


def draw(
    screen: Screen, record: RunRecord, saved: Sequence[str] = (), next_command: str | None = None
) -> None:
    """Draws the whole report; `next_command` is what to type next."""
    _head(screen, record)
    screen.blank()
    _results(screen, record)
    screen.blank()
    if record.ledger is not None:
        ledger.draw_live(screen, record.ledger)
    elif record.ledger_reason:
        screen.flow("ledger", ["none", record.ledger_reason])
    screen.blank()
    run_findings.findings(screen, record)
    screen.blank()
    _basis(screen, record)
    screen.blank()
    run_tables.host(screen, record)
    screen.blank()
    run_tables.strata(screen, record.steps)
    screen.blank()
    run_tables.ranks(screen, record)
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
    facts: list[Piece] = [devices(record.env), f"torch {record.env.torch}"]
    if len(record.ranks) > 1:
        facts.append(f"{len(record.ranks)} ranks")
    facts.append(f"{figures.counted(steps.timed, 'step')} timed of {steps.total}")
    if left_out := dropped(steps):
        facts.append(f"dropped: {left_out}")
    screen.heading((command_line(record.command, "run"), "bold"), facts)
    for warning in endings(record):
        screen.line((warning, "bold red"))
    if record.plan is not None:
        screen.line(f"with the plan {record.plan}")


def devices(env: Env) -> str:
    """Returns what the steps ran on, in words."""
    if env.gpus:
        return ", ".join(f"{n} x {name}" for name, n in Counter(env.gpus).items())
    if env.device_type != "cpu":
        return env.device_type
    return f"{env.cpu}, {figures.counted(env.cpu_threads, 'thread')} on {env.cpu_cores} cores"


def dropped(steps: Steps) -> str:
    """Returns how many steps were left out, by why; "" for none."""
    parts = [
        (steps.dropped_warmup, "warm-up (set by hand)" if steps.by_hand else "warm-up"),
        (steps.dropped_compile, "compiling"),
        (steps.dropped_counted, "counting FLOPs"),
        (steps.dropped_pause, "with a pause"),
    ]
    return ", ".join(f"{n} {why}" for n, why in parts if n)


def endings(record: RunRecord) -> list[str]:
    """Returns how the run ended, where there is something to say about it."""
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
    screen.flow("MFU", run_mfu.value(record), style="bold")
    if mfu.value is None:
        screen.flow("", [*run_mfu.mask_aware(mfu), *run_mfu.rate(mfu)])
    screen.flow(
        "step",
        [
            (interval(record), "bold"),
            f"median {figures.duration(time.median)}",
            f"p10 {figures.duration(time.p10)}, p90 {figures.duration(time.p90)}",
            time.source,
        ],
    )
    screen.flow("throughput", throughput(record))
    screen.flow("energy", energy(record))
    screen.flow("cost", cost(record))


def interval(record: RunRecord) -> str:
    """Returns the mean step with its interval."""
    time = record.step_s
    if time.ci95 is None:
        return f"{figures.duration(time.mean)}, one step, so no interval"
    return f"{figures.plus_minus(time.mean, time.ci95)} (95 %)"


def throughput(record: RunRecord) -> list[Piece]:
    """Returns the work per second, and what it was counted from."""
    work = record.throughput
    items: list[Piece] = []
    if work.samples_per_s is not None:
        items.append(figures.number(work.samples_per_s, "samples/s"))
    if work.tokens_per_s is not None:
        items.append(figures.number(work.tokens_per_s, "tokens/s"))
    if work.real_tokens_per_s is not None:
        items.append(figures.number(work.real_tokens_per_s, "real tokens/s"))
    if work.padding_frac is not None:
        items.append(f"{percent(work.padding_frac)} padding")
    items.append(figures.number(work.steps_per_s, "steps/s"))
    if work.samples_per_step is not None:
        items.append(figures.number(work.samples_per_step, "samples a step"))
    if work.counted_from and not work.reason:
        items.append(f"counted from the {work.counted_from}")
    elif work.samples_per_s is None and not work.reason:
        items.append("samples were not visible")
    if work.reason:
        items.append((f"samples and tokens are not given: {work.reason}", WARN))
    return items


def energy(record: RunRecord) -> list[Piece]:
    """Returns joules and watts, or why they were not measured."""
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
        items.append((energy.reason, WARN))
    return items


def cost(record: RunRecord) -> list[Piece]:
    """Returns money, where a price was given."""
    cost = record.cost
    if cost.usd_per_device_hour is None:
        return []
    shown = [
        (cost.usd_per_m_tokens, "a million tokens"),
        (cost.usd_per_m_samples, "a million samples"),
        (cost.usd_per_1k_steps, "a thousand steps"),
    ]
    items: list[Piece] = [f"{figures.money(usd)} {of}" for usd, of in shown if usd is not None]
    if cost.reason:
        items.append((f"not given: {cost.reason}", WARN))
    price = figures.money(cost.usd_per_device_hour)
    several = cost.devices is not None and cost.devices != 1
    times = f"{cost.devices} x " if several else ""
    of = "host" if record.env.device_type == "cpu" else "device"
    return [*items, f"at {times}{price} a {of} hour ({cost.price_source})"]


def _basis(screen: Screen, record: RunRecord) -> None:
    """Draws what the MFU stands on: peak, FLOPs, coverage, and what we cost."""
    mfu, own = record.mfu, record.overhead
    if mfu.peak_flops_per_s is not None:
        screen.flow("peak", run_mfu.peak(mfu))
    screen.flow("FLOPs", run_mfu.flops(record))
    screen.flow("coverage", run_mfu.coverage(mfu))
    screen.flow(
        "overhead",
        [
            f"{percent(record.overhead_frac)} of the step is our own",
            f"{figures.duration(own.host_us_per_step * 1e-6)} a step",
            f"attached in {figures.duration(own.attach_s)}",
            own.method,
        ],
    )
    screen.flow("steps", step_rule(record.steps))


def step_rule(steps: Steps) -> list[Piece]:
    """Returns what ends a step and which steps count."""
    items: list[Piece] = [f"a step ends with: {steps.boundary}"]
    if steps.micro_batches is not None and steps.micro_batches != 1:
        items.append(figures.number(steps.micro_batches, "micro-batches a step"))
    if steps.skipped_by_scaler:
        skipped = f"{steps.skipped_by_scaler} skipped by the GradScaler: time, but no FLOPs"
        items.append((skipped, WARN))
    rule = steps.warmup_rule
    items.append(rule if rule.startswith("warm-up") else f"warm-up: {rule}")
    if steps.note:
        items.append((steps.note, WARN))
    return items


def _surroundings(screen: Screen, record: RunRecord) -> None:
    """Draws what was kept out of the step time, and the state of memory and device."""
    for at, pause in enumerate(record.steps.pauses):
        times = f"{pause.kind.replace('_', ' ')}, {pause.count} x"
        total = f"{figures.duration(pause.total_s)} in all"
        screen.flow("" if at else "kept apart", [times, total, pause.evidence])
    screen.flow("memory", memory(record))
    if record.env.device_type != "cpu":
        screen.flow("clocks", clocks(record))
        screen.flow("device", device(record))
    if record.patches:
        screen.flow("hooks", [f"{figures.few(record.patches, 6)} ({state_of_hooks(record)})"])


def state_of_hooks(record: RunRecord) -> str:
    """Returns whether the hooks are out again, as far as it is known: a process that was killed cannot tell."""
    if any(note.startswith(NOT_UNDONE) for note in record.notes):
        return "not all undone, see the notes"
    if record.complete:
        return "all undone"
    if record.exit_code is None:
        return "still in place"
    return "whether they were undone is not known: the measurement was not complete"


def memory(record: RunRecord) -> list[Piece]:
    """Returns peaks of memory."""
    memory = record.memory
    items: list[Piece] = []
    if memory.allocated_peak_bytes is not None:
        items.append(f"peak allocated {figures.size(memory.allocated_peak_bytes)}")
    if memory.reserved_peak_bytes is not None:
        items.append(f"reserved {figures.size(memory.reserved_peak_bytes)}")
    if memory.device_total_bytes is not None:
        items.append(f"device {figures.size(memory.device_total_bytes)}")
    return [*items, f"host process {figures.size(memory.host_rss_peak_bytes)}"]


def clocks(record: RunRecord) -> list[Piece]:
    """Returns clocks, temperature, limits, and what held the device back."""
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
        items.append((f"limit {clocks.power_limit_w:.0f} W{usual}", WARN if lowered else ""))
    if clocks.throttle:
        items.append((f"held back by {', '.join(clocks.throttle)}", WARN))
    if clocks.note:
        items.append(clocks.note)
    return items


def device(record: RunRecord) -> list[Piece]:
    """Returns what the device's own counters say, or why they say nothing; nothing where they were not asked."""
    metrics = record.device_metrics
    if metrics is None:
        return []
    shares = [
        ("SM busy", metrics.sm_busy_frac),
        ("SM occupancy", metrics.sm_occupancy_frac),
        ("tensor cores", metrics.tensor_frac),
        ("FP32", metrics.fp32_frac),
        ("FP16", metrics.fp16_frac),
        ("FP64", metrics.fp64_frac),
        ("memory bandwidth", metrics.dram_bandwidth_frac),
    ]
    items: list[Piece] = [
        f"{name} {percent(frac)}"
        for name, frac in shares
        if frac is not None and (frac >= LEAST_PIPE_FRAC or name not in PIPES)
    ]
    for name, in_rate, out_rate in (
        ("PCIe", metrics.pcie_rx_bytes_per_s, metrics.pcie_tx_bytes_per_s),
        ("NVLink", metrics.nvlink_rx_bytes_per_s, metrics.nvlink_tx_bytes_per_s),
    ):
        if in_rate is not None and out_rate is not None and in_rate + out_rate > 0:
            items.append(f"{name} {figures.size(in_rate)}/s in, {figures.size(out_rate)}/s out")
    if not items:
        return [f"not read: {metrics.reason or 'the record has no reason'}"]
    over = f", over {figures.duration(metrics.window_s)}" if metrics.window_s is not None else ""
    return [*items, f"NVML GPM{over}"]


def _ways_on(
    screen: Screen, record: RunRecord, next_command: str | None, saved: Sequence[str]
) -> None:
    if next_command:
        screen.flow("next", [next_command])
    screen.flow("saved", list(saved))
    screen.flow("measured", [f"{record.created} by flopwise {record.flopwise}", record.env.host])
