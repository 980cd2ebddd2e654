"""The families as one bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flopwise.records.ledger import FAMILIES, LedgerRecord
from flopwise.reports.html import render_ledger_html
from flopwise.reports.html.families import WORDS


def test_the_bar_is_the_step(trace_record: LedgerRecord, parsed: Callable[[str], Any]) -> None:
    found = parsed(render_ledger_html(trace_record)).section("By family")
    bar = found.all("div", "stack")[0].all("rect")
    kinds = [rect.attributes["class"] for rect in bar]
    assert kinds == ["useful", "memory", "optimizer", "pipeline"]
    assert sum(float(rect.attributes["width"]) for rect in bar) == pytest.approx(1000, abs=0.01)
    assert [key.text for key in found.all("li")] == [
        "useful work 0.002 ms, 0.22 %", "memory 0.598 ms, 59.8 %", "optimizer 0.100 ms, 10 %",
        "pipeline: idle, copies, preempted 0.300 ms, 30 %",
    ]  # fmt: skip
    assert "compute 70 %, exposed communication 0 %, exposed copies 0 %, idle 30 %" in found.text


def test_none_no_section(trace_record: LedgerRecord) -> None:
    assert "By family" not in render_ledger_html(dataclasses.replace(trace_record, families={}))
    timeless = dataclasses.replace(trace_record, step_s=0.0)
    assert "By family" not in render_ledger_html(timeless)


def test_every_family_has_words() -> None:
    assert set(WORDS) == set(FAMILIES.values())
