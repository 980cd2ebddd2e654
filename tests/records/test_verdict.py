"""The tune record: what `--json` holds by name, and older records."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from flopwise.records import store, verdict
from flopwise.records.verdict import (
    Comparison,
    Parity,
    Side,
    Speedup,
    Trial,
    TuneRecord,
)

FOUND = Comparison("faster", 0.8, (0.78, 0.82), 8, 4, 0.010, 0.008, 0.01, 0.01)
PARITY = Parity("reordered", True, 1.0, 1.0, 0.0, 0.0, 1.0, 1e-3, "source", "")


def record(**changes: Any) -> TuneRecord:
    given: dict[str, Any] = {
        "schema": verdict.SCHEMA, "flopwise": "0", "created": "", "command": [], "script": "train.py", "baseline_step_s": 0.010,
        "baseline_mfu": 0.1, "final_step_s": 0.008, "final_mfu": 0.125, "aa_spread_frac": 0.01, "aa": None,
        "trials": [Trial("FW102", "fused-optimizer", "kept", "why", 0.8, (0.78, 0.82), FOUND, PARITY, predicted_ratio=0.85)],
        "kept": ["FW102 fused-optimizer"], "proof": None, "plan": "plan.toml", "wall_s": 1.0, "notes": [], **changes,
    }  # fmt: skip
    return TuneRecord(**given)


def test_what_is_stored_has_the_names_that_are_promised() -> None:
    whole = record(
        baseline=Side(0.010, 0.1), final=Side(0.008, 0.125), speedup=Speedup(0.8, (0.78, 0.82))
    )
    data = json.loads(store.encode(verdict.stored(whole)))
    assert data["baseline"] == {"step_s": 0.010, "mfu": 0.1}
    assert data["final"] == {"step_s": 0.008, "mfu": 0.125}
    assert data["speedup"] == {"ratio": 0.8, "ci95": [0.78, 0.82]}
    (trial,) = data["trials"]
    assert {"fix", "verdict", "ratio", "ci95", "predicted_ratio", "reason"} <= set(trial)
    assert (trial["parity"]["class"], trial["parity"]["passed"]) == ("reordered", True)
    assert {"aa_spread_frac", "kept", "plan"} <= set(data)
    text = store.encode(verdict.stored(whole)).encode()
    assert store.decode(text, TuneRecord, verdict.SCHEMA, "tune.json") == whole


def test_a_record_of_an_older_version_is_read() -> None:
    older = dataclasses.asdict(record())
    for name in ("baseline", "final", "speedup", "break_even", "predicted", "writes", "more_writes", "sessions", "resume", "savings", "ledgers", "ledgers_reason", "multiplied"):  # fmt: skip
        del older[name]
    del older["trials"][0]["environment"], older["trials"][0]["causes"]
    text = json.dumps(older).encode()
    assert store.decode(text, TuneRecord, verdict.SCHEMA, "tune.json") == record()


def test_ratios_of_kept_fixes_multiply() -> None:
    one = Trial("FW102", "x", "kept", "", 0.8)
    assert verdict.multiplied([one, dataclasses.replace(one, ratio=0.5)]) == 0.4
    assert verdict.multiplied([one, dataclasses.replace(one, ratio=None)]) is None
    assert verdict.multiplied([]) is None
