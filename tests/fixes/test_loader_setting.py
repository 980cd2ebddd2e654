from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from flopwise.fixes.loader_setting import LoaderSetting, fingerprint

ORIGINALS = DataLoader.__init__, DataLoader.__iter__


class Numbers(Dataset):
    def __init__(self, n: int = 24) -> None:
        self.n, self.shift = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i + self.shift


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class OwnIterator(DataLoader):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.fixture
def install() -> Iterator[Any]:
    undo = []

    def install(setting: LoaderSetting | None = None) -> Any:
        undo.append((setting or LoaderSetting(2)).install())
        return undo[-1]

    yield install
    for remove in reversed(undo):
        remove()
    assert (DataLoader.__init__, DataLoader.__iter__) == ORIGINALS
    gc.collect()
    assert multiprocessing.active_children() == []


class TestLeftAlone:
    @pytest.mark.parametrize(
        "made",
        [
            lambda: DataLoader(Stream()),
            lambda: DataLoader(Numbers(), num_workers=1),
            lambda: DataLoader(Numbers(), batch_size=None),
            lambda: OwnIterator(Numbers()),
        ],
        ids=["iterable", "has workers", "no batches", "own iterator"],
    )
    def test_loaders_that_workers_would_change(self, made: Any, install: Any) -> None:
        before = made().num_workers
        install()
        assert made().num_workers == before

    def test_loaders_with_another_fingerprint(self, install: Any) -> None:
        install(LoaderSetting(2, match="Numbers, batch 8, RandomSampler"))
        assert DataLoader(Numbers(), batch_size=8).num_workers == 0
        assert DataLoader(Numbers(), 4, True).num_workers == 0
        assert DataLoader(Numbers(), 8, True).num_workers == 2

    def test_a_wrong_call_still_says_what_is_wrong(self, install: Any) -> None:
        install()
        with pytest.raises(TypeError, match="nonsense"):
            DataLoader(Numbers(), nonsense=1)
        with pytest.raises(ValueError, match="non-negative"):
            DataLoader(Numbers(), num_workers=-1)


class TestFingerprint:
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"batch_size": 8, "shuffle": True},
            {"sampler": WeightedRandomSampler([1.0] * 24, 24)},
            {"batch_sampler": [[0, 1], [2]]},
        ],
    )
    def test_of_a_loader_is_that_of_its_arguments(
        self, arguments: dict[str, Any], install: Any
    ) -> None:
        wanted = fingerprint(DataLoader(Numbers(), **arguments))
        install(LoaderSetting(1, match=wanted))
        assert DataLoader(Numbers(), **arguments).num_workers == 1


class TestOrder:
    @pytest.mark.parametrize("persistent", [True, False])
    @pytest.mark.parametrize(
        "arguments",
        [
            lambda: {"shuffle": True},
            lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(7)},
            lambda: {"sampler": WeightedRandomSampler([1.0] * 24, 24)},
            lambda: {},
        ],
        ids=["shuffled", "own generator", "weighted", "in order"],
    )
    def test_is_the_bare_loaders_over_three_epochs(
        self, arguments: Any, persistent: bool, install: Any
    ) -> None:
        def run() -> tuple[list[Any], Any, Any]:
            torch.manual_seed(2)
            loader = DataLoader(Numbers(), batch_size=4, **arguments())
            seen = [batch.tolist() for _ in range(3) for batch in loader]
            return seen, torch.rand(3).tolist(), loader

        bare, bare_next, _ = run()
        install(LoaderSetting(2, persistent_workers=persistent))
        ours, ours_next, loader = run()
        assert loader.num_workers == 2
        assert loader.persistent_workers == persistent
        assert ours == bare
        assert ours_next == bare_next

    def test_workers_persist(self, install: Any) -> None:
        install()
        loader = DataLoader(Numbers(), batch_size=4)
        list(loader)
        first = [w.pid for w in loader._iterator._workers]
        list(loader)
        assert [w.pid for w in loader._iterator._workers] == first

    def test_a_changed_data_set_reaches_the_workers_at_the_next_epoch(self, install: Any) -> None:
        install()
        dataset = Numbers(8)
        loader = DataLoader(dataset, batch_size=4)
        epochs = []
        for epoch in range(3):
            dataset.shift = 100 * epoch
            epochs.append([x for batch in loader for x in batch.tolist()])
        assert epochs == [[100 * e + i for i in range(8)] for e in range(3)]

    def test_a_loop_inside_a_loop_over_one_loader(self, install: Any) -> None:
        def run() -> list[Any]:
            torch.manual_seed(2)
            loader = DataLoader(Numbers(12), batch_size=4, shuffle=True)
            return [(a.tolist(), b.tolist()) for a in loader for b in loader]

        bare = run()
        install()
        assert run() == bare

    def test_an_epoch_left_early(self, install: Any) -> None:
        def run() -> list[Any]:
            torch.manual_seed(2)
            loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
            return [next(iter(loader)).tolist() for _ in range(3)] + [b.tolist() for b in loader]

        bare = run()
        install()
        assert run() == bare


class TestMoreWorkers:
    def test_only_for_loaders_with_as_many_as_the_plan_says(self, install: Any) -> None:
        install(LoaderSetting(2, had_workers=1))
        assert DataLoader(Numbers()).num_workers == 0
        assert DataLoader(Numbers(), num_workers=1).num_workers == 2
        assert DataLoader(Numbers(), num_workers=2).num_workers == 2

    @pytest.mark.parametrize("persistent", [True, False])
    @pytest.mark.parametrize("generator", [None, 7])
    def test_order_and_random_stream_are_the_bare_loaders(
        self, persistent: bool, generator: int | None, install: Any
    ) -> None:
        def run() -> tuple[list[Any], Any, Any]:
            torch.manual_seed(2)
            own = None if generator is None else torch.Generator().manual_seed(generator)
            loader = DataLoader(
                Numbers(), 4, True, num_workers=1, persistent_workers=persistent, generator=own
            )
            seen = [batch.tolist() for _ in range(3) for batch in loader]
            return seen, torch.rand(3).tolist(), loader

        bare, bare_next, _ = run()
        install(LoaderSetting(2, had_workers=1))
        ours, ours_next, loader = run()
        assert (loader.num_workers, loader.persistent_workers) == (2, True)
        assert ours == bare
        assert ours_next == bare_next


class TestStored:
    def test_strings_round_trip(self) -> None:
        setting = LoaderSetting(3, True, False, "x, batch 4, RandomSampler", 2)
        assert LoaderSetting.from_strings(setting.as_strings()) == setting

    @pytest.mark.parametrize(
        "wrong", [{}, {"num_workers": "two"}, {"num_workers": "2", "pin_memory": "x"}]
    )
    def test_what_cannot_be_read_is_said(self, wrong: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"two|loader-workers"):
            LoaderSetting.from_strings(wrong)


class TestUndo:
    def test_new_loaders_are_bare_again_and_built_ones_go_on(self, install: Any) -> None:
        remove = install()
        loader = DataLoader(Numbers(8), batch_size=4)
        list(loader)
        remove()
        assert DataLoader(Numbers()).num_workers == 0
        assert [b.tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
