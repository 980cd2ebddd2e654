"""What coverage is a share of, and that one clock is never added to another."""

from __future__ import annotations

import pytest
import torch

from flopwise.meter import count_clock
from flopwise.meter.count_clock import BASIS, BYTES, DEVICE, HOST, Clock, Sample, shares
from flopwise.meter.count_ops import Op


class Event:
    """A CUDA event at a known time in milliseconds."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def sample(name: str, kind: str, weight: float, covered: bool) -> Sample:
    made = Sample(name, kind, (Event(0.0), Event(weight)) if kind == DEVICE else weight)
    made.covered = covered
    return made


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_shares_of_host_time_largest_missing_first() -> None:
    covered, missing, basis = shares(
        [
            sample("aten::mm", HOST, 60, True),
            sample("a::x", HOST, 10, False),
            sample("a::y", HOST, 25, False),
            sample("a::x", HOST, 5, False),
        ]
    )
    assert covered == 0.6
    assert list(missing.items()) == [("a::y", 0.25), ("a::x", 0.15)]
    assert basis == BASIS[HOST]


@pytest.mark.usefixtures("_no_device")
def test_where_a_gpu_worked_its_time_alone_weighs() -> None:
    covered, missing, basis = shares(
        [
            sample("aten::mm", DEVICE, 3.0, True),
            sample("a::x", DEVICE, 1.0, False),
            sample("aten::add", HOST, 1e9, True),
            sample("a::host", HOST, 1e9, False),
        ]
    )
    assert covered == 0.75
    assert missing == {"a::x": 0.25, "a::host": 0.0}
    assert basis == BASIS[DEVICE]


@pytest.mark.usefixtures("_no_device")
def test_views_and_captured_ops_weigh_nothing_beside_events() -> None:
    covered, missing, _ = shares(
        [sample("aten::mm", DEVICE, 3.0, True), sample("v", BYTES, 0, True)]
    )
    assert (covered, missing) == (1.0, {})


def test_nothing_ran_nothing_is_missing_but_an_unknown_op_without_weight_is() -> None:
    assert shares([])[:2] == (1.0, {})
    assert shares([sample("a::x", BYTES, 0, False)])[:2] == (0.0, {"a::x": 0})


def test_an_op_on_a_gpu_gets_events_until_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    class Recorded:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)

        def record(self, stream: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(count_clock, "_initialised", lambda: True)
    monkeypatch.setattr(count_clock, "_cuda_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(count_clock, "capturing", lambda: False)
    monkeypatch.setattr(count_clock, "EVENTS", 2)
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    clock, op = Clock(timed=True), Op("aten::mm", None, False, False, (), False, None)
    kinds = [clock.end(op, clock.begin(op, (), {}), (), {}, None).kind for _ in range(4)]
    assert kinds == [DEVICE, DEVICE, BYTES, BYTES]
    assert len(made) == 4

    monkeypatch.setattr(count_clock, "capturing", lambda: True)
    during = Clock(timed=True)
    assert during.end(op, during.begin(op, (), {}), (), {}, None).kind == BYTES
    assert len(made) == 4
