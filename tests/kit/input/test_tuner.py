from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flopwise.errors import InputError
from flopwise.kit.input import (
    LoaderChoice,
    PinnedPool,
    Prefetcher,
    collate_into,
    tune_loader,
    tuner,
)
from flopwise.kit.input.trial import LoaderTrial

# The machines here have more cores than the one that runs the tests.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

DATA = TensorDataset(torch.arange(64))


class Machine:
    """Answers for trials as a machine would: loading takes load_s a batch on one worker, the step compute_s."""

    def __init__(
        self, load_s: float, compute_s: float, cores: int, half_frac: float = 0.005
    ) -> None:
        self.load_s, self.compute_s, self.cores, self.half_frac = (
            load_s,
            compute_s,
            cores,
            half_frac,
        )
        self.tried: list[LoaderChoice] = []

    def __call__(self, loader: Any, choice: LoaderChoice, device: Any, step: Any) -> Any:
        self.tried.append(choice)
        return self

    batch_bytes = 1000

    def measure(self, steps: int, end: float) -> LoaderTrial:
        choice = self.tried[-1]
        lanes = min(choice.num_workers, self.cores)
        step_s = max(self.compute_s, self.load_s / lanes) if lanes else self.load_s + self.compute_s
        frac = (step_s - self.compute_s) / step_s
        return LoaderTrial(
            choice,
            steps,
            step_s,
            frac * step_s,
            frac,
            max(0.0, frac - self.half_frac),
            frac + self.half_frac,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(load_s: float, compute_s: float, cores: int = 16, memory: int = 1000) -> Machine:
        made = Machine(load_s, compute_s, cores)
        monkeypatch.setattr(tuner, "TrialRun", made)
        monkeypatch.setattr(tuner, "usable_cores", lambda: cores)
        monkeypatch.setattr(tuner, "most_workers_by_memory", lambda: memory)
        monkeypatch.setattr(tuner, "shared_memory_problem", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return made

    return make


def tune(loader: Any = None, **options: Any) -> Any:
    return tune_loader(
        loader if loader is not None else DataLoader(DATA), lambda _: None, device="cpu", **options
    )


def test_a_loader_that_keeps_up_is_left_as_it_is(machine: Any) -> None:
    made = machine(load_s=0.0001, compute_s=0.1)
    loader = DataLoader(DATA)
    tuning = tune(loader)
    assert len(made.tried) == 1
    assert tuning.loader() is loader
    assert tuning.choice == LoaderChoice(0, None, False, 3)


def test_as_many_workers_as_the_waiting_needs_and_no_more(machine: Any) -> None:
    made = machine(load_s=0.045, compute_s=0.010)
    tuning = tune()
    assert tuning.choice is not None
    assert tuning.choice.num_workers == 5  # ceil(45 / 10)
    assert [c.num_workers for c in made.tried] == [0, 5]
    assert tuning.loader().num_workers == 5
    assert "the device waits 0.0% of the time" in tuning.reason


@pytest.mark.parametrize(
    ("limits", "options", "workers"),
    [({"cores": 4}, {}, 4), ({"memory": 3}, {}, 3), ({}, {"max_workers": 2}, 2)],
    ids=["cores", "memory", "asked"],
)
def test_never_more_than_cores_memory_and_the_caller_allow(
    machine: Any, limits: Any, options: Any, workers: int
) -> None:
    made = machine(load_s=1.0, compute_s=0.010, **limits)
    tuning = tune(**options)
    assert max(c.num_workers for c in made.tried) == workers
    assert tuning.choice.num_workers == workers
    assert (
        "nothing tried brings it below the aim: loading itself must become cheaper" in tuning.reason
    )


def test_where_more_workers_do_not_help_fewer_are_chosen(machine: Any) -> None:
    made = machine(load_s=0.1, compute_s=0.010, cores=16)
    made.cores = 2  # what the machine gives, whatever it says it has
    tuning = tune()
    assert tuning.choice.num_workers <= 10
    assert len(made.tried) <= 6


def test_shared_memory_limits_what_is_tried(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine(load_s=0.1, compute_s=0.010)
    monkeypatch.setattr(
        tuner,
        "shared_memory_problem",
        lambda nbytes, workers, factor: "full" if workers > 1 else None,
    )
    tune()
    assert max(c.num_workers for c in made.tried) <= 1


def test_a_pool_limits_the_workers_to_what_it_has_slots_for(machine: Any) -> None:
    made = machine(load_s=1.0, compute_s=0.010)
    pool = PinnedPool(64, 11)
    tuning = tune(DataLoader(DATA, collate_fn=collate_into(pool)))
    assert tuning.choice.num_workers == 3  # (11 - 3 - 2) // 2
    assert all(
        c.num_workers * (c.prefetch_factor or 2) + c.depth + 2 <= 11 or not c.num_workers
        for c in made.tried[:2]
    )


def test_a_data_set_that_more_workers_would_change_keeps_its_number(machine: Any) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.ones(1)] * 50)

    made = machine(load_s=0.1, compute_s=0.010)
    tune(DataLoader(Stream()))
    assert {c.num_workers for c in made.tried} == {0}


def test_anything_else_than_a_dataloader_has_its_ring_deepened_and_says_why(machine: Any) -> None:
    made = machine(load_s=0.1, compute_s=0.010)
    batches = [torch.ones(1)] * 4
    tuning = tune(batches)
    assert [c.depth for c in made.tried] == [3, 6]
    assert tuning.loader() is batches
    assert "list is not a DataLoader" in tuning.reason


def test_what_can_be_read_once_is_not_used_up() -> None:
    batches = iter([1, 2])
    with pytest.raises(InputError, match="can be read only once"):
        tune(batches)
    assert list(batches) == [1, 2]


def test_nothing_comes_of_a_loader_without_batches() -> None:
    tuning = tune([])
    assert tuning.choice is None
    assert tuning.reason == "nothing was tried: the loader gives no batch"
    assert tuning.loader() == []


def test_when_the_time_is_up_the_best_so_far_is_taken(machine: Any) -> None:
    made = machine(load_s=0.1, compute_s=0.010)
    tuning = tune(budget_s=0.0)
    assert len(made.tried) == 1
    assert tuning.choice == LoaderChoice(0, None, False, 3)


def test_the_table_shows_every_trial_and_the_choice(machine: Any) -> None:
    machine(load_s=0.03, compute_s=0.010)
    said: list[str] = []
    tuning = tune(say=said.append)
    lines = tuning.table().splitlines()
    assert lines[1:-1] == said
    assert lines[0].split()[0] == "workers"
    assert lines[-1].startswith("chosen: num_workers=3, prefetch_factor=2")


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.006)
        return torch.tensor(i)


def test_for_real_waiting_goes_down_and_the_batches_are_the_same_in_the_same_order() -> None:
    def loader() -> Any:
        return DataLoader(
            Slow(), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    wanted = [int(x) for x, _ in zip(loader(), range(12), strict=False)]
    given = loader()
    tuning = tune_loader(
        given, lambda _: time.sleep(0.005), device="cpu", steps=20, max_workers=2, budget_s=20
    )
    first, best = tuning.trials[0], min(tuning.trials, key=lambda t: t.wait_frac)
    assert first.wait_frac > 0.1
    assert best.choice.num_workers >= 1
    assert best.step_s < first.step_s
    assert tuning.choice is not None
    batches = tuning.prefetcher()
    assert isinstance(batches, Prefetcher)
    assert [int(x) for x, _ in zip(batches, range(12), strict=False)] == wanted
    batches.close()
