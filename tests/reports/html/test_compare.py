"""The page of a comparison: what the terminal shows, in its order, and nothing that acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.records.comparison import (
    SCHEMA,
    Changed,
    ComparisonRecord,
    Condition,
    FamilyChange,
    GateResult,
    LineChange,
    Side,
    StepChange,
)
from flopwise.reports.html import render_comparison_html
from flopwise.reports.html.compare import CHANGED
from flopwise.reports.terminal import render

Parsed = Callable[[str], Any]
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"


@pytest.fixture
def record() -> ComparisonRecord:
    """A step of 10 ms that became one of 8, by 2 ms less waiting for batches."""
    old = Side(
        "a.json", "trace", "NVIDIA H200", None, None, True, 5, "optimizer", 10e-3, None, 0.4, None, None, None, True, [],
    )  # fmt: skip
    return ComparisonRecord(
        schema=SCHEMA,
        flopwise="1.0",
        old=old,
        new=dataclasses.replace(old, path="b.json", step_s=8e-3, mfu=None, mfu_reason="no peak"),
        conditions=[
            Condition("profiled", "the old side was profiled", ["step"]),
            Condition("rank", "other ranks", []),
        ],
        step=StepChange(
            10e-3, 8e-3, -2e-3, (-2.2e-3, -1.8e-3), 0.8, (0.78, 0.82), "faster", 0.025, None
        ),
        mfu_difference=None,
        lines=[
            LineChange(
                "idle_input", "pipeline", 3e-3, 1e-3, -2e-3, (-2.1e-3, -1.9e-3), (-2.3e-3, -1.7e-3), 30.0, 12.5, -17.5, True,
            ),
            LineChange("optimizer", "optimizer", 3e-3, 2.999e-3, -1e-6, None, None, 30, 37, 7, False),
        ],
        rest_s=None,
        lines_reason=None,
        families=[FamilyChange("pipeline", 3e-3, 1e-3, -2e-3)],
        operators=[Changed("aten::mm", "", "slower", 1e-3, 1.5e-3, 5e-4, None, 10.0, 12.0)],
        kernels=[Changed("gemm", "aten::mm", "not listed now", 1e-3, None, -9e-4, 1e-4, 3.0, None)],
        gates=[GateResult("5%", "step", "passed", "at most 1.0500")],
        failed=False,
        notes=["a note"],
    )  # fmt: skip


def test_the_page_has_what_the_terminal_shows(record: ComparisonRecord, parsed: Parsed) -> None:
    root = parsed(render_comparison_html(record))
    assert root.all("h1")[0].text == "flopwise compare a.json b.json"
    assert [p.text for p in root.all("p", "facts")][1:] == [
        "old a.json · trace · NVIDIA H200 · 5 profiled steps, ended by the optimizer",
        "new b.json · trace · NVIDIA H200 · 5 profiled steps, ended by the optimizer",
    ]
    (verdict,) = root.all("section", "verdict")
    assert (
        verdict.text == "Before the figures not alike: the old side was profiled mind: other ranks"
    )
    assert [card.text for card in root.all("div", "card")] == [
        "step faster 10 ms to 8 ms · t_new / t_old 0.8000 (0.7800 to 0.8200) · -2 ms (-2.20 to -1.80 ms)",
        "MFU 40 % to none new: no peak",
        "can show a step longer by 2.50 % or more, in 4 of 5 such comparisons",
    ]
    assert [item.text for item in root.section("Limits").all("li")] == [
        "passed · 5% · at most 1.0500"
    ]
    lines = root.section("Where the difference lies")
    assert lines.rows() == [
        ["", "old", "new", "difference", "95 %, all lines", "points", ""],
        ["idle: waiting for data", "3 ms", "1 ms", "-2 ms", "-2.30 to -1.70 ms", "-17.50", "shown"],
        ["1 smaller difference", "3 ms", "3 ms", "-1 µs", "", "+7.00", ""],
        ["step", "10 ms", "8 ms", "-2 ms", "-2.20 to -1.80 ms", "", ""],
    ]
    assert lines.text.endswith("by family pipeline -2 ms")
    assert root.section("By operator").rows() == [
        ["difference", "old", "new", "calls", "operator"],
        ["+500 µs", "1 ms", "1.50 ms", "10 to 12", "aten::mm"],
    ]
    assert root.section("By kernel").rows()[1] == [
        "-900 µs", "1 ms", "< 100 µs", "3 to ?", "gemm of aten::mm",
    ]  # fmt: skip
    assert root.section("Notes").text == "Notes a note"
    shown = " ".join(render(record, width=200, color=False).split())
    for row in [*lines.rows(), *root.section("By operator").rows()]:
        assert " ".join(filter(None, row)) in shown


def test_what_is_not_there_has_its_reason_or_no_section(
    record: ComparisonRecord, parsed: Parsed
) -> None:
    bare = dataclasses.replace(
        record, conditions=[], lines=[], lines_reason="the old side has no ledger", gates=[], operators=[], kernels=[], notes=[],
    )  # fmt: skip
    root = parsed(render_comparison_html(bare))
    (verdict,) = root.all("section", "verdict")
    assert verdict.text == "No lines : the old side has no ledger"
    assert root.all("h2") == []


def test_what_is_only_said_is_no_warning_that_voids(
    record: ComparisonRecord, parsed: Parsed
) -> None:
    mind = dataclasses.replace(record, conditions=record.conditions[1:])
    (verdict,) = parsed(render_comparison_html(mind)).all("section", "verdict")
    assert verdict.attributes["class"] == "verdict"
    assert verdict.text == "Before the figures mind: other ranks"


def test_long_lists_are_cut_and_said(record: ComparisonRecord, parsed: Parsed) -> None:
    many = [dataclasses.replace(record.operators[0], name=f"op{i}") for i in range(CHANGED + 12)]
    found = parsed(render_comparison_html(dataclasses.replace(record, operators=many)))
    section = found.section("By operator")
    assert len(section.rows()) == 1 + CHANGED
    assert section.text.endswith("and 12 more, in the JSON")


def test_names_that_a_page_would_obey(record: ComparisonRecord, parsed: Parsed) -> None:
    hostile = dataclasses.replace(
        record,
        old=dataclasses.replace(record.old, path=HOSTILE, device_name=HOSTILE, steps_by=HOSTILE),
        conditions=[Condition(HOSTILE, HOSTILE, [HOSTILE])],
        lines=[dataclasses.replace(record.lines[0], name=HOSTILE)],
        families=[FamilyChange(HOSTILE, 3e-3, 1e-3, -2e-3)],
        operators=[dataclasses.replace(record.operators[0], name=HOSTILE)],
        kernels=[dataclasses.replace(record.kernels[0], name=HOSTILE, operator=HOSTILE)],
        gates=[GateResult(HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
        notes=[HOSTILE],
    )
    page = render_comparison_html(hostile)
    parsed(page)  # which checks that nothing but our own elements is there
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(data=st.data())
def test_any_record_is_a_page(any_record: Any, parsed: Parsed, data: st.DataObject) -> None:
    parsed(render_comparison_html(data.draw(any_record(ComparisonRecord))))
