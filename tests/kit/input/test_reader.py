from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from flopwise.errors import FlopwiseWarning, InputError
from flopwise.kit.input.reader import InThread, InTurn, Snapshot
from flopwise.kit.input.sent import Times


class Link:
    """Hands items through, and notes by which thread."""

    def __init__(self, fail_at: Any = None) -> None:
        self.threads: list[str] = []
        self.entered = 0
        self.fail_at = fail_at

    def send(self, item: Any, number: int) -> Any:
        self.threads.append(threading.current_thread().name)
        if item == self.fail_at:
            raise OSError("link down")
        return (number, item)

    def enter_thread(self) -> None:
        self.entered += 1


def drain(reader: Any) -> list[Any]:
    got = []
    while True:
        try:
            got.append(reader.take().sent)
        except StopIteration:
            return got


@pytest.mark.parametrize("kind", [InThread, InTurn])
def test_order_numbers_and_the_end_that_stays_the_end(kind: Any) -> None:
    reader = kind(iter("abc"), Link(), 2)
    assert drain(reader) == [(0, "a"), (1, "b"), (2, "c")]
    with pytest.raises(StopIteration):
        reader.take()
    assert reader.stop() == []


@pytest.mark.parametrize("kind", [InThread, InTurn])
@pytest.mark.parametrize("depth", [1, 3])
def test_it_reads_as_far_ahead_as_told_and_no_farther(kind: Any, depth: int) -> None:
    read: list[int] = []

    def loader() -> Any:
        for k in range(100):
            read.append(k)
            yield k

    reader = kind(loader(), Link(), depth)
    for taken in range(1, 4):
        reader.take()
        deadline = time.monotonic() + 2
        while len(read) < taken + depth and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(read) == taken + depth
    left = reader.stop()
    assert [s.sent[1] for s in left] == list(range(3, 3 + depth))


def test_the_first_batch_is_read_where_the_loop_runs_the_others_in_the_thread() -> None:
    link = Link()
    reader = InThread(iter(range(4)), link, 2)  # type: ignore[arg-type]
    drain(reader)
    assert link.threads == ["MainThread"] + ["flopwise-input"] * 3
    assert link.entered == 1
    turn = Link()
    drain(InTurn(iter(range(4)), turn, 2))
    assert set(turn.threads) == {"MainThread"}


@pytest.mark.parametrize("kind", [InThread, InTurn])
def test_errors_wait_for_their_turn(kind: Any) -> None:
    reader = kind(iter([0, 1, 2]), Link(fail_at=1), 3)
    assert reader.take().sent == (0, 0)
    for _ in range(2):
        with pytest.raises(OSError, match="link down"):
            reader.take()
    reader.stop()


def test_an_interrupt_in_the_loops_own_thread_is_not_kept_back() -> None:
    def loader() -> Any:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        InTurn(loader(), Link(), 3).take()  # at once, not three steps later


def test_whatever_ends_the_thread_reaches_the_loop() -> None:
    def loader() -> Any:
        yield 0
        raise SystemExit(4)

    reader = InThread(loader(), Link(), 3)
    reader.take()
    with pytest.raises(SystemExit):
        reader.take()
    broken = Link()
    broken.enter_thread = lambda: (_ for _ in ()).throw(RuntimeError("no such device"))  # type: ignore[method-assign]
    reader = InThread(iter(range(3)), broken, 3)  # type: ignore[arg-type]
    reader.take()
    with pytest.raises(RuntimeError, match="no such device"):
        reader.take()


def test_states_are_those_behind_each_batch() -> None:
    at = [0]

    def loader() -> Any:
        for k in range(5):
            at[0] = k + 1
            yield k

    reader = InTurn(loader(), Link(), 2, lambda: at[0])
    taken: list[Snapshot] = [reader.take() for _ in range(3)]
    assert [t.state for t in taken] == [1, 2, 3]
    reader.stop()


def test_a_thread_that_was_left_behind_sends_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flopwise.kit.input.reader.PATIENCE_S", 0.02)
    go_on = threading.Event()

    def loader() -> Any:
        yield 0
        go_on.wait()
        yield 1

    link = Link()
    reader = InThread(loader(), link, 2)
    reader.take()
    with pytest.warns(FlopwiseWarning, match="left behind"):
        reader.stop()
    go_on.set()
    assert reader._thread is not None
    reader._thread.join(5)
    assert not reader._thread.is_alive()
    assert len(link.threads) == 1


def test_the_loops_way_of_recording_gradients_is_the_readers() -> None:
    seen: list[bool] = []

    def loader() -> Any:
        for _ in range(3):
            seen.append(torch.is_grad_enabled())
            yield 0

    drain(InThread(loader(), Link(), 1))
    with torch.no_grad():
        drain(InThread(loader(), Link(), 1))
    assert seen == [True] * 3 + [False] * 3


def test_stopping_from_within_or_twice_or_before_the_start_is_fine() -> None:
    reader = InThread(iter(range(3)), Link(), 1)  # type: ignore[arg-type]
    assert reader.stop() == []
    with pytest.raises(InputError, match="was closed"):  # not the loader's end
        reader.take()
    reader = InThread(iter(range(9)), Link(), 1)  # type: ignore[arg-type]
    reader.take()
    reader.stop()
    reader.stop()


@pytest.mark.parametrize("kind", [InThread, InTurn])
def test_what_is_waited_for_is_kept(kind: Any) -> None:
    def loader() -> Any:
        for k in range(5):
            time.sleep(0.02)
            yield k

    times = Times()
    drain(kind(loader(), Link(), 1, None, times))
    assert times.loader_s >= 0.1
    assert (times.loop_s >= 0.07) == (
        kind is InThread
    )  # the loop that reads itself waits in the loader
    assert times.copies_s == times.steps_s == 0


def test_a_loop_that_another_thread_closes_is_told_and_does_not_see_an_end() -> None:
    def slow() -> Any:
        for k in range(50):
            time.sleep(0.05)
            yield k

    reader = InThread(slow(), Link(), 1)
    reader.take()
    closer = threading.Timer(0.12, reader.stop)
    closer.start()
    with pytest.raises(InputError, match="was closed"):
        drain(reader)
    closer.join()


@pytest.mark.parametrize("kind", [InThread, InTurn])
def test_a_batch_that_holds_itself_is_told(kind: Any) -> None:
    class Deep(Link):
        def send(self, item: Any, number: int) -> Any:
            return self.send(item, number)

    with pytest.raises(InputError, match="holds itself, or is nested too deeply"):
        kind(iter([1]), Deep(), 1).take()
