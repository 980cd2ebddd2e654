"""Late reading: nothing waits on a device, and everything arrives in order. The device is played by fakes."""

from __future__ import annotations

import pytest
import torch

from flopwise.kit.precision import late
from flopwise.kit.precision.late import Late, Review

CPU = torch.device("cpu")


def write(rows: Late, values: list[float], scale: float = 2.0) -> None:
    for value in values:
        rows.write([torch.tensor(value)], torch.tensor(scale))


class TestOnTheHost:
    def test_rows_are_known_at_once(self) -> None:
        rows = Late(4, CPU)
        for value in (1.0, float("inf"), float("nan"), 6.0):
            write(rows, [value])
            rows.ask()
            rows.arrived()
        known = rows.known
        assert (known.updates, known.skipped, known.in_a_row) == (4, 2, 0)
        assert (known.amax, known.scale) == (3.0, 2.0)  # unscaled

    def test_recent_rows_are_those_of_the_ring(self) -> None:
        rows = Late(3, CPU)
        write(rows, [1.0, 2.0])
        assert rows.recent()[:, 0].tolist() == [1.0, 2.0]
        write(rows, [3.0, 4.0])
        assert sorted(rows.recent()[:, 0].tolist()) == [2.0, 3.0, 4.0]

    def test_a_read_around_the_end_of_the_ring_keeps_the_order(self) -> None:
        rows = Late(3, CPU)
        write(rows, [1.0, 2.0])
        rows.ask()
        write(rows, [float("inf"), 4.0])
        rows.ask()
        rows.arrived()
        assert (rows.known.updates, rows.known.skipped, rows.known.in_a_row) == (4, 1, 0)
        assert rows.known.amax == 2.0

    def test_the_largest_of_several_checks_is_written(self) -> None:
        rows = Late(2, CPU)
        rows.write([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(1.0))
        assert rows.recent().tolist() == [[5.0, 1.0]]

    def test_it_resumes_with_full_rings_and_short_ones(self) -> None:
        for updates, kept in (
            (2, [[1.0, 1.0], [2.0, 1.0]]),
            (7, [[4.0, 1.0], [5.0, 1.0], [3.0, 1.0]]),
        ):
            rows = Late(3, CPU)
            rows.resume(kept, updates, 1)
            assert rows.recent().tolist() == kept
            assert (rows.known.updates, rows.known.skipped) == (updates, 1)
        rows = Late(5, CPU)
        rows.resume([[1.0, 1.0]] * 3, 7, 0)  # of a ring of another length
        assert (rows.written, rows.known.updates) == (0, 7)


class Event:
    """A CUDA event that has happened when the test says so."""

    def __init__(self) -> None:
        self.happened, self.waited = False, 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened, self.waited = True, self.waited + 1


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Makes copies take part in a CUDA device's ways, on the CPU."""
    made: list[Event] = []

    def copied(tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        made.append(Event())
        return tensor.clone(), made[-1]

    monkeypatch.setattr(late, "_copied", copied)
    return made


class TestOnADevice:
    def device_rows(self, rows: int = 8, every: int = 2) -> Late:
        made = Late(rows, CPU)
        made._every = every
        return made

    def test_nothing_is_waited_for(self, events: list[Event]) -> None:
        rows = self.device_rows()
        for value in (1.0, float("inf"), 1.0, 1.0):
            write(rows, [value])
            rows.ask()
            assert rows.arrived() == []
        assert len(events) == 2  # one copy every two updates
        assert (rows.known.updates, [e.waited for e in events]) == (0, [0, 0])
        events[1].happened = True
        rows.arrived()
        assert rows.known.updates == 0  # in order
        events[0].happened = True
        rows.arrived()
        assert (rows.known.updates, rows.known.skipped) == (4, 1)

    def test_a_forced_read_waits_for_all(self, events: list[Event]) -> None:
        rows = self.device_rows(every=10)
        write(rows, [1.0, 2.0, 3.0])
        rows.ask()
        assert events == []
        rows.ask(force=True)
        rows.arrived(wait=True)
        assert (rows.known.updates, events[0].waited) == (3, 1)
        rows.ask(force=True)
        assert len(events) == 1  # nothing new

    def test_reviews_arrive_between_the_rows(self, events: list[Event]) -> None:
        rows = self.device_rows()
        write(rows, [1.0, 1.0])
        rows.ask()
        rows.ask_review(2, torch.tensor([0.5, 4096.0, 0.25, 0.125, 0.0]))
        for event in events:
            event.happened = True
        (review,) = rows.arrived()
        assert review == Review(2, 0.5, 4096.0, 0.25, 0.125, 0.0)
        assert list(rows.known.reviews) == [review]
        assert str(review) == (
            "update 2: max |grad| 0.5, scale 4096; of the gradients 25.00% are subnormal in float16, 12.50% would be lost, "
            "0.00% are zero"
        )


def test_on_a_cuda_device_reads_are_few() -> None:
    made = Late.__new__(Late)
    # only the choice of how often: a CUDA ring cannot be made here
    torch_zeros, torch.zeros = torch.zeros, lambda *a, **k: torch_zeros(*a, dtype=k["dtype"])
    try:
        made.__init__(100, torch.device("cuda"))  # type: ignore[misc]
        assert made._every == 10
        made.__init__(4, torch.device("cuda"))  # type: ignore[misc]
        assert made._every == 4
    finally:
        torch.zeros = torch_zeros
