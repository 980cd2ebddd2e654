"""The tables of a job's report: its ranks and its collectives."""

from __future__ import annotations

from collections.abc import Iterable

from flopwise.records.job import CollectiveKind, JobRecord, RankRecord
from flopwise.reports import figures
from flopwise.reports import job_words as words
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Column, Piece, Screen

RANKS = 16  # rows; of more ranks the telling ones
COLLECTIVES = 12
#: What the column of waiting is a share of.
WAITING = "waiting as a share of the time of all matched calls"
#: What the figures of a kind of collective are of.
COLLECTIVES_OF = "times and calls a step and rank; bytes a call"
#: Columns of `rank_row` before its last cell, and of `collective_row`.
RANK_COLUMNS = (
    Column("rank", right=True),
    Column("step", right=True),
    Column("communication", right=True),
    Column("waiting", right=True),
    Column("exposed", right=True, drop=1),
    Column("clock offset", right=True, drop=3),
    Column("matched", right=True, drop=2),
)
COLLECTIVE_COLUMNS = (
    Column("collective"),
    Column("dtype", drop=3),
    Column("bytes", right=True),
    Column("group", drop=6),
    Column("calls", right=True, drop=5),
    Column("time", right=True),
    Column("waiting", right=True),
    Column("transfer", right=True, drop=2),
    Column("exposed", right=True, drop=7),
    Column("bus bandw.", right=True, drop=1),
    Column("of link", right=True, drop=4),
)


def ranks(screen: Screen, record: JobRecord) -> None:
    """Draws a row a rank."""
    if not record.ranks:
        return
    shown = words.telling(record, RANKS)
    screen.line(("by rank, a step", "bold"), (f"; {WAITING}", "dim"))
    screen.table([*RANK_COLUMNS, Column("", tail=True)], [rank_row(record, one) for one in shown])
    _not_shown(screen, words.others(record, len(shown)))
    _withheld(screen, record, ("steps", "overlap", "waits", "matching"), [o.rank for o in shown])


def rank_row(record: JobRecord, one: RankRecord) -> list[Piece]:
    """Returns the cells of a rank: step, communication, waiting, exposed, clock, matched, and why it has no ledger."""
    wait = words.wait_frac(one)
    none = "no calls" if not one.calls else None
    return [
        str(one.rank),
        _time(one.step_s, record, "steps", one.rank),
        none or _time(one.communication_s, record, "overlap", one.rank),
        none or (missing(record, "waits", one.rank) if wait is None else percent(wait)),
        none or _time(one.exposed_s, record, "overlap", one.rank),
        clock(record, one),
        none or f"{one.matched} of {one.calls}",
        ""
        if one.ledger is not None or one.ledger_reason == words.NOT_ASKED
        else (f"no ledger: {one.ledger_reason or 'no reason given'}", WARN),
    ]


def clock(record: JobRecord, one: RankRecord) -> Piece:
    """Returns how far a rank's clock is from that of the first one, and how well that is known."""
    offset, error = one.clock_offset_s, one.clock_error_s
    if offset is None:
        return missing(record, "matching", one.rank)
    if offset == 0 and one is record.ranks[0]:
        return "reference"
    if error is None:
        return figures.duration(offset)
    return f"{figures.duration(offset)} ± {figures.duration(error)}"


def collectives(screen: Screen, record: JobRecord) -> None:
    """Draws a row a kind of collective."""
    if not record.collectives:
        screen.flow("collectives", ["none"])
        return
    shown = record.collectives[:COLLECTIVES]
    columns = list(COLLECTIVE_COLUMNS)
    rows = [collective_row(record, one) for one in shown]
    if any(one.redundant for one in shown):
        columns.append(Column("", tail=True))
        for row, one in zip(rows, shown, strict=True):
            row.append((f"redundant: {one.redundant}", WARN) if one.redundant else "")
    screen.line(("collectives, the longest first", "bold"), (f"; {COLLECTIVES_OF}", "dim"))
    screen.table(columns, rows)
    rest = len(record.collectives) - len(shown)
    _not_shown(screen, f"{figures.counted(rest, 'more kind')} in the JSON" if rest > 0 else "")
    _withheld(screen, record, ("overlap", "waits", "bandwidth"), ())


def collective_row(record: JobRecord, one: CollectiveKind) -> list[Piece]:
    """Returns the cells of a kind: operation, dtype, bytes, group, calls, its times, bus bandwidth and its share of the link."""
    bus = one.bus_bytes_per_s
    return [
        one.op,
        one.dtype or words.NOT_KNOWN,
        words.NOT_KNOWN if one.nbytes is None else figures.size(one.nbytes),
        group(one),
        words.number(one.calls),
        figures.duration(one.s),
        _time(one.wait_s, record, "waits"),
        _time(one.transfer_s, record, "waits"),
        _time(one.exposed_s, record, "overlap"),
        missing(record, "bandwidth") if bus is None else figures.quantity(bus, "B/s"),
        missing(record, "bandwidth") if one.of_link_frac is None else percent(one.of_link_frac),
    ]


def group(one: CollectiveKind) -> str:
    """Returns the name of a group and how many ranks are in it."""
    size = "" if one.group_size is None else figures.counted(one.group_size, "rank")
    return ", ".join(filter(None, (one.group, size))) or words.NOT_KNOWN


def missing(record: JobRecord, conclusion: str, rank: int | None = None) -> Piece:
    """Returns what stands in a cell whose figure is not there."""
    return (words.absent(record, conclusion, rank), WARN)


def withheld(record: JobRecord, conclusions: Iterable[str], ranks: Iterable[int]) -> list[Piece]:
    """Returns by which defects figures of a table are withheld, of the job or of one of these ranks."""
    shown = list(ranks)
    said: list[Piece] = []
    for conclusion in conclusions:
        found = dict.fromkeys(words.codes(record, conclusion))
        for rank in shown:
            found |= dict.fromkeys(words.codes(record, conclusion, rank))
        if found:
            what = words.CONCLUSIONS.get(conclusion, conclusion)
            said.append(f"{what}, by {figures.few(list(found), 4)}")
    return said


def _withheld(
    screen: Screen, record: JobRecord, conclusions: Iterable[str], ranks: Iterable[int]
) -> None:
    screen.flow(words.WITHHELD, withheld(record, conclusions, ranks))


def _not_shown(screen: Screen, text: str) -> None:
    if text:
        screen.line((text, "dim"))


def _time(
    value_s: float | None, record: JobRecord, conclusion: str, rank: int | None = None
) -> Piece:
    return missing(record, conclusion, rank) if value_s is None else figures.duration(value_s)
