"""The trials of one process: what is done with an A/A control, and with a fix that is slow."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.fixes import driver
from flopwise.meter import ending
from flopwise.records.verdict import Comparison, Parity
from flopwise.trials.compare import PairedComparison
from flopwise.trials.schedule import Pair

SOUND = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
OFF = dataclasses.replace(SOUND, outcome="slower", ratio=1.05, ci95=(1.02, 1.08))


def the_driver(tmp_path: Any, aa: Comparison | None) -> driver.Driver:
    session: Any = SimpleNamespace(config=SimpleNamespace(folder=tmp_path), live=True)
    options: dict[str, Any] = {"budget_s": 60, "per_fix_s": 30, "fixes": ["FW102"]}
    options["aa"] = None if aa is None else {**dataclasses.asdict(aa), "ci95": list(aa.ci95)}
    return driver.Driver(session, options)


class Twice:
    """A fix that makes steps twice as fast, applied."""

    setting: dict[str, str] = {}  # noqa: RUF012
    compile_s = 0.0

    def __init__(self) -> None:
        self.on = False

    def verify(self, snapshot: Any) -> Parity:
        return Parity("identical", True, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, "", "")

    def enable(self) -> None:
        self.on = True

    def disable(self) -> None:
        self.on = False

    ready = settled = lambda self: True
    failure = lambda self: None  # noqa: E731


def judged(subject: driver.Driver, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, Any]:
    """Returns whether the fix was kept, and its trial; eight pairs that show it to be twice as fast."""

    def compare(
        plan: Any, comparison: PairedComparison, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        for n in range(8):
            comparison.add(Pair(n, (1.0,) * 4, (0.5,) * 4, n % 2 == 0, False))
        return
        yield

    monkeypatch.setattr(subject, "_compare", compare)
    monkeypatch.setattr(subject, "_blocks", lambda rows, slower: None)
    rows = [SimpleNamespace(flags=0, end_ns=10**9)]
    steps = subject._judge(FUSED, Twice(), None, rows)  # type: ignore[arg-type]
    kept = to_the_end(steps, lambda: SimpleNamespace(flags=0, end_ns=0, event=None))
    return kept, subject._trials[0]


FUSED: Any = SimpleNamespace(code="FW102", name="fused-optimizer")


def to_the_end(steps: Generator[None, Any, Any], next_row: Callable[[], Any]) -> Any:
    """Returns what comes of steps that are sent one row after another."""
    next(steps)
    try:
        while True:
            steps.send(next_row())
    except StopIteration as stop:
        return stop.value


def test_the_end_of_the_trials_is_silent_in_a_thread_that_trains(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(ending, "say_if_it_waits", watched.append)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # Python's, not pytest's
    subject = the_driver(tmp_path, SOUND)

    def one_step() -> Generator[None, Any, None]:
        yield

    monkeypatch.setattr(subject, "_all", one_step)
    session: Any = SimpleNamespace(
        config=SimpleNamespace(folder=str(tmp_path)), trainers=SimpleNamespace(thread=-1),
        detach=lambda: None, device=torch.device("cpu"),
    )  # fmt: skip
    subject._session = session
    went_on: list[Any] = []

    def train() -> None:
        went_on.append("before")
        subject(session, None)  # type: ignore[arg-type]
        went_on.append("after")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert (went_on, watched) == (["before"], [str(tmp_path)])
    assert capfd.readouterr().err == ""
    assert json.loads((tmp_path / "trials.json").read_text())["status"] == "complete"


@pytest.mark.parametrize("aa", [None, SOUND])
def test_a_gain_beside_a_sound_control_is_kept(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, aa: Comparison | None
) -> None:
    kept, trial = judged(the_driver(tmp_path, aa), monkeypatch)
    assert kept
    assert (trial.verdict, trial.comparison.outcome) == ("kept", "faster")


def test_a_gain_beside_a_control_that_is_off_is_not_believed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, trial = judged(the_driver(tmp_path, OFF), monkeypatch)
    assert not kept
    assert (trial.verdict, trial.comparison.outcome) == ("not kept", "not shown")
    assert trial.reason.startswith("looks faster, t_new / t_old 0.500 (")
    assert "but is not believed: the A/A control is off: 1.050 (1.020-1.080, 8" in trial.reason


def test_a_control_of_an_earlier_process_is_not_run_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def nothing(*_: Any) -> Generator[None, Any, list[Any]]:
        return [None] * 24
        yield

    def control(*_: Any) -> Generator[None, Any, None]:
        ran.append(True)
        return
        yield

    monkeypatch.setattr(driver, "facts_of", lambda *_: None)
    for aa, runs in ((SOUND, 0), (None, 1)):
        subject = the_driver(tmp_path, aa)
        subject._session.roots = SimpleNamespace(autocast=None)  # type: ignore[assignment]
        subject._fixes = []
        monkeypatch.setattr(subject, "_until_known", nothing)
        monkeypatch.setattr(subject, "_steady", nothing)
        monkeypatch.setattr(subject, "_blocks", lambda rows: None)
        monkeypatch.setattr(subject, "_aa_trial", control)
        monkeypatch.setattr(subject, "_write", lambda status: None)
        ran.clear()
        assert list(subject._all()) == []
        assert len(ran) == runs
        assert subject._aa == aa
        assert [note for note in subject._notes if "too few pairs" in note][:1] == subject._notes
        assert len(subject._notes) == runs


class World:
    """A clock that only the steps of a training move: 0.1 s each, `factor` times as long with the fix on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, factor: float, noise: float = 0.001
    ) -> None:
        self.now, self.factor, self.noise = 1000.0, factor, noise
        self.random = random.Random(0)
        self.fix = Twice()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(driver, "time", clock)
        monkeypatch.setattr(driver, "frames_compiled", lambda: 0)

    def row(self) -> Any:
        step_s = 0.1 * (self.factor if self.fix.on else 1.0)
        self.now += step_s * self.random.lognormvariate(0, self.noise)
        return SimpleNamespace(flags=0, end_ns=round(self.now * 1e9), event=None)

    def race(self, tmp_path: Any, **options: Any) -> Any:
        """Returns the trial of the fix."""
        given = {"budget_s": 600, "per_fix_s": 30, "fixes": ["FW102"], **options}
        session: Any = SimpleNamespace(config=SimpleNamespace(folder=tmp_path))
        subject = driver.Driver(session, given)
        row_s = [0.1 * self.random.lognormvariate(0, self.noise) for _ in range(24)]
        rows: Any = [SimpleNamespace(flags=0, end_ns=round(1e9 * row)) for row in row_s]
        held = Parity("identical", True, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, "", "")
        to_the_end(subject._race(FUSED, self.fix, held, rows), self.row)  # type: ignore[arg-type]
        self.deadline = subject._deadline
        return subject._trials[0]


@pytest.mark.parametrize("factor", [1.05, 1.5, 6.0])
def test_a_fix_that_is_plainly_slower_is_called_slower_with_the_figure_within_its_time(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    world = World(monkeypatch, factor)
    trial = world.race(tmp_path)
    assert (trial.verdict, trial.comparison.outcome) == ("not kept", "slower")
    assert trial.ci95[0] > 1
    assert trial.ratio == pytest.approx(factor, rel=0.01)
    low, high = trial.ci95
    assert trial.reason == (
        f"slower: a step takes {trial.ratio:.4g}x as long (95 %: {low:.4g} to {high:.4g})"
    )
    assert world.now - 1000 < 2 * 30  # settling and comparing
    assert not world.fix.on


def test_too_few_pairs_are_no_interval_and_the_time_that_is_named_is_enough(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = World(monkeypatch, 25.0).race(tmp_path)
    assert (trial.verdict, trial.comparison) == ("declined", None)
    before, _, after = trial.reason.partition("; with it a step was seen to take 2.5 s, ")
    assert (
        before
        == "the 30 s for one fix ended after 1 of the 6 pairs of blocks that an interval takes"
    )
    assert after.startswith("without it 0.1 s (no interval); --per-fix ")
    needed_s = float(after.split("--per-fix ")[1].split("s would do")[0])
    again = World(monkeypatch, 25.0).race(tmp_path, per_fix_s=needed_s)
    assert again.comparison.outcome == "slower"
    assert again.reason.startswith("slower: a step takes 2")


def test_a_fix_whose_steps_do_not_fit_into_its_time_is_said_to_be_so_with_what_was_seen(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = World(monkeypatch, 200.0).race(tmp_path)
    assert trial.verdict == "declined"
    assert trial.reason == (
        "not settled after 40 s; with it a step was seen to take 20 s, without it 0.1 s (no interval)"
    )


def test_the_end_of_all_trials_ends_one_in_the_middle(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, 2.0)
    trial = world.race(tmp_path, budget_s=12, launched_at=995.0)  # 5 s were gone at the start
    assert world.now == pytest.approx(1007, abs=0.3)
    assert trial.reason.startswith("the time for trials ended after ")
    assert trial.reason.endswith("a longer --budget would do")


def test_equal_arms_whose_trial_ends_by_the_clock_are_rarely_called_slower(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number of pairs hangs on how long the steps took: an interval for one look would not do.
    world = World(monkeypatch, 1.0, noise=0.4)
    outcomes = [
        world.race(tmp_path, budget_s=1e6, seed=seed).comparison.outcome for seed in range(100)
    ]
    assert (
        outcomes.count("slower") <= 8
    )  # at most 2.5 % are meant; more than 8 of 100 then have 0.1 %
    assert outcomes.count("faster") <= 8


def test_what_is_kept_takes_its_warm_up_in_every_process_of_the_proof(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, 0.5)
    world.fix.compile_s = 7.0
    trial = world.race(tmp_path, processes=3)
    assert trial.verdict == "kept"
    assert trial.warmup_s == pytest.approx(7.0, abs=0.1)
    assert world.deadline == pytest.approx(1000 + 600 - 3 * 7, abs=0.3)
    assert "its warm-up of 7 s pays back after 140 steps" in trial.reason
