"""The figures in the page of kit.memory are those of the raw results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results" / "h200").glob("kit_memory*.json"))


def test_the_page_has_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import kit_memory_table as table

    page = (ROOT / "docs" / "kit" / "memory.md").read_text(encoding="utf-8")
    if not RESULTS:
        assert table.HEADING not in page  # no figure that was not measured
        return
    sections = table.measured(RESULTS)
    assert all("H200" in found["gpu"] for found in sections.values())
    assert not any(json.loads(file.read_text(encoding="utf-8"))["tiny"] for file in RESULTS)
    _, _, after = page.partition(f"{table.HEADING}\n\n")
    assert after.partition("\n## ")[0].strip() == table.page(sections).strip()
