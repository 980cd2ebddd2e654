"""docs/flops.md names every op that has a formula, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from flopwise.flops.table import RULES

PAGE = Path(__file__).parents[2] / "docs" / "flops.md"


def test_the_table_of_the_page_is_the_table_of_the_code() -> None:
    rows = [
        line.split("|")[1]
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    names -= {"needed", "needed_causal", "executed"}
    assert {n if "::" in n else f"aten::{n}" for n in names} == set(RULES)
