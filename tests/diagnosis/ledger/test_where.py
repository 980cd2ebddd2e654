"""The user's line around a host event."""

from __future__ import annotations

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
