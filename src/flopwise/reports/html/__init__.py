"""Reports as one HTML file each, a module a section: `render_html` of a run, `render_ledger_html` of a trace,
`render_job_html` of the traces of several ranks, `render_comparison_html` of two measurements.

The file holds all that it needs, loads nothing, runs no script, and reads in light and dark, on a phone and on paper.
"""

from __future__ import annotations

from flopwise.reports.html.compare import render_comparison_html
from flopwise.reports.html.job import render_job_html
from flopwise.reports.html.page import render_html, render_ledger_html

__all__ = ["render_comparison_html", "render_html", "render_job_html", "render_ledger_html"]
