"""loader-workers where the loader has workers already: more of them, in a running epoch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, get_worker_info
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.interface import Declined, Eligible, Scene

CUDA = torch.device("cuda")
HAD = 1
ORIGINALS = [_SingleProcessDataLoaderIter._next_data, _MultiProcessingDataLoaderIter._next_data]


class Squares(Dataset):
    """Item i is (i, i squared)."""

    scale = 1

    def __init__(self, n: int = 40) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, torch.full((3,), float(i * i * self.scale))


class Augmented(Squares):
    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, torch.rand(3)


class Where(Squares):
    """Item is the process that fetched it."""

    def __getitem__(self, i: int) -> int:
        return os.getpid()


class Stateful(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(0)

    def __getitem__(self, i: int) -> float:
        return self.own.random()


class Sneaky(Squares):
    """Fails in every worker but the loader's own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        info = get_worker_info()
        if info is not None and info.num_workers > HAD and i >= 16:
            if self.how == "raises":
                raise OSError("not here")
            os._exit(9)
        return super().__getitem__(i)


class Broken(Squares):
    def __getitem__(self, i: int) -> int:
        if i == 30:
            raise KeyError("sample 30")
        return i


def loader_of(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **({"batch_size": 4, "num_workers": HAD} | arguments))


def scene(*loaders: Any, cores: int = 4, data_frac: float | None = 0.6, **more: Any) -> Scene:
    return Scene(loaders=loaders, step_s=0.06, data_frac=data_frac, cores=cores, **more)


def drain(loader: Any, switch: Any = None, applied: Any = None, epochs: int = 1) -> list[Any]:
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
    done = []

    def apply(*loaders: Any, **kwargs: Any) -> Any:
        done.append(LoaderWorkers().apply(scene(*loaders, **kwargs)))
        return done[-1]

    yield apply
    while done:
        done.pop().undo()
    gc.collect()
    kinds = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
    assert [kind._next_data for kind in kinds] == ORIGINALS
    assert multiprocessing.active_children() == []


LOADERS = {
    "in order": lambda: loader_of(Squares()),
    "shuffled": lambda: loader_of(Squares(41), shuffle=True),
    "two workers": lambda: loader_of(Squares(), shuffle=True, num_workers=2),
    "persistent": lambda: loader_of(Squares(), shuffle=True, persistent_workers=True),
    "own generator": lambda: loader_of(
        Squares(), shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "batch sampler": lambda: DataLoader(
        Squares(),
        num_workers=HAD,
        prefetch_factor=3,
        batch_sampler=BatchSampler(RandomSampler(range(40)), 4, True),
    ),
    "fewer batches than workers hold": lambda: loader_of(Squares(9), shuffle=True),
}

SWITCHES = {
    "off": lambda k: False,
    "on": lambda k: True,
    "blocks of 3": lambda k: (k // 3) % 2 == 1,
    "every batch": lambda k: k % 2 == 0,
    "random": lambda k: random.Random(k).random() < 0.5,
}


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(loader_of(Squares()), cores=2), "1 workers already"),
            (lambda: scene(loader_of(Squares(), in_order=False)), "in which its workers load"),
            (
                lambda: scene(loader_of(Squares(), multiprocessing_context="spawn")),
                "other than by forking",
            ),
            (lambda: scene(loader_of(Squares()), data_frac=0.01), "1.0 %"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = LoaderWorkers().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_on_a_gpu_where_the_worker_keeps_up_with_a_shorter_step(self) -> None:
        # 6 ms to load a batch, 59.4 ms of other things: with an eighth of them, 7.4 ms, it still keeps up.
        loader = loader_of(Squares())
        answer = LoaderWorkers().check(
            scene(loader, data_frac=0.01, device=CUDA, loads={loader: (0.006, 0.006)})
        )
        assert isinstance(answer, Declined)
        assert "8 times shorter" in answer.reason

    def test_not_where_it_would_not(self) -> None:
        loader = loader_of(Squares())
        answer = LoaderWorkers().check(
            scene(loader, data_frac=0.01, device=CUDA, loads={loader: (0.012, 0.012)})
        )
        assert isinstance(answer, Eligible)

    def test_where_the_workers_that_are_needed_are_there(self, apply: Any) -> None:
        loader = loader_of(Squares(), num_workers=2)
        applied = apply(loader, loads={loader: (0.04, 0.04)})  # the rest takes 24 ms
        drain(loader)
        assert not applied.verify().passed
        assert "2 workers keep up" in applied.failure()


class TestNumber:
    @pytest.mark.parametrize(
        ("load_s", "data_frac", "device", "cores", "workers"),
        [
            (0.05, 0.6, "cpu", 16, 3),  # 50 ms to load, 24 ms of other things
            (0.05, 0.6, "cpu", 3, 2),
            (None, 0.6, "cpu", 16, 3),  # one worker that is waited for takes a step for each batch
            (0.05, 0.0, "cuda", 16, 7),  # an eighth of 60 ms
            (0.05, 0.6, "cuda", 8, 7),
        ],
    )
    def test_is_what_the_time_to_load_needs(
        self, load_s: float | None, data_frac: float, device: str, cores: int, workers: int
    ) -> None:
        loader = loader_of(Squares())
        loads = {} if load_s is None else {loader: (load_s, load_s)}
        here = scene(
            loader, cores=cores, data_frac=data_frac, device=torch.device(device), loads=loads
        )
        applied = LoaderWorkers().apply(here)
        try:
            assert applied._number(applied._feeds[0]) == (workers, None)
        finally:
            applied.undo()

    def test_is_less_where_shared_memory_is_short(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Of a batch's 4 x (8 + 12) bytes, 2 x 2 x 3 workers would need 960.
        monkeypatch.setattr("flopwise.hardware.limits.free_shared_memory_bytes", lambda: 700)
        loader = loader_of(Squares())
        applied = apply(loader)
        drain(loader)
        assert applied.verify().passed
        assert applied.setting["num_workers"] == "2"


class TestOrderAndContent:
    @pytest.mark.parametrize(
        ("name", "when"),
        [*((name, "random") for name in LOADERS), *(("persistent", when) for when in SWITCHES)],
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

    def test_more_workers_really_fetch_while_it_is_on_and_only_then(self, apply: Any) -> None:
        loader = loader_of(Where(100), batch_size=2)
        applied = apply(loader)
        iterator, by = iter(loader), []
        own = {w.pid for w in iterator._workers}
        for k, batch in enumerate(iterator):
            by.append(set(batch.tolist()) <= own)
            if k == 9:
                applied.enable()
            if k == 29:
                applied.disable()
        depth = 2 * int(applied.setting["num_workers"])
        assert depth == 6
        assert by[:12] == [True] * 12  # two were with the loader's own worker at the switch
        assert by[12:30] == [False] * 18
        assert by[30 : 30 + depth] == [False] * depth
        assert by[30 + depth :] == [True] * (20 - depth)

    def test_settled_says_when_the_switch_has_taken_effect(self, apply: Any) -> None:
        loader = loader_of(Where(120), batch_size=2)
        applied = apply(loader)
        history = []
        for k, _ in enumerate(loader):
            if k == 4:
                applied.enable()
            if k == 30:
                applied.disable()
            history.append(applied.settled())
        assert all(history[:4])
        assert not any(history[4:12])
        assert all(history[13:30])
        assert not any(history[30:36])
        assert all(history[38:])

    @pytest.mark.parametrize("persistent", [True, False])
    def test_an_epoch_that_is_left_early_loses_nothing_of_the_next(
        self, persistent: bool, apply: Any
    ) -> None:
        def run(loader: Any, applied: Any) -> list[Any]:
            seen = []
            for epoch in range(4):
                for k, batch in enumerate(loader):
                    if applied is not None:
                        applied.enable() if epoch != 2 else applied.disable()
                    seen.append(batch)
                    if k == 3:
                        break
            return seen

        made = lambda: loader_of(Squares(), shuffle=True, persistent_workers=persistent)  # noqa: E731
        torch.manual_seed(1)
        bare = run(made(), None)
        torch.manual_seed(1)
        loader = made()
        assert same(run(loader, apply(loader)), bare)

    @pytest.mark.parametrize("persistent", [True, False])
    def test_a_changed_data_set_is_seen_when_the_scripts_own_workers_would_see_it(
        self, persistent: bool, apply: Any
    ) -> None:
        def run(dataset: Any, loader: Any, applied: Any) -> list[Any]:
            seen = []
            for epoch in range(3):
                dataset.scale = epoch + 1
                for k, batch in enumerate(loader):
                    if applied is not None and k > 1:
                        applied.enable()
                    seen.append(batch)
            return seen

        def made(dataset: Any) -> Any:
            return loader_of(dataset, persistent_workers=persistent)

        dataset = Squares()
        bare = run(dataset, made(dataset), None)
        dataset = Squares()
        loader = made(dataset)
        applied = apply(loader)
        assert same(run(dataset, loader, applied), bare)


class TestFaults:
    @pytest.mark.parametrize("how", ["raises", "dies"])
    def test_a_worker_that_fails_costs_nothing_but_the_fix(
        self, how: str, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flopwise.fixes.worker_pool.LOOK_S", 0.2)
        bare = drain(loader_of(Squares()))
        loader = loader_of(Sneaky(how))
        applied = apply(loader)
        assert same(drain(loader, lambda k: True, applied), bare)
        assert "a worker failed" in applied.failure()

    def test_the_scripts_own_error_stays_its_own_and_the_rest_follows(self, apply: Any) -> None:
        def run(loader: Any, applied: Any) -> list[Any]:
            seen, iterator = [], iter(loader)
            while True:
                try:
                    seen.append(next(iterator).tolist())
                except StopIteration:
                    return seen
                except KeyError as error:
                    seen.append("error" if "sample 30" in str(error) else error)
                if applied is not None:
                    applied.enable()

        bare = run(loader_of(Broken()), None)
        assert bare.index("error") == 7
        loader = loader_of(Broken())
        applied = apply(loader)
        assert run(loader, applied) == bare

    def test_a_data_set_that_keeps_state_fails(self, apply: Any) -> None:
        loader = loader_of(Stateful())
        applied = apply(loader)
        drain(loader)
        assert not applied.verify().passed


class TestParity:
    def test_batches_are_identical(self, apply: Any) -> None:
        loader = loader_of(Squares(), shuffle=True)
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
        loader = loader_of(Augmented())
        applied = apply(loader)
        drain(loader)
        parity = applied.verify()
        assert parity.passed, parity.detail
        assert parity.numerics == "reordered"

    def test_augmentations_of_the_pool_are_not_those_of_the_next_epoch(self, apply: Any) -> None:
        torch.manual_seed(0)
        loader = loader_of(Augmented())
        applied = apply(loader)
        values = [x.tolist() for _, x in drain(loader, lambda k: k < 9, applied, epochs=3)]
        assert len({str(v) for v in values}) == len(values)


class TestUndo:
    @pytest.mark.parametrize("at", [0, 4, 9])
    @pytest.mark.parametrize("persistent", [True, False])
    def test_in_the_middle_of_an_epoch_goes_on_with_the_same_batches(
        self, at: int, persistent: bool, apply: Any
    ) -> None:
        loader = loader_of(Squares(), persistent_workers=persistent)
        before = {k: v for k, v in vars(loader).items() if k != "_iterator"}
        applied = apply(loader)
        seen, iterator = [], iter(loader)
        for k, batch in enumerate(iterator):
            seen.append(batch)
            applied.enable() if k == 0 else None
            if k == at:
                applied.undo()
        assert same(seen, drain(loader_of(Squares())))
        assert not {"_next_data", "_try_put_index", "_next_index"} & set(vars(iterator))
        assert {k: v for k, v in vars(loader).items() if k != "_iterator"} == before
        assert same(drain(loader), seen)
        loader._iterator = None

    def test_before_anything_was_captured_leaves_nothing_behind(self, apply: Any) -> None:
        loader = loader_of(Squares())
        applied, iterator = apply(loader), iter(loader)
        next(iterator)
        assert "_next_index" in vars(iterator)
        applied.undo()
        assert "_next_index" not in vars(iterator)
        assert len(list(iterator)) == 9
