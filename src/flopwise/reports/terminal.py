"""Reports for a terminal, one function a kind of record."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.comparison import ComparisonRecord
from flopwise.records.ledger import LedgerRecord
from flopwise.records.preview import Preview
from flopwise.records.run import RunRecord
from flopwise.records.verdict import TuneRecord
from flopwise.reports import compare, ledger, preview, run, tune
from flopwise.reports.job import render_job
from flopwise.reports.screen import Screen

__all__ = [
    "render_comparison", "render_job", "render_ledger", "render_preview", "render_run", "render_tune",
]  # fmt: skip


def render_run(
    record: RunRecord,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    next_command: str | None = None,
    saved: Sequence[str] = (),
) -> str:
    """Returns the report of a run: lines of at most `width` cells, ending in a newline.

    Args:
        width: cells, 40 to 200; anything else is moved to the nearer end.
        color: with ANSI escape sequences.
        ascii_only: for a target whose encoding lacks the signs for micro, plus-minus and blocks.
        next_command: what to type next.
        saved: paths that were written.
    """
    screen = Screen(width, ascii_only=ascii_only)
    run.draw(screen, record, next_command, saved)
    return screen.render(color=color)


def render_tune(
    record: TuneRecord,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    saved: Sequence[str] = (),
) -> str:
    """Returns the report of a `flopwise tune`; arguments as in `render_run`."""
    screen = Screen(width, ascii_only=ascii_only)
    tune.draw(screen, record, saved)
    return screen.render(color=color)


def render_preview(
    record: Preview,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    saved: Sequence[str] = (),
) -> str:
    """Returns the report of a `flopwise tune --dry-run`; arguments as in `render_run`."""
    screen = Screen(width, ascii_only=ascii_only)
    preview.draw(screen, record, saved)
    return screen.render(color=color)


def render_ledger(
    record: LedgerRecord,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    saved: Sequence[str] = (),
) -> str:
    """Returns the report of a `flopwise analyze`; arguments as in `render_run`."""
    screen = Screen(width, ascii_only=ascii_only)
    ledger.draw(screen, record, saved)
    return screen.render(color=color)


def render_comparison(
    record: ComparisonRecord,
    *,
    width: int,
    color: bool,
    ascii_only: bool = False,
    saved: Sequence[str] = (),
) -> str:
    """Returns the report of a `flopwise compare`; arguments as in `render_run`."""
    screen = Screen(width, ascii_only=ascii_only)
    compare.draw(screen, record, saved)
    return screen.render(color=color)
