"""One thread that trains is measured, whichever it is; several at once are noticed, and only their steps counted."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import flopwise
from flopwise.launch import folder as folders
from flopwise.meter import ending
from flopwise.meter.config import Config
from flopwise.meter.session import Session
from flopwise.meter.watch import SLOT, Watch


class Thread:
    """Does one thing after another in a thread of its own, so that a test knows the order."""

    def __init__(self, name: str) -> None:
        self._todo: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._done: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=name)
        self._thread.start()

    def do(self, what: Callable[[], Any]) -> Any:
        self._todo.put(what)
        result, error = self._done.get(timeout=60)
        if error is not None:
            raise error
        return result

    def _work(self) -> None:
        while (what := self._todo.get()) is not None:
            try:
                self._done.put((what(), None))
            except BaseException as error:
                self._done.put((None, error))

    def end(self) -> None:
        self._todo.put(None)
        self._thread.join()


@pytest.fixture
def threads() -> Iterator[tuple[Thread, Thread]]:
    pair = Thread("first"), Thread("second")
    yield pair
    for thread in pair:
        assert thread.do(_get_current_dispatch_mode_stack) == []  # nothing of ours is left on it
        thread.end()


class Training:
    """A model, its optimizer, and one step of both."""

    def __init__(self, width: int = 8) -> None:
        self.net = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.width = width

    def loss(self) -> torch.Tensor:
        return self.net(torch.randn(6, self.width)).square().mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def check_only_steps_are_known(measured: Any, steps: int) -> None:
    record = measured.record
    assert record.several.startswith("several threads train at once (")
    assert record.steps_seen == steps
    assert record.flops == record.losses == []
    assert not any(row.sampled for row in record.rows)


# ---------------------------------------------------------------------- one


def test_one_thread_that_is_not_the_main_one(measure: Any, threads: Any) -> None:
    training, (first, _) = Training(), threads
    measured = measure(
        lambda: first.do(lambda: [training.step() for _ in range(40)]), count=True, steps=20
    )
    record = measured.record
    assert record.several is None
    assert measured.kinds().count("timed") == 20
    assert sum(record.flops[0].needed.values()) > 0
    row = record.rows[-1]
    assert row.shape == "6x8 float32"
    assert row.samples == 6
    assert row.forward_ns
    assert row.backward_ns
    assert row.optimizer_ns


def test_an_epoch_in_each_thread(measure: Any, threads: Any) -> None:
    training = Training()

    def train() -> None:
        for thread in threads:
            thread.do(lambda: [training.step() for _ in range(20)])

    record = measure(train, count=True).record
    assert (record.several, record.steps_seen, len(record.flops)) == (None, 40, 1)
    # The first call in a thread that has not trained so far could be anybody's.
    assert sum(row.shape != "6x8 float32" for row in record.rows[6:]) <= 1


def test_a_training_that_moves_from_thread_to_thread_has_times_and_no_flops(
    measure: Any, threads: Any
) -> None:
    training = Training()

    def train() -> None:
        for i in range(40):
            threads[i % 2].do(training.step)

    record = measure(train, count=True, steps=20).record
    assert (record.several, record.flops) == (None, [])
    assert sum(row.kind == "timed" for row in record.rows) == 20
    assert any("moves from one to another" in note for note in record.notes)
    assert all(row.backward_ns and row.forward_ns for row in record.rows[3:])


def test_two_optimizers_that_move_together_are_one_training(measure: Any, threads: Any) -> None:
    pair = Training(), Training()

    def train() -> None:
        for i in range(30):
            threads[i % 2].do(lambda: [training.step() for training in pair])

    record = measure(train).record
    assert (record.several, record.steps_seen) == (None, 30)
    assert record.boundary == "optimizer cycle of 2 (2 optimizers)"


def test_trainings_one_after_another_in_threads_of_their_own(measure: Any, threads: Any) -> None:
    def train() -> None:
        for i in range(4):
            training = Training()
            threads[i % 2].do(lambda one=training: [one.step() for _ in range(25)])

    record = measure(train, warmup=3).record
    assert (record.several, record.steps_seen) == (None, 100)


def test_a_trial_run_before_another_thread_trains(measure: Any, threads: Any) -> None:
    training, (first, _) = Training(), threads

    def train() -> None:
        training.backward()
        first.do(lambda: [training.step() for _ in range(20)])

    record = measure(train, count=True).record
    assert (record.several, record.steps_seen, len(record.flops)) == (None, 20, 1)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_thread_that_only_acts(measure: Any, threads: Any, gradients: bool) -> None:
    training, (_, actor) = Training(), threads

    def act() -> None:
        with torch.set_grad_enabled(gradients):
            training.net(torch.randn(3, 8))

    def train() -> None:
        for i in range(40):
            if i > 10 and i % 4 == 0:
                actor.do(act)
            training.step()

    record = measure(train, count=True).record
    assert (record.several, record.steps_seen, len(record.flops)) == (None, 40, 1)
    timed = [row for row in record.rows if row.kind == "timed"]
    assert {(row.samples, row.shape) for row in timed} == {(6, "6x8 float32")}
    assert "evaluation" not in {row.kind for row in record.rows}


def test_a_step_is_not_counted_whose_model_was_called_in_another_thread(
    measure: Any, threads: Any
) -> None:
    training, (_, helper) = Training(), threads

    def train() -> None:
        for _ in range(30):
            training.optimizer.zero_grad()
            (training.loss() + helper.do(training.loss)).backward()
            training.optimizer.step()

    record = measure(train, count=True).record
    assert (record.several, record.flops) == (None, [])
    assert any("spread over several threads" in note for note in record.notes)


def test_batches_drawn_in_a_thread_of_their_own(measure: Any, threads: Any) -> None:
    training, (_, drawer) = Training(), threads
    loader = DataLoader(TensorDataset(torch.randn(240, 8)), batch_size=6)

    def train() -> None:
        batches = iter(loader)
        for _ in range(40):
            training.optimizer.zero_grad()
            (x,) = drawer.do(lambda: next(batches))
            training.net(x).square().mean().backward()
            training.optimizer.step()

    record = measure(train, stride=4, steps=24, warmup=5).record
    assert (record.several, record.draws_apart) == (None, True)
    assert {row.sampled for row in record.rows} == {True, False}
    assert all(row.data_ns == 0 for row in record.rows)
    assert record.rows[-1].samples == 6


def test_a_batch_that_another_thread_draws_during_a_step_does_not_lose_the_step(
    measure: Any, threads: Any
) -> None:
    training, (_, drawer) = Training(), threads
    batches = iter(DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=2))

    training.optimizer.register_step_pre_hook(lambda *_: drawer.do(lambda: next(batches)) and None)
    record = measure(lambda: [training.step() for _ in range(20)]).record
    assert (record.steps_seen, record.boundary) == (20, "optimizer")


# ---------------------------------------------------------------------- autograd's threads, replicas

#: Backward passes inside one another from which autograd takes threads of a pool (MAX_DEPTH in its engine.h).
DEEP = 70


class Deeper(torch.autograd.Function):
    """Runs another backward pass in its own, and so on down."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, bottom: Callable[[], Any]) -> torch.Tensor:
        ctx.depth, ctx.bottom = depth, bottom
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            if ctx.depth:
                x = torch.ones(1, requires_grad=True)
                Deeper.apply(x, ctx.depth - 1, ctx.bottom).sum().backward()
            else:
                ctx.bottom().backward()
        return grad, None, None


def test_optimizers_that_step_in_hooks_in_threads_of_autograd(measure: Any) -> None:
    training = Training()
    each = {p: torch.optim.SGD([p], lr=0.01) for p in training.net.parameters()}
    seen = set()

    def update(p: nn.Parameter) -> None:
        seen.add(threading.get_ident())
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(update)

    def train() -> None:
        for i in range(24):
            if i % 3:
                training.loss().backward()
            else:
                x = torch.ones(1, requires_grad=True)
                Deeper.apply(x, DEEP, training.loss).sum().backward()

    record = measure(train, count=True).record
    assert len(seen) > 1  # the main thread, and one of autograd's
    assert (record.several, record.steps_seen) == (None, 24)
    assert any("step inside the backward pass" in note for note in record.notes)


def test_replicas_of_a_watched_module_are_themselves(measure: Any) -> None:
    training = Training()
    outputs = []

    def train() -> None:
        for i in range(12):
            training.step()
            if i > 5:
                assert isinstance(vars(training.net)[SLOT], Watch)
                replica = training.net._replicate_for_data_parallel()
                replica._modules["0"] = nn.Linear(8, 16)
                outputs.append((training.net(torch.ones(1, 8)), replica(torch.ones(1, 8))))

    before = nn.Module._replicate_for_data_parallel
    measure(train)
    assert nn.Module._replicate_for_data_parallel is before
    assert all(not torch.equal(own, replicas) for own, replicas in outputs)


# ---------------------------------------------------------------------- several


@pytest.mark.parametrize("warm", [0, 60])
def test_two_trainings_in_turn(measure: Any, threads: Any, warm: int) -> None:
    pair = Training(), Training(12)

    def train() -> None:
        threads[0].do(lambda: [pair[0].step() for _ in range(warm)])
        for i in range(120):
            threads[i % 2].do(pair[i % 2].step)

    measured = measure(train, stride=None, count=True, steps=warm + 40)
    assert measured.session.phase == "done"
    assert measured.kinds().count("timed") == warm + 40
    # Noticed when either has come back to its own optimizer: at the fourth step, which has no beginning.
    check_only_steps_are_known(measured, warm + 4 + len(measured.record.rows))
    assert measured.record.boundary == "any step of 2 threads"


def test_two_backward_passes_at_once_are_enough(measure: Any, threads: Any) -> None:
    one, other = Training(), Training(12)

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            threads[1].do(other.backward)
            return grad

    def train() -> None:
        for _ in range(20):
            one.optimizer.zero_grad()
            Meanwhile.apply(one.loss()).backward()
            one.optimizer.step()

    measured = measure(train, count=True)
    check_only_steps_are_known(measured, 20)
    assert "noticed before the first step" in measured.record.several


def test_one_optimizer_of_two_threads(measure: Any, threads: Any) -> None:
    training = Training()

    def train() -> None:
        for _ in range(20):
            for thread in threads:
                thread.do(lambda: training.loss().backward())
            training.optimizer.step()
            training.optimizer.zero_grad()

    check_only_steps_are_known(measure(train, count=True), 20)


def test_backward_passes_in_one_thread_and_steps_in_another(measure: Any, threads: Any) -> None:
    training = Training()

    def train() -> None:
        for _ in range(20):
            threads[0].do(training.backward)
            threads[1].do(training.optimizer.step)

    said = measure(train).record.several
    assert "first at " in said
    assert "second at " in said
    assert "must run its backward passes and optimizer steps in the same" in said


def test_it_is_said_who_trains_and_where(measure: Any, threads: Any) -> None:
    pair = Training(), Training(12)

    def train() -> None:
        for i in range(40):
            threads[i % 2].do(pair[i % 2].step)

    said = measure(train).record.several
    assert "first" in said
    assert "second at " in said
    assert "test_trainers.py:" in said
    assert "noticed after 4 steps" in said
    assert "What holds: the time from one optimizer step to the next" in said
    assert "in a process of its own" in said


def test_a_count_that_is_under_way_is_taken_off_in_its_own_thread(
    measure: Any, threads: Any
) -> None:
    pair = Training(), Training(12)
    stacks: list[int] = []

    def train() -> None:
        for _ in range(30):
            threads[0].do(pair[0].step)
            stacks.append(len(threads[0].do(_get_current_dispatch_mode_stack)))
            if stacks[-1]:
                break
        for i in range(1, 40):
            threads[i % 2].do(pair[i % 2].step)

    measured = measure(train, count=True)
    assert stacks[-1] == 1  # the fixture looks that nothing is left
    check_only_steps_are_known(measured, len(stacks) + 39)
    assert measured.record.notes == []


def test_a_count_that_is_left_behind_goes_when_its_thread_steps_next(threads: Any) -> None:
    training, (first, second) = Training(), threads
    session = Session(Config(steps=5))
    session.attach()
    try:
        while not session.counting.running:
            first.do(training.step)
        second.do(lambda: [training.step() for _ in range(40)])
    finally:
        session.detach()
    assert session.phase == "done"
    assert any("a dispatch mode of first, which only passes" in note for note in session.notes)
    assert len(first.do(_get_current_dispatch_mode_stack)) == 1
    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    first.do(training.step)  # the fixture looks that nothing is left
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks - 1


def test_a_script_that_ends_while_it_begins_to_look_like_several(
    measure: Any, threads: Any
) -> None:
    pair = Training(), Training(12)

    def train() -> None:
        for i in range(3):
            threads[i % 2].do(pair[i % 2].step)

    check_only_steps_are_known(measure(train), 3)


def test_steps_that_are_marked_in_two_threads(measure: Any, threads: Any) -> None:
    pair = Training(), Training(12)

    def train() -> None:
        for i in range(40):
            thread = threads[i % 2]
            thread.do(pair[i % 2].backward)
            threads[(i + 1) % 2].do(flopwise.step)

    measured = measure(train)
    check_only_steps_are_known(measured, 40)
    assert measured.record.boundary == "mark"


def test_trainings_without_an_optimizer_of_torchs_are_not_timed(measure: Any, threads: Any) -> None:
    pair = Training(), Training(12)

    def train() -> None:
        for i in range(40):
            threads[i % 2].do(pair[i % 2].backward)

    record = measure(train).record
    assert record.several is not None
    assert record.rows == []
    assert record.steps_seen > 0


def test_several_are_not_stopped_and_the_parent_is_told(threads: Any, tmp_path: Path) -> None:
    pair = Training(), Training(12)
    session = Session(Config(str(tmp_path), steps=10, stop_after=True, count=False))
    session.attach()
    try:
        for i in range(60):
            threads[i % 2].do(pair[i % 2].step)
    finally:
        session.detach()
    assert session.phase == "done"
    assert session.notes == ["--stop-after: several threads train, so the script was not ended"]
    session.close()  # waits for the record
    atexit.unregister(session.close)
    assert (
        len(list(tmp_path.glob("ranks/*.json"))) == len(list(tmp_path.glob(folders.GOES_ON))) == 1
    )


def test_one_that_trains_in_a_thread_is_stopped_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[Any] = []
    monkeypatch.setattr(ending, "say_if_it_waits", lambda _: left.append(True))
    training = Training()
    steps = []

    def train() -> None:
        try:
            for _ in range(60):
                training.step()
                steps.append(1)
        except SystemExit as error:
            left.append(type(error))

    session = Session(Config(steps=10, stop_after=True, count=False))
    session.attach()
    try:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    finally:
        session.detach()
    # A thread that ends with any other class than this one says so on stderr.
    assert (len(steps) < 30, left, session.notes) == (True, [True, SystemExit], [])


def test_several_at_full_speed(measure: Any) -> None:
    pair = Training(), Training(12)
    begin = threading.Barrier(2)
    results: dict[int, list[torch.Tensor]] = {}

    def train(which: int) -> None:
        begin.wait()
        for _ in range(150):
            pair[which].step()
            time.sleep(0.0002)
        results[which] = _get_current_dispatch_mode_stack()

    def both() -> None:
        running = [threading.Thread(target=train, args=(i,)) for i in (0, 1)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    measured = measure(both, count=True, stride=None, steps=100)
    assert results == {0: [], 1: []}
    assert measured.record.several is not None
    assert measured.kinds().count("timed") == 100
    assert all(row.ns >= 0 for row in measured.record.rows)
