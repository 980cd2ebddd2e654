"""How long a thread waited for a core, from what Linux keeps of it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from flopwise.meter import preemption
from flopwise.meter.preemption import Preemption, run_delay_ns


def test_of_a_stretch_the_share_that_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    delays, times = iter([5_000, 255_000]), iter([1_000_000, 2_000_000])
    monkeypatch.setattr(preemption, "run_delay_ns", lambda: next(delays))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(times))
    found = Preemption()
    found.begin()
    found.end()
    assert found.frac == 0.25


def test_another_thread_and_a_silent_system_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Preemption()
    found.begin()
    other = threading.Thread(target=found.end)
    other.start()
    other.join()
    assert found.frac is None
    monkeypatch.setattr(preemption, "_PATH", "/nowhere")
    assert run_delay_ns() is None
    found = Preemption()
    found.begin()
    found.end()
    assert found.frac is None


def test_damaged_figures_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for text in ("", "1", "a b c", "1 x 2"):
        path = tmp_path / "schedstat"
        path.write_text(text)
        monkeypatch.setattr(preemption, "_PATH", str(path))
        assert run_delay_ns() is None


@pytest.mark.skipif(run_delay_ns() is None, reason="this kernel keeps no schedstat")
def test_a_crowded_core_shows() -> None:
    """Two threads of native work on one core: each waits for half of the time."""
    import hashlib

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    stop = threading.Event()
    block = b"x" * 4_000_000  # hashing it lets go of the interpreter

    def burn() -> None:
        os.sched_setaffinity(0, {min(cores)})
        while not stop.is_set():
            hashlib.sha256(block).digest()

    rival = threading.Thread(target=burn)
    try:
        rival.start()
        found = Preemption()
        found.begin()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            hashlib.sha256(block).digest()
        found.end()
    finally:
        stop.set()
        rival.join()
        os.sched_setaffinity(0, cores)
    assert found.frac is not None
    assert found.frac > 0.2
