from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from flopwise.kit.nested import NotRebuiltError, copies, map_tensors, tensors_in

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Output:
    loss: Any
    logits: Any = None


class Stored(MutableMapping[str, Any]):
    """A mapping around a store of its own, as many a batch class is."""

    def __init__(self, store: dict[str, Any]) -> None:
        self.store = store

    def __getitem__(self, key: str) -> Any:
        return self.store[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store[key] = value

    def __delitem__(self, key: str) -> None:
        del self.store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store)

    def __len__(self) -> int:
        return len(self.store)


class Tagged(list[Any]):
    """A list that needs more than its parts."""

    def __init__(self, parts: Any, *, tag: str) -> None:
        super().__init__(parts)
        self.tag = tag


class TestTrees:
    def test_tensors_in_every_container(self) -> None:
        t = [torch.tensor(float(i)) for i in range(6)]
        tree = {
            "x": [t[0], (t[1], "text")],
            "y": Pair(t[2], None),
            "z": Output(t[3], OrderedDict(k=t[4])),
        }
        assert [float(v) for v in tensors_in(tree)] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(
        "tree",
        [
            [torch.ones(1), 2],
            (torch.ones(1),),
            Pair(torch.ones(1), 3),
            {"k": torch.ones(1)},
            OrderedDict(k=torch.ones(1)),
            Output(torch.ones(1)),
        ],
        ids=lambda tree: type(tree).__name__,
    )
    def test_mapped_containers_keep_their_kind_and_leave_the_old_one_alone(self, tree: Any) -> None:
        new = map_tensors(tree, lambda t: t + 1)
        assert type(new) is type(tree)
        assert [float(t) for t in tensors_in(new)] == [2.0]
        assert [float(t) for t in tensors_in(tree)] == [1.0]

    def test_where_nothing_changes_the_object_stays(self) -> None:
        tree = {"a": [torch.ones(1)], "b": Pair(1, 2)}
        assert map_tensors(tree, lambda t: t) is tree

    def test_a_mapping_that_cannot_be_changed_is_built_anew(self) -> None:
        tree = MappingProxyType({"k": torch.ones(1)})
        new = map_tensors(tree, lambda t: t + 1)
        assert type(new) is MappingProxyType
        assert float(new["k"]) == 2

    def test_a_mapping_whose_copy_shares_its_store_leaves_the_old_one_alone(self) -> None:
        tree = Stored({"a": torch.ones(1), "b": torch.ones(2)})
        new = map_tensors(tree, lambda t: t + 1)
        assert type(new) is Stored
        assert [float(t.sum()) for t in tensors_in(new)] == [2.0, 4.0]
        assert [float(t.sum()) for t in tensors_in(tree)] == [1.0, 2.0]

    def test_a_list_of_a_type_of_its_own_keeps_its_attributes(self) -> None:
        tree = Tagged([torch.ones(1)], tag="left")
        new = map_tensors(tree, lambda t: t + 1)
        assert (type(new), new.tag, float(new[0]), float(tree[0])) == (Tagged, "left", 2.0, 1.0)

    def test_names_and_numbers_by_the_hundred_are_passed_over(self) -> None:
        asked = []

        class Asks(type):
            def __instancecheck__(cls, value: Any) -> bool:
                asked.append(value)
                return False

        class Kind(metaclass=Asks):
            pass

        tree = {"names": ["n"] * 300, "ids": tuple(range(300)), "x": None, "y": torch.ones(1)}
        assert list(tensors_in(tree, Kind)) == []
        assert map_tensors(tree, lambda t: t + 1, Kind) is tree
        assert len(asked) == 8  # the tree, two lists and a tensor, by each of the two

    def test_a_type_that_cannot_be_built_again_is_named(self) -> None:
        class Fixed(tuple):  # type: ignore[type-arg]
            def __new__(cls) -> Any:
                return super().__new__(cls, [torch.ones(1)])

        with pytest.raises(
            NotRebuiltError, match=r"Fixed cannot be built again from its parts \(TypeError"
        ):
            map_tensors(Fixed(), lambda t: t + 1)
        assert len(map_tensors(Fixed(), lambda t: t)) == 1


class TestCopies:
    def test_have_the_same_values_strides_and_dtype_and_memory_of_their_own(self) -> None:
        base = torch.arange(48.0).reshape(4, 12)
        tree = {
            "whole": base,
            "slice": base[:, :-1],
            "shifted": base[:, 1:],
            "turned": base.t(),
            "every other": base[:, ::2],
            "repeated": base[:, :1].expand(4, 5),
            "last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "windows": torch.arange(10).unfold(0, 4, 2),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2, dtype=torch.int8),
        }
        found = copies(tree)
        for name, tensor in tree.items():
            copy = found[name]
            assert torch.equal(copy, tensor), name
            assert copy.stride() == tensor.stride(), name
            assert copy.dtype == tensor.dtype
            if tensor.numel():
                assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        base.zero_()
        assert found["slice"].sum() > 0

    def test_one_tensor_that_is_there_twice_is_so_in_the_copy(self) -> None:
        ids = torch.arange(4)
        (first,), found = copies(((ids,), {"labels": ids, "other": ids.clone()}))
        assert found["labels"] is first
        assert found["other"] is not first
        assert first is not ids

    def test_they_are_detached(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        assert not copies([weight * 2])[0].requires_grad


def test_a_field_of_a_dataclass_that_is_not_set_yet_stays_unset() -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        late: torch.Tensor = dataclasses.field(init=False)

    batch = Batch(torch.ones(2))
    assert len(list(tensors_in(batch))) == 1
    doubled = map_tensors(batch, lambda t: t * 2)
    assert doubled.x.tolist() == [2, 2]
    assert not hasattr(doubled, "late")
