"""Work in another thread, under a deadline, with the caller's modes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest
import torch
import torch._dynamo

from flopwise.kit.graph import deadline
from flopwise.kit.graph.deadline import Overdue, Within, modes_problem


def test_results_and_errors_come_back() -> None:
    within = Within(5.0)
    assert within.run(lambda: 3) == 3
    assert within.left_s < 5.0

    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        within.run(fails)


def test_the_callers_modes_hold_in_the_thread() -> None:
    def look() -> tuple[object, ...]:
        return (
            threading.current_thread() is threading.main_thread(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_num_threads(),
        )

    before = torch.get_num_threads()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert Within(5.0).run(look) == (False, False, True, torch.bfloat16, before)
    assert Within(5.0).run(look)[1:3] == (True, False)


def test_an_endless_loop_is_left_and_stopped() -> None:
    ended = threading.Event()

    def endless() -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    started = time.monotonic()
    with pytest.raises(Overdue, match="abandoned after 0 s"):
        Within(0.2).run(endless)
    assert time.monotonic() - started < 2.0
    assert ended.wait(5.0)


def test_no_time_left() -> None:
    with pytest.raises(Overdue, match="no time left"):
        Within(0.0).run(lambda: 1)


def test_modes_that_other_threads_do_not_see() -> None:
    assert modes_problem() is None
    with torch.device("cpu"):
        assert modes_problem() == "a mode of torch is active in this thread"
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert modes_problem() == "hooks on saved tensors are active in this thread"
    with torch.inference_mode():
        assert modes_problem() == "inference mode is on in this thread"


def test_one_thread_serves_all_and_survives_being_stopped() -> None:
    first = Within(5.0).run(threading.get_ident)

    def endless() -> None:
        while True:
            time.sleep(0.001)

    with pytest.raises(Overdue):
        Within(0.2).run(endless)
    assert Within(5.0).run(threading.get_ident) == first
    assert Within(5.0).run(threading.get_ident) == first


def test_while_an_abandoned_job_lasts_nothing_new_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "GRACE_S", 0.05)
    release = threading.Event()

    def stuck() -> None:  # as in C++, where no exception arrives
        while not release.is_set():
            with contextlib.suppress(BaseException):
                release.wait(0.01)

    with pytest.raises(Overdue, match="abandoned"):
        Within(0.1).run(stuck)
    with pytest.raises(Overdue, match="not begun: an abandoned one has not ended"):
        Within(5.0).run(lambda: 1)
    release.set()
    for _ in range(100):
        try:
            assert Within(5.0).run(lambda: 1) == 1
            break
        except Overdue:
            time.sleep(0.05)
    else:
        pytest.fail("the thread never came back")


def test_compilations_of_several_models_one_after_the_other() -> None:
    def compiled(grad: bool) -> float:
        layer = torch.nn.Linear(4, 4)
        function = torch.compile(lambda x: layer(x), backend="aot_eager")
        with torch.set_grad_enabled(grad):
            return float(function(torch.ones(1, 4)).detach().sum())

    for grad in (True, False, True):
        Within(60.0).run(lambda grad=grad: compiled(grad))
    torch._dynamo.reset()
    Within(60.0).run(lambda: compiled(True))


def test_finalizers_are_not_interrupted() -> None:
    seen: list[bool] = []

    class Dies:
        def __del__(self) -> None:
            seen.append(deadline._heeds(sys._getframe()))

    Dies()
    seen.append(deadline._heeds(sys._getframe()))
    assert seen == [False, True]


def test_what_is_interrupted_does_not_go_on_beside_the_caller() -> None:
    ended = threading.Event()

    def works() -> None:
        try:
            for _ in range(2000):
                time.sleep(0.01)
        finally:
            ended.set()

    def interrupted(_: object = None) -> bool:
        raise KeyboardInterrupt

    job_of = deadline._Job

    class Job(job_of):  # type: ignore[misc, valid-type]
        def __init__(self, function: object) -> None:
            super().__init__(function)
            event, waits = self.done, [interrupted]
            real = event.wait
            event.wait = lambda timeout=None: (waits.pop() if waits else real)(timeout)  # type: ignore[method-assign]

    deadline._Job = Job  # type: ignore[misc]
    try:
        with pytest.raises(KeyboardInterrupt):
            Within(30.0).run(works)
    finally:
        deadline._Job = job_of  # type: ignore[misc]
    assert ended.wait(5.0)
    assert Within(5.0).run(lambda: 1) == 1
