"""Pairs of blocks of several processes of a short script: judged after each, kept over an interruption, and told."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from pathlib import Path
from typing import Any

import pytest

from flopwise import tuning
from flopwise.records.pool import ALL, CONTROL, BlockPair, Turn
from flopwise.records.verdict import Comparison, Trial
from flopwise.tuning.budget import Budget
from flopwise.tuning.pooling import Pools, judge, last_word, over

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
NAMES = {"FW101": "loader-workers", "FW102": "fused-optimizer"}


def turn(
    process: int,
    what: str,
    ratio: float,
    pairs: int = 5,
    beside: list[str] | None = None,
    codes: list[str] | None = None,
    noise: float = 0.002,
    predicted: float | None = None,
) -> Turn:
    rng = random.Random(f"{process}{what}")
    made = []
    for _ in range(pairs):
        new = [0.01 * ratio * math.exp(rng.gauss(0, noise)) for _ in range(4)]
        made.append(BlockPair([0.01] * 4, new, bool(rng.getrandbits(1))))
    known = [Trial(code, NAMES.get(code, code), "declined", "", setting={"a": "b"}, predicted_ratio=predicted)
             for code in (codes or ([what] if what not in (ALL, CONTROL) else []))]  # fmt: skip
    return Turn(process, what, beside or [], made, codes or [what], 1.0, 2, known)


# ---------------------------------------------------------------------- judging


def test_a_gain_is_kept_once_processes_agree_and_says_where_it_is_from() -> None:
    pools = Pools([turn(1, "FW101", 0.7)])
    assert judge(pools, ["FW101"], 4, AA) == []
    pools.turns += [turn(2, "FW101", 0.705), turn(3, "FW101", 0.695)]
    (trial,) = judge(pools, ["FW101"], 4, AA)
    assert (trial.verdict, trial.setting) == ("kept", {"a": "b"})
    assert trial.reason.endswith("(15 pairs of blocks in 3 processes)")
    assert trial.ratio == pytest.approx(0.7, rel=0.01)
    assert (trial.comparison.pairs, trial.comparison.processes) == (15, 3)  # type: ignore[union-attr]


def test_pairs_beside_other_fixes_are_another_comparison() -> None:
    pools = Pools([turn(n, "FW101", 0.7, beside=["FW102"]) for n in (1, 2, 3)])
    pools.turns.append(turn(4, "FW101", 1.0, beside=[]))
    assert judge(pools, ["FW101"], 4, AA) == []
    assert pools.pairs("FW101") == 5


def test_of_two_that_gain_nothing_the_less_promising_goes_first() -> None:
    pools = Pools([turn(n, "FW101", 1.1, predicted=0.5) for n in (1, 2, 3)])
    pools.turns += [turn(n, "FW102", 1.1, predicted=0.9) for n in (1, 2, 3)]
    (trial,) = judge(pools, ["FW101", "FW102"], 4, AA)
    assert (trial.fix, trial.verdict) == ("FW102", "not kept")
    assert trial.reason.startswith("slower: a step takes 1.1")


def test_a_control_that_is_off_withholds() -> None:
    pools = Pools([turn(n, "FW101", 0.7) for n in (1, 2, 3)])
    off = dataclasses.replace(AA, ci95=(1.02, 1.05))
    (trial,) = judge(pools, ["FW101"], 4, off)
    assert trial.verdict == "not kept"
    assert "is not believed: the A/A control is off" in trial.reason


def test_the_control_is_of_all_pairs_whatever_was_on() -> None:
    pools = Pools([turn(1, CONTROL, 1.0, pairs=5), turn(2, CONTROL, 1.0, pairs=3)])
    found = pools.control()
    assert found is not None
    assert (found.pairs, found.outcome) == (8, "not shown")
    assert Pools(pools.turns[:1]).control() is None


def test_what_is_hopeless_is_given_up() -> None:
    pools = Pools([turn(n, "FW101", 1.0, pairs=6, noise=0.05) for n in (1, 2, 3)])
    assert over(pools.compared("FW101", 4))
    assert not over(Pools(pools.turns[:1]).compared("FW101", 4))


def test_blocks_that_had_not_settled_are_compared_anew_with_a_longer_wash_out() -> None:
    def late(process: int, washout_steps: int) -> Turn:
        made = turn(process, "FW101", 0.95, noise=0.001)
        pairs = [dataclasses.replace(p, new=[0.0100, 0.0100, 0.0090, 0.0090]) for p in made.pairs]
        return dataclasses.replace(made, pairs=pairs, washout_steps=washout_steps)

    pools = Pools([late(n, 2) for n in (1, 2)])
    assert judge(pools, ["FW101"], 4, AA) == []
    (standing,) = pools.standings(4)
    assert (standing.pairs, standing.washout_steps) == (0, 8)
    pools.turns += [dataclasses.replace(turn(n, "FW101", 0.9), washout_steps=8) for n in (3, 4)]
    assert pools.pairs("FW101") == 10
    (trial,) = judge(pools, ["FW101"], 4, AA)
    assert trial.verdict == "kept"


def test_nothing_is_said_of_a_fix_without_pairs() -> None:
    assert last_word(Pools(), ["FW101"], [], 4, AA, "over") == []


# ---------------------------------------------------------------------- a tune


def test_a_short_script_is_started_until_all_has_a_verdict(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [[turn(n, "FW101", 0.7), turn(n, "FW102", 1.2)] for n in (1, 2, 3)]
    stage.turns = [[], *both]
    tune = stage.tuning()
    tune.processes.quiet = False
    stage.trials = [([], AA, [])]
    # The first has left nothing but that the script is short, and shares.
    stage.turns[0] = [turn(1, "FW101", 0.7, pairs=1)]
    record = tune.run()
    assert [(t.fix, t.verdict) for t in record.trials] == [("FW101", "kept"), ("FW102", "not kept")]
    assert record.kept == ["FW101 loader-workers"]
    names = [name for name in stage.options if name.startswith("trials-")]
    assert len(names) == 3
    first, second = (stage.options[name]["trial"] for name in names[:2])
    assert (first["short"], first["pools"], first["process"]) == (False, [], 1)
    assert (second["short"], second["process"]) == (True, 2)
    assert second["pools"] == [
        {
            "what": "FW101",
            "beside": [],
            "pairs": 1,
            "closed": False,
            "washout_steps": 2,
            "wants_processes": False,
        }
    ]
    assert second["shares"]["step_s"] == 0.01
    said = capsys.readouterr().err
    assert "trying loader-workers (1 pair so far), fused-optimizer" in said
    assert "loader-workers: kept. 30" in said


def test_a_process_that_brings_nothing_new_is_the_last(stage: Stage) -> None:
    stage.turns = [[turn(1, "FW101", 0.7)], []]
    record = stage.tune()
    assert [name for name in stage.options if name.startswith("trials-")] == ["trials-1", "trials-2"]  # fmt: skip
    reasons = {t.fix: t.reason for t in record.trials}
    assert reasons["FW101"] == (
        "the script ended before it could be tried; 5 of the 7 pairs of blocks that an interval takes were made in 1 process"
    )
    assert reasons["FW102"] == "the script ended before it could be tried"


def test_what_pairs_there_are_stand_when_it_is_taken_up_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(BaseException):
        pass

    monkeypatch.setattr(tuning, "Budget", functools.partial(Budget, clock=lambda: stage.now))
    stage.turns = [[turn(n, "FW101", 0.7)] for n in (1, 2, 3)]
    stage.cuts = {"trials-2": Cut()}
    with pytest.raises(Cut):
        stage.tune(codes=["FW101"])
    stage.cuts.clear()
    record = tuning.resume(Path(stage.folder), budget_s=None, force=False, quiet=True).run()
    (trial,) = record.trials
    assert trial.verdict == "kept"
    assert (trial.comparison.pairs, trial.comparison.processes) == (15, 3)  # type: ignore[union-attr]
    third = stage.options["trials-3"]["trial"]
    assert third["pools"][0]["pairs"] == 10
    assert third["short"]


def test_the_time_ends_it_with_what_there_is(stage: Stage) -> None:
    all_on = {"codes": ["FW101", "FW102"]}
    stage.turns = [[turn(n, ALL, 0.6, **all_on), turn(n, "FW101", 0.75, pairs=1)] for n in range(1, 30)]  # fmt: skip
    record = stage.tune(budget_s=150)
    assert [t.verdict for t in record.trials] == ["kept", "kept"]
    assert "all 2 fixes together: 40" in record.trials[1].reason
    assert record.plan is not None
    assert record.time.trials_s < 150
