"""Ranks that decide together: what one of them sees counts for all, and one that leaves ends it for all."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.fixes import driver, racing
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.ranks import LONGEST_TEXT, Connected, Ranks, RanksApartError, ranks_of
from flopwise.meter.rows import Row
from flopwise.records.verdict import Parity

HELD = Parity("reordered", True, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, "", "")


def on_every_rank(world: int, work: Callable[[int], Any]) -> list[Any]:
    """Returns what a function returns in a process a rank, or the words of the error that it raised."""
    context = multiprocessing.get_context("fork")

    def run(rank: int, end: Any) -> None:
        torch.set_num_threads(1)
        try:
            end.send(work(rank))
        except Exception as error:
            end.send(f"{type(error).__name__}: {error}")

    pipes = [context.Pipe() for _ in range(world)]
    started = [
        context.Process(target=run, args=(r, pipes[r][1]), daemon=True) for r in range(world)
    ]
    for process in started:
        process.start()
    found = [pipe[0].recv() if pipe[0].poll(60) else None for pipe in pipes]
    for process in started:
        process.join(5)
    return found


def test_values_and_texts_are_those_of_all_ranks_in_order(tmp_path: Any) -> None:
    long = "\u00e4" * LONGEST_TEXT

    def work(rank: int) -> Any:
        ranks = ranks_of(rank, 3, str(tmp_path))
        return (
            ranks.gather([rank, 1e18 + rank * 1024]),
            ranks.mean([rank, 10.0]),
            ranks.all(rank < 3),
            ranks.all(rank < 2),
            ranks.texts([None, "", long][rank]),
            ranks.first("no \u00fc" if rank == 1 else None),
            ranks.first("no"),
            ranks.first(None),
        )

    found = on_every_rank(3, work)
    assert found[0] == found[1] == found[2]
    values, mean, every, some, texts, first, same, none = found[0]
    assert values == [[0, 1e18], [1, 1e18 + 1024], [2, 1e18 + 2048]]
    assert mean == [1.0, 10.0]
    assert (every, some) == (True, False)
    assert texts == [None, "", "\u00e4" * (LONGEST_TEXT // 2)]
    assert (first, same, none) == ("rank 1: no \u00fc", "no", None)


def test_one_rank_alone_connects_to_nobody(tmp_path: Any) -> None:
    ranks = ranks_of(0, 1, str(tmp_path))
    assert type(ranks) is Ranks
    assert ranks.gather([3.0]) == [[3.0]]
    assert (ranks.first("why"), ranks.first(None)) == ("why", None)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_leaves_ends_the_waiting_of_the_others(tmp_path: Any) -> None:
    def work(rank: int) -> Any:
        ranks = Connected(rank, 2, str(tmp_path))
        ranks.gather([1.0])
        if rank == 1:
            return "left"
        began = time.monotonic()
        with pytest.raises(RanksApartError, match="has left the trials"):
            ranks.gather([1.0])
        return time.monotonic() - began

    waited, left = on_every_rank(2, work)
    assert left == "left"
    assert waited < 20


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(RanksApartError, match="rank 0 did not come"):
        Connected(1, 2, str(tmp_path), patience_s=0.2)


class Switch(Applied):
    """A simulated fix: on rank 1 "broken" fails once it is on, and "wrong" does not hold its numbers."""

    def __init__(self, code: str, rank: int) -> None:
        self.setting = {}
        self.code, self.rank, self.on = code, rank, False

    def enable(self) -> None:
        self.on = True

    def disable(self) -> None:
        self.on = False

    undo = disable

    def verify(self, snapshot: Any) -> Parity:
        import dataclasses

        wrong = self.code == "WRONG" and self.rank == 1
        return dataclasses.replace(HELD, passed=not wrong, detail="apart")

    def failure(self) -> str | None:
        return "it broke" if self.on and self.code == "BROKEN" and self.rank == 1 else None


def test_ranks_that_see_different_things_take_the_same_way(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int) -> Any:
        noise = random.Random(rank)
        clock = SimpleNamespace(now=1000.0 + 77 * rank)
        switches: list[Switch] = []

        def kind(code: str) -> Any:
            def check(self: Any, scene: Scene) -> Eligible | Declined:
                return Declined("not here") if code == "ABSENT" and rank == 1 else Eligible()

            def apply(self: Any, scene: Scene, setting: Any = None) -> Applied:
                switches.append(Switch(code, rank))
                return switches[-1]

            members = {"code": code, "name": code.lower(), "check": check, "apply": apply}
            return type(code, (Fix,), {**members, "causes": ("x",), "numerics": "reordered"})

        times = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
        for module in (driver, racing):
            monkeypatch.setattr(module, "time", times)
        codes = ["GOOD", "BROKEN", "WRONG", "ABSENT", "USELESS"]
        monkeypatch.setattr(driver, "FIXES", tuple(kind(code) for code in codes))
        monkeypatch.setattr(racing, "frames_compiled", lambda: 0)
        monkeypatch.setattr(driver, "facts_of", lambda *_: None)
        monkeypatch.setattr(driver, "scene_of", lambda *_: Scene())
        roots = SimpleNamespace(
            settled=True, autocast=None, keep_inputs=False, look_away=lambda: None,
            watch_again=lambda: None,
            take_inputs=lambda: SimpleNamespace(module=None, _replace=lambda **_: object()),
        )  # fmt: skip
        folder = tmp_path / str(rank)
        folder.mkdir()
        session: Any = SimpleNamespace(
            config=SimpleNamespace(folder=folder), roots=roots, rows=[0] * 9, live=True,
            boundaries_known=lambda: True, device=torch.device("cpu"), plan=None,
        )  # fmt: skip
        options = {"budget_s": 3600, "per_fix_s": 60, "fixes": codes, "aa": None}
        subject = driver.Driver(session, options)
        subject.races.ranks = Connected(rank, 2, str(tmp_path))
        steps, path = subject._all(), []
        next(steps)
        try:
            while True:
                on = {s.code for s in switches if s.on}
                path.append(sorted(on))
                # Ranks wait for each other, but each has its own clock, and only rank 0 saves now and then.
                clock.now += 0.1 * (0.8 if "GOOD" in on else 1) * noise.lognormvariate(0, 0.01)
                saves = 2 if rank == 0 and noise.random() < 0.05 else 0
                end = round(clock.now * 1e9)
                row = Row(end, saves, 0, 0, 0, 0, 0, 0, 1, *[None] * 3, "", None, None, None)
                steps.send(subject._of_all(row))
        except StopIteration:
            pass
        return path, [(t.fix, t.verdict, t.reason, t.ratio) for t in subject.trials]

    found = on_every_rank(2, work)
    assert found[0] == found[1], found
    trials = {fix: (verdict, reason) for fix, verdict, reason, _ in found[0][1]}
    assert trials["GOOD"][0] == "kept"
    assert trials["BROKEN"] == ("declined", "beside the others: rank 1: it broke")
    assert trials["WRONG"] == ("not kept", "parity failed: rank 1: apart")
    assert trials["ABSENT"] == ("declined", "rank 1: not here")
    assert trials["USELESS"][0] == "not kept"
    assert len(found[0][0]) > 200
