from __future__ import annotations

import pytest
import torch

from flopwise.kit.memory.allocator_counters import allocator_state, from_stats


def test_counters_by_their_names() -> None:
    state = from_stats({
        "allocated_bytes.all.current": 600,
        "allocated_bytes.all.peak": 750,
        "reserved_bytes.all.current": 800,
        "reserved_bytes.all.peak": 1000,
        "inactive_split_bytes.all.current": 200,
        "requested_bytes.all.current": 570,
        "num_alloc_retries": 2,
        "num_ooms": 1,
        "num_device_alloc": 5,
        "num_device_free": 3,
    })  # fmt: skip
    assert (state.retries, state.out_of_memory) == (2, 1)
    assert (state.driver_allocations, state.driver_frees) == (5, 3)
    assert state.fragmentation_frac == 0.25
    assert state.peak_unused_frac == 0.25
    assert state.rounding_frac == pytest.approx(0.05)


def test_a_backend_that_lacks_counters() -> None:
    state = from_stats({"allocated_bytes.all.current": 10})
    assert state.retries == 0
    assert (state.fragmentation_frac, state.peak_unused_frac, state.rounding_frac) == (0, 0, 0)


def test_there_is_none_where_cuda_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert allocator_state() is None
