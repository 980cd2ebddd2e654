from __future__ import annotations

import pytest

from flopwise.hardware import limits
from flopwise.kit import worker_count
from flopwise.kit.worker_count import (
    choose_workers,
    most_workers_by_memory,
    shared_memory_problem,
)


@pytest.mark.parametrize(
    ("data_frac", "waits", "cores", "workers"),
    [
        (0.0, False, 16, 1),
        (0.5, False, 16, 1),
        (0.75, False, 16, 3),  # a load takes three times what the rest takes
        (0.76, False, 16, 4),
        (0.99, False, 16, 15),  # one core is left to training
        (0.99, True, 16, 16),
        (1.0, True, 4, 4),
        (0.9, False, 1, 1),
    ],
)
def test_as_many_as_keep_up(data_frac: float, waits: bool, cores: int, workers: int) -> None:
    assert choose_workers(data_frac, waits, cores) == workers


def test_as_many_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 1000)
    monkeypatch.setattr(limits, "resident_bytes", lambda: 300)
    assert most_workers_by_memory() == 3
    monkeypatch.setattr(limits, "resident_bytes", lambda: None)
    assert most_workers_by_memory() > 1000


def test_shared_memory_holds_the_batches_in_flight_twice_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_count.limits, "free_shared_memory_bytes", lambda: 64 << 20)
    assert shared_memory_problem(4 << 20, 4, 2) is None
    assert (
        shared_memory_problem(4 << 20, 5, 2)
        == "/dev/shm has 64 MiB free, batches in flight need 80 MiB"
    )
    monkeypatch.setattr(worker_count.limits, "free_shared_memory_bytes", lambda: None)
    assert shared_memory_problem(1 << 40, 5, 2) is None
