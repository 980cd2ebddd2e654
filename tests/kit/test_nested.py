from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

from flopwise.kit.nested import NotRebuiltError, map_tensors, tensors_in

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Output:
    loss: Any
    logits: Any = None


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

    def test_a_type_that_cannot_be_built_again_is_named(self) -> None:
        class Fixed(list):  # type: ignore[type-arg]
            def __init__(self) -> None:
                super().__init__([torch.ones(1)])

        with pytest.raises(
            NotRebuiltError, match=r"Fixed cannot be built again from its parts \(TypeError"
        ):
            map_tensors(Fixed(), lambda t: t + 1)
        assert len(map_tensors(Fixed(), lambda t: t)) == 1
