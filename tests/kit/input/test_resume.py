from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from flopwise.errors import InputError
from flopwise.kit.input import Prefetcher, resume

DATA = TensorDataset(torch.arange(10))


def test_generators_are_found_once_each() -> None:
    g, h = torch.Generator(), torch.Generator()
    loader = DataLoader(DATA, sampler=RandomSampler(DATA, generator=g), generator=h)
    assert resume.generators_of(loader) == [h, g]
    assert resume.generators_of(DataLoader(DATA, shuffle=True, generator=g)) == [g]
    assert resume.generators_of([1, 2]) == []


def test_the_order_of_an_epoch_comes_again_with_its_own_generator_and_others_are_left_alone() -> (
    None
):
    g = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, shuffle=True, generator=g)
    begun = resume.begin(loader, None)
    whole = [int(x) for (x,) in begun.batches]
    state = resume.state_of(0, 4, begun.start, None)
    g.manual_seed(77)
    main = torch.get_rng_state()
    again = resume.begin(loader, state)
    assert again.handed == 4
    assert [int(x) for (x,) in again.batches] == whole[4:]
    assert torch.equal(torch.get_rng_state(), main)
    # what is saved from here on is the epoch's beginning, not the place where it was taken up
    assert again.start is not None
    assert torch.equal(again.start.generators[0], state["generators"][0])


def test_a_state_of_no_batches_begins_an_epoch() -> None:
    begun = resume.begin([1, 2], resume.checked(resume.state_of(3, 0, None, None)))
    assert list(begun.batches) == [1, 2]


def test_a_loader_that_ends_too_early_is_told() -> None:
    state = resume.state_of(0, 5, resume.EpochStart([]), None)
    with pytest.raises(InputError, match="ended after 3 batches; 5 were handed out"):
        resume.begin([1, 2, 3], state)


def test_another_loader_is_told_before_anything_is_skipped() -> None:
    state = resume.state_of(0, 5, resume.EpochStart([]), None)
    loader = DataLoader(DATA, shuffle=True, generator=torch.Generator())
    with pytest.raises(InputError, match="0 generators, this one has 1"):
        resume.begin(loader, state)


def test_a_loader_of_other_batches_is_told_before_anything_is_skipped() -> None:
    state = resume.state_of(0, 2, resume.EpochStart(DataLoader(DATA, 2, shuffle=True)), None)
    with pytest.raises(
        InputError, match="5 batches an epoch, this one has 3 batches an epoch: its"
    ):
        resume.begin(DataLoader(DATA, 4, shuffle=True), state)


def test_an_iterable_data_set_is_taken_up_with_as_many_workers_only() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(10))

    state = resume.state_of(0, 2, resume.EpochStart(DataLoader(Stream(), 2)), None)
    assert next(iter(resume.begin(DataLoader(Stream(), 2), state).batches)).tolist() == [4, 5]
    with pytest.raises(InputError, match="with 0 workers on an iterable data set, this one has 1"):
        resume.begin(DataLoader(Stream(), 2, num_workers=1), state)


def test_half_a_state_is_none() -> None:
    class Half:
        def state_dict(self) -> Any:
            return {}

    class Whole(Half):
        def load_state_dict(self, state: Any) -> None: ...

    assert resume.own_state(Half()) is None
    assert resume.own_state(Whole()) is not None
    assert resume.own_state([1]) is None


@pytest.mark.parametrize(
    "state",
    [None, 3, {}, {"version": 1}, {"version": 1, "batches": "2"}, {"version": 9, "batches": 2}],
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(InputError, match="nothing was loaded"):
        resume.checked(state)


def test_a_state_can_be_saved_with_weights_only() -> None:
    import io

    file = io.BytesIO()
    state = resume.state_of(
        1, 3, resume.EpochStart(DataLoader(DATA, generator=torch.Generator())), None
    )
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert resume.checked(loaded)["batches"] == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_drawn_between_the_iterator_and_its_first_batch_does_not_change_the_order(
    workers: int,
) -> None:
    loader = DataLoader(DATA, 2, shuffle=True, num_workers=workers)
    batches = Prefetcher(loader, "cpu")
    iterator = iter(batches)
    torch.randn(100)  # the model is made
    first = [next(iterator)[0].tolist() for _ in range(2)]
    state = batches.state_dict()
    rest = [x.tolist() for (x,) in iterator]
    again = Prefetcher(loader, "cpu")
    for _ in range(2):  # also from a state of the pass that was taken up
        torch.manual_seed(5)
        again.load_state_dict(state)
        taken = iter(again)
        torch.randn(7)
        got = [next(taken)[0].tolist()]
        state_later = again.state_dict()
        got += [x.tolist() for (x,) in taken]
        assert got == rest
        assert state_later["batches"] == 3
        again.load_state_dict(state_later)
        assert [x.tolist() for (x,) in again] == rest[1:]
    assert sorted(n for part in first + rest for n in part) == list(range(10))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_workers_that_persist_give_the_same_order_in_this_process_and_in_another(
    epoch: int, own: bool
) -> None:
    def loader(**options: Any) -> Any:
        generator = torch.Generator().manual_seed(4) if own else None
        return DataLoader(DATA, 2, shuffle=True, generator=generator, **options)

    kept: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    batches = Prefetcher(loader(**kept), "cpu")
    for _ in range(epoch):
        list(batches)
    iterator = iter(batches)
    for _ in range(2):
        next(iterator)
    state = batches.state_dict()
    rest = [x.tolist() for (x,) in iterator]
    for again in (batches, Prefetcher(loader(**kept), "cpu")):
        for _ in range(2):
            again.load_state_dict(state)
            assert [x.tolist() for (x,) in again] == rest
    for other in ({}, {"num_workers": 1}):
        taken_up = Prefetcher(loader(**other), "cpu")
        taken_up.load_state_dict(state)
        if epoch:
            with pytest.raises(InputError, match="without persistent_workers=True"):
                next(iter(taken_up))
        else:
            assert [x.tolist() for (x,) in taken_up] == rest


def test_another_number_of_workers_takes_an_epoch_up() -> None:
    for before, after in ((0, 1), (1, 0)):
        batches = Prefetcher(DataLoader(DATA, 2, shuffle=True, num_workers=before), "cpu")
        iterator = iter(batches)
        next(iterator)
        state = batches.state_dict()
        rest = [x.tolist() for (x,) in iterator]
        again = Prefetcher(DataLoader(DATA, 2, shuffle=True, num_workers=after), "cpu")
        again.load_state_dict(state)
        assert [x.tolist() for (x,) in again] == rest


def test_an_order_drawn_after_other_numbers_is_not_taken_up_with_workers() -> None:
    batches = Prefetcher(DataLoader(DATA, 2, shuffle=True), "cpu")
    iterator = iter(batches)
    torch.randn(3)
    next(iterator)
    again = Prefetcher(DataLoader(DATA, 2, shuffle=True, num_workers=1), "cpu")
    again.load_state_dict(batches.state_dict())
    with pytest.raises(InputError, match="take it up with num_workers=0"):
        iter(again)


def test_a_loader_of_another_order_is_told() -> None:
    state = resume.state_of(0, 2, resume.EpochStart(DataLoader(DATA, 2, shuffle=True)), None)
    with pytest.raises(InputError, match="a RandomSampler draws, here a SequentialSampler does"):
        resume.begin(DataLoader(DATA, 2), state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"main_generator": 3, "generators": []},
        {"main_generator": torch.zeros(3, dtype=torch.uint8), "generators": []},
        {"main_generator": torch.get_rng_state(), "generators": None},
        {"main_generator": torch.get_rng_state(), "generators": [1]},
    ],
)
def test_a_damaged_state_is_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not the state of a Prefetcher"):
        resume.checked({"version": 1, "epoch": 0, "batches": 1, **wrong})


def test_a_state_of_a_loader_with_its_own_is_not_for_one_without() -> None:
    with pytest.raises(InputError, match="a list has none"):
        resume.begin([1, 2], resume.state_of(0, 1, None, {"place": 1}))
