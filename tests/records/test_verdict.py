"""The tune record: what `--json` holds by name, older records, and how far predictions were from what was measured."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from flopwise.records import store, verdict
from flopwise.records.verdict import (
    Comparison,
    Parity,
    Predicted,
    Side,
    Speedup,
    Trial,
    TuneRecord,
    agreement,
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
    for name in ("baseline", "final", "speedup", "break_even", "predicted", "writes", "more_writes", "sessions", "resume"):  # fmt: skip
        del older[name]
    del older["trials"][0]["environment"]
    text = json.dumps(older).encode()
    assert store.decode(text, TuneRecord, verdict.SCHEMA, "tune.json") == record()


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (0.8, Predicted(1, 0.0, 0, 0)),
        (0.7, Predicted(1, 0.5, 1, 0)),  # 30 % promised, 20 % found (18 to 22)
        (0.92, Predicted(1, 0.6, 0, 1)),  # 8 % promised, at least 18 % found
        (None, None),
    ],
)
def test_predictions_are_held_against_measured_gains(
    predicted: float | None, expected: Predicted | None
) -> None:
    trial = Trial("FW102", "x", "kept", "", 0.8, (0.78, 0.82), predicted_ratio=predicted)
    found = agreement([trial])
    if expected is None or found is None:
        assert found is expected
        return
    assert found.median_error_frac == pytest.approx(expected.median_error_frac)
    assert dataclasses.replace(found, median_error_frac=0) == dataclasses.replace(expected, median_error_frac=0)  # fmt: skip


def test_a_gain_that_was_not_shown_is_no_measured_gain() -> None:
    trial = Trial("FW102", "x", "not kept", "", 0.99, (0.97, 1.01), predicted_ratio=0.8)
    assert agreement([trial, Trial("FW101", "y", "declined", "", predicted_ratio=0.8)]) is None
