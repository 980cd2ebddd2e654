"""Whole reports against whole expected text.

A text in data/ is what `flopwise report data/NAME.json --width N` prints into a pipe.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.records.run import RunRecord
from flopwise.records.verdict import TuneRecord
from flopwise.reports.terminal import render

DATA = Path(__file__).parent / "data"
SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("cpu", 100),
        ("unknown_gpu", 100),
        ("two_ranks", 100),
        ("two_ranks", 40),
        ("partial", 100),
        ("tune", 100),
        ("tune", 160),
        ("tune_whole", 80),
        ("tune_whole", 120),
        ("tune_nothing", 100),
    ],
)
def test_report_is_this_text(sample, name, width):
    expected = (DATA / f"{name}.{width}.txt").read_text(encoding="utf-8")
    assert render(sample(name), width=width, color=False) == expected


def test_ascii_report_is_this_text(sample):
    expected = (DATA / "two_ranks.70.ascii.txt").read_text(encoding="ascii")
    assert render(sample("two_ranks"), width=70, color=False, ascii_only=True) == expected


@pytest.mark.parametrize(
    "name", ["cpu", "unknown_gpu", "two_ranks", "partial", "tune", "tune_whole"]
)
def test_colour_adds_only_colour(sample, name):
    coloured = render(sample(name), width=100, color=True)
    plain = SGR.sub("", coloured)
    assert coloured != plain
    expected = render(sample(name), width=100, color=False)
    assert [line.rstrip() for line in plain.splitlines()] == expected.splitlines()


@pytest.mark.parametrize("kind", [RunRecord, TuneRecord])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(40, 200), ascii_only=st.booleans())
def test_no_line_is_wider_than_asked_and_nothing_escapes(any_record, kind, data, width, ascii_only):
    record = data.draw(any_record(kind))
    text = render(record, width=width, color=False, ascii_only=ascii_only)
    assert text.endswith("\n")
    assert max(cell_len(line) for line in text.split("\n")) <= width
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", text
    )
    assert text.isascii() or not ascii_only
    coloured = SGR.sub("", render(record, width=width, color=True, ascii_only=ascii_only))
    assert "\x1b" not in coloured
    assert max(cell_len(line) for line in coloured.split("\n")) <= width


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("[red]x[/].py", "'[red]x[/].py'"),
        (":boom:.py", ":boom:.py"),
        ("a\x1b[31mb.py", r"'a\x1b[31mb.py'"),
        ("a\nMFU 99 %.py", r"'a\nMFU 99 %.py'"),
        ("caf\udce9.py", r"'caf\udce9.py'"),
        ("gpj.\u202eyp", r"'gpj.\u202eyp'"),
        ("\u9b54法.py", "'魔法.py'"),
    ],
)
def test_hostile_script_name_is_shown_as_it_is(sample, name, shown):
    record = dataclasses.replace(sample("cpu"), command=[name])
    for color in (False, True):
        first = SGR.sub("", render(record, width=100, color=color)).splitlines()[0]
        assert first.rstrip() == f"flopwise run {shown}"


def test_width_outside_the_range_is_moved_to_its_end(sample):
    record = sample("cpu")
    assert render(record, width=3, color=False) == render(record, width=40, color=False)
    assert render(record, width=999, color=False) == render(record, width=200, color=False)
