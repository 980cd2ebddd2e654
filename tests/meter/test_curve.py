"""Losses by step, as a longer run of an unmodified script leaves them; each script in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flopwise
from flopwise.launch.command import environment
from flopwise.launch.folder import create
from flopwise.meter.config import Config
from flopwise.meter.curve import Recorder
from flopwise.meter.session import Session
from flopwise.records import store
from flopwise.records.curve import PATTERN, SCHEMA, RecordedCurve

Train = Callable[[], None]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., RecordedCurve]:
    """Runs a training in a forked process, under a recorder of `steps` steps."""

    def run(train: Train, steps: int = 30, **options: Any) -> RecordedCurve:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                session = Session(Config(folder=str(tmp_path), count=False, steps=sys.maxsize))
                recorder = Recorder(session, steps, **options)
                recorder.install()
                session.attach()
                try:
                    train()
                    code = 3  # the script came to its end
                except SystemExit as end:
                    code = 0 if end.code == 0 else 1
                session.close()
                recorder.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, 3)
        (path,) = tmp_path.glob(PATTERN)
        return store.read(path, RecordedCurve, SCHEMA)

    return run


def script(optimizer: Any = torch.optim.SGD, *, parts: int = 1, steps: int = 200) -> Train:
    """Returns a training whose n-th loss is 1 / n, in `parts` backward calls."""

    def train() -> None:
        weight = nn.Parameter(torch.ones(3))
        stepper = optimizer([weight], lr=0.0)
        for n in range(1, steps + 1):
            stepper.zero_grad()
            for _ in range(parts):
                (weight.sum() / 3 / n / parts).backward()
            stepper.step()

    return train


def test_every_step_has_its_loss_and_the_script_ends_after_the_last(record: Any) -> None:
    found = record(script())
    assert found.losses == pytest.approx([1 / n for n in range(1, 31)])
    assert (found.asked, found.diverged, found.trouble, found.rank) == (30, None, None, 0)
    steps = [step for step, _ in found.stamps]
    assert steps == list(range(1, 31))
    times = [s for _, s in found.stamps]
    assert times == sorted(times)
    assert times[0] > 0


def test_a_batch_in_parts_has_the_sum_of_their_losses(record: Any) -> None:
    assert record(script(parts=4)).losses == pytest.approx([1 / n for n in range(1, 31)])


def test_a_script_that_ends_before_leaves_what_there_is(record: Any) -> None:
    found = record(script(steps=12))
    assert (len(found.losses), found.asked, found.stamps[-1][0]) == (12, 30, 12)


def test_the_clock_is_read_at_200_steps_at_most(record: Any) -> None:
    found = record(script(steps=2000), steps=1000)
    assert len(found.losses) == 1000
    assert found.losses == pytest.approx([1 / n for n in range(1, 1001)])
    assert [step for step, _ in found.stamps] == [1, *range(5, 1001, 5)]


def test_several_optimizers_of_one_step_are_one_step(record: Any) -> None:
    def train() -> None:
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        first, second = torch.optim.SGD([a], lr=0.0), torch.optim.Adam([b], lr=0.0)
        for n in range(1, 100):
            for weight, stepper in ((a, first), (a, first), (b, second)):
                stepper.zero_grad()
                (weight.sum() / n).backward()
                stepper.step()

    found = record(train)
    assert len(found.losses) == 30
    assert found.losses == pytest.approx([3 / n for n in range(1, 31)])


class Nested(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.0)
        inner.step()
        return super().step(closure)


def test_an_optimizer_within_another_is_no_step(record: Any) -> None:
    assert record(script(Nested)).losses == pytest.approx([1 / n for n in range(1, 31)])


def test_losses_are_those_before_a_scaler_scaled_them_and_skipped_steps_are_steps(
    record: Any,
) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(1))
        stepper = torch.optim.SGD([weight], lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        for n in range(1, 100):
            stepper.zero_grad()
            loss = 3 * weight.sum() / n
            scaler.scale(loss).backward()
            scaler.step(stepper)
            scaler.update()

    found = record(train)
    assert found.losses == pytest.approx([3 / n for n in range(1, 31)])


def test_a_loss_that_is_no_number_is_said(record: Any) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(1))
        stepper = torch.optim.SGD([weight], lr=0.0)
        for n in range(1, 100):
            stepper.zero_grad()
            (0 * weight.sum() + (float("inf") if n in (9, 11) else 1.0)).backward()
            stepper.step()

    found = record(train)
    assert found.diverged == 9
    assert (found.losses[7], found.losses[8], found.losses[9], found.losses[10]) == (
        1.0,
        None,
        1.0,
        None,
    )


def test_what_is_no_single_number_has_no_loss(record: Any) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(2))
        stepper = torch.optim.SGD([weight], lr=0.0)
        for _ in range(60):
            weight.grad = None
            (2 * weight).backward(torch.ones(2))
            stepper.step()

    found = record(train)
    assert (len(found.losses), set(found.losses)) == (30, {None})


def test_parts_that_are_computed_again_are_no_losses(record: Any) -> None:
    def train() -> None:
        net = nn.Linear(1, 1)
        stepper = torch.optim.SGD(net.parameters(), lr=0.0)
        for n in range(1, 100):
            stepper.zero_grad()
            data = torch.ones(1, requires_grad=True)
            again = torch.utils.checkpoint.checkpoint(net, data, use_reentrant=True)
            (again.sum() * 0 + 1 / n).backward()
            stepper.step()

    assert record(train).losses == pytest.approx([1 / n for n in range(1, 31)])


def test_what_goes_wrong_of_ours_is_said_and_the_script_goes_on(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Recorder, tensors: Any) -> None:
        raise ZeroDivisionError("so")

    monkeypatch.setattr(Recorder, "_take", fails)
    found = record(script(steps=40))
    assert (found.losses, found.trouble) == ([], "ZeroDivisionError: so")
    assert list(tmp_path.glob("goes-on-*.txt"))  # so that the parent ends what is its own


def test_steps_by_hand_are_steps(record: Any) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(1))
        for n in range(1, 100):
            weight.grad = None
            (weight.sum() / n).backward()
            with torch.no_grad():
                weight -= 0 * weight.grad
            flopwise.step()

    found = record(train)
    assert len(found.losses) == 30
    assert found.losses[-20:] == pytest.approx([1 / n for n in range(11, 31)])


def test_updates_without_an_optimizer_are_steps(record: Any) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(1))
        for n in range(1, 100):
            (weight.sum() / n).backward()
            with torch.no_grad():
                weight -= 0 * weight.grad
            weight.grad = None

    found = record(train)
    assert len(found.losses) == 30
    assert found.losses == pytest.approx([1 / n for n in range(1, 31)])


def test_a_script_runs_as_it_does_alone_but_for_its_seed(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent("""
        import random, torch
        torch.manual_seed(7); random.seed(7)
        weight = torch.nn.Parameter(torch.randn(4))
        stepper = torch.optim.Adam([weight], lr=0.1)
        for n in range(40):
            loss = (weight - torch.randn(4)).square().mean() + random.random()
            stepper.zero_grad(); loss.backward(); stepper.step()
            print(loss.item(), flush=True)
        """)
    )

    def run(name: str, offset: int | None) -> tuple[list[float], RecordedCurve | None]:
        env = dict(os.environ)
        folder = tmp_path / name
        if offset is not None:
            options = {"command": ["x"], "quality": {"steps": 25, "offset": offset}}
            env = environment(create(str(folder), "x", options), env)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(program)], env=env, capture_output=True, text=True, check=True
        )  # fmt: skip
        printed = [float(line) for line in done.stdout.split()]
        if offset is None:
            return printed, None
        (path,) = folder.glob(PATTERN)
        return printed, store.read(path, RecordedCurve, SCHEMA)

    bare, _ = run("", None)
    same, found = run("a", 0)
    assert found is not None
    assert found.losses == bare[:25]
    assert same == bare[:24]  # ended within the 25th step, before it is printed
    assert found.moved == {}
    other, moved = run("b", 100_003)
    assert moved is not None
    assert other != same
    assert moved.moved == {"torch.manual_seed": 1, "random.seed": 1}
