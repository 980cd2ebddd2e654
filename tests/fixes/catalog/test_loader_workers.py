from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.interface import Declined, Eligible, Scene
from flopwise.hardware import limits
from flopwise.kit.worker_count import choose_workers

ORIGINAL = _SingleProcessDataLoaderIter._next_data


class Squares(Dataset):
    """Item i is (i, i squared)."""

    def __init__(self, n: int = 40, item_s: float = 0.0) -> None:
        self.n, self.item_s = n, item_s

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        if self.item_s:
            time.sleep(self.item_s)
        return i, torch.full((3,), float(i * i))


class Augmented(Squares):
    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, torch.rand(3)


class Where(Squares):
    """Item is the process that fetched it."""

    def __getitem__(self, i: int) -> int:
        return os.getpid()


class Stateful(Squares):
    """Draws from a generator of its own, which every forked worker would replay."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(0)

    def __getitem__(self, i: int) -> float:
        return self.own.random()


class Sneaky(Squares):
    """Fails, hangs or dies in workers only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        if get_worker_info() is not None and i >= 16:
            if self.how == "raises":
                raise OSError("not in a worker")
            if self.how == "dies":
                os._exit(9)
            time.sleep(60)
        return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Curriculum(Sampler):
    """Its order depends on when it is asked."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(time.time()) % 8

    def __len__(self) -> int:
        return 8


class OwnIterator(DataLoader):
    def __iter__(self) -> Any:
        return super().__iter__()


def scene(*loaders: Any, data_frac: float | None = 0.6, cores: int = 2) -> Scene:
    return Scene(loaders=loaders, step_s=0.06, data_frac=data_frac, cores=cores)


def drain(loader: Any, switch: Any = None, applied: Any = None, epochs: int = 1) -> list[Any]:
    """Runs epochs; `switch(k)` says whether the fix is on from batch k on."""
    seen, k = [], 0
    for _ in range(epochs):
        for batch in loader:
            seen.append(batch)
            if switch is not None:
                applied.enable() if switch(k) else applied.disable()
            k += 1
    return seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def apply() -> Iterator[Any]:
    """Applies the fix and undoes it at the end; no worker may be left."""
    done = []

    def apply(*loaders: Any, **kwargs: Any) -> Any:
        done.append(LoaderWorkers().apply(scene(*loaders, **kwargs)))
        return done[-1]

    yield apply
    for applied in done:
        applied.undo()
    gc.collect()
    assert _SingleProcessDataLoaderIter._next_data is ORIGINAL
    assert multiprocessing.active_children() == []


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no DataLoader"),
            (lambda: scene(DataLoader(Stream())), "iterable"),
            (lambda: scene(DataLoader(Squares(), num_workers=1)), "workers already"),
            (lambda: scene(DataLoader(Squares(), batch_size=None)), "batch_size=None"),
            (lambda: scene(OwnIterator(Squares())), "iterator of its own"),
            (lambda: scene(DataLoader(Squares(), sampler=Curriculum())), "Curriculum"),
            (
                lambda: scene(
                    DataLoader(Squares(), batch_sampler=BatchSampler(Curriculum(), 2, False))
                ),
                "Curriculum",
            ),
            (lambda: scene(DataLoader(Squares()), data_frac=0.01), "1.0 %"),
            (lambda: scene(DataLoader(Squares()), data_frac=None), "not measured"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = LoaderWorkers().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_where_processes_cannot_be_forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
        answer = LoaderWorkers().check(scene(DataLoader(Squares())))
        assert isinstance(answer, Declined)
        assert "forked" in answer.reason

    def test_where_the_script_chose_to_spawn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
        answer = LoaderWorkers().check(scene(DataLoader(Squares())))
        assert isinstance(answer, Declined)
        assert "spawn" in answer.reason

    def test_without_memory_for_a_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "available_memory_bytes", lambda: 1000)
        answer = LoaderWorkers().check(scene(DataLoader(Squares())))
        assert isinstance(answer, Declined)
        assert "memory" in answer.reason

    def test_without_shared_memory_for_the_batches(
        self, monkeypatch: pytest.MonkeyPatch, apply: Any
    ) -> None:
        monkeypatch.setattr(limits, "free_shared_memory_bytes", lambda: 10)
        loader = DataLoader(Squares())
        applied = apply(loader)
        drain(loader)
        assert not applied.verify().passed
        assert "/dev/shm" in applied.failure()

    @pytest.mark.parametrize(
        "loader",
        [
            DataLoader(Squares()),
            DataLoader(Squares(), batch_size=4, shuffle=True),
            DataLoader(Squares(), sampler=WeightedRandomSampler([1.0] * 40, 40)),
            DataLoader(Squares(), batch_sampler=BatchSampler(RandomSampler(range(40)), 4, True)),
            DataLoader(TensorDataset(torch.arange(8))),
        ],
    )
    def test_not_a_plain_loader(self, loader: Any) -> None:
        assert isinstance(LoaderWorkers().check(scene(loader)), Eligible)


class TestNumberOfWorkers:
    def test_in_02_two_thirds_waiting_on_two_cores_gets_two_and_never_eight(self) -> None:
        # 8 items of 5 ms against 20 ms of computing: 40 of 60 ms.
        assert choose_workers(2 / 3, waits=True, cores=2) == 2

    @pytest.mark.parametrize(
        ("data_frac", "waits", "cores", "workers"),
        [
            (0.1, True, 16, 1),
            (0.5, True, 16, 1),
            (0.51, True, 16, 2),
            (0.9, True, 16, 9),
            (0.99, True, 16, 16),
            (1.0, True, 4, 4),
            (0.99, False, 16, 15),  # computing loaders leave training its core
            (0.9, False, 2, 1),
            (0.9, False, 1, 1),
            (0.9, True, 1, 1),  # IN-05: one core by affinity
        ],
    )
    def test_is_what_the_waiting_needs_within_the_cores(
        self, data_frac: float, waits: bool, cores: int, workers: int
    ) -> None:
        assert choose_workers(data_frac, waits, cores) == workers

    def test_in_05_affinity_bounds_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
        assert Scene().cores == 1

    @pytest.mark.parametrize(
        ("ranks", "cores"), [("2", 4), ("3", 2), ("16", 1), ("x", 8), ("0", 8)]
    )
    def test_ranks_of_one_host_share_the_cores(
        self, ranks: str, cores: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(limits, "_cpu_quota", lambda root: None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert Scene().cores == cores

    def test_a_sleeping_loader_gets_a_worker_a_core(self, apply: Any) -> None:
        loader = DataLoader(Squares(8, 0.005), batch_size=4)
        applied = apply(loader, data_frac=0.9)
        drain(loader)
        applied.verify()
        assert applied.setting["num_workers"] == "2"

    @pytest.mark.parametrize(("planned", "workers"), [("1", "1"), ("2", "2"), ("8", "2")])
    def test_a_planned_number_is_taken_within_the_cores(self, planned: str, workers: str) -> None:
        loader = DataLoader(Squares())
        applied = LoaderWorkers().apply(scene(loader), {"num_workers": planned})
        try:
            applied.enable()
            assert applied.setting["num_workers"] == workers
        finally:
            applied.undo()

    def test_two_loaders_share_the_cores(self, apply: Any) -> None:
        loaders = [DataLoader(Squares(8, 0.005), batch_size=4) for _ in range(2)]
        applied = apply(*loaders, data_frac=0.9)
        for loader in loaders:
            drain(loader)
        applied.verify()
        assert applied.setting["num_workers"] == "1"


LOADERS = {
    "in order": lambda: DataLoader(Squares(), batch_size=4),
    "shuffled": lambda: DataLoader(Squares(), batch_size=4, shuffle=True),
    "ragged": lambda: DataLoader(Squares(41), batch_size=4, shuffle=True),
    "drop last": lambda: DataLoader(Squares(43), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        Squares(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "weighted": lambda: DataLoader(
        Squares(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40)
    ),
    "collate": lambda: DataLoader(Squares(), batch_size=4, collate_fn=lambda items: dict(items)),
}

SWITCHES = {
    "off": lambda k: False,
    "on": lambda k: True,
    "blocks of 3": lambda k: (k // 3) % 2 == 1,
    "every batch": lambda k: k % 2 == 0,
    "random": lambda k: random.Random(k).random() < 0.5,
}


class TestOrderAndContent:
    @pytest.mark.parametrize(
        ("name", "when"),
        [*((name, "random") for name in LOADERS), *(("shuffled", when) for when in SWITCHES)],
    )
    def test_are_the_bare_loaders_whenever_it_is_switched(
        self, name: str, when: str, apply: Any
    ) -> None:
        made, switch = LOADERS[name], SWITCHES[when]
        torch.manual_seed(3)
        bare = drain(made(), epochs=3)
        bare_rng = torch.get_rng_state()
        torch.manual_seed(3)
        loader = made()
        applied = apply(loader)
        ours = drain(loader, switch, applied, epochs=3)
        assert [str(b) for b in ours] == [str(b) for b in bare]
        assert torch.equal(torch.get_rng_state(), bare_rng)
        assert applied.failure() is None

    def test_workers_really_fetch_while_it_is_on_and_only_then(self, apply: Any) -> None:
        loader = DataLoader(Where(60), batch_size=2)
        applied = apply(loader)
        here = []
        for k, batch in enumerate(loader):
            here.append(bool((batch == os.getpid()).all()))
            if k == 9:
                applied.enable()
            if k == 19:
                applied.disable()
        depth = 2 * int(applied.setting["num_workers"])
        assert here[:10] == [True] * 10
        assert here[10:20] == [False] * 10
        assert (
            here[20 : 20 + depth] == [False] * depth
        )  # drawn before the switch, served in their turn
        assert here[20 + depth :] == [True] * (10 - depth)

    def test_settled_says_when_the_switch_has_taken_effect(self, apply: Any) -> None:
        loader = DataLoader(Where(60), batch_size=2)
        applied = apply(loader)
        history = []
        for k, _ in enumerate(loader):
            if k == 4:
                applied.enable()
                depth = 2 * int(applied.setting["num_workers"])
            if k == 14:
                applied.disable()
            history.append(applied.settled())
        assert all(history[:4])
        assert history[4 : 4 + depth] == [False] * depth
        assert all(history[4 + depth : 14])
        assert history[14 : 14 + depth] == [False] * depth
        assert all(history[14 + depth :])

    def test_an_epoch_that_is_left_early_loses_nothing_of_the_next(self, apply: Any) -> None:
        def run(loader: Any, applied: Any) -> list[Any]:
            seen = []
            for _ in range(3):
                for k, batch in enumerate(loader):
                    if applied is not None:
                        applied.enable()
                    seen.append(batch)
                    if k == 3:
                        break
            return seen

        torch.manual_seed(1)
        bare = run(DataLoader(Squares(), batch_size=4, shuffle=True), None)
        torch.manual_seed(1)
        loader = DataLoader(Squares(), batch_size=4, shuffle=True)
        assert same(run(loader, apply(loader)), bare)

    def test_two_iterators_of_one_loader_keep_apart(self, apply: Any) -> None:
        def run(loader: Any) -> list[Any]:
            one, two, seen = iter(loader), iter(loader), []
            for k in range(8):
                seen.append(next(one if k % 3 else two))
            del one
            return seen + list(two)

        torch.manual_seed(1)
        bare = run(DataLoader(Squares(), batch_size=4, shuffle=True))
        torch.manual_seed(1)
        loader = DataLoader(Squares(), batch_size=4, shuffle=True)
        applied = apply(loader)
        applied.enable()
        assert same(run(loader), bare)

    def test_attributes_that_the_script_sets_reach_the_workers(self, apply: Any) -> None:
        class Scaled(Squares):
            scale = 1

            def __getitem__(self, i: int) -> int:
                return i * self.scale

        def run(dataset: Any, loader: Any, applied: Any) -> list[Any]:
            seen = []
            for epoch in range(3):
                dataset.scale = epoch + 1
                for k, batch in enumerate(loader):
                    if applied is not None:
                        applied.enable()
                    if k == 5:
                        dataset.scale = 10 * (epoch + 1)
                    seen.append(batch)
            return seen

        dataset = Scaled()
        bare = run(dataset, DataLoader(dataset, batch_size=4), None)
        loader = DataLoader(dataset, batch_size=4)
        applied = apply(loader)
        assert same(run(dataset, loader, applied), bare)
        assert applied.failure() is None


class TestFaults:
    @pytest.mark.parametrize("how", ["raises", "dies"])
    def test_a_worker_that_fails_costs_nothing_but_the_fix(self, how: str, apply: Any) -> None:
        bare = drain(DataLoader(Squares(), batch_size=4))
        loader = DataLoader(Sneaky(how), batch_size=4)
        applied = apply(loader)
        assert same(drain(loader, lambda k: True, applied), bare)
        assert "a worker failed" in applied.failure()

    def test_a_worker_that_hangs_is_given_up(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flopwise.fixes.worker_pool.LEAST_TIMEOUT_S", 0.5)
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
        bare = drain(DataLoader(Squares(), batch_size=4))
        loader = DataLoader(Sneaky("hangs"), batch_size=4)
        applied = apply(loader)
        assert same(drain(loader, lambda k: True, applied), bare)
        assert "no batch came" in applied.failure()

    def test_the_scripts_own_error_stays_its_own(self, apply: Any) -> None:
        class Broken(Squares):
            def __getitem__(self, i: int) -> int:
                if i == 30:
                    raise KeyError("sample 30")
                return i

        loader = DataLoader(Broken(), batch_size=4)
        applied = apply(loader)
        with pytest.raises(KeyError, match="sample 30"):
            drain(loader, lambda k: True, applied)

    def test_no_signal_handler_is_left(self, apply: Any) -> None:
        import signal

        from torch.utils.data._utils import signal_handling

        before = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
        loader = DataLoader(Squares(), batch_size=4)
        drain(loader, lambda k: True, apply(loader))
        assert (signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set) == before


class TestParity:
    def test_batches_are_identical(self, apply: Any) -> None:
        loader = DataLoader(Squares(), batch_size=4, shuffle=True)
        applied = apply(loader)
        assert not applied.ready()
        drain(loader)
        assert applied.ready()
        rng = torch.get_rng_state()
        parity = applied.verify()
        assert parity.passed, parity.detail
        assert parity.numerics == "identical"
        assert torch.equal(rng, torch.get_rng_state())

    def test_random_augmentation_makes_it_reordered(self, apply: Any) -> None:
        loader = DataLoader(Augmented(), batch_size=4)
        applied = apply(loader)
        drain(loader)
        parity = applied.verify()
        assert parity.passed
        assert parity.numerics == "reordered"

    def test_a_data_set_that_keeps_state_fails(self, apply: Any) -> None:
        loader = DataLoader(Stateful(), batch_size=4)
        applied = apply(loader)
        drain(loader)
        assert not applied.verify().passed

    def test_in_the_middle_of_an_epoch_it_takes_no_batch_away(self, apply: Any) -> None:
        loader = DataLoader(Squares(), batch_size=4)
        applied = apply(loader)
        seen = []
        for k, batch in enumerate(loader):
            seen.append(batch)
            if k == 3:
                assert applied.verify().passed
                applied.enable()
            if k == 6:
                assert applied.verify().passed
        assert same(seen, drain(DataLoader(Squares(), batch_size=4)))


class TestEffect:
    def test_loading_and_computing_overlap(self, apply: Any) -> None:
        # IN-02: 8 items of 5 ms a batch, 20 ms of computing.
        loader = DataLoader(Squares(160, 0.005), batch_size=8)
        applied = apply(loader, data_frac=2 / 3)
        times = {False: [], True: []}
        last, on = time.perf_counter(), False
        for k, _ in enumerate(loader):
            time.sleep(0.02)
            now = time.perf_counter()
            if applied.settled() and k > 2:
                times[on].append(now - last)
            last = now
            if k == 7:
                applied.enable()
                on = True
                last = time.perf_counter()
        assert min(times[False]) > 0.055
        assert sum(times[True]) / len(times[True]) < 0.045


class TestUndo:
    @pytest.mark.parametrize("at", [0, 4, 9])
    def test_in_the_middle_of_an_epoch_goes_on_with_the_same_batches(
        self, at: int, apply: Any
    ) -> None:
        loader = DataLoader(Squares(), batch_size=4)
        before = dict(vars(loader))
        applied = apply(loader)
        seen = []
        iterator = iter(loader)
        for k, batch in enumerate(iterator):
            seen.append(batch)
            applied.enable() if k == 0 else None
            if k == at:
                applied.undo()
                assert _SingleProcessDataLoaderIter._next_data is ORIGINAL
                assert multiprocessing.active_children() == []
        assert same(seen, drain(DataLoader(Squares(), batch_size=4)))
        assert "_next_data" not in vars(iterator)
        assert vars(loader) == before

    def test_under_another_patch_ours_lets_everything_through(self) -> None:
        loader = DataLoader(Squares(), batch_size=4)
        applied = LoaderWorkers().apply(scene(loader))
        ours = _SingleProcessDataLoaderIter._next_data
        theirs = lambda self: ours(self)  # noqa: E731
        _SingleProcessDataLoaderIter._next_data = theirs
        try:
            applied.undo()
            assert _SingleProcessDataLoaderIter._next_data is theirs
            assert len(drain(loader)) == 10
        finally:
            _SingleProcessDataLoaderIter._next_data = ORIGINAL
