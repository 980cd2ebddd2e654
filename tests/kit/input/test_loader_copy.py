from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from flopwise.errors import InputError
from flopwise.kit.input import LoaderChoice
from flopwise.kit.input.loader_copy import (
    choice_of,
    kept_random_state,
    more_workers_problem,
    problem,
    with_choice,
)

DATA = TensorDataset(torch.arange(17))
TWO = LoaderChoice(2, 4, False, 3)


class Drawing(Dataset[Any]):
    """Items that draw from the worker's own generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return torch.randint(0, 10**9, ())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(5))


def order(loader: Any) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(
            DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
        ),
        lambda: DataLoader(DATA, batch_size=4, drop_last=True),
        lambda: DataLoader(
            DATA,
            batch_sampler=BatchSampler(
                RandomSampler(DATA, generator=torch.Generator().manual_seed(2)), 3, False
            ),
        ),
        lambda: DataLoader(DATA, batch_size=None),
        lambda: DataLoader(Stream(), batch_size=2),
    ],
    ids=["shuffled", "dropping", "batch sampler", "single items", "iterable"],
)
def test_the_copy_gives_the_same_batches_in_the_same_order(loader: Any) -> None:
    wanted = order(loader())
    given = loader()
    choice = TWO if not isinstance(given.dataset, IterableDataset) else LoaderChoice(1, 2, False, 3)
    copy = with_choice(given, choice)
    assert choice_of(copy, 3) == choice
    assert order(copy) == wanted


def test_workers_get_the_seeds_that_they_would_have_got() -> None:
    def draws(loader: Any) -> Any:
        torch.manual_seed(11)
        return order(loader)

    given = DataLoader(Drawing(), batch_size=2, num_workers=2)
    assert draws(with_choice(given, TWO)) == draws(given)


def test_what_else_is_set_stays() -> None:
    def init(_: int) -> None: ...

    given = DataLoader(
        DATA,
        batch_size=4,
        num_workers=1,
        timeout=7,
        worker_init_fn=init,
        persistent_workers=True,
        collate_fn=len,
    )
    copy = with_choice(given, TWO)
    assert (copy.timeout, copy.worker_init_fn, copy.persistent_workers, copy.collate_fn) == (
        7,
        init,
        True,
        len,
    )
    none = with_choice(given, LoaderChoice(0, None, False, 3))
    assert (none.num_workers, none.timeout) == (0, 0)


def test_loaders_that_cannot_be_built_again_are_told() -> None:
    class Own(DataLoader[Any]):
        pass

    assert "is not a DataLoader" in problem([1])
    assert "subclass of DataLoader" in problem(Own(DATA))
    assert problem(DataLoader(DATA)) == ""
    with pytest.raises(InputError, match="subclass"):
        with_choice(Own(DATA), TWO)
    assert "would give other data" in more_workers_problem(DataLoader(Stream()))


def test_a_choice_keeps_workers_and_prefetch_factor_in_agreement() -> None:
    assert LoaderChoice(0, None, False, 3).but(num_workers=2).prefetch_factor == 2
    assert TWO.but(num_workers=0).prefetch_factor is None
    assert TWO.but(depth=6) == LoaderChoice(2, 4, False, 6)


def test_trying_out_moves_no_random_stream() -> None:
    g = torch.Generator().manual_seed(4)
    loader = DataLoader(DATA, shuffle=True, generator=g)
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)

    def draws() -> Any:
        return (
            torch.rand(1).item(),
            random.random(),
            numpy.random.rand(),
            torch.rand(1, generator=g).item(),
        )

    with kept_random_state(loader):
        first = draws()
    with kept_random_state(loader):
        draws()
    assert draws() == first
