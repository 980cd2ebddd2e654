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
    took = {"step_ms": 100.0, "step_s": [0.099, 0.1, 0.11], "set_up_s": 1.4}
    half = {"step_ms": 50.0, "step_s": [0.05, 0.05, 0.06]}
    memory = {"allocated_gb": 20.0, "reserved_gb": 25.0}
    arms = {
        "eager": took | memory,
        "in place together": half | memory | {"base": "eager", "first_s": 30.0, "set_up_s": 31.2},
        "in place captured": half | {
            "allocated_gb": 2.0, "graph_gb": 8.0, "base": "eager", "first_s": 30.0, "set_up_s": 2.9, "capture_s": 0.5,
        },
        "captured": took | {"step_ms": 101.0, "base": "eager", "set_up_s": 3.0, "capture_s": 0.5, "allocated_gb": 9.0},
        "by hand": {"step_ms": 51.0, "step_s": [0.051, 0.051, 0.05], "set_up_s": 7.0},
        "regional together": {"error": "RuntimeError: not compiled\nno time | left."},
        "in place": {"left_out": "no time left"},
    }  # fmt: skip
    section = {"source": "own", "batch": [[16, 1024]], "arms": arms}
    text = written.page(run(**{"parts gpt2": section}))
    assert "**GPT-2 124M** (written out here), batch 16 x 1024:" in text
    assert "| bf16 | 100.00 ms (99.00 to 110.00) | 1.00 x | 20.0 GB | – | – |" in text
    # 31.2 s less four steps; with code that an earlier arm had waited for 30 s: 2.9 s less 18 steps on top.
    row = (
        "| all, `compile_in_place` | 50.00 ms (50.00 to 60.00) | 2.00 x | 20.0 GB | 31.0 s | 620 |"
    )
    assert row in text
    assert "| 2.00 x | 10.0 GB | 32.0 s | 640 |" in text
    assert "| 0.99 x | 9.0 GB | 1.2 s | never |" in text
    assert "| all, `compile_regions` | not measured: no time / left | – | – | – | – |" in text
    assert "| bf16, `compile_in_place` | not measured | – | – | – | – |" in text
    assert "takes 0.980 times as long as an expert's step (0.980 to 1.200 by rounds)" in text


def test_a_first_step_longer_than_the_deadline_is_said(written: Any) -> None:
    from flopwise.kit.graph import compiled_calls

    assert written.DEADLINE_S == compiled_calls.DEADLINE_S
    took = {"step_ms": 100.0, "step_s": [0.1], "set_up_s": 5.4}
    arms = {"eager": took, "in place together": took | {"first_s": 130.5}}
    section = {"source": "own", "batch": [[1]], "arms": arms}
    text = written.page(run(**{"parts gpt2": section}))
    assert (
        "The first step took 130 s, which is more than `deadline_s` allows by default (120 s)"
        in text
    )
    arms["in place together"]["first_s"] = 119.0
    assert "`deadline_s`" not in written.page(run(**{"parts gpt2": section}))


def test_compiling_from_a_cache_is_no_compile_time(written: Any) -> None:
    took = {"step_ms": 100.0, "step_s": [0.1], "set_up_s": 5.4}
    warm = {"eager": took, "regional together": took | {"base": "eager", "first_s": 5.0}}
    assert written.spent_s(warm, "regional together") is None
    section = {"source": "own", "batch": [[1]], "arms": warm}
    assert "`compile_regions` and an expert's compilation found" in written.page(
        run(**{"parts gpt2": section})
    )
    warm["regional together"]["cold"] = True
    assert written.spent_s(warm, "regional together") == pytest.approx(5.0)
    assert "`compile_regions` and an expert's" not in written.page(run(**{"parts gpt2": section}))
    assert written.spent_s(warm, "eager") is None


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
