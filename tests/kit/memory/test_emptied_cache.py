from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.kit.memory import emptied_cache
from flopwise.kit.memory.allocator_counters import AllocatorState
from flopwise.kit.memory.emptied_cache import EmptyCacheCost, empty_cache_cost, held_back
from flopwise.kit.memory.interleaved import Ratio


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "empty_cache", lambda: seen.append(1))
    return seen


class TestHeldBack:
    @pytest.mark.parametrize(("free", "through"), [(0.5, 0), (0.01, 2)])
    def test_calls_go_through_where_memory_is_short(
        self, calls: list[int], monkeypatch: pytest.MonkeyPatch, free: float, through: int
    ) -> None:
        monkeypatch.setattr(emptied_cache, "_free_frac", lambda: free)
        with held_back() as seen:
            torch.cuda.empty_cache()
            torch.cuda.memory.empty_cache()
        assert len(calls) == seen.let_through == through
        assert seen.calls == 2
        assert all("test_emptied_cache.py:" in where for where in seen.places)
        torch.cuda.empty_cache()
        assert len(calls) == through + 1

    def test_none_and_all(self, calls: list[int]) -> None:
        for free_frac, through in ((None, 0), (1, 1)):
            calls.clear()
            with held_back(free_frac):
                torch.cuda.empty_cache()
            assert len(calls) == through


class TestCost:
    def test_a_step_without_calls(self) -> None:
        assert str(empty_cache_cost(lambda: None)) == "the step does not empty the cache"

    def test_calls_are_counted_and_the_step_is_measured_without_them(
        self, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ratio = Ratio(0.002, 0.001, 0.5, 0.4, 0.6, 7)

        def compare(old: Any, new: Any, device: Any, **kwargs: Any) -> Ratio:
            before = len(calls)
            old()
            assert len(calls) == before + 2
            new()
            assert len(calls) == before + 2
            return ratio

        monkeypatch.setattr(emptied_cache, "compare", compare)

        def step() -> None:
            torch.cuda.empty_cache()
            torch.cuda.empty_cache()

        cost = empty_cache_cost(step)
        assert (cost.calls_per_step, cost.step, cost.driver_calls) == (2, ratio, None)
        assert len(cost.places) == 2

    def test_the_device_is_asked_for_once_the_step_has_run(
        self, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[int] = []
        devices: list[torch.device] = []

        def compare(old: Any, new: Any, device: torch.device, **kwargs: Any) -> Ratio:
            devices.append(device)
            return Ratio(0.002, 0.001, 0.5, 0.4, 0.6, 7)

        def step() -> None:
            ran.append(1)
            torch.cuda.empty_cache()

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(ran))
        monkeypatch.setattr(emptied_cache, "compare", compare)
        monkeypatch.setattr(emptied_cache, "_driver_calls", lambda step, device: None)
        empty_cache_cost(step)
        assert devices == [torch.device("cuda")]

    def test_driver_calls_a_step_are_read_from_the_allocator(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = iter([10, 30])

        def state(device: Any) -> AllocatorState:
            return AllocatorState(0, 0, 0, 9, 0, 0, 0, next(counts), 5, 0)

        monkeypatch.setattr(emptied_cache, "allocator_state", state)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        steps: list[int] = []
        found = emptied_cache._driver_calls(lambda: steps.append(1), torch.device("cuda"))
        assert found == (4.0, 9)
        assert len(steps) == 6  # one before the count

    def test_it_is_told_in_words(self) -> None:
        cost = EmptyCacheCost(
            1, ("t.py:3",), Ratio(0.002, 0.001, 0.5, 0.4, 0.6, 7), (60.0, 0.0), (2**30, 2**31)
        )
        assert str(cost) == (
            "empty_cache 1 times a step at t.py:3: without it 0.500 of the time (95 % interval 0.400 to "
            "0.600, 7 rounds; 2 ms before, 1 ms after); driver allocations and frees a step 60 with it, "
            "0 without; peak reserved 1.00 GiB with it, 2.00 without: take it out, or hold it back until "
            "memory is short"
        )
