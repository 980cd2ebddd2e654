"""The user's line around a host event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flopwise.diagnosis.ledger.where import Places


def place_of(timeline: Any, name: str) -> str | None:
    events = timeline.read().events
    (row,) = np.flatnonzero(events.names_where(lambda n: n == name))
    return Places(events).of(int(row))


def test_the_innermost_function_that_is_no_librarys(timeline: Any) -> None:
    timeline.add("python_function", "train.py(10): <module>", 0, 100)
    timeline.add("python_function", "my/model.py(33): forward", 10, 50)
    timeline.add("python_function", "torch/nn/modules/linear.py(116): forward", 12, 40)
    timeline.call("cudaStreamSynchronize", 20, 5)
    assert place_of(timeline, "cudaStreamSynchronize") == "my/model.py:33"


def test_another_threads_functions_do_not_count(timeline: Any) -> None:
    timeline.add("python_function", "train.py(10): <module>", 0, 100, (10, 2))
    timeline.call("cudaStreamSynchronize", 20, 5, tid=1)
    assert place_of(timeline, "cudaStreamSynchronize") is None


def test_the_stack_of_old_traces(timeline: Any) -> None:
    stack = (
        "/opt/venv/lib/python3.7/site-packages/torch/utils/data/dataloader.py(517): __next__;"
        "/home/me/train.py(42): <module>"
    )
    timeline.op("enumerate(DataLoader)", 0, 10, **{"Call stack": stack})
    assert place_of(timeline, "enumerate(DataLoader)") == "/home/me/train.py:42"


def test_without_stacks_there_is_no_place(timeline: Any) -> None:
    timeline.op("aten::mm", 0, 10)
    assert place_of(timeline, "aten::mm") is None


def stacked(timeline: Any) -> Any:
    """One step: a product at model.py:33 with its gradient, under autograd's engine on another thread."""
    timeline.add("python_function", "train.py(10): <module>", 0, 100)
    timeline.add("python_function", "model.py(33): forward", 10, 20)
    square = ([8, 8], "float")
    timeline.op("aten::mm", 12, 10, square, square, **{"Sequence number": 7})
    timeline.add("python_function", "train.py(12): step", 40, 50)
    node = "autograd::engine::evaluate_function: MmBackward0"
    timeline.op(node, 50, 30, tid=2, **{"Sequence number": 7})
    timeline.op("MmBackward0", 51, 28, tid=2, **{"Sequence number": 7})
    timeline.op("aten::mm", 55, 10, ([8, 9], "float"), square, tid=2)
    return timeline


def test_a_gradient_has_the_place_of_its_forward(timeline: Any) -> None:
    events = stacked(timeline).read().events
    rows = np.flatnonzero(events.names_where(lambda n: n == "aten::mm"))
    assert [Places(events).of(int(row)) for row in rows] == ["model.py:33", "model.py:33"]


def test_an_operator_that_makes_no_node_does_not_take_the_number(timeline: Any) -> None:
    timeline.add("python_function", "data.py(5): load", 0, 8)
    timeline.op("aten::clone", 1, 5, **{"Sequence number": 7})
    events = stacked(timeline).read().events
    last = int(np.flatnonzero(events.names_where(lambda n: n == "aten::mm"))[-1])
    assert Places(events).of(last) == "model.py:33"


def test_the_place_of_another_trace_by_name_and_shapes(timelines: Callable[[], Any]) -> None:
    other = Places(stacked(timelines()).read().events)
    bare = timelines()
    square = ([8, 8], "float")
    bare.op("aten::linear", 9, 20)
    bare.op("aten::mm", 12, 10, square, square)
    bare.op("aten::mm", 35, 10, ([8, 9], "float"), square)
    bare.op("aten::mm", 55, 10, ([5, 5], "float"), square)
    events = bare.read().events
    rows = np.flatnonzero(events.names_where(lambda n: n == "aten::mm")).tolist()
    places = Places(events, other)
    assert [places.of(row) for row in rows] == ["model.py:33", "model.py:33", None]
    assert Places(events).of(rows[0]) is None


def test_of_several_lines_the_costliest(timelines: Callable[[], Any]) -> None:
    t = timelines()
    for at, dur, line in ((0, 10, 1), (20, 40, 2), (70, 10, 1)):
        t.add("python_function", f"model.py({line}): forward", at, dur)
        t.op("aten::relu", at + 1, dur - 2, ([8], "float"))
    bare = timelines()
    bare.op("aten::relu", 1, 5, ([8], "float"))
    assert Places(bare.read().events, Places(t.read().events)).of(0) == "model.py:2"


def test_a_wait_is_found_by_the_operator_around_it(timelines: Callable[[], Any]) -> None:
    t = timelines()
    t.add("python_function", "train.py(77): log", 0, 50)
    t.op("aten::item", 5, 40, ([], "float"))
    t.op("aten::_local_scalar_dense", 6, 38, ([], "float"))
    t.call("cudaStreamSynchronize", 8, 10)
    t.add("python_function", "train.py(99): copy", 60, 500)
    t.call("cudaStreamSynchronize", 61, 490)
    bare = timelines()
    bare.op("aten::item", 5, 40, ([], "float"))
    bare.call("cudaStreamSynchronize", 10, 20)
    events = bare.read().events
    (row,) = np.flatnonzero(events.names_where(lambda n: n == "cudaStreamSynchronize"))
    assert Places(events, Places(t.read().events)).of(int(row)) == "train.py:77"


def test_a_wait_outside_of_any_operator_is_found_by_its_name(timelines: Callable[[], Any]) -> None:
    t = timelines()
    t.add("python_function", "train.py(99): copy", 60, 500)
    t.call("cudaStreamSynchronize", 61, 490)
    bare = timelines()
    bare.call("cudaStreamSynchronize", 10, 20)
    assert Places(bare.read().events, Places(t.read().events)).of(0) == "train.py:99"


def test_neither_a_step_nor_a_node_of_the_engine_tells_a_place(
    timelines: Callable[[], Any],
) -> None:
    made = []
    for size in (8, 9):
        t = timelines()
        if size == 8:
            t.add("python_function", "train.py(10): <module>", 0, 100)
        t.mark(1, 0, 100)
        t.op("autograd::engine::evaluate_function: MmBackward0", 10, 50)
        t.op("aten::mm", 20, 10, ([size, size], "float"))
        made.append(t.read().events)
    here, bare = Places(made[0]), made[1]
    (row,) = np.flatnonzero(bare.names_where(lambda n: n == "aten::mm"))
    assert here.by_key[("ProfilerStep#1", b"")] == "train.py:10"
    assert Places(bare, here).of(int(row)) is None
