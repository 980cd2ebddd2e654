"""The figures in the page of kit.graph are those of the raw results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "kit_graph.json"
HEADING = "## Measured on an H200"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import kit_graph_page

    return kit_graph_page


def test_the_page_has_what_was_measured(written: Any) -> None:
    page = (ROOT / "docs" / "kit" / "graph.md").read_text(encoding="utf-8")
    if not RESULTS.exists():
        assert HEADING not in page  # no figure that was not measured
        return
    text = RESULTS.read_text(encoding="utf-8")
    found = json.loads(text)
    assert not found["tiny"]
    assert "H200" in found["gpu"]
    assert "site-packages" not in text
    _, _, after = page.partition(f"{HEADING}\n\n")
    assert after.partition("\n## ")[0].strip() == written.page(found).strip()


def run(**sections: Any) -> dict[str, Any]:
    return {
        "torch": "2.11.0",
        "gpu": "NVIDIA H200",
        "tiny": False,
        "compile_threads": "16",
        "sections": sections,
    }


def test_rows_tell_what_was_measured_and_what_was_not(written: Any) -> None:
    arms = {
        "eager": {"step_ms": 100.0, "allocated_gb": 20.0, "reserved_gb": 25.0},
        "in place together": {
            "step_ms": 50.0, "allocated_gb": 10.0, "reserved_gb": 11.0, "spent_s": 30.04, "break_even_steps": 1234,
        },
        "captured": {
            "step_ms": 101.0, "allocated_gb": 9.0, "reserved_gb": 24.0, "graphs": 1, "spent_s": 2.0, "break_even_steps": None,
        },
        "by hand": {"step_ms": 51.0},
        "regional together": {"error": "RuntimeError: not compiled\nno time | left."},
        "in place": {"left_out": "no time left"},
    }  # fmt: skip
    section = {"source": "own", "batch": [[16, 1024]], "arms": arms}
    text = written.page(run(**{"parts gpt2": section}))
    assert "**GPT-2 124M** (written out here), batch 16 x 1024:" in text
    assert "| bf16 | 100.00 ms | 1.00 x | 20.0 GB | – | – |" in text
    assert "| all, `compile_in_place` | 50.00 ms | 2.00 x | 10.0 GB | 30.0 s | 1 234 |" in text
    assert "| all, `CapturedStep` | 101.00 ms | 0.99 x | 24.0 GB | 2.0 s | never |" in text
    assert "| all, `compile_regions` | – | not measured: no time / left | – | – | – |" in text
    assert "not measured: no time left" in text
    assert "takes 98.0 % of the time of an expert's step" in text


def test_runs_are_merged_without_the_machines_paths(written: Any) -> None:
    place = "/opt/x/.venv/lib/python3.12/site-packages/torch/optim/sgd.py:12"
    one = run(fusion={"left_out": "no time left"})
    two = run(fold={"error": f"at {place} and /work/main/train.py, line 3"})
    found = written.merged([one, two])
    assert set(found["sections"]) == {"fusion", "fold"}
    assert found["sections"]["fold"]["error"] == "at sgd.py:12 and train.py, line 3"
    assert "Not measured: at sgd.py:12" in written.page(found)
    with pytest.raises(ValueError, match="torch differs"):
        written.merged([one, {**two, "torch": "2.13.0"}])
