"""Arms are timed in turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.kit.graph import timing
from flopwise.kit.graph.timing import interleaved

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def arm(self, name: str, seconds: float) -> Any:
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def test_medians_in_mirrored_turns(clock: Clock) -> None:
    arms = {"a": clock.arm("a", 0.5), "b": clock.arm("b", 0.25)}
    assert interleaved(arms, CPU, rounds=4, warm_up=1, calls=1, budget_s=100) == {
        "a": 0.5,
        "b": 0.25,
    }
    assert "".join(clock.log) == "ab" + "ab" + "abba" * 2


def test_short_arms_are_called_often_and_the_budget_ends_it(clock: Clock) -> None:
    interleaved({"a": clock.arm("a", 0.0001)}, CPU, rounds=3, warm_up=0)
    assert len(clock.log) in (1 + 3 * 19, 1 + 3 * 20)
    clock.log.clear()
    interleaved({"a": clock.arm("a", 1.0)}, CPU, rounds=9, warm_up=0, budget_s=2.0, calls=1)
    assert len(clock.log) == 1 + 3  # never fewer than three
