"""Compute under collectives against the same compute without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flopwise.diagnosis.ledger.contention import Contention, contention, shaped
from flopwise.trace.launches import launches
from flopwise.trace.ownership import classes
from flopwise.trace.table import Operands

SQUARE = ([64, 64], "float")
WIDE = ([64, 128], "float")


def place(t: Any, at: float, us: float, *operands: Any, name: str = "aten::mm") -> None:
    """Adds a kernel of an operator, launched long before."""
    op = t.op(name, at / 100, 0.5, *operands)
    t.kernel("gemm", 1000 + at, us, at=at / 100 + 0.1, took=0.2, op=op)


def collective(t: Any, at: float, us: float) -> None:
    t.kernel("ncclDevKernel_AllReduce", 1000 + at, us, stream=9)


def found(t: Any) -> tuple[Contention, list[tuple[float, float]]]:
    """Returns the contention, and by compute kernel in order its duration in microseconds and its share."""
    events = t.read().events
    work = launches(events, 0)
    kind = classes(events, work)
    out = contention(events, work, kind, np.asarray(work.op < 0))
    rows = np.flatnonzero(kind == 0)
    length = (work.end_ns - work.start_ns) / 1e3
    return out, [(float(length[row]), round(float(out.frac[row]), 6)) for row in rows]


def test_beyond_the_median_of_its_twins(timeline: Any) -> None:
    for at, us in ((0, 90), (100, 100), (200, 120)):
        place(timeline, at, us, SQUARE, SQUARE)
    collective(timeline, 400, 100)
    place(timeline, 400, 125, SQUARE, SQUARE)
    out, shares = found(timeline)
    assert shares == [(90, 0), (100, 0), (120, 0), (125, 0.2)]
    assert not out.unknown.any()


def test_scatter_around_the_twins_cancels(timeline: Any) -> None:
    place(timeline, 0, 100, SQUARE, SQUARE)
    collective(timeline, 200, 500)
    place(timeline, 200, 80, SQUARE, SQUARE)
    place(timeline, 300, 120, SQUARE, SQUARE)
    assert [share for _, share in found(timeline)[1]] == [0, 0, 0]


def test_faster_under_a_collective_is_no_contention(timeline: Any) -> None:
    place(timeline, 0, 100, SQUARE, SQUARE)
    collective(timeline, 200, 500)
    place(timeline, 200, 80, SQUARE, SQUARE)
    assert found(timeline)[1] == [(100, 0), (80, 0)]


@pytest.mark.parametrize(
    ("name", "operands"), [("aten::mm", (SQUARE, WIDE)), ("aten::bmm", (SQUARE, SQUARE)), ("aten::mm", ())]
)  # fmt: skip
def test_other_shapes_and_operators_are_no_twins(timeline: Any, name: str, operands: Any) -> None:
    place(timeline, 0, 100, *operands, name=name)
    collective(timeline, 200, 500)
    place(timeline, 200, 200, SQUARE, SQUARE)
    out, shares = found(timeline)
    assert shares == [(100, 0), (200, 0)]
    assert out.unknown.sum() == 1


def test_without_shapes_or_an_operator_it_is_not_known(timeline: Any) -> None:
    for at in (0, 200):
        place(timeline, at, 100)
        timeline.kernel("gemm", 1100 + at, 50)
    collective(timeline, 200, 500)
    out, shares = found(timeline)
    assert [share for _, share in shares] == [0, 0, 0, 0]
    assert out.unknown.sum() == 2


def test_of_lists_of_tensors_the_shapes_are_missing() -> None:
    assert shaped(Operands(b"[[4], [4]]", b'["float", "float"]'))
    assert not shaped(Operands(b"[[], []]", b'["TensorList", "float"]'))
    assert not shaped(Operands(b"[[]]", b'["GenericList"]'))
    assert not shaped(Operands())
    assert not shaped(Operands(b"[[4]"))


def test_without_a_collective_there_is_none(timeline: Any) -> None:
    place(timeline, 0, 100)
    out, _ = found(timeline)
    assert not out.frac.any()
    assert not out.unknown.any()
