"""The benchmark of the precision room on a CPU with tiny sizes: every section gives figures, and failures are kept."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "kit_precision.py"
Run = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a function that runs sections and gives the process and its JSON."""

    def go(only: str, *more: str, before: str = "") -> Any:
        out = tmp_path / "out.json"
        code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import kit_precision as k\n{before}\n"
        code += "sys.exit(k.main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", code, "--tiny", "--out", str(out), "--only", only, *more],
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done, json.loads(out.read_text()) if out.exists() else {}

    return go


def test_every_section_gives_figures_and_the_page_has_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, out = run("scaler_equal,scaler_overhead,master_weights,mixed,tf32,fp8")
    assert done.returncode == 0, done.stderr
    sections = out["sections"]
    equal = sections["scaler_equal"]
    assert equal["ok"]
    assert len(equal["rows"]) == 12
    assert all(row["equal"] == row["tensors"] > 20 for row in equal["rows"])
    assert all(row["gradscaler_equals_itself"] and not row["differ"] for row in equal["rows"])
    (size,) = sections["scaler_overhead"]["sizes"]
    ours = size["cost"]
    assert ours["low_frac"] <= ours["frac"] <= ours["high_frac"]
    assert set(size["step_ms"]) == set(size["host_ms"]) == {
        "float16, no scaler", "float16, DynamicScaler", "float16, GradScaler", "bfloat16",
        "float16, no scaler again", "float16, DynamicScaler, torch's kernels",
    }  # fmt: skip
    assert size["torchs_kernels_cost"].keys() == ours.keys()
    assert not size["one_kernel"]  # it is for CUDA devices
    assert size["one_kernel_declined"] is None
    masters = sections["master_weights"]
    assert masters["equal_state_dicts_after_4_steps"]
    assert masters["memory"]["masters"]["categories"]["masters_bytes"] > 0
    assert masters["memory"]["autocast"]["categories"]["masters_bytes"] == 0
    mixed = sections["mixed"]
    assert {n: e["share"] for n, e in mixed["effects"].items() if "share" in e} == {
        "float32": 1.0, "bfloat16": 1.0, "float16": 1.0,
    }  # fmt: skip
    assert "CUDA" in mixed["effects"]["tf32"]["declined"]
    assert "CUDA" in sections["tf32"]["skipped"]
    assert "CUDA" in sections["fp8"]["declined"]
    assert sections["fp8"]["ok"]
    assert out["environment"]["device"]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from precision.page import page

    text = page(out)
    assert (
        "are equal to GradScaler's to the bit after 20 steps with overflows, in 12 set-ups" in text
    )
    assert "| parameters | bfloat16 step | cost of DynamicScaler |" in text
    assert "us a step with torch's, too, " in text
    assert "**float8.** Declined there: float8 products need a CUDA device" in text
    assert "state dicts are equal to the bit after 4 steps" in text
    assert "**TF32.** Not measured: TF32 is a format of CUDA tensor cores" in text


def test_waits_are_counted_by_a_profile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done, out = run("scaler_sync")
    assert done.returncode == 0, done.stderr
    rows = {
        (r["optimizer"], r["arm"]): r["more_than_without"]
        for r in out["sections"]["scaler_sync"]["rows"]
    }
    assert rows["sgd foreach", "GradScaler"] == {"aten::_local_scalar_dense": 1.0}
    assert rows["sgd foreach", "DynamicScaler"] == {}
    assert rows["adamw fused", "DynamicScaler"] == {}
    assert out["sections"]["scaler_sync"]["ok"]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from precision.page import page

    assert "| sgd foreach, clipped | 1 aten::_local_scalar_dense | none |" in page(out)


def test_a_failing_section_is_recorded_and_the_others_go_on(run: Run) -> None:
    broken = (
        "def fails(tiny, deadline): raise ValueError('as planted in /some/folder/x.py')\n"
        "k.SECTIONS['mixed'] = fails"
    )
    done, out = run("mixed,tf32", before=broken)
    assert done.returncode == 1
    assert out["sections"]["mixed"]["error"] == "ValueError: as planted in x.py"
    assert "skipped" in out["sections"]["tf32"]


def test_a_spent_budget_leaves_sections_out(run: Run) -> None:
    done, out = run("tf32", "--budget-s", "-1")
    assert done.returncode == 0
    assert out["sections"]["tf32"] == {"skipped": "the budget was spent"}


def test_sections_of_an_earlier_run_are_kept_where_the_machine_is_the_same(
    run: Run, tmp_path: Path
) -> None:
    run("tf32")
    done, out = run("fp8", "--keep")
    assert done.returncode == 0, done.stderr
    assert set(out["sections"]) == {"tf32", "fp8"}
    _, out = run("fp8", "--keep", "--budget-s", "-1")
    assert "declined" in out["sections"]["fp8"]  # what was measured stays
    out["environment"]["device"] = "another"
    (tmp_path / "out.json").write_text(json.dumps(out))
    done, _ = run("fp8", "--keep")
    assert done.returncode == 2
    assert "is of another machine" in done.stderr


def test_the_section_is_put_into_a_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from precision.page import put_into

    first = put_into("# Page\n\n## Limits\n\nNone.\n", "1 ms")
    assert first == "# Page\n\n## Limits\n\nNone.\n\n## Measured on an H200\n\n1 ms\n"
    assert put_into(first, "2 ms") == first.replace("1 ms", "2 ms")
    between = first + "\n## More\n\nText.\n"
    assert put_into(between, "2 ms") == between.replace("1 ms", "2 ms")


def test_an_unknown_section_is_named(run: Run) -> None:
    done, _ = run("other")
    assert done.returncode == 2
    assert "no such section: other" in done.stderr


def test_differences_are_named_and_told_apart_from_the_models_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import torch
    from precision import page, scaling

    def trained(kind: str, scaler: Any, *sizes: Any) -> dict[str, torch.Tensor]:
        own = type(scaler).__name__ == "DynamicScaler"
        noise = next(calls) if kind == "sgd foreach" else 0
        return {"w": torch.tensor([1.5 if own and kind == "sgd fused" else 1.0 + noise])}

    calls = iter(range(10))
    monkeypatch.setattr(scaling, "_trained", trained)
    found = scaling.equal(True, math.inf)
    rows = {(r["optimizer"], r["clip"]): r for r in found["rows"]}
    assert not found["ok"]
    assert rows["sgd fused", False]["differ"] == {"w": 0.5}
    assert rows["sgd fused", False]["gradscaler_equals_itself"]
    assert not rows["sgd foreach", False]["gradscaler_equals_itself"]
    assert rows["adamw fused", True]["equal"] == 1
    text = "\n".join(page._equal(found))
    assert "sgd fused, clipped: 1 differ, by up to 5.0e-01." in text
    assert "sgd foreach: two runs of GradScaler differ, too." in text


@pytest.mark.parametrize(("n", "outside"), [(5, None), (6, 0), (12, 2), (30, 9)])
def test_intervals_of_a_median_are_between_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, n: int, outside: int | None
) -> None:
    # of n tosses of a coin at most this many are heads with 2.5 %: 6: 0 (1.6 %), 12: 2 (1.9 %), 30: 9 (2.1 %)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from precision.stacks import change, median_of

    values = [float(k) for k in range(n)]
    found = median_of(values[::-1])
    assert found["frac"] == (n - 1) / 2
    ends = (-math.inf, math.inf) if outside is None else (float(outside), float(n - 1 - outside))
    assert (found["low_frac"], found["high_frac"]) == ends
    paired = change({"a": [2.0, 6.0, 12.0], "b": [1.0, 2.0, 3.0]}, "a", "b")
    assert paired["frac"] == 2.0
