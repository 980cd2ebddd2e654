"""The loop of the programs with a known fault: blocks in turns, their arithmetic, and two programs themselves."""

from __future__ import annotations

import json
import statistics

import pytest


@pytest.fixture
def loop(benchmark_module):
    return benchmark_module("loop")


@pytest.fixture
def where(loop):
    return loop.Where("cpu", small=True)


def test_a_round_gives_one_difference_from_which_a_linear_drift_cancels(loop):
    order = ["on", "off", "off", "on", "off", "on", "on", "off"]
    blocks = [(name, (5.0 if name == "on" else 2.0) + 0.1 * k) for k, name in enumerate(order)]
    assert loop.differences(blocks, "on") == pytest.approx([3.0, 3.0])
    assert loop.differences(blocks[:7], "on") == pytest.approx([3.0])


def test_the_bootstrap_covers_the_mean_about_as_wide_as_theory_has_it(loop):
    values = [float(k % 7) for k in range(70)]
    low, high = loop.bootstrap(values)
    half = 1.96 * statistics.stdev(values) / 70**0.5
    assert (low, high) == pytest.approx((3 - half, 3 + half), abs=0.1)
    assert loop.bootstrap([2.0]) == (2.0, 2.0)


class Machine:
    """A device whose clock only steps move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter

    def arm(self, loop, name: str, step_s: float, settle: int = 3):
        def step() -> None:
            self.log.append(name)
            self.now += step_s

        return loop.Arm(step, settle)


@pytest.fixture
def machine(loop, monkeypatch):
    found = Machine()
    monkeypatch.setattr(loop, "time", found)
    return found


def test_two_arms_alternate_and_their_difference_is_found(loop, where, machine):
    arms = {"on": machine.arm(loop, "on", 0.03), "off": machine.arm(loop, "off", 0.01, settle=5)}
    found = loop.alternate(arms, where, rounds=4, block_s=0.1, settle_s=0.0, limit_s=1e9)
    assert found["difference_s"] == pytest.approx(0.02)
    assert found["arms_s"] == pytest.approx({"on": 0.03, "off": 0.01})
    assert found["block_steps"] == {"on": 3, "off": 10}
    assert found["settle_steps"] == {"on": 3, "off": 5}
    order = [name for name, _ in found["blocks_s"]]
    assert order == ["on", "off", "off", "on", "off", "on", "on", "off"] * 2
    warm = 2 * (loop.WARM_STEPS + loop.PILOT_STEPS)
    first = ["on"] * 6 + ["off"] * 25 + ["on"] * 6
    assert machine.log[warm : warm + len(first)] == first


def test_rounds_end_with_the_time_but_never_before_three(loop, where, machine):
    arms = {"on": machine.arm(loop, "on", 0.03), "off": machine.arm(loop, "off", 0.01)}
    found = loop.alternate(arms, where, rounds=50, block_s=0.1, settle_s=0.5, limit_s=0.0)
    assert len(found["differences_s"]) == 3
    assert found["settle_steps"] == {"on": 17, "off": 50}


def test_training_ends_after_its_steps_or_seconds_and_writes_its_own_clock(
    loop, where, machine, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRUTH_JSON", str(tmp_path / "truth.json"))
    loop.train(machine.arm(loop, "on", 0.5), where, steps=4, seconds=100)
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert truth["step_s"] == pytest.approx([0.5] * 3)
    assert truth["unix_s"] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    loop.train(machine.arm(loop, "on", 0.5), where, steps=0, seconds=3)
    assert len(machine.log) == 4 + 6


def test_training_that_is_ended_from_outside_still_writes_its_clock(
    loop, where, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRUTH_JSON", str(tmp_path / "truth.json"))
    steps = iter(range(3))

    def step() -> None:
        if next(steps, None) is None:
            raise SystemExit

    with pytest.raises(SystemExit):
        loop.train(loop.Arm(step), where, steps=0, seconds=60)
    assert len(json.loads((tmp_path / "truth.json").read_text())["step_s"]) == 2


def test_a_fix_that_does_not_exist_is_refused(loop):
    assert loop.named("bf16,sdpa", ("bf16", "sdpa", "compile")) == {"bf16", "sdpa"}
    assert loop.named("", ("bf16",)) == frozenset()
    with pytest.raises(SystemExit, match="no fix is called fp4; there are bf16"):
        loop.named("fp4", ("bf16",))


def test_a_sleeping_loader_costs_at_least_its_sleep(loop, where, benchmark_module):
    program = benchmark_module("sleep_in_loader")
    arms = {"on": program.build(True, where), "off": program.build(False, where)}
    found = loop.alternate(arms, where, rounds=3, block_s=0.02, settle_s=0.0, limit_s=60)
    assert found["difference_s"] >= 0.039
    assert found["ci95"][0] <= found["difference_s"] <= found["ci95"][1]


@pytest.mark.parametrize("name", ["checkpointing", "unfused_chain"])
def test_a_fault_changes_the_time_and_not_the_training(loop, where, benchmark_module, name):
    """The parameters after three steps are the same with the fault and without it."""
    import torch

    program = benchmark_module(name)
    after = []
    for fault in (True, False):
        torch.manual_seed(0)
        step = program.build(fault, where).step
        for _ in range(3):
            step()
        model = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))["model"]
        after.append(torch.cat([p.detach().flatten() for p in model.cell_contents.parameters()]))
    torch.testing.assert_close(*after, rtol=1e-4, atol=5e-5)
