"""A run report as an SVG picture, for documents."""

from __future__ import annotations

from flopwise.records.run import RunRecord
from flopwise.reports import run
from flopwise.reports.screen import Screen


def render_svg(record: RunRecord, *, width: int = 100, title: str = "flopwise") -> str:
    """Returns the report of a run as SVG, `width` cells wide, that loads nothing from elsewhere."""
    screen = Screen(width)
    run.draw(screen, record)
    return screen.svg(title)
