"""The lines of a ledger and their families."""

from __future__ import annotations

import dataclasses

from flopwise.records.ledger import FAMILIES, LedgerRecord


def test_every_line_has_one_of_the_families() -> None:
    assert set(FAMILIES.values()) == {
        "useful", "precision", "hardware", "memory", "recompute", "optimizer", "communication",
        "pipeline", "unexplained",
    }  # fmt: skip
    assert {name for name, family in FAMILIES.items() if family == "useful"} == {"ideal"}
    assert all(FAMILIES[name] == "pipeline" for name in FAMILIES if name.startswith("idle_"))


def test_fields_that_came_later_have_a_default() -> None:
    """Records that were stored before can be read."""
    later = [
        f.name for f in dataclasses.fields(LedgerRecord) if f.default is not dataclasses.MISSING
    ]
    assert "busy_most_frac" in later
