from __future__ import annotations

import signal
import threading
import time

import pytest

from flopwise.fixes.time_limit import Overdue, alarm_problem, limit_is_set, time_limit

# The alarm signal is under test, which the usual method of pytest-timeout takes for itself.
pytestmark = pytest.mark.timeout(60, method="thread")


def test_a_block_that_ends_in_time_is_left_alone() -> None:
    with time_limit(5.0):
        assert limit_is_set()
    assert not limit_is_set()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_block_that_takes_longer_is_left() -> None:
    started = time.monotonic()
    with pytest.raises(Overdue, match="abandoned after 0 s"), time_limit(0.1):
        time.sleep(30)
    assert time.monotonic() - started < 5
    assert alarm_problem() is None


def test_a_handler_for_exceptions_does_not_swallow_it() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    with pytest.raises(Overdue), time_limit(0.1):
        stubborn()


def test_an_error_of_the_block_itself_passes_and_the_alarm_is_off() -> None:
    with pytest.raises(KeyError), time_limit(5.0):
        raise KeyError("x")
    assert alarm_problem() is None


def test_without_an_alarm_the_block_runs_unlimited() -> None:
    done = []

    def run() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
            done.append(limit_is_set())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [False]
