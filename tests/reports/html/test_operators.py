"""Operators, and the calls that left the device idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flopwise.records.ledger import LedgerRecord, Spent
from flopwise.reports.html import render_ledger_html


def test_both_tables(trace_record: LedgerRecord, parsed: Callable[[str], Any]) -> None:
    calls = [Spent("cudaStreamSynchronize", 2e-5, 0.02)]
    record = dataclasses.replace(trace_record, blocking=calls)
    found = parsed(render_ledger_html(record)).section("By operator")
    operators, blocking = found.all("table")
    assert operators.rows()[:2] == [
        ["operator", "calls", "ms a step", "% of step", "its longest kernels"],
        ["aten::mm", "1", "0.400", "40.0", "gemm"],
    ]
    assert blocking.rows() == [
        ["call", "ms a step", "% of step"],
        ["cudaStreamSynchronize", "0.020", "2.0"],
    ]


def test_kernels_that_are_their_operators_have_no_column(
    trace_record: LedgerRecord, parsed: Callable[[str], Any]
) -> None:
    same = [dataclasses.replace(one, kernels=[one.name]) for one in trace_record.operators]
    record = dataclasses.replace(trace_record, operators=same)
    found = parsed(render_ledger_html(record)).section("By operator")
    assert found.rows()[0] == ["operator", "calls", "ms a step", "% of step"]


def test_none_no_section(trace_record: LedgerRecord) -> None:
    record = dataclasses.replace(trace_record, operators=[], blocking=[])
    assert "By operator" not in render_ledger_html(record)
