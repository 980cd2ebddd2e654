"""Operators that have the tokens of a batch among their sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flopwise.diagnosis.ledger.padding import tokens, works_on
from flopwise.trace.table import Operands

BATCH = frozenset({(8, 1024)})


def test_tokens_are_what_an_embedding_looks_up(timeline: Any) -> None:
    table = ([50304, 768], "float")
    timeline.op("aten::embedding", 0, 10, table, ([8, 1024], "long int"), -1, False, False)
    timeline.op("aten::embedding", 20, 10, table, ([8, 1024], "long int"), -1, False, False)
    timeline.op("aten::embedding", 40, 10, table, ([1], "long int"), -1, False, False)
    timeline.op("aten::embedding", 60, 10)  # nothing recorded
    timeline.op("aten::relu", 80, 10, ([4, 4], "float"))
    assert tokens(timeline.read().events) == BATCH


@pytest.mark.parametrize(
    ("shapes", "works"),
    [
        ([[8, 1024, 768]], True),
        ([[8192, 768]], True),
        ([[8, 12, 1024, 64]], True),
        ([[8, 12, 1024, 1024]], True),
        ([[768], [8192, 50304]], True),
        ([[768, 3072]], False),
        ([[1024, 1024]], False),  # a weight as wide as the batch is long
        ([[50304, 768]], False),
        ([[8]], False),
        ([], False),
    ],
)  # fmt: skip
def test_shapes_that_hold_them(shapes: Any, works: bool) -> None:
    given = Operands(json.dumps(shapes).encode(), json.dumps(["float"] * len(shapes)).encode())
    assert works_on(given, BATCH) is works
    assert not works_on(given, frozenset())


def test_damaged_operands_hold_nothing() -> None:
    assert not works_on(Operands(b"[[8, 1024"), BATCH)
