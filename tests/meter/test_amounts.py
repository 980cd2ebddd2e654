"""Python's calls of a step up to a limit, and the process's memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator

import pytest

from flopwise.meter import amounts
from flopwise.meter.amounts import PythonCalls, resident_bytes


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    yield
    sys.setprofile(None)


def called() -> None:
    len("")


def counted(most: int, n: int) -> bool:
    calls = PythonCalls(most)
    calls.begin()
    for _ in range(n):
        called()
    more = calls.end()
    assert sys.getprofile() is None
    return more


def test_calls_of_python_and_of_c_count_up_to_the_limit() -> None:
    assert not counted(1000, 400)  # 800, and a few of the counting itself
    assert counted(1000, 600)


def test_beyond_the_limit_nothing_is_traced_any_more() -> None:
    calls = PythonCalls(10)
    calls.begin()
    for _ in range(20):
        called()
    assert sys.getprofile() is None
    assert calls.end()


def test_somebody_elses_tracer_stays() -> None:
    def theirs(*_: object) -> None:
        return None

    calls = PythonCalls(1000)
    calls.begin()
    sys.setprofile(theirs)
    calls.end()
    assert sys.getprofile() is theirs


def test_ending_what_was_not_begun_does_nothing() -> None:
    assert PythonCalls(1).end() is False


def test_more_than_the_limit_is_said_once() -> None:
    calls = PythonCalls(10)
    calls.begin()
    for _ in range(20):
        called()
    assert calls.end()
    assert not calls.end()


def test_memory_grows_with_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64_000_000) as kept:  # pages that nothing had before
        for at in range(0, len(kept), 4096):
            kept[at] = 1
        assert resident_bytes() - before > 50_000_000
    monkeypatch.setattr(amounts.os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError))
    assert resident_bytes() == 0
