"""Predicted against measured gains: what is read, the table, and the results that the documents are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TRIALS = [
    {"fix": "FW104", "name": "bf16-autocast", "verdict": "kept", "ratio": 0.5, "ci95": [0.48, 0.52], "predicted_ratio": 0.6},
    {"fix": "FW101", "name": "loader-workers", "verdict": "not kept", "ratio": 0.99, "ci95": [0.97, 1.01], "predicted_ratio": 0.9},
    {"fix": "FW102", "name": "fused-optimizer", "verdict": "kept", "ratio": 0.9, "ci95": [0.88, 0.92], "predicted_ratio": 0.98},
    {"fix": "FW103", "name": "channels-last", "verdict": "declined", "ratio": None, "ci95": None, "predicted_ratio": None},
]  # fmt: skip


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("predicted_gains")


@pytest.fixture
def tune(tmp_path):
    folder = tmp_path / "tune-a"
    folder.mkdir()
    record = {"schema": "flopwise.tune/1", "created": "2026", "trials": TRIALS, "speedup": None}
    (folder / "tune.json").write_text(json.dumps(record))
    return folder


def test_the_table_of_a_tune(bench, tune, capsys):
    assert bench.main([str(tune)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:5] == [
        "| tune-a | FW104 bf16-autocast | kept | 40 % | 50 % (48 % to 52 %) | 20 % |  |",
        "| tune-a | FW101 loader-workers | not kept | 10 % | 1 % (-1 % to 3 %) | - | above |",
        "| tune-a | FW102 fused-optimizer | kept | 2 % | 10 % (8 % to 12 %) | 80 % | below half |",
    ]
    assert lines[6] == (
        "3 trials of 1 tune have both, 2 of them a gain for certain. Median error of these 50 % (wanted: at most 25 %); "
        "1 of 2 (50 %) predicted more than 2x below the lower bound of the measured gain, 0 above its upper bound. "
        "Of 1 where no gain was shown, 1 were predicted above what can have been gained."
    )


def test_tunes_of_every_kind_of_file_are_read(bench, tune, tmp_path):
    kept = tmp_path / "h200" / "tunes.json"
    kept.parent.mkdir()
    bench.main(["--add", str(kept), f"one={tune}"])
    bench.main(["--add", str(kept), f"two={tune / 'tune.json'}"])
    assert list(bench.read(kept)) == ["one", "two"]
    models = {"models": {"gpt2": {"tune": {"trials": TRIALS}}, "bert": {"compare": {}}}}
    (tmp_path / "h200" / "tune_models.json").write_text(json.dumps(models))
    assert list(bench.results(tmp_path)) == ["gpt2, h200", "one, h200", "two, h200"]
    found = bench.gains(bench.results(tmp_path))
    assert len(found) == 9
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no tune in it"):
        bench.read(tmp_path / "other.json")


def test_without_predictions_nothing_is_claimed(bench):
    assert bench.report({"a": []}) == "Of 1 tune no trial has a prediction and a measurement."


def test_the_results_hold_tunes_and_no_paths(bench):
    tunes = bench.results(RESULTS)
    assert tunes
    assert all(trials for trials in tunes.values())
    for path in RESULTS.rglob("tunes*.json"):
        assert "/tmp/" not in path.read_text("utf-8")


def test_the_models_table_has_them(benchmark_module):
    models = benchmark_module("tune_models")
    trials = [{**trial, "parity": True} for trial in TRIALS]
    text = models.table({"models": {"gpt2": {"tune": {"trials": trials}}}})
    assert "| gpt2 | FW104 bf16-autocast | kept | 40 % | 50 % (48 % to 52 %) | 20 % |  |" in text
    assert "Predicted against measured, over all trials:" in text
    assert "Predicted against" not in models.table({"models": {}})
