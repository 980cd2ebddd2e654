"""The report of a dry run: what would be tried first, and why the rest would not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.records.preview import SCHEMA, Preview, Prospect
from flopwise.records.verdict import Side
from flopwise.reports.terminal import render_preview

FIXES = [
    Prospect("FW101", "loader-workers", "declined", "no DataLoader was seen", None, [], False, False),
    Prospect("FW105", "compile-model", "would be tried", "", 0.8, ["L107 launch-bound"], False, False),
    Prospect("FW116", "allocator-settings", "would be tried", "3 retries", None, [], False, True),
    Prospect("FW120", "fp8", "only if asked for", "", None, [], True, False),
]  # fmt: skip
RECORD = Preview(
    SCHEMA, "0.1", "2026-01-01T00:00:00Z", ["flopwise", "tune", "--dry-run", "train.py"], "train.py", "runs/1/baseline",
    Side(0.0186, 0.0188), FIXES, ["said"],
)  # fmt: skip


def test_the_report_is_this_text():
    assert render_preview(RECORD, width=130, color=False, saved=["runs/1/preview.json"]) == (
        "flopwise tune --dry-run train.py                                                                        "
        "dry run: nothing was tried\n\n"
        "  as it is    18.6 ms · 1.88 % MFU\n\n"
        "  fix                                          predicted t_new / t_old  why\n"
        "  FW105 compile-model       would be tried                      0.8000  L107 launch-bound\n"
        "  FW116 allocator-settings  would be tried                           -  3 retries; tried in pairs of fresh processes\n"
        "  FW120 fp8                 only if asked for                        -\n"
        "  FW101 loader-workers      declined                                 -  no DataLoader was seen\n\n"
        "  note        said\n"
        "  opt-in      --allow fp8 tries what changes more than time and rounding\n"
        "  saved       runs/1/preview.json\n"
        "  measured    2026-01-01T00:00:00Z by flopwise 0.1\n"
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data(), width=st.integers(20, 220))
def test_any_record_fits_the_width(data, width, any_record):
    record = data.draw(any_record(Preview))
    text = render_preview(dataclasses.replace(record, schema=SCHEMA), width=width, color=False)
    assert text.endswith("\n")


@pytest.mark.parametrize("width", [40, 80])
def test_narrow_ones_keep_every_fix(width):
    text = render_preview(RECORD, width=width, color=False)
    assert all(fix.code in text for fix in FIXES)
