"""Cases that touch a loop's input, as `flopwise.kit.input` answers them: one test a case.

IN-03 to IN-05 (start-up of every epoch, threads of workers, all workers on one core) are found by the meter; the kit
changes none of them. IN-06 is judged by the meter; what the tuner does with it is below.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flopwise.kit.input import PinnedPool, Prefetcher, collate_into, plan_pinned, tune_loader

# Python 3.12 and later say so wherever a process with threads forks, as DataLoader does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
GIB = 2**30


class Items(Dataset[torch.Tensor]):
    """Items that take the time that `seconds` says."""

    def __init__(self, n: int, seconds: Callable[[int], float]) -> None:
        self.n, self.seconds = n, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds(index))
        return torch.tensor([float(index)])


def test_in_01_a_deeper_ring_alone_does_not_feed_a_device_that_loading_cannot_keep_up_with() -> (
    None
):
    def mean_wait(depth: int) -> float:
        items = Items(96, lambda index: 0.08 if index % 16 == 0 else 0.002)  # 110 ms for 4 batches
        loader = DataLoader(items, batch_size=4, num_workers=2, prefetch_factor=2)
        batches = Prefetcher(loader, "cpu", depth, measure_wait=True)
        for _ in batches:
            time.sleep(0.005)  # 20 ms for 4 batches
        return statistics.fmean(batches.waits_s()[8:])

    shallow, deep = mean_wait(2), mean_wait(8)
    assert shallow > 0.004
    assert deep > 0.5 * shallow
    # so the tuner looks for workers first, and says so where none are to be had
    items = Items(640, lambda index: 0.02 if index % 16 == 0 else 0.001)
    tuning = tune_loader(
        DataLoader(items, 4), lambda _: None, device="cpu", steps=20, max_workers=0, budget_s=5
    )
    assert "loading itself must become cheaper" in tuning.reason


def test_in_02_the_number_of_workers_comes_from_a_trial_and_is_not_above_the_cores() -> None:
    loader = DataLoader(Items(4000, lambda _: 0.0005), batch_size=8)
    tuning = tune_loader(loader, lambda _: time.sleep(0.004), device="cpu", steps=20, budget_s=15)
    tried = [t.choice.num_workers for t in tuning.trials]
    assert tried[0] == 0
    assert max(tried) <= CORES  # 8 on 2 cores was slower than none
    assert tuning.choice is not None
    chosen = next(t for t in tuning.trials if t.choice == tuning.choice)
    assert chosen.step_s <= tuning.trials[0].step_s  # before and after, measured


def test_in_06_waiting_is_taken_over_the_trial_and_its_interval_shows_the_change() -> None:
    items = Items(
        400, lambda index: 0.0002 if index < 20 else 0.010
    )  # fast at first, starved later
    tuning = tune_loader(
        DataLoader(items, batch_size=1),
        lambda _: time.sleep(0.002),
        device="cpu",
        steps=40,
        max_workers=0,
        budget_s=3,
    )
    first = tuning.trials[0]
    assert first.wait_frac > 0.3  # "input is fine" does not stand
    assert first.high_frac - first.low_frac > 0.1


class Deadly(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            time.sleep(0.05)  # the first batch is through
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def consume(batches: Any) -> None:
    for _ in batches:
        time.sleep(0.01)


@pytest.mark.parametrize("pooled", [False, True])
def test_hg_09_a_worker_that_is_killed_is_one_error_and_nothing_stays_behind(
    pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch looks after its workers every 5 s, and the thread that reads ends when it has.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.3,))
    pool = PinnedPool(4096, 8)
    loader = DataLoader(
        Deadly(), batch_size=2, num_workers=1, collate_fn=collate_into(pool) if pooled else None
    )
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"killed by signal: Killed|exited unexpectedly"):
        consume(Prefetcher(loader, "cpu"))
    assert time.monotonic() - begun < 3.0
    assert not [t for t in threading.enumerate() if t.name == "flopwise-input"]
    gc.collect()
    pool.reclaim()
    assert pool.held + sum(pool._tokens.take() is not None for _ in range(9)) == 8


LOCK = threading.Lock()


class Locked(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        with LOCK:
            return torch.tensor(index)


def test_hg_09_a_lock_inherited_by_fork_ends_in_the_loaders_own_timeout() -> None:
    loader = DataLoader(Locked(), num_workers=1, timeout=1, multiprocessing_context="fork")
    begun = time.monotonic()
    with LOCK, pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iter(Prefetcher(loader, "cpu")))
    assert time.monotonic() - begun < 8


def test_hg_09_threads_of_the_kit_hold_no_lock_that_a_worker_of_another_loader_needs() -> None:
    """A pool is in use by a reading thread while a second loader forks its workers; they take slots without a lock."""
    pool = PinnedPool(4096, 32)
    for _ in range(5):
        first = iter(
            Prefetcher(
                DataLoader(Items(64, lambda _: 0.0), num_workers=1, collate_fn=collate_into(pool)),
                "cpu",
            )
        )
        next(first)
        second = Prefetcher(
            DataLoader(Items(16, lambda _: 0.0), num_workers=2, collate_fn=collate_into(pool)),
            "cpu",
        )
        assert [int(x) for x in second] == list(range(16))
        del first
    assert pool.counts.fallbacks == {}


def test_me_04_what_page_locked_buffers_will_take_is_said_before() -> None:
    plan = plan_pinned([int(2.25 * GIB), int(1.125 * GIB), int(0.563 * GIB)])
    assert plan.taken == (4 * GIB, 2 * GIB, GIB)
    assert plan.factor == pytest.approx(1.78, abs=0.005)
    assert "the caching host allocator takes 4 + 2 + 1 = 7 GiB, factor 1.78" in str(plan)
    assert plan.asked_bytes == sum(
        plan.asked
    )  # what the kit's own buffers take: they are registered exactly


class Noisy(Dataset[Any]):
    """Adds noise from the global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index + 0.1 * torch.rand(())


@pytest.mark.parametrize("workers", [0, 2])
def test_ck_03_skipped_batches_draw_what_they_drew_and_the_loops_generator_is_left_alone(
    workers: int,
) -> None:
    def loader() -> Any:
        return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)

    torch.manual_seed(7)
    batches = Prefetcher(loader(), "cpu", thread=False)
    whole, state = [], None
    for k, x in enumerate(batches):
        whole.append(x)
        if k == 4:
            state = batches.state_dict()
    assert state is not None
    torch.manual_seed(1)
    again = Prefetcher(loader(), "cpu", thread=False)
    again.load_state_dict(state)
    before = torch.get_rng_state()
    rest = iter(again)
    assert torch.equal(torch.get_rng_state(), before)  # skipping came first and left nothing behind
    if workers:  # noise is drawn by workers whose seeds come with the epoch: exact
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[5:], strict=True))
    else:  # drawn beside the loop's own numbers: the order is the same, the noise is the limit that the docs state
        assert all(torch.equal(a.floor(), b.floor()) for a, b in zip(rest, whole[5:], strict=True))
