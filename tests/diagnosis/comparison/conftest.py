"""Sides of a comparison, made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flopwise.diagnosis.comparison.sides import Measured, of_ledger
from flopwise.records.ledger import FAMILIES, SCHEMA, Hot, LedgerRecord, Line, Share, Spent

#: Milliseconds of each line, and half of its interval.
LINES = {"ideal": (4.0, 0.0), "memory_excess": (3.0, 0.1), "idle_input": (3.0, 0.2)}


@pytest.fixture(scope="session")
def a_ledger() -> Callable[..., LedgerRecord]:
    """Returns a function that makes a ledger: 8 steps of 10 ms on an H200, unless told otherwise."""

    def make(
        lines: dict[str, tuple[float, float]] | None = None,
        each_ms: Sequence[float] | None = None,
        operators: dict[str, float] | None = None,
        kernels: dict[str, float] | None = None,
        **fields: Any,
    ) -> LedgerRecord:
        lines = LINES if lines is None else lines
        whole = sum(ms for ms, _ in lines.values()) or 10.0
        each = [whole + off for off in (-0.1, 0.1) * 4] if each_ms is None else each_ms
        step_ms = sum(each) / len(each)
        made = LedgerRecord(
            schema=SCHEMA,
            flopwise="0",
            trace="trace.json",
            device=0,
            device_name="NVIDIA H200",
            rank=0,
            world_size=1,
            steps=len(each),
            steps_in_trace=len(each) + 1,
            steps_by="optimizer",
            step_s=step_ms * 1e-3,
            step_s_each=[ms * 1e-3 for ms in each],
            profiled=False,
            mfu=lines.get("ideal", (0.0, 0.0))[0] / step_ms,
            mfu_reason=None,
            model_flops_per_step=4e12,
            peak_flops_per_s=1e15,
            peak_source="data sheet",
            coverage_frac=1.0,
            lines=[
                Line(
                    name,
                    FAMILIES[name],
                    ms * 1e-3,
                    ((ms - half) * 1e-3, (ms + half) * 1e-3),
                    ms / step_ms,
                    100 * ms / step_ms,
                )
                for name, (ms, half) in lines.items()
            ],
            families={},
            busy_frac=0.7,
            partition=Share(0.08, 0.7, 0.0, 0.0, 0.3),
            operators=[
                Spent(name, ms * 1e-3, ms / step_ms, calls=2.0)
                for name, ms in (operators or {}).items()
            ],
            blocking=[],
            residual_frac=0.0,
            trusted=True,
            untrusted_because=[],
            hot=[
                Hot(name, "aten::mm", ms * 1e-3, 0.1, 2.0, "compute", None, None, None, None)
                for name, ms in (kernels or {}).items()
            ],
        )
        return dataclasses.replace(made, **fields)

    return make


@pytest.fixture(scope="session")
def a_side(a_ledger: Callable[..., LedgerRecord]) -> Callable[..., Measured]:
    """Returns a function that makes a side from such a ledger."""

    def make(*args: Any, **fields: Any) -> Measured:
        return of_ledger(a_ledger(*args, **fields), "trace.json", "trace")

    return make
