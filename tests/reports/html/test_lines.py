"""The waterfall: words, times, errors, gains, and where its bars lie."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ledger import causes
from flopwise.records.finding import Finding
from flopwise.records.ledger import FAMILIES, LedgerRecord, Line
from flopwise.reports.html import render_ledger_html
from flopwise.reports.html.lines import COLORED, LINE_OF, Scale, gain, points

Parsed = Callable[[str], Any]


def drawn(parsed: Parsed, record: LedgerRecord) -> Any:
    return parsed(render_ledger_html(record)).section("Where the step goes")


def test_the_lines_and_their_sum(trace_record: LedgerRecord, parsed: Parsed) -> None:
    assert drawn(parsed, trace_record).rows() == [
        ["", "", "ms a step", "± 95 %", "MFU points"],
        ["useful work", "", "0.002", "", "0.2"],
        ["products: above their floor", "", "0.398", "", "39.8"],
        ["optimizer", "", "0.100", "", "10.0"],
        ["memory: bytes at full bandwidth", "", "0.100", "", "10.0"],
        ["memory: above that", "", "0.100", "", "10.0"],
        ["idle: between queued kernels", "", "0.300", "", "30.0"],
        ["step", "", "1.000", "", "100.0"],
    ]


def test_each_bar_begins_where_the_one_above_ends(
    trace_record: LedgerRecord, parsed: Parsed
) -> None:
    bars = [
        (rect.attributes["class"], float(rect.attributes["x"]), float(rect.attributes["width"]))
        for svg in drawn(parsed, trace_record).all("svg")
        for rect in svg.all("rect")
        if rect.attributes["class"] != "track"
    ]
    assert [kind for kind, _, _ in bars] == [
        "useful", "memory", "optimizer", "memory", "memory", "idle_device",
    ]  # fmt: skip
    assert bars[0][1] == 0
    for (_, left, width), (_, following, _) in itertools.pairwise(bars[1:]):
        assert following == pytest.approx(left + width, abs=0.01)
    assert bars[-1][1] + bars[-1][2] == pytest.approx(1000)


def test_a_negative_line_goes_back(trace_record: LedgerRecord, parsed: Parsed) -> None:
    lines = [
        Line("ideal", "useful", 1.2e-3, (0, 0), 1.2),
        Line("precision", "precision", -0.2e-3, (0, 0), -0.2),
    ]
    section = drawn(parsed, dataclasses.replace(trace_record, lines=lines))
    assert section.rows()[2] == ["precision: slower dtype than 16 bit", "", "-0.200", "", "-20.0"]
    ideal, precision = (svg.all("rect")[1].attributes for svg in section.all("svg"))
    assert (ideal["x"], ideal["width"]) == ("0", "1000")
    assert (precision["x"], precision["width"]) == ("833.333", "166.667")


def test_shares_where_a_record_has_no_points(trace_record: LedgerRecord, parsed: Parsed) -> None:
    lines = [dataclasses.replace(line, mfu_points=0.0) for line in trace_record.lines]
    rows = drawn(parsed, dataclasses.replace(trace_record, lines=lines)).rows()
    assert [row[4] for row in rows[:3]] == ["% of step", "0.2", "39.8"]


def test_errors_even_and_uneven(trace_record: LedgerRecord, parsed: Parsed) -> None:
    lines = [
        Line("ideal", "useful", 0.5e-3, (0.49e-3, 0.51e-3), 0.5),
        Line("idle_launch", "pipeline", 0.5e-3, (0.0, 0.52e-3), 0.5),
    ]
    rows = drawn(parsed, dataclasses.replace(trace_record, lines=lines)).rows()
    assert [row[3] for row in rows[1:3]] == ["± 0.010", "0.000 to 0.520"]


def test_gains_stand_beside_their_lines(trace_record: LedgerRecord, parsed: Parsed) -> None:
    found = [
        Finding("L105", "exposed-copy", 0.1, [], "", "", None, "measured"),
        Finding("L104", "slow-dtype", 0.3, [], "", "", 0.5, "measured"),
    ]
    lines = [*trace_record.lines, Line("precision", "precision", 1e-4, (0, 0), 0.1)]
    section = drawn(parsed, dataclasses.replace(trace_record, lines=lines, findings=found))
    rows = section.rows()
    assert rows[0][5] == "if only this were fixed"
    assert [row[5] for row in rows[1:]] == ["", "", "", "", "", "", "2.00x", ""]
    assert "they do not add up" in section.text


@pytest.mark.parametrize(
    ("frac", "said"),
    [(None, ""), (0.0, "1.00x"), (0.25, "1.33x"), (0.95, "20.0x"), (1.0, ""), (float("nan"), "")],
)
def test_less_time_as_times_as_fast(frac: float | None, said: str) -> None:
    assert gain(frac) == said


@pytest.mark.parametrize(
    ("whole_s", "shown"),
    [
        (0.3705, ("ms", "0.1", "370.5", "0", "-12.0")),
        (0.0331, ("ms", "0.13", "370.50", "0", "-12.00")),
        (2.0, ("s", "<0.001", "0.370", "0", "-0.012")),
        (2e-5, ("µs", "130.00", "370500.00", "0", "-12000.00")),
    ],
)
def test_one_unit_and_one_number_of_decimals(whole_s: float, shown: tuple[str, ...]) -> None:
    scale = Scale(whole_s)
    texts = [scale.text(s) for s in (1.3e-4, 0.3705, 0.0, -0.012)]
    texts[2] = texts[2].rstrip("0.") or "0"
    assert (scale.unit, *texts) == shown


def test_points_keep_one_decimal() -> None:
    assert [points(v) for v in (0.0, 0.01, 4.8, -3.26, 1e300)] == [
        "0.0", "<0.1", "4.8", "-3.3", "out of range",
    ]  # fmt: skip


def test_every_family_has_a_colour_and_every_cause_a_line() -> None:
    assert set(FAMILIES.values()) <= COLORED
    assert set(LINE_OF.values()) <= set(FAMILIES)
    folder = Path(causes.__file__).parent
    assert set(LINE_OF) <= {path.stem.replace("_", "-") for path in folder.glob("*.py")}
