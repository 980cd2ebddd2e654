"""Low device use because of loading: one test a case, times a fifth to a tenth of the reports'."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Items(Dataset[torch.Tensor]):
    """Items that take the time that `seconds` says."""

    def __init__(self, n: int, seconds: Callable[[int], float]) -> None:
        self.n = n
        self.seconds = seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds(index))
        return torch.ones(4)


def train(loader: DataLoader[Any], compute_s: float, epochs: int = 1) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            time.sleep(compute_s)
            loss.backward()
            optimizer.step()


def test_in_01_the_device_is_idle_on_every_fourth_batch(run_case: Any) -> None:
    items = Items(208, lambda index: 0.08 if index % 16 == 0 else 0.002)
    loader = DataLoader(items, batch_size=4, num_workers=2, prefetch_factor=2)
    case = run_case(lambda: train(loader, 0.010), count=False, warmup=4)
    found = case.finding("input-wait")
    assert 0.35 < found.share_frac < 0.8  # about half of the wall time
    assert "the wait comes at every 4th step" in found.evidence
    needed = re.search(r"(\d+) workers are needed", found.evidence)
    assert (
        needed is not None
    )  # 86 + 3 x 8 = 110 ms for 4 batches, 10 ms a step: 3, on an idle machine
    assert 3 <= int(needed[1]) <= 5
    assert "a larger prefetch_factor alone does not raise the steady rate" in case.report
    assert found.predicted_gain_frac is not None
    assert 0 < found.predicted_gain_frac < found.share_frac + 0.05
    assert re.search(r"test_kind_1_input\.py:\d+$", found.where[0])
    assert case.record.phases.verdict.startswith("input-bound")


def test_in_02_the_training_process_fetches_its_own_batches(run_case: Any) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(Items(240, lambda _: 0.002), batch_size=8, num_workers=workers)

    before = run_case(lambda: train(loader(0), 0.008), count=False, warmup=4)
    found = before.finding("input-wait")
    assert "num_workers=0" in found.evidence
    assert "their overlap is zero" in found.evidence
    assert 0.5 < found.share_frac < 0.85
    proposed = re.search(r"num_workers=(\d+) \(this process has (\d+) core", found.advice)
    assert proposed is not None
    workers, cores = map(int, proposed.groups())
    assert 1 <= workers <= cores <= CORES
    assert "measures the samples a second before and after" in found.advice
    after = run_case(lambda: train(loader(workers), 0.008), count=False, warmup=4)
    assert after.record.throughput.samples_per_s > 1.1 * before.record.throughput.samples_per_s
    assert "their overlap is zero" not in after.report


@pytest.mark.parametrize("persistent", [False, True])
def test_in_03_a_pause_at_the_start_of_every_epoch(run_case: Any, persistent: bool) -> None:
    def slow_start(_: int) -> None:
        time.sleep(0.15)

    loader = DataLoader(
        Items(64, lambda _: 0.001),
        batch_size=8,
        num_workers=2,
        persistent_workers=persistent,
        worker_init_fn=slow_start,
    )
    case = run_case(lambda: train(loader, 0.004, epochs=4), count=False, warmup=3)
    pause = next(p for p in case.record.steps.pauses if p.kind == "epoch_start")
    assert pause.count == 3
    if persistent:
        assert "epoch-start-up" not in case.causes()
        assert pause.total_s < 0.15  # less than one slow start
        return
    found = case.finding("epoch-start-up")
    seconds = re.match(r"([\d.]+) ms in all, ([\d.]+) ms at each of 3 starts", found.evidence)
    assert seconds is not None, found.evidence
    assert 3 * 150 <= float(seconds[1]) < 3 * 800
    assert "2 workers are started anew" in found.evidence
    assert "The steady wait for data is apart from it" in found.evidence
    assert 0.4 < found.share_frac < 0.95  # three starts of 150 ms against some 28 steps of 5 ms
    assert found.predicted_gain_frac == found.share_frac
    assert found.advice.startswith("persistent_workers=True")


class Products(Dataset[torch.Tensor]):
    """A matrix product an item, in the thread pool of a library."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.ones(1000, 1000)
        return (x @ x)[0, :4] * 1e-3


@pytest.mark.parametrize("capped", [False, True])
def test_in_04_threads_of_the_workers_swamp_the_cores(run_case: Any, capped: bool) -> None:
    threads = 1 if capped else 2 * CORES
    loader = DataLoader(
        Products(),
        batch_size=1,
        num_workers=2,
        worker_init_fn=lambda _: torch.set_num_threads(threads),
    )
    case = run_case(lambda: train(loader, 0.001), count=False, warmup=4)
    assert case.record.throughput.samples_per_s > 0  # the rate, before and after
    if capped and CORES > 1:
        assert "threads-exceed-cores" not in case.causes()
        return
    if capped:
        pytest.skip("on one core two workers are too many, too")
    found = case.finding("threads-exceed-cores")
    wanted, cores = re.match(
        r"on average ([\d.]+) threads of this job want a core, it has (\d+)", found.evidence
    ).groups()  # type: ignore[union-attr]
    assert float(wanted) > 1.1 * int(cores)
    assert int(cores) == CORES
    assert re.search(
        r"1 rank x \d+ busy threads? \+ 1 x 2 workers x up to \d+ busy threads", found.evidence
    )
    assert "OpenMP" in found.evidence  # torch's pool
    assert f"at most {max(1, CORES // 2)} thread" in found.advice


class Busy(Dataset[torch.Tensor]):
    """Items that compute for 4 ms."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return torch.ones(4)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.skipif(CORES < 2, reason="one core cannot be cut to fewer")
@pytest.mark.parametrize("pinned", [True, False])
def test_in_05_all_workers_run_on_one_core(run_case: Any, pinned: bool) -> None:
    everything = os.sched_getaffinity(0)

    def script() -> None:
        if pinned:
            os.sched_setaffinity(0, {min(everything)})  # what an imported library does unasked
        train(DataLoader(Busy(), batch_size=4, num_workers=4), 0.001)

    try:
        case = run_case(script, count=False, warmup=4)
    finally:
        os.sched_setaffinity(0, everything)
    if not pinned:
        assert "workers-share-cores" not in case.causes()
        return
    found = case.finding("workers-share-cores")
    assert found.evidence.startswith(f"4 workers share 1 of {CORES} cores")
    assert f"began with {CORES} and was cut to 1 (before the first step)" in found.evidence
    assert re.search(r"test_kind_1_input\.py:\d+$", found.where[0])
    assert "more workers would not help" in found.advice


def test_in_06_fast_at_first_and_starved_later(run_case: Any) -> None:
    items = Items(400, lambda index: 0.0004 if index < 200 else 0.012)
    loader = DataLoader(items, batch_size=8, num_workers=2)

    def script() -> None:
        train(loader, 0.006)

    case = run_case(script, count=False, warmup=4)
    found = case.finding("input-degrades")
    said = re.search(
        r"rose from ([\d.]+) % to ([\d.]+) % of a step after step (\d+)", found.evidence
    )
    assert said is not None, found.evidence
    before, after, step = float(said[1]), float(said[2]), int(said[3])
    assert before < 45  # close to 0 on an idle machine
    assert after > before + 40
    assert 24 <= step <= 32  # item 200 is in batch 26; two workers have up to four batches ready
    assert found.share_frac == pytest.approx(after / 100, abs=1e-3)
    assert "what the first steps showed does not hold" in case.report
    assert case.record.phases.verdict.startswith(
        "input-bound"
    )  # of the whole, not of the beginning


def test_nothing_is_found_where_loading_keeps_up(run_case: Any) -> None:
    loader = DataLoader(
        Items(120, lambda _: 0.0002), batch_size=4, num_workers=2, persistent_workers=True
    )
    case = run_case(lambda: train(loader, 0.060), count=False, warmup=4)
    assert case.causes() == []
    assert "findings" not in case.report
