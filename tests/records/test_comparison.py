"""A comparison is written and read back as it is."""

from __future__ import annotations

from flopwise.records import store
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


def test_round_trip() -> None:
    side = Side(
        "a", "run", None, None, 2, False, 50, "optimizer", 0.01, (0.009, 0.011), None, "no peak",
        1e12, None, None, [], "a CPU", {"torch": "2.13.0"},
    )  # fmt: skip
    record = ComparisonRecord(
        schema=SCHEMA,
        flopwise="0",
        old=side,
        new=side,
        conditions=[Condition("device", "other devices", ["step"])],
        step=StepChange(0.01, 0.01, 0.0, None, 1.0, None, "not shown", None, "one step"),
        mfu_difference=None,
        lines=[LineChange("ideal", "useful", 1.0, 2.0, 1.0, None, (0.5, 1.5), 10, 20, 10, True)],
        rest_s=None,
        lines_reason=None,
        families=[FamilyChange("useful", 1.0, 2.0, 1.0)],
        operators=[Changed("aten::mm", "", "not listed now", 1.0, None, -0.5, 0.5, 2.0, None)],
        kernels=[],
        gates=[GateResult("5%", "step", "unclear", "one step")],
        failed=False,
    )
    data = store.encode(record).encode()
    assert store.decode(data, ComparisonRecord, SCHEMA, "x") == record
