from __future__ import annotations

import datetime
import pathlib
import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from flopwise.errors import FlopwiseWarning
from flopwise.kit.input.leaves import (
    MovesItself,
    Opaque,
    Stays,
    leaves_of,
    moved_by_itself,
    only_plain,
    wrapped,
)
from flopwise.kit.nested import tensors_in

CPU = torch.device("cpu")


class Store:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Graph:
    """As PyG's Data: a store of stores."""

    def __init__(self) -> None:
        self._store = Store(
            x=torch.ones(2), edges=[torch.zeros(3)], more={"s": Store(y=torch.ones(4))}
        )

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return self


class Slotted:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = torch.ones(5)

    def to(self, device: Any) -> Slotted:
        return self


@dataclass
class Sample:
    graph: Any
    name: str = "n"


@pytest.mark.parametrize(
    ("value", "moves", "stays"),
    [
        (torch.ones(1), False, False),
        (Graph(), True, False),
        (pack_sequence([torch.ones(2)]), True, False),
        (UserDict(x=torch.ones(1)), False, False),
        ({"to": 1}, False, False),
        (Sample(1), False, False),
        ("text", False, False),
        (None, False, False),
        (3.5, False, False),
        (pathlib.Path("a"), False, False),
        (datetime.date(2024, 1, 1), False, False),
        (torch.float32, False, False),
        (Graph, False, True),
        (object(), False, True),
        ({1, 2}, False, True),
        (Opaque(1), False, False),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_moves_by_itself_and_what_stays(value: Any, moves: bool, stays: bool) -> None:
    assert isinstance(value, MovesItself) is moves
    assert isinstance(value, Stays) is stays


def test_objects_are_wrapped_wherever_they_are_and_the_batch_is_left_alone() -> None:
    batch = {
        "a": [Graph(), 1],
        "b": Sample(Graph()),
        "c": (torch.ones(1), pack_sequence([torch.ones(2)])),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = wrapped(batch)
    assert isinstance(got["a"][0], Opaque)
    assert isinstance(got["b"].graph, Opaque)
    assert isinstance(got["c"][1], Opaque)
    assert isinstance(batch["a"][0], Graph)  # type: ignore[index]
    assert isinstance(batch["b"].graph, Graph)  # type: ignore[union-attr]
    plain = [torch.ones(1), {"x": 2}]
    assert wrapped(plain) is plain


def test_what_cannot_be_moved_is_named_once() -> None:
    with pytest.warns(
        FlopwiseWarning, match=r"test_leaves.Store in a batch has no .to\(device\)"
    ) as said:
        wrapped([Store(), [Store()]])
    assert len(said) == 1


class Made:
    """What a transform may make: no `to`, tensors beside it and in a list of objects."""

    def __init__(self) -> None:
        self.image = torch.ones(6)
        self.targets = [Part()]


class Part:
    def __init__(self) -> None:
        self.boxes = torch.ones(7)


def test_tensors_inside_objects_are_found() -> None:
    sizes = {t.numel() for t in leaves_of([torch.ones(1), Graph(), Slotted(), Sample(Graph())])}
    assert sizes == {1, 2, 3, 4, 5}
    assert {t.numel() for t in leaves_of({"made": [Made()]})} == {6, 7}
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert {t.data_ptr() for t in leaves_of(packed)} >= {
        packed.data.data_ptr(),
        packed.batch_sizes.data_ptr(),
    }


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda x: x.to_sparse(), 2),
        (lambda x: x.to_sparse_csr(), 3),
        (lambda x: x.to_sparse_csc(), 3),
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), 2),
        (lambda x: torch.nested.nested_tensor([x, x[:1]]), 1),
    ],
    ids=["coo", "csr", "csc", "jagged", "nested"],
)
@pytest.mark.filterwarnings(
    "ignore:Sparse CS:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)
def test_tensors_without_memory_of_their_own_are_taken_apart(make: Any, parts: int) -> None:
    found = list(leaves_of([make(torch.eye(2))]))
    assert all(t.data_ptr() or not t.numel() for t in found)
    assert len(found) >= parts


def test_objects_are_moved_by_their_own_to_with_or_without_non_blocking() -> None:
    packed = pack_sequence([torch.ones(2)])
    source, moved = moved_by_itself(packed, CPU)
    assert isinstance(moved, PackedSequence)
    assert source is packed
    slotted = Slotted()
    assert moved_by_itself(slotted, CPU) == (slotted, slotted)

    class Broken:
        def to(self, device: Any, non_blocking: bool = False) -> Any:
            raise TypeError("my own fault")

    with pytest.raises(TypeError, match="my own fault"):
        moved_by_itself(Broken(), CPU)


def test_on_a_device_they_are_page_locked_first_where_they_can_be() -> None:
    class Lockable:
        def __init__(self, locked: bool = False) -> None:
            self.locked = locked

        def pin_memory(self) -> Lockable:
            return Lockable(True)

        def to(self, device: Any, non_blocking: bool = False) -> bool:
            return self.locked

    cuda = torch.device("cuda:0")
    assert moved_by_itself(Lockable(), cuda)[1] is True
    assert moved_by_itself(Lockable(), CPU)[1] is False

    class Refusing(Lockable):
        def pin_memory(self) -> Lockable:
            raise RuntimeError("no page-locked memory")

    assert moved_by_itself(Refusing(), cuda)[1] is False


@pytest.mark.parametrize(
    ("batch", "plain"),
    [
        (torch.ones(2), True),
        ([torch.ones(2), {"y": (torch.ones(1), 3, "name")}, None], True),
        ([], True),
        (torch.nn.Parameter(torch.ones(1)), False),
        ([torch.ones(1), torch.ones(2, 2).to_sparse()], False),
        ((torch.ones(1), object()), False),
        (UserDict(x=torch.ones(1)), False),
        (namedtuple("P", "x")(torch.ones(1)), False),
        (b"bytes", True),
    ],
)
def test_batches_that_are_plain_tensors_alone_are_known(batch: Any, plain: bool) -> None:
    found = only_plain(batch)
    assert (found is not None) == plain
    if found is not None:
        assert all(a is b for a, b in zip(found, tensors_in(batch), strict=True))
