"""Trials of a script that ends too soon: what each process leaves, and what all of them come to together."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from flopwise.records.pool import ALL, CONTROL
from flopwise.records.verdict import Comparison, Parity, Trial
from flopwise.tuning.pooling import Pools, judge, last_word

World = Any  # of conftest.py


class Tune:
    """Processes of one script, one after another, as the parent makes them."""

    def __init__(self, world: World, folder: Any, steps: int, **options: Any) -> None:
        self.world, self.folder, self.steps, self.options = world, folder, steps, options
        self.pools, self.trials, self.control = Pools(), [], None
        self.shares: Any = None
        self.processes = 0

    @property
    def kept(self) -> list[str]:
        return [t.fix for t in self.trials if t.verdict == "kept"]

    @property
    def open(self) -> list[str]:
        from flopwise.fixes import driver

        done = {t.fix for t in self.trials}
        return [kind.code for kind in driver.FIXES if kind.code not in done]

    def comparisons(self) -> int:
        from flopwise.fixes import driver

        never = sum(t.comparison is None and t.verdict != "kept" for t in self.trials)
        return max(1, len(driver.FIXES) - never) + 1

    def process(self) -> bool:
        """Runs one process; returns whether its trials came to their end."""
        self.processes += 1
        self.world.always = set(self.kept)
        aa = dataclasses.asdict(self.control) if self.control else None
        standings = self.pools.standings(self.comparisons()) if self.processes > 1 else []
        found = self.world.tune(
            self.folder, self.steps, fixes=self.open, process=self.processes, short=self.processes > 1,
            kept=self.kept, shares=self.shares, pools=json.loads(json.dumps([dataclasses.asdict(s) for s in standings])),
            seed=1000 * self.processes, comparisons=self.comparisons(), aa=aa, **self.options,
        )  # fmt: skip
        subject = self.world.subject
        subject._left()
        written = json.loads((self.folder / "trials.json").read_text())
        assert written["status"] == "running"
        self.trials += list(found.values())
        self.pools.turns += [turn for turn in subject.pool.turns if turn.pairs]
        self.shares = written["shares"]
        self.control = self.control or subject.races.control or self.pools.control()
        self.trials += judge(self.pools, self.open, self.comparisons(), self.control)
        return bool(self.world.complete)

    def run(self, most: int = 40) -> dict[str, Trial]:
        while self.open and self.processes < most:
            self.process()
        left = last_word(self.pools, self.open, self.trials, self.comparisons(), self.control, "the time is over")  # fmt: skip
        self.trials += left
        return {t.fix: t for t in self.trials}


@pytest.mark.parametrize("steps", [50, 80, 150])
def test_a_script_too_short_for_a_verdict_comes_to_one_over_its_processes(
    tmp_path: Any, world: Any, steps: int
) -> None:
    training = world(lambda on: 0.1 * (0.6 if "A" in on else 1) * (1.3 if "B" in on else 1))
    training.fixes(A={}, B={}, C={"parity": dataclasses.replace(_held(), passed=False)})
    tune = Tune(training, tmp_path, steps)
    trials = tune.run()
    assert {code: t.verdict for code, t in trials.items()} == {
        "A": "kept", "B": "not kept", "C": "not kept",
    }  # fmt: skip
    assert trials["A"].ratio == pytest.approx(0.6, rel=0.02)
    assert trials["B"].ratio == pytest.approx(1.3, rel=0.02)
    assert trials["A"].ci95[0] < 0.6 < trials["A"].ci95[1] < 1
    assert trials["A"].parity is not None
    assert tune.processes <= {50: 24, 80: 12, 150: 5}[steps]
    if steps < 100:
        assert trials["A"].comparison.processes >= 2
        assert "processes)" in trials["A"].reason


def test_a_fix_that_is_kept_is_on_from_the_start_of_the_next_process(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * (0.5 if "A" in on else 1))
    training.fixes(A={}, B={})
    tune = Tune(training, tmp_path, 80)
    trials = tune.run()
    assert trials["A"].verdict == "kept"
    assert trials["B"].verdict == "not kept"
    assert trials["B"].reason.startswith("no gain shown: a gain of ")
    assert any("A" in t.beside for t in tune.pools.turns if t.what == "B")


def test_of_two_that_do_the_same_one_is_kept(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1 if not on & {"A", "B"} else 0.05)
    training.fixes(A={"findings": ("L104",)}, B={})
    trials = Tune(training, tmp_path, 80, findings={"L104": 0.4}).run()
    assert (trials["B"].verdict, trials["A"].verdict) == ("not kept", "kept")
    assert trials["A"].ratio == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("seed", range(6))
def test_what_differs_from_process_to_process_alone_is_not_kept(
    tmp_path: Any, world: Any, seed: int
) -> None:
    # Within each process steps differ by up to several percent with the fix on, for sure; over processes by nothing.
    training = world(lambda on: 0.1)
    training.noise = 0.001
    luck = random.Random(seed)
    training.fixes(A={}, B={"parity": dataclasses.replace(_held(), passed=False)})
    tune = Tune(training, tmp_path, 80, comparisons=2)
    tune.options.pop("comparisons")
    while tune.open and tune.processes < 12:
        effect = 1 + luck.gauss(0, 0.03)
        training.step_s = lambda on, effect=effect: 0.1 * (effect if "A" in on else 1)
        tune.process()
    found = {t.fix: t for t in tune.trials}.get("A")
    assert found is None or found.verdict != "kept" or found.comparison.processes == 1


def test_the_numbers_are_compared_anew_in_every_process(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1 * (0.9 if "A" in on else 1))
    (fix, _) = training.fixes(A={}, B={})
    tune = Tune(training, tmp_path, 80)
    tune.process()
    tune.process()
    assert "A" in tune.open
    fix.parity = dataclasses.replace(_held(), passed=False, detail="0.01 apart")
    tune.process()
    assert {t.fix: t.reason for t in tune.trials}["A"] == "parity failed: 0.01 apart"


def test_what_cannot_be_told_of_one_alone_stays_if_all_together_are_faster(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * 0.8 ** len(on))
    training.fixes(A={}, B={})
    tune = Tune(training, tmp_path, 60)
    while tune.pools.all_on(tune.comparisons(), None) is None or tune.control is None:
        tune.process()
        assert tune.processes < 12
    while (found := tune.pools.all_on(tune.comparisons(), tune.control)) and found.outcome != "faster":  # fmt: skip
        tune.process()
        assert tune.processes < 12
    tune.trials, tune.pools.turns = [], [t for t in tune.pools.turns if t.what in (ALL, CONTROL)]
    trials = {t.fix: t for t in last_word(tune.pools, ["A", "B"], [], 3, tune.control, "over")}
    assert {t.verdict for t in trials.values()} == {"kept"}
    assert trials["A"].reason.startswith(
        "its own part was not shown in the time; all 2 fixes together: 36"
    )
    out = [Trial("B", "fix-b", "not kept", "slower")]
    assert last_word(tune.pools, ["A"], out, 3, tune.control, "over") == []


def test_too_few_pairs_are_said_to_be_so(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1 * 0.9 ** len(on))
    training.fixes(A={})
    tune = Tune(training, tmp_path, 60)
    tune.control = dataclasses.replace(_SOUND)
    trials = tune.run(most=2)
    assert trials["A"].verdict == "declined"
    assert trials["A"].reason == (
        "the time is over; 4 of the 7 pairs of blocks that an interval takes were made in 1 process"
    )


def test_what_compiles_comes_once_the_others_have_a_verdict(tmp_path: Any, world: Any) -> None:
    training = world(lambda on: 0.1 * 0.7 ** len(on))
    training.fixes(A={}, L={"late": True, "compile_s": 3.0})
    tune = Tune(training, tmp_path, 90)
    trials = tune.run()
    assert list(trials) == ["A", "L"]
    assert trials["L"].verdict == "kept"
    assert trials["L"].warmup_s == pytest.approx(3.0)
    assert {tuple(t.beside) for t in tune.pools.turns if t.what == "L"} <= {("A",)}


def test_a_script_with_no_step_to_spare_leaves_nothing_and_does_no_harm(
    tmp_path: Any, world: Any
) -> None:
    training = world(lambda on: 0.1 * 0.5 ** len(on))
    training.fixes(A={}, B={})
    tune = Tune(training, tmp_path, 12)
    for _ in range(3):
        tune.process()
    assert (tune.pools.turns, tune.trials) == ([], [])


_SOUND = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)


def _held() -> Parity:
    return Parity("reordered", True, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, "", "")
