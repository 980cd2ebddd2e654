"""The promises of docs/trials.md, by simulation through the real schedule and comparison.

A small part of benchmarks/trials_simulation.py with fixed seeds. The bar is 5 % false "faster"; a
count is held against the 99.9 % quantile of the binomial distribution with that probability, so
that a method at exactly 5 % would fail about one case in a thousand, had the seeds not been fixed.
The last test of each group shows that a method that is wrong does fail the same bar.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RUNS, LOOKS = 150, 200


def load() -> ModuleType:
    path = ROOT / "benchmarks" / "trials_simulation.py"
    spec = importlib.util.spec_from_file_location("trials_simulation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


simulation = load()


def largest_allowed(runs: int, rate: float = 0.05, level: float = 0.999) -> int:
    """Returns the `level` quantile of the binomial distribution."""
    total = 0.0
    for k in range(runs + 1):
        total += math.comb(runs, k) * rate**k * (1 - rate) ** (runs - k)
        if total >= level:
            return k
    return runs


BAR = largest_allowed(RUNS)  # 17 of 150


@pytest.mark.parametrize("process", list(simulation.PROCESSES))
def test_stopping_early_is_at_most_5_percent_wrong_and_peeking_at_a_t_interval_is_not(
    process: str,
) -> None:
    ours, naive = simulation.false_faster(process, RUNS, LOOKS)
    assert ours <= BAR
    if process == "normal":
        assert naive > BAR


def test_a_fixed_order_takes_a_clock_ramp_for_a_gain() -> None:
    false = 0
    for seed in range(20):
        steps = simulation.PROCESSES["clocks ramp up: 0.5 % faster each block"](
            simulation.random.Random(seed)
        )
        order = simulation.FixedOrder(seed, simulation.BLOCK_STEPS, simulation.WASHOUT_STEPS)
        result = simulation.trial(
            steps,
            seed,
            simulation.equal,
            schedule=order,
            comparison=simulation.NoDriftCorrection(),
        )
        false += result.outcome == "faster"
    assert false > largest_allowed(20)


@pytest.mark.parametrize("process", list(simulation.PROCESSES)[:3])
def test_a_1_percent_gain_at_1_percent_noise_is_found_within_40_pairs(process: str) -> None:
    trials = simulation.found(process, 0.01, 100, looks=40)
    assert sum(trial.outcome == "faster" for trial in trials) >= 90
    held = 0
    for trial in trials:
        seen = trial.comparison.comparison()
        assert seen is not None
        held += seen.ci95[0] <= 0.99 <= seen.ci95[1]
    assert held >= 100 - largest_allowed(100)  # the interval at the stop holds the truth


def test_a_loss_is_never_called_faster() -> None:
    trials = simulation.found("normal", -0.01, 100, looks=60)
    assert sum(trial.outcome == "faster" for trial in trials) == 0


def test_the_simulated_noise_is_what_it_is_said_to_be() -> None:
    for process in list(simulation.PROCESSES)[:4]:
        steps = simulation.PROCESSES[process](simulation.random.Random(1))
        result = simulation.trial(steps, 1, simulation.equal, looks=2000, min_pairs=2000)
        assert result.comparison._effect.sequence.spread == pytest.approx(0.01, rel=0.15)


def test_of_several_processes_each_counts_once_and_all_pairs_alone_would_be_wrong() -> None:
    results = [simulation.of_processes(seed, 0.0, 0.03, 5, 0.001) for seed in range(RUNS)]
    assert sum(both for both, _, _ in results) <= BAR
    assert sum(alone for _, alone, _ in results) > BAR


def test_the_documented_table_is_the_measured_one() -> None:
    stored = json.loads((ROOT / "benchmarks/results/trials_simulation.json").read_text("utf-8"))
    rows = [simulation.Row(**row) for row in stored]
    docs = (ROOT / "docs/trials.md").read_text("utf-8")
    for line in simulation.markdown(rows).splitlines():
        assert line in docs
    bar = [row for row in rows if row.measure == "false faster"]
    assert len(bar) == len(simulation.PROCESSES)
    assert all(row.value <= 0.05 for row in bar)
    several = [row for row in rows if row.measure == "false faster, both intervals"]
    assert len(several) == 4
    assert all(row.value <= 0.05 for row in several)
    found = [row for row in rows if row.measure == "found"]
    assert all(row.value >= 0.9 for row in found)
