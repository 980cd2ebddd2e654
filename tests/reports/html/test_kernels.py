"""The kernels that take most, and the bandwidth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flopwise.records.ledger import Bandwidth, Hot, LedgerRecord, Spent
from flopwise.reports.html import render_ledger_html

Parsed = Callable[[str], Any]
TITLE = "Kernels that take most"
GEMM = Hot("gemm<T>", "aten::mm", 4e-4, 0.4, 2.0, "compute", 0.697, 316.3, 46.8e12, 148.1e9)
COPY = Hot("Memcpy HtoD", "aten::copy_", 1e-5, 0.01, 1.5, "copy", None, None, None, 25.1e9)
USED = Bandwidth(
    3.1e11,
    0.986,
    0.174,
    0.178,
    4.8e12,
    [Spent("Memcpy HtoD", 1e-5, 0.01, ["262 kB a step", "25.1 GB/s"], 2)],
)


def drawn(parsed: Parsed, record: LedgerRecord, **fields: Any) -> Any:
    return parsed(render_ledger_html(dataclasses.replace(record, **fields))).section(TITLE)


def test_a_row_a_kernel(trace_record: LedgerRecord, parsed: Parsed) -> None:
    found = drawn(parsed, trace_record, hot=[GEMM, COPY], bandwidth=None)
    assert found.rows() == [
        ["kernel, operator", "ms a step", "% of step", "calls", "bound by", "of that bound", "FLOP/s", "bytes/s",
         "FLOP/byte"],
        ["gemm<T> aten::mm", "0.400", "40.0", "2", "compute", "69.7 %", "46.8 TFLOP/s", "148.1 GB/s", "316"],
        ["Memcpy HtoD aten::copy_", "0.010", "1.0", "1.5", "copy", "-", "-", "25.1 GB/s", "-"],
    ]  # fmt: skip
    (meter,) = found.all("svg", "meter")
    assert meter.all("rect")[0].attributes["width"] == "69.7"
    assert [badge.attributes["class"] for badge in found.all("span", "badge")] == [
        "badge is-compute", "badge is-copy",
    ]  # fmt: skip


def test_columns_that_nobody_knows_are_left_out(trace_record: LedgerRecord, parsed: Parsed) -> None:
    found = drawn(parsed, trace_record, hot=[dataclasses.replace(COPY, bound="<odd>")])
    assert found.rows()[0] == [
        "kernel, operator",
        "ms a step",
        "% of step",
        "calls",
        "bound by",
        "bytes/s",
    ]
    assert found.all("span", "badge")[0].attributes["class"] == "badge is-none"


def test_an_operator_of_the_same_name_is_not_repeated(
    trace_record: LedgerRecord, parsed: Parsed
) -> None:
    one = dataclasses.replace(COPY, kernel="aten::mm", operator="aten::mm")
    assert drawn(parsed, trace_record, hot=[one]).rows()[1][0] == "aten::mm"


def test_the_bandwidth_and_the_copies(trace_record: LedgerRecord, parsed: Parsed) -> None:
    record = dataclasses.replace(trace_record, hot=[], bandwidth=USED)
    root = parsed(render_ledger_html(record))
    found = root.section(TITLE)
    said = [item.text for item in found.all("dd")]
    assert said == [
        "17.4 % of 4.80 TB/s, over the whole step", "17.8 % over the time of these kernels", "310 GB a step, at least",
        "98.6 % of kernel time",
    ]  # fmt: skip
    assert found.rows()[1] == ["Memcpy HtoD", "2", "10 µs", "1.0", "262 kB a step · 25.1 GB/s"]
    card = root.all("div", "card")[3].text
    assert (
        card == "memory bandwidth 17.4 % of 4.80 TB/s, at least · known for 98.6 % of kernel time"
    )


def test_an_unknown_bandwidth_is_no_figure(trace_record: LedgerRecord, parsed: Parsed) -> None:
    unknown = Bandwidth(1e9, 0.2, None, None, None)
    root = parsed(render_ledger_html(dataclasses.replace(trace_record, bandwidth=unknown)))
    assert len(root.all("div", "card")) == 3
    assert [item.text for item in root.section(TITLE).all("dd")] == [
        "1 GB a step, at least",
        "20 % of kernel time",
    ]


def test_nothing_ran_no_section(trace_record: LedgerRecord) -> None:
    assert TITLE not in render_ledger_html(
        dataclasses.replace(trace_record, hot=[], bandwidth=None)
    )
