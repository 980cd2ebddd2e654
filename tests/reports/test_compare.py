"""The report of a comparison: whole, at any width, in ASCII, with hostile names."""

from __future__ import annotations

import dataclasses
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
from flopwise.reports.terminal import render

OLD = Side(
    "a.json", "trace", "NVIDIA H200", 0, 8, True, 5, "optimizer", 10e-3, None, 0.4, None, 4e12,
    1e15, True, [],
)  # fmt: skip
NEW = dataclasses.replace(OLD, path="runs/b", kind="run", profiled=False, steps=50, mfu=0.5)
RECORD = ComparisonRecord(
    schema=SCHEMA,
    flopwise="0",
    old=OLD,
    new=NEW,
    conditions=[
        Condition("profiled", "the old side was profiled", ["step"]),
        Condition("rank", "other ranks: 0 against 1", []),
    ],
    step=StepChange(
        10e-3, 8e-3, -2e-3, (-2.2e-3, -1.8e-3), 0.8, (0.78, 0.82), "faster", 0.025, None
    ),
    mfu_difference=0.1,
    lines=[
        LineChange(
            "idle_input", "pipeline", 3e-3, 1e-3, -2e-3, (-2.1e-3, -1.9e-3), (-2.3e-3, -1.7e-3),
            30.0, 12.5, -17.5, True,
        ),
        LineChange("ideal", "useful", 4e-3, 4e-3, 0.0, (0, 0), (0, 0), 40.0, 50.0, 10.0, False),
        LineChange("optimizer", "optimizer", 3e-3, 2.999e-3, -1e-6, None, None, 30, 37, 7, False),
        LineChange("residual", "unexplained", 0.0, 0.0, 0.0, None, None, 0.0, 0.0, 0.0, False),
    ],
    rest_s=1e-6,
    lines_reason=None,
    families=[FamilyChange("pipeline", 3e-3, 1e-3, -2e-3), FamilyChange("useful", 4e-3, 4e-3, 0)],
    operators=[
        Changed("aten::mm", "", "slower", 1e-3, 1.5e-3, 5e-4, None, 10.0, 12.0),
        Changed("aten::new", "", "new", 0.0, 2e-4, 2e-4, None, 0.0, 1.0),
        Changed("aten::same", "", "same", 1e-3, 1e-3, 0.0, None, 1.0, 1.0),
    ],
    kernels=[Changed("gemm", "aten::mm", "not listed now", 1e-3, None, -9e-4, 1e-4, 3.0, None)],
    gates=[
        GateResult("5%", "step", "passed", "t_new / t_old 0.8000, at most 1.0500"),
        GateResult("idle_input=1ms", "idle_input", "failed", "longer"),
    ],
    failed=True,
    notes=["a note"],
)  # fmt: skip

WHOLE = """\
flopwise compare a.json runs/b
  old         a.json · trace · NVIDIA H200 · 5 profiled steps, ended by the optimizer · rank 0 of 8
  new         runs/b · run · NVIDIA H200 · 50 undisturbed steps, ended by the optimizer
              rank 0 of 8

  not alike   the old side was profiled
  mind        other ranks: 0 against 1

  step        faster · 10 ms to 8 ms · t_new / t_old 0.8000 (0.7800 to 0.8200)
              -2 ms (-2.20 to -1.80 ms)
  can show    a step longer by 2.50 % or more, in 4 of 5 such comparisons
  MFU         40 % to 50 % · +10 points
  limit       passed · 5% · t_new / t_old 0.8000, at most 1.0500
  limit       failed · idle_input=1ms · longer

  where the difference lies
                                                  old   new  difference  points
  idle: waiting for data                         3 ms  1 ms       -2 ms  -17.50  shown
  residual: undisturbed step less all of these   0 ns  0 ns        0 ns   +0.00
  2 smaller differences                          7 ms  7 ms       -1 µs  +17.00
  in no line                                                      +1 µs
  step                                          10 ms  8 ms       -2 ms
  by family   pipeline -2 ms

  by operator, the largest difference first (no intervals)
  difference   old      new     calls  operator
     +500 µs  1 ms  1.50 ms  10 to 12  aten::mm
     +200 µs  0 ns   200 µs    0 to 1  aten::new (new)

  by kernel, the largest difference first (no intervals)
  difference   old       new   calls  kernel
     -900 µs  1 ms  < 100 µs  3 to ?  gemm of aten::mm

  note        a note

  saved       c.json
"""


def test_the_whole_report() -> None:
    text = render(RECORD, width=100, color=False, saved=["c.json"])
    assert text == WHOLE


@pytest.mark.parametrize("width", [40, 60, 100, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_never_wider_than_it_was_told(width: int, ascii_only: bool) -> None:
    text = render(RECORD, width=width, color=False, ascii_only=ascii_only)
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.isascii() is ascii_only
    flat = " ".join(text.split())
    if width == 40:  # cells wrap
        assert "residual" in flat
        return
    for words in ("not alike", "waiting for data", "-2 ms", "residual", "aten::mm", "failed"):
        assert words in flat


def test_what_is_not_known_has_its_reason() -> None:
    none = dataclasses.replace(OLD, mfu=None, mfu_reason="no peak is known", device_name=None)
    record = dataclasses.replace(
        RECORD,
        old=none,
        mfu_difference=None,
        lines=[],
        lines_reason="the old side has no ledger: why",
        rest_s=None,
        step=dataclasses.replace(
            RECORD.step,
            ci95=None,
            difference_ci95=None,
            minimum_detectable_frac=None,
            outcome="not shown",
            reason="no interval: one step",
        ),
    )
    flat = " ".join(render(record, width=100, color=False).split())
    assert "device not named" in flat
    assert "MFU none to 50 % · old: no peak is known" in flat
    assert "lines none · the old side has no ledger: why" in flat
    assert (
        "not shown · 10 ms to 8 ms · t_new / t_old 0.8000 · -2 ms · no interval: one step" in flat
    )
    assert "can show nothing" in flat


def test_long_lists_are_cut_and_said() -> None:
    many = [dataclasses.replace(RECORD.operators[0], name=f"op{i}") for i in range(20)]
    text = render(dataclasses.replace(RECORD, operators=many), width=100, color=False)
    assert "op7" in text
    assert "op8" not in text
    assert "and 12 more, in the JSON" in text


HOSTILE = "\x1b[31m\x1b]0;title\x07\r\n\u202e[bold]\ud800漢"


@pytest.mark.parametrize("width", [40, 100])
def test_names_that_a_terminal_would_obey(width: int) -> None:
    hostile = dataclasses.replace(
        RECORD,
        old=dataclasses.replace(OLD, path=HOSTILE, device_name=HOSTILE),
        operators=[dataclasses.replace(RECORD.operators[0], name=HOSTILE)],
        kernels=[dataclasses.replace(RECORD.kernels[0], name=HOSTILE, operator=HOSTILE)],
    )
    text = render(hostile, width=width, color=False)
    assert not set(text) & set("\x1b\x07\r\u202e\ud800")
    assert "[bold]" in "".join(text.split())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data(), width=st.integers(40, 200), ascii_only=st.booleans())
def test_any_record_can_be_drawn(
    any_record: Any, data: st.DataObject, width: int, ascii_only: bool
) -> None:
    record = data.draw(any_record(ComparisonRecord))
    text = render(record, width=width, color=False, ascii_only=ascii_only)
    text.encode("utf-8")
    assert "\x1b" not in text
