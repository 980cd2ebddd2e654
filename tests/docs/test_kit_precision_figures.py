"""The figures in the page of kit.precision are those of the raw results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "kit_precision.json"
HEADING = "## Measured on an H200"


def test_the_page_has_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "kit" / "precision.md").read_text(encoding="utf-8")
    if not RESULTS.exists():
        assert HEADING not in page  # no figure that was not measured
        return
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    from precision.page import page as section

    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert not found["tiny"]
    assert "H200" in found["environment"]["device"]
    _, _, after = page.partition(f"{HEADING}\n\n")
    assert after.partition("\n## ")[0].strip() == section(found).strip()
