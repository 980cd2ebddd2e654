"""The counters of the device beside the busy share of the ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.measurement import counters, ledgers
from flopwise.records.rank import DeviceMetrics
from flopwise.records.run import Pause


def run(sm_busy_frac: float | None, *pauses: Pause, window_s: float | None = 5.0) -> Any:
    metrics = DeviceMetrics(window_s=window_s, sm_busy_frac=sm_busy_frac)
    return SimpleNamespace(device_metrics=metrics, steps=SimpleNamespace(pauses=list(pauses)))


def ledger(busy_frac: float, most: float | None = None) -> Any:
    return SimpleNamespace(busy_frac=busy_frac, busy_most_frac=most, world_size=1)


@pytest.mark.parametrize(
    ("sm_busy_frac", "busy_frac", "says"),
    [
        (0.30, 0.90, False),  # small kernels
        (0.90, 0.90, False),
        (0.599, 0.50, False),
        (0.601, 0.50, True),
        (1.00, 0.05, True),
        (None, 0.05, False),
    ],
)
def test_only_more_than_busy_contradicts(
    sm_busy_frac: float | None, busy_frac: float, says: bool
) -> None:
    assert bool(counters.contradictions(run(sm_busy_frac), ledger(busy_frac))) is says


def test_the_note_has_both_figures() -> None:
    assert counters.contradictions(run(0.93), ledger(0.41)) == [
        "the device's own counters contradict the ledger: SMs had work for 93 % of the timed "
        "window, kernels of this process ran for 41 % of the step. Another process used the device, or the "
        "trace lacks kernels, or the profiled steps were not like the timed ones"
    ]


def test_a_pause_may_have_been_busy_all_the_time() -> None:
    pause = Pause("evaluation", 1, 2.0, "no backward")  # 2 of 5 s: at most 0.5 + 0.5 * 0.4
    assert counters.contradictions(run(0.79, pause), ledger(0.5)) == []
    assert counters.contradictions(run(0.81, pause), ledger(0.5)) != []


def test_the_upper_end_of_busy_counts() -> None:
    assert counters.contradictions(run(0.75), ledger(0.5, 0.7)) == []
    assert counters.contradictions(run(0.85), ledger(0.5, 0.7)) != []


def test_nothing_was_read() -> None:
    nothing = SimpleNamespace(device_metrics=None, steps=SimpleNamespace(pauses=[]))
    assert counters.contradictions(nothing, ledger(0.1)) == []  # type: ignore[arg-type]
    assert counters.contradictions(run(0.9, window_s=None), ledger(0.1)) == []


def test_it_stands_among_the_notes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "replace", lambda record, **changes: changes)
    record, found = run(0.93), ledger(0.41)
    record.notes, record.findings, found.findings = ["first"], [], []
    changes: Any = ledgers.with_ledger(record, found, None)
    assert changes["notes"] == ["first", *counters.contradictions(record, found)]
