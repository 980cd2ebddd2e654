"""Times to a target quality, from scripts that only print, and the lines of MLPerf's log format."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOUND = {"device": "a CPU", "cores": 2, "torch": "2.13.0", "kind": "cpu"}


@pytest.fixture
def bench(benchmark_module: Any) -> ModuleType:
    return benchmark_module("time_to_quality")


@pytest.fixture
def run(bench: ModuleType) -> Any:
    """A run that comes to the target at its third evaluation."""
    return bench.Run(
        "tuned", 1338, 1000.0, 2.5,
        [[20, 3.0, 4.0, 3.5], [40, 2.5, 6.0, 5.5], [60, 2.05, 8.0, 7.5], [80, 2.0, 10.0, 9.5]], 11.0, 0, 0.5,
        ["applied by the plan: FW102 fused-optimizer"],
    )  # fmt: skip


def events(lines: Any) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        prefix, _, rest = line.partition(" ")
        assert prefix == ":::MLLOG"
        event = json.loads(rest)
        assert list(event) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert event["event_type"] in ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")
        assert {"file", "lineno"} <= set(event["metadata"])
        found.append(event)
    return found


def test_a_run_is_told_by_its_first_evaluation_at_the_target(bench: ModuleType, run: Any) -> None:
    told = bench._told(bench.JOBS["gpt"], run)
    assert (told["target_step"], told["from_start_s"], told["from_first_step_s"]) == (60, 8.0, 5.5)
    assert told["evaluations"][-1] == [80, 2.0, 10.0]
    never = bench._told(bench.JOBS["gpt"], replace(run, evaluations=run.evaluations[:2]))
    assert (never["target_step"], never["from_start_s"], never["from_first_step_s"]) == (
        None,
        None,
        None,
    )
    assert bench.JOBS["cnn"].reached(0.9)
    assert not bench.JOBS["cnn"].reached(0.8)


def test_log_lines_are_those_of_mlperf_and_in_order(bench: ModuleType, run: Any) -> None:
    found = events(bench.mllog(bench.JOBS["gpt"], run, FOUND))
    keys = [event["key"] for event in found]
    for once in (
        "init_start",
        "init_stop",
        "run_start",
        "run_stop",
        "seed",
        "train_samples",
        "eval_samples",
    ):
        assert keys.count(once) == 1
    assert (
        keys.index("init_start")
        < keys.index("init_stop")
        < keys.index("run_start")
        < keys.index("run_stop")
    )
    assert keys[-1] == "run_stop"  # at the target, though the run went on
    by_key = {event["key"]: event for event in found}
    assert by_key["seed"]["value"] == 1338
    assert by_key["run_stop"]["metadata"]["status"] == "success"
    assert by_key["run_stop"]["time_ms"] - by_key["run_start"]["time_ms"] == 5500
    accuracies = [
        (e["value"], e["metadata"]["samples_count"]) for e in found if e["key"] == "eval_accuracy"
    ]
    assert accuracies == [(3.0, 160), (2.5, 320), (2.05, 480)]
    times = [event["time_ms"] for event in found]
    assert times == sorted(times)
    for event in found:
        if re.match("(block|eval)_(start|stop|accuracy)", event["key"]):
            assert "samples_count" in event["metadata"]


def test_every_interval_that_begins_ends(bench: ModuleType, run: Any) -> None:
    for one in (run, replace(run, evaluations=run.evaluations[:2])):
        found = events(bench.mllog(bench.JOBS["gpt"], one, FOUND))
        began = [
            e["key"].removesuffix("_start") for e in found if e["event_type"] == "INTERVAL_START"
        ]
        ended = [e["key"].removesuffix("_stop") for e in found if e["event_type"] == "INTERVAL_END"]
        assert sorted(began) == sorted(ended)
    assert found[-1]["metadata"]["status"] == "aborted"


def test_lines_are_read_with_the_time_at_which_they_come(bench: ModuleType) -> None:
    code = (
        "import time\n"
        "for step in (1, 2):\n"
        "    time.sleep(0.1)\n    print(f'step {step} loss 1.5')\n"
        "print('something else')\n"
        "print('step 2 val loss 2.1')\n"
    )
    found = bench.read(bench.JOBS["gpt"], "naive", 1, [sys.executable, "-u", "-c", code])
    assert found.exit_code == 0
    ((step, value, at_s, began_s),) = found.evaluations
    assert (step, value) == (2, 2.1)
    assert 0.1 < found.first_step_s < began_s <= at_s <= found.wall_s


@pytest.mark.parametrize("name", ["gpt", "cnn", "gpt2"])
def test_scripts_print_what_is_read(bench: ModuleType, name: str) -> None:
    job = bench.JOBS[name]
    text = (ROOT / job.script).read_text("utf-8")
    printed = re.findall(r'print\(f"((?:step|epoch) [^"]*)"', text)
    filled = [re.sub(r"\{[^}]*\}", "2", line) for line in printed]
    assert any(job.evaluation.match(line) for line in filled)
    assert any(bench.STEP.match(line) for line in filled)
    assert "--seed" in text


def test_what_is_known_of_the_examples_is_true(bench: ModuleType) -> None:
    text = (ROOT / "examples" / "train_cnn.py").read_text("utf-8")
    assert "lines[:1500]" in text
    assert bench.JOBS["cnn"].train_samples == 1500
    assert bench.JOBS["cnn"].steps_per_count == -(-1500 // bench.JOBS["cnn"].batch)
    from pydoc_data.topics import topics

    assert len("\n\n".join(topics[name] for name in sorted(topics))) == bench.TEXT


def test_arms_that_a_device_has_not_are_said(bench: ModuleType, tmp_path: Path) -> None:
    options = bench._options(["--out", str(tmp_path / "x.json")])
    cpu = bench._entry(bench.JOBS["gpt"], None, options, "cpu")
    assert cpu["arms"] == ["naive", "bf16"]
    assert sorted(cpu["left_out"]) == ["fp16", "tf32", "tuned"]
    gpu = bench._entry(bench.JOBS["gpt2"], None, options, "cuda")
    assert gpu["arms"] == ["naive", "tf32", "bf16"]
    made = bench._plans(bench.JOBS["gpt"], cpu, tmp_path)
    assert [fix.code for fix in bench.plans.load(made["bf16"]).fixes] == ["FW104"]


def test_it_goes_on_with_what_is_missing(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def read(job: Any, arm: str, seed: int, words: Any) -> Any:
        ran.append((arm, seed))
        assert ("--plan" in words) == (arm != "naive")
        return bench.Run(arm, seed, 0.0, 1.0, [[20, 2.0, 3.0, 2.5]], 4.0, 0)

    monkeypatch.setattr(bench, "read", read)
    monkeypatch.setattr(bench, "_tune", lambda *_: None)
    out = tmp_path / "results.json"
    words = ["--out", str(out), "--work", str(tmp_path / "work"), "--jobs", "gpt"]
    assert bench.main([*words, "--budget", "0"]) == 1
    assert bench.main([*words, "--seeds", "1"]) == 0
    assert sorted(ran) == [("bf16", 1337), ("naive", 1337)]
    assert bench.main([*words, "--resume"]) == 0
    assert sorted(ran) == [(arm, seed) for arm in ("bf16", "naive") for seed in (1337, 1338, 1339)]
    assert sorted(path.name for path in (tmp_path / "results").iterdir())[0] == "gpt-bf16-1337.txt"
