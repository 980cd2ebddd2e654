from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopwise.kit.memory.arguments import ArgumentError
from flopwise.kit.memory.copied_pages import PackedStrings, copied_objects


class Files:
    def __init__(self, items: Any) -> None:
        self.items = items
        self.transform = {"size": 3}


class TestCopiedObjects:
    def test_a_list_of_texts(self) -> None:
        texts = [f"{i:0100}" for i in range(20_000)]
        found = copied_objects(Files(texts), workers=4)
        assert [(f.path, f.kind, f.objects, f.workers) for f in found] == [
            ("dataset.items", "list of str", 20_000, 4)
        ]
        size = 20_000 * sys.getsizeof(texts[0]) + sys.getsizeof(texts)
        assert found[0].object_bytes == size
        assert found[0].peak_bytes == 5 * size
        assert "It is no leak of the loader. Keep them in PackedStrings" in str(found[0])

    def test_the_largest_first_and_as_deep_as_attributes_of_attributes(self) -> None:
        dataset = Files(Files({i: [i, i] for i in range(10_000)}))
        dataset.extra = list(range(10_000))  # type: ignore[attr-defined]
        found = copied_objects(dataset, workers=2)
        assert [(f.path, f.kind) for f in found] == [
            ("dataset.items.items", "dict of list"),
            ("dataset.extra", "list of int"),
        ]
        assert str(found[1]).endswith("Keep them in a tensor or an array")

    def test_an_array_of_objects_is_one_of_references(self) -> None:
        class Array(list[str]):
            dtype = "object"

        (found,) = copied_objects(Files(Array(f"{i:0100}" for i in range(10_000))), workers=2)
        assert found.kind == "list of str"

    @pytest.mark.parametrize(
        "items",
        [
            torch.zeros(100_000),
            b"x" * 100_000,
            list(range(9_999)),
            None,
            PackedStrings(["a"] * 20_000),
        ],
    )
    def test_what_copies_nothing(self, items: Any) -> None:
        assert copied_objects(Files(items), workers=4) == []

    def test_a_ring_of_references_ends(self) -> None:
        dataset = Files([])
        dataset.items.append(dataset)
        assert copied_objects(dataset, workers=1) == []


class TestPackedStrings:
    @given(st.lists(st.text(max_size=20), max_size=20))
    def test_it_is_the_list(self, texts: list[str]) -> None:
        packed = PackedStrings(texts)
        assert list(packed) == texts
        assert len(packed) == len(texts)
        assert packed[1:-1:2] == texts[1:-1:2]
        for i in range(-len(texts), len(texts)):
            assert packed[i] == texts[i]

    def test_out_of_range(self) -> None:
        for i in (2, -3):
            with pytest.raises(IndexError, match="of 2 texts"):
                PackedStrings(["a", "b"])[i]

    def test_a_pickle(self) -> None:
        assert list(pickle.loads(pickle.dumps(PackedStrings(["a", "", "é"])))) == ["a", "", "é"]


def test_names_of_files_that_are_no_text_come_back() -> None:
    names = [b"caf\xe9.jpg".decode(errors="surrogateescape"), "a"]
    packed = PackedStrings(names)
    assert list(packed) == names
    assert packed[0].encode(errors="surrogateescape") == b"caf\xe9.jpg"


@pytest.mark.parametrize("texts", [["a", None], b"ab"])
def test_what_is_no_text_is_told(texts: Any) -> None:
    with pytest.raises(ArgumentError, match=r"PackedStrings: text . is a (NoneType|int)"):
        PackedStrings(texts)
