"""Reports for a terminal: one function for every kind of record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flopwise.records.comparison import ComparisonRecord
from flopwise.records.job import JobRecord
from flopwise.records.ledger import LedgerRecord
from flopwise.records.preview import Preview
from flopwise.records.run import RunRecord
from flopwise.records.verdict import TuneRecord
from flopwise.reports import compare, job, ledger, preview, run, tune
from flopwise.reports.screen import Screen

Record = RunRecord | TuneRecord | Preview | LedgerRecord | JobRecord | ComparisonRecord

#: Who draws which kind: functions of a screen, the record, and the paths that were written.
DRAWN: dict[type, Callable[..., None]] = {
    RunRecord: run.draw,
    TuneRecord: tune.draw,
    Preview: preview.draw,
    LedgerRecord: ledger.draw,
    JobRecord: job.draw,
    ComparisonRecord: compare.draw,
}


def render(
    record: Record,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    saved: Sequence[str] = (),
    **more: Any,
) -> str:
    """Returns the report of a record: lines of at most `width` cells, ending in a newline.

    Args:
        record: of any kind.
        width: cells, 40 to 200; anything else is moved to the nearer end.
        color: with ANSI escape sequences.
        ascii_only: for a target whose encoding lacks the signs for micro, plus-minus and blocks.
        saved: paths that were written.
        more: what this kind of report is given besides: a run's `next_command`, what to type next.
    """
    screen = Screen(width, ascii_only=ascii_only)
    DRAWN[type(record)](screen, record, saved, **more)
    return screen.render(color=color)
