"""Races: what a comparison says of a fix that is faster, slower, or slow to try, and how long it takes to say it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.fixes import racing
from flopwise.fixes.candidates import Candidate
from flopwise.records.verdict import Comparison

SOUND = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
OFF = dataclasses.replace(SOUND, outcome="slower", ratio=1.05, ci95=(1.02, 1.08))


class Twice:
    """A fix, applied."""

    compile_s = 0.0

    def __init__(self) -> None:
        self.on = False

    def enable(self) -> None:
        self.on = True

    def disable(self) -> None:
        self.on = False

    def settled(self) -> bool:
        return True

    def failure(self) -> str | None:
        return None


FUSED: Any = SimpleNamespace(code="FW102", name="fused-optimizer")


def to_the_end(steps: Generator[None, Any, Any], next_row: Callable[[], Any]) -> Any:
    """Returns what comes of steps that are sent one row after another."""
    next(steps)
    try:
        while True:
            steps.send(next_row())
    except StopIteration as stop:
        return stop.value


class World:
    """A clock that only the steps of a training move: 0.1 s each, `factor` times as long with the fix on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, factor: float, noise: float = 0.001
    ) -> None:
        self.now, self.factor, self.noise = 1000.0, factor, noise
        self.random = random.Random(0)
        self.fix = Twice()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(racing, "time", clock)
        monkeypatch.setattr(racing, "frames_compiled", lambda: 0)

    def row(self) -> Any:
        step_s = 0.1 * (self.factor if self.fix.on else 1.0)
        self.now += step_s * self.random.lognormvariate(0, self.noise)
        return SimpleNamespace(flags=0, end_ns=round(self.now * 1e9), event=None)

    def race(
        self, budget_s: float = 600, per_fix_s: float = 30, seed: int = 0, control: Any = None
    ) -> Any:
        """Returns what the race of the fix came to."""
        races = racing.Races(
            SimpleNamespace(),  # type: ignore[arg-type]
            self.now + budget_s,
            per_fix_s,
            seed=seed,
            control=control,
        )
        row_s = [0.1 * self.random.lognormvariate(0, self.noise) for _ in range(24)]
        rows: Any = [SimpleNamespace(flags=0, end_ns=round(1e9 * row)) for row in row_s]
        candidate = Candidate(FUSED, self.fix)  # type: ignore[arg-type]
        return to_the_end(races.race(candidate, rows), self.row)


@pytest.mark.parametrize("factor", [1.05, 1.5, 6.0])
def test_a_fix_that_is_plainly_slower_is_called_slower_with_the_figure_within_its_time(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    world = World(monkeypatch, factor)
    trial = world.race()
    assert (trial.verdict, trial.comparison.outcome) == ("not kept", "slower")
    assert trial.comparison.ci95[0] > 1
    assert trial.comparison.ratio == pytest.approx(factor, rel=0.01)
    low, high = trial.comparison.ci95
    assert trial.reason == (
        f"slower: a step takes {trial.comparison.ratio:.4g}x as long (95 %: {low:.4g} to {high:.4g})"
    )
    assert world.now - 1000 < 2 * 30  # settling and comparing
    assert not world.fix.on


def test_too_few_pairs_are_no_interval_and_the_time_that_is_named_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = World(monkeypatch, 25.0).race()
    assert (trial.verdict, trial.comparison) == ("declined", None)
    before, _, after = trial.reason.partition("; with it a step was seen to take 2.5 s, ")
    assert (
        before
        == "the 30 s for one fix ended after 1 of the 6 pairs of blocks that an interval takes"
    )
    assert after.startswith("without it 0.1 s (no interval); --per-fix ")
    needed_s = float(after.split("--per-fix ")[1].split("s would do")[0])
    again = World(monkeypatch, 25.0).race(per_fix_s=needed_s)
    assert again.comparison.outcome == "slower"
    assert again.reason.startswith("slower: a step takes 2")


def test_a_fix_whose_steps_do_not_fit_into_its_time_is_said_to_be_so_with_what_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = World(monkeypatch, 200.0).race()
    assert trial.verdict == "declined"
    assert trial.reason == (
        "not settled after 40 s; with it a step was seen to take 20 s, without it 0.1 s (no interval)"
    )


def test_the_end_of_all_trials_ends_one_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2.0)
    trial = world.race(budget_s=7)
    assert world.now == pytest.approx(1007, abs=0.3)
    assert trial.reason.startswith("the time for trials ended after ")
    assert trial.reason.endswith("a longer --budget would do")


def test_equal_arms_whose_trial_ends_by_the_clock_are_rarely_called_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The number of pairs hangs on how long the steps took: an interval for one look would not do.
    world = World(monkeypatch, 1.0, noise=0.4)
    outcomes = [world.race(budget_s=1e6, seed=seed).comparison.outcome for seed in range(100)]
    assert (
        outcomes.count("slower") <= 8
    )  # at most 2.5 % are meant; more than 8 of 100 then have 0.1 %
    assert outcomes.count("faster") <= 8


def test_a_warm_up_pays_back_after_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 0.5)
    world.fix.compile_s = 7.0
    trial = world.race()
    assert trial.verdict == "kept"
    assert trial.warmup_s == pytest.approx(7.0, abs=0.1)
    assert "its warm-up of 7 s pays back after 140 steps" in trial.reason


@pytest.mark.parametrize("control", [None, SOUND])
def test_a_gain_beside_a_sound_control_is_kept(
    monkeypatch: pytest.MonkeyPatch, control: Comparison | None
) -> None:
    trial = World(monkeypatch, 0.5).race(control=control)
    assert (trial.verdict, trial.comparison.outcome) == ("kept", "faster")


def test_a_gain_beside_a_control_that_is_off_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = World(monkeypatch, 0.97).race(control=OFF)
    assert (trial.verdict, trial.comparison.outcome) == ("not kept", "not shown")
    assert trial.reason.startswith("looks faster, t_new / t_old 0.97")
    assert "but is not believed: the A/A control is off: 1.050 (1.020-1.080, 8" in trial.reason
