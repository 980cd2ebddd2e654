"""The report of a ledger, from its record."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.ledger import LedgerRecord, Line, Live
from flopwise.reports import figures, run_findings
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Column, Piece, Screen, bar

#: What a line says, in words.
WORDS = {
    "ideal": "useful work",
    "precision": "precision: slower dtype than 16 bit",
    "hardware": "hardware: what the device reaches",
    "ceiling": "hardware: FLOPs a clock that it reaches",
    "clock": "hardware: its clock",
    "gemm_bytes": "products: memory-bound",
    "gemm_excess": "products: above their floor",
    "gemm_unsplit": "products: device's rates not known",
    "recompute": "forward run again",
    "padding": "padding",
    "optimizer": "optimizer",
    "memory_bound": "memory: bytes at full bandwidth",
    "memory_excess": "memory: above that",
    "memory_unsplit": "memory: shapes or bandwidth unknown",
    "comm_transfer": "collectives, while data moves",
    "comm_wait": "collectives, waiting for other ranks",
    "comm_unsplit": "collectives: waiting and moving",
    "contention": "compute slowed by collectives",
    "exposed_copy": "copies between host and device",
    "idle_input": "idle: waiting for data",
    "idle_sync": "idle: the host waited for the device",
    "idle_launch": "idle: the host was late",
    "idle_device": "idle: between queued kernels",
    "idle_other": "idle: cause not seen",
    "preempted": "preempted: other work had the cores",
    "unattributed": "operators without a known cost",
    "residual": "residual: undisturbed step less all of these",
}
OPERATORS = 8
CELLS = 20
#: Smaller lines are left to the JSON, but for these.
SHOWN_FRAC = 0.0005
ALWAYS = ("ideal", "residual")


def draw(screen: Screen, record: LedgerRecord, saved: Sequence[str] = ()) -> None:
    """Draws the whole report."""
    screen.heading((f"flopwise analyze {record.trace}", "bold"), facts(record))
    screen.blank()
    _headline(screen, record)
    screen.blank()
    _lines(screen, record)
    screen.blank()
    run_findings.findings(screen, record, "the largest gain first")
    screen.blank()
    _operators(screen, record)
    screen.blank()
    _partition(screen, record)
    screen.blank()
    for doubt in record.untrusted_because:
        screen.flow("not trusted", [(doubt, WARN)])
    for note in record.notes:
        screen.flow("note", [note])
    if saved:
        screen.blank()
        screen.flow("saved", list(saved))


def facts(record: LedgerRecord) -> list[Piece]:
    """Returns what a trace's ledger is of: device, steps and rank."""
    found: list[Piece] = [
        f"device {record.device}: {record.device_name or 'not named'}"
        if record.device >= 0
        else "CPU",
        f"{figures.counted(record.steps, 'step')} of {record.steps_in_trace}, ended by the {record.steps_by}",
    ]
    if record.rank is not None and record.world_size and record.world_size > 1:
        found.append(f"rank {record.rank} of {record.world_size}")
    return found


def is_by_construction(record: LedgerRecord) -> bool:
    """Returns whether the residual is 0 because idle time is what the rest leaves, and so tells nothing."""
    return (
        record.residual_frac == 0
        and record.live is not None
        and "estimates" in record.live.idle_from
    )


def change(live: Live) -> str:
    """Returns what the steps after the windows take against those before, with its interval; "" where none were timed."""
    if live.after_frac is None:
        return ""
    text = f"{100 * live.after_frac:+.2g} %"
    if live.after_ci95 is None:
        return text
    low, high = (100 * bound for bound in live.after_ci95)
    return f"{text} ({low:+.2g} to {high:+.2g}, 95 %)"


def attached(live: Live) -> list[Piece]:
    """Returns that the profiler was not taken out, with the reason; nothing where it was, or was left to the user."""
    if live.torn_down is None or not live.torn_down.startswith("no: "):
        return []
    return [f"the profiler stays attached: {live.torn_down.removeprefix('no: ')}"]


def draw_live(screen: Screen, record: LedgerRecord) -> None:
    """Draws the part of a run's report that its ledger is: lines, how far they can be trusted, the windows."""
    _lines(screen, record)
    residual = record.residual_frac
    told: list[Piece] = []
    if residual is not None:
        how = ", by construction" if is_by_construction(record) else ""
        told.append(f"residual {percent(residual)}{how}")
    told.append(f"{percent(record.coverage_frac)} of kernel time has a known cost")
    told.append(f"device busy {percent(record.busy_frac)}")
    verdict: Piece = ("trusted", "bold green") if record.trusted else ("not trusted", WARN)
    screen.flow("ledger", [verdict, *told])
    for doubt in record.untrusted_because:
        screen.flow("", [(doubt, WARN)])
    if record.live is not None:
        _windows(screen, record.live)


def _windows(screen: Screen, live: Live) -> None:
    cost_s = sum(window.cost_s for window in live.windows)
    parts = [
        f"{window.kind}: {figures.counted(window.steps, 'step')}"
        + (f" of {figures.duration(window.step_s)}" if window.step_s is not None else "")
        for window in live.windows
    ]
    screen.flow(
        "profiled",
        [*parts, f"opening, closing and writing them took {figures.duration(cost_s)}, once"],
    )
    if live.idle_from:
        screen.flow("", [f"idle time from {live.idle_from}"])
    if live.after_frac is None or live.after_step_s is None:
        screen.flow("", ["the script ended before steps could be timed after them"])
        return
    took = f"afterwards a step takes {figures.duration(live.after_step_s)}"
    screen.flow("", [took, change(live), *attached(live)])


def _headline(screen: Screen, record: LedgerRecord) -> None:
    if record.mfu is not None and record.peak_flops_per_s is not None:
        peak = figures.quantity(record.peak_flops_per_s, "FLOP/s")
        mfu: list[Piece] = [
            (percent(record.mfu), "bold green"),
            f"of {peak}",
            record.peak_source or "",
        ]
    else:
        mfu = [("none", WARN), record.mfu_reason or ""]
    screen.flow("MFU", mfu)
    each = ", ".join(figures.duration(s) for s in record.step_s_each[:6])
    step: list[Piece] = [(figures.duration(record.step_s), "bold"), "profiled", f"each: {each}"]
    screen.flow("step", step)
    busy = percent(record.busy_frac)
    if record.busy_most_frac is not None and percent(record.busy_most_frac) != busy:
        busy += f" to {percent(record.busy_most_frac)}, by how long the unusable kernels ran"
    screen.flow("device busy", [busy])
    screen.flow("known cost", [f"{percent(record.coverage_frac)} of kernel time"])


def _lines(screen: Screen, record: LedgerRecord) -> None:
    screen.line(("where the step goes", "bold"))
    draw_lines(screen, record.lines, record.step_s)


def draw_lines(screen: Screen, lines: Sequence[Line], step_s: float) -> None:
    """Draws lines as a table that ends with the step."""
    rows: list[list[Piece]] = [
        [
            WORDS.get(line.name, line.name),
            (bar(max(0.0, min(1.0, line.share_frac)), CELLS), "blue"),
            figures.duration(line.s),
            _between(line),
            percent(line.share_frac),
        ]
        for line in lines
        if abs(line.share_frac) >= SHOWN_FRAC or line.name in ALWAYS
    ]
    rows.append([("step", "bold"), "", figures.duration(step_s), "", percent(1.0)])
    screen.table(
        [
            Column(""),
            Column("", drop=1),
            Column("a step", right=True),
            Column("95 %", right=True, drop=2),
            Column("share", right=True),
        ],
        rows,
    )


def _between(line: Line) -> str:
    low, high = line.ci95
    if high - low < 1e-9:
        return ""
    return f"{figures.duration(low)} to {figures.duration(high)}"


def _operators(screen: Screen, record: LedgerRecord) -> None:
    if not record.operators:
        return
    screen.line(("by operator, the largest", "bold"))
    rows: list[list[Piece]] = [
        [one.name, f"{one.calls:.4g}", figures.duration(one.s), percent(one.share_frac)]
        for one in record.operators[:OPERATORS]
    ]
    screen.table(
        [
            Column("operator", tail=True),
            Column("calls", right=True, drop=1),
            Column("a step", right=True),
            Column("share", right=True),
        ],
        rows,
    )
    for call in record.blocking[:3]:
        screen.flow(
            "idle by",
            [f"{call.name}: {figures.duration(call.s)} a step ({percent(call.share_frac)})"],
        )


def _partition(screen: Screen, record: LedgerRecord) -> None:
    part = record.partition
    screen.flow(
        "event span",
        [
            f"{figures.duration(part.span_s)} from the first device event to the last",
            f"compute {percent(part.compute_frac)}",
            f"exposed communication {percent(part.exposed_communication_frac)}",
            f"exposed copies {percent(part.exposed_copy_frac)}",
            f"idle {percent(part.idle_frac)}",
        ],
    )
