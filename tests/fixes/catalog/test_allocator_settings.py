from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import pytest
import torch

from flopwise.fixes.catalog import allocator_settings
from flopwise.fixes.catalog.allocator_settings import NAMES, AllocatorSettings, cause_of
from flopwise.fixes.interface import Declined, Eligible, Scene
from flopwise.kit.memory import allocator_counters
from flopwise.kit.memory.allocator_counters import AllocatorState

GB = 10**9
CUDA = torch.device("cuda")
QUIET = AllocatorState(
    allocated_bytes=20 * GB,
    reserved_bytes=30 * GB,
    peak_allocated_bytes=28 * GB,
    peak_reserved_bytes=30 * GB,
    inactive_split_bytes=GB,
    retries=0,
    out_of_memory=0,
    driver_allocations=40,
    driver_frees=0,
    requested_bytes=20 * GB,
)


def state(**changes: int) -> AllocatorState:
    return dataclasses.replace(QUIET, **changes)


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (state(), None),
        (state(retries=3), "tried again 3 times"),
        (state(out_of_memory=1), "found no memory 1 times"),
        (state(peak_reserved_bytes=70 * GB, peak_allocated_bytes=50 * GB), "29 % of the reserved"),
        (state(peak_reserved_bytes=70 * GB, peak_allocated_bytes=60 * GB), None),
        (state(peak_reserved_bytes=30 * GB, peak_allocated_bytes=10 * GB), None),  # there is room
    ],
)
def test_its_causes(seen: AllocatorState, cause: str | None) -> None:
    found = cause_of(seen, 80 * GB)
    assert found is None if cause is None else cause in str(found)


class TestCheck:
    @pytest.fixture(autouse=True)
    def _card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GB, 80 * GB))

    def seen(self, monkeypatch: pytest.MonkeyPatch, seen: AllocatorState | None) -> Any:
        monkeypatch.setattr(allocator_counters, "allocator_state", lambda device: seen)
        return AllocatorSettings().check(Scene(device=CUDA))

    def test_retries_are_a_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = self.seen(monkeypatch, state(retries=2))
        assert isinstance(answer, Eligible)
        assert "2 times" in answer.note

    def test_a_quiet_allocator_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = self.seen(monkeypatch, QUIET)
        assert isinstance(answer, Declined)
        assert answer.reason == (
            "the allocator had no retries, and holds 30 of 80 GB, 7 % of it unused"
        )

    def test_other_reasons(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "not been used" in self.seen(monkeypatch, None).reason
        assert "no CUDA device" in AllocatorSettings().check(Scene()).reason
        monkeypatch.setenv(NAMES[1], "max_split_size_mb:512")
        assert NAMES[1] in self.seen(monkeypatch, state(retries=2)).reason
        monkeypatch.setattr(sys, "platform", "win32")
        assert "Linux" in self.seen(monkeypatch, state(retries=2)).reason


class TestEnvironment:
    def test_both_names_alike(self) -> None:
        wanted = dict.fromkeys(NAMES, "expandable_segments:True")
        assert AllocatorSettings.environment({}) == wanted
        assert AllocatorSettings.environment({"conf": "expandable_segments:True"}) == wanted

    def test_nothing_else_from_a_plan(self) -> None:
        with pytest.raises(ValueError, match="expandable"):
            AllocatorSettings.environment({"conf": "backend:cudaMallocAsync"})

    def test_it_is_no_switch(self) -> None:
        with pytest.raises(RuntimeError, match="before its process starts"):
            AllocatorSettings().apply(Scene())

    def test_a_planned_run_says_where_it_is_not_in_use(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start_up = AllocatorSettings.at_start({})
        start_up.install()
        for name in NAMES:
            monkeypatch.setitem(os.environ, name, "expandable_segments:True")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        segments: list[dict[str, Any]] = [{"is_expandable": True}]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
        assert start_up.trouble() is None
        segments[:] = [{"is_expandable": False}]
        assert "does not use" in str(start_up.trouble())
        monkeypatch.delitem(os.environ, NAMES[0])
        assert NAMES[0] in str(start_up.trouble())

    def test_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in NAMES:
            monkeypatch.setenv(name, "expandable_segments:True")
        monkeypatch.setattr(allocator_settings.torch.cuda, "is_available", lambda: False)
        assert "not in use" in str(AllocatorSettings.at_start({}).trouble())
