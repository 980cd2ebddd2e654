from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.input import LoaderChoice
from flopwise.kit.input.trial import HEAD, TrialRun, trial_of

CHOICE = LoaderChoice(2, 2, False, 3)


def test_the_wait_is_a_share_of_the_step_with_an_interval_from_blocks() -> None:
    steady = trial_of(CHOICE, [0.001] * 40, [0.010] * 40, 0.0)
    assert (steady.steps, steady.step_s, steady.wait_s) == (
        40,
        pytest.approx(0.01),
        pytest.approx(0.001),
    )
    assert steady.wait_frac == pytest.approx(0.1)
    assert steady.low_frac == pytest.approx(0.1)
    assert steady.high_frac == pytest.approx(0.1)
    uneven = trial_of(CHOICE, [0.0] * 20 + [0.002] * 20, [0.010] * 40, 0.0)
    # ten blocks of 0 and 2 ms: mean 1 ms, standard deviation 1.0541 ms, half width 2.262 x 1.0541 / sqrt(10)
    assert uneven.high_frac == pytest.approx(0.1 + 2.262 * 0.10541 / 10**0.5, rel=1e-3)
    assert uneven.low_frac == pytest.approx(0.1 - 2.262 * 0.10541 / 10**0.5, rel=1e-2)


def test_what_the_device_still_did_counts_into_the_steps() -> None:
    assert trial_of(CHOICE, [0.0] * 20, [0.001] * 20, 0.18).step_s == pytest.approx(0.010)


def test_too_few_steps_say_nothing() -> None:
    trial = trial_of(CHOICE, [0.0] * 5, [0.01] * 5, 0.0)
    assert (trial.low_frac, trial.high_frac, trial.note) == (0.0, 1.0, "too few steps")


def test_rows_stand_under_the_head() -> None:
    row = trial_of(CHOICE, [0.001] * 40, [0.010] * 40, 0.0).row()
    assert row == "      2        2     no     3     10.00      1.00  10.0%  10.0% - 10.0%     40"
    assert HEAD.index("step ms") + len("step ms") == row.index("10.00") + len("10.00")


class Slow(Dataset[Any]):
    def __init__(self, n: int, item_s: float) -> None:
        self.n, self.item_s = n, item_s

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        time.sleep(self.item_s)
        return torch.ones(8)


def test_a_loader_that_is_too_slow_is_seen_to_be() -> None:
    loader = DataLoader(Slow(100, 0.010), batch_size=1)
    run = TrialRun(loader, LoaderChoice(0, None, False, 2), "cpu", lambda _: time.sleep(0.003))
    trial = run.measure(20, time.monotonic() + 60)
    assert trial is not None
    assert trial.steps == 20
    assert 0.5 < trial.wait_frac < 0.85  # 7 of 10 ms
    assert run.batch_bytes == 32


def test_epochs_shorter_than_the_trial_are_begun_again() -> None:
    loader = DataLoader(Slow(4, 0.0), batch_size=1)
    trial = TrialRun(loader, LoaderChoice(0, None, False, 2), "cpu", lambda _: None).measure(
        20, time.monotonic() + 60
    )
    assert trial is not None
    assert trial.steps == 20


def test_without_batches_there_is_no_trial() -> None:
    assert (
        TrialRun([], LoaderChoice(0, None, False, 2), "cpu", len).measure(20, time.monotonic() + 60)
        is None
    )
    one = TrialRun([torch.ones(1)], LoaderChoice(0, None, False, 2), "cpu", len)
    assert one.measure(20, time.monotonic() + 60) is None  # a first batch pays for the start


def test_when_time_is_up_twenty_steps_are_enough() -> None:
    loader = DataLoader(Slow(500, 0.0), batch_size=1)
    trial = TrialRun(loader, LoaderChoice(0, None, False, 2), "cpu", lambda _: None).measure(
        400, time.monotonic() - 1
    )
    assert trial is not None
    assert trial.steps == 20


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_are_slower_than_the_step_are_seen_though_much_was_queued() -> None:
    """Two workers bring a batch in 30 ms for a step of 24; what the slow first step lets queue up lasts for 40 steps."""
    stepped = []

    def step(batch: Any) -> None:
        time.sleep(0.024 if stepped else 0.6)
        stepped.append(batch)

    loader = DataLoader(Slow(500, 0.060), batch_size=1, num_workers=2, prefetch_factor=2)
    run = TrialRun(loader, LoaderChoice(2, 2, False, 3), "cpu", step)
    trial = run.measure(20, time.monotonic() + 60)
    assert trial is not None
    assert trial.step_s > 0.028
    assert 0.1 < trial.wait_frac < 0.4  # 6 of 30 ms
    assert len(stepped) == trial.steps + 4  # what was queued was taken without the step
