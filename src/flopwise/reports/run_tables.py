"""The tables of a run report: where the host spends the step, by input shape, by rank."""

from __future__ import annotations

from flopwise.records.run import Phases, RunRecord, Steps
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Column, Piece, Screen, bar

TABLE_ROWS = 8  # longer tables are cut, and say so


def host(screen: Screen, record: RunRecord) -> None:
    """Draws the phases of the host as bars. Shares are of their sum, the mean host time of a step."""
    phases = record.phases
    screen.line(("where the host spends the step", "bold"))
    cells = min(max(screen.width - 46, 6), 40)
    whole_s = sum(seconds or 0.0 for _, seconds in host_phases(phases))
    rows: list[list[Piece]] = []
    for name, seconds in host_phases(phases):
        if seconds is None:
            rows.append([name, ("inside other", "dim"), "", ""])
            continue
        frac = seconds / whole_s if whole_s > 0 else 0.0
        rows.append([name, (bar(frac, cells), "blue"), figures.duration(seconds), percent(frac)])
    rows.append(["together", "", figures.duration(whole_s), ""])
    screen.table(
        [Column(""), Column(""), Column("a step", right=True), Column("share", right=True)], rows
    )
    if record.env.device_type != "cpu":
        screen.line(("times to issue the work to the device, not to do it", "dim"))
    if phases.device_idle_at_data_frac is not None:
        dry = f"the device had run dry at the end of {percent(phases.device_idle_at_data_frac)}"
        screen.line((f"{dry} of the waits for data", "dim"))
    screen.flow("verdict", [(phases.verdict, "bold yellow")] if phases.verdict else [])


def host_phases(phases: Phases) -> list[tuple[str, float | None]]:
    """Returns the phases by name, in seconds a step; None: part of "other"."""
    return [
        ("data wait", phases.data_s),
        ("forward", phases.forward_s),
        ("backward", phases.backward_s),
        ("optimizer", phases.optimizer_s),
        ("other", phases.other_s),
    ]


def strata(screen: Screen, steps: Steps) -> None:
    """Draws a row for each input shape; nothing if there is one."""
    if len(steps.strata) < 2:
        return
    rows: list[list[Piece]] = [
        [
            stratum.shape or "unknown",
            str(stratum.steps),
            figures.duration(stratum.mean_s),
            percent(stratum.share_frac),
            "not counted"
            if stratum.model_flops_per_step is None
            else figures.quantity(stratum.model_flops_per_step, "FLOP"),
        ]
        for stratum in steps.strata[:TABLE_ROWS]
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
    _cut(screen, len(steps.strata), "shape")


def ranks(screen: Screen, record: RunRecord) -> None:
    """Draws a row for each rank, those in trouble first to stay; nothing for one healthy rank."""
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
            figures.duration(rank.data_s) if rank.steps and rank.data_s is not None else "-",
            (rank.status, "" if rank.status == "complete" else WARN),
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
