"""A simulated training, in which fixes make steps longer or shorter as they are told to."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Generator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from flopwise.fixes import driver, racing
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

HELD = Parity("reordered", True, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, "", "")


def run(steps: Generator[None, Any, Any], next_row: Callable[[], Any], most: int) -> bool:
    """Sends one row after another, so many at most; returns whether that was the end."""
    next(steps)
    try:
        for _ in range(most):
            steps.send(next_row())
    except StopIteration:
        return True
    return False


class Switch(Applied):
    """A fix in a world of simulated steps, applied."""

    def __init__(self, fix: Simulated) -> None:
        self.setting = {}
        self.fix, self.on, self.undone = fix, False, False
        self.unit_roundoff = fix.unit_roundoff
        self.compile_s = 0.0

    def enable(self) -> None:
        assert not self.undone
        self.on = True

    def disable(self) -> None:
        self.on = False

    def undo(self) -> None:
        self.on, self.undone = False, True

    def verify(self, snapshot: Snapshot) -> Parity:
        assert not self.on
        self.compile_s = self.fix.compile_s
        return self.fix.parity

    def failure(self) -> str | None:
        others = [s.fix.code for s in self.fix.world.switches if s.on]
        return "it broke" if self.on and self.fix.breaks_beside in others else None


class Simulated(Fix):
    """A fix in a world of simulated steps.

    What it does:
    Nothing.

    Why it helps:
    It does not.

    When it declines:
    Never.

    What can change:
    Nothing.
    """

    causes = ("nothing",)
    numerics = "reordered"
    world: ClassVar[World]
    parity: ClassVar[Parity] = HELD
    unit_roundoff: ClassVar[float | None] = None
    breaks_beside: ClassVar[str] = ""
    compile_s: ClassVar[float] = 0.0

    def check(self, scene: Scene) -> Eligible | Declined:
        return Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        switch = Switch(self)
        self.world.switches.append(switch)
        return switch


class World:
    """Simulated training: `step_s` tells how long a step takes with what is on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[set[str]], float]
    ) -> None:
        self.now, self.step_s, self.noise = 1000.0, step_s, 0.002
        self.random = random.Random(0)
        self.switches: list[Switch] = []
        self.always: set[str] = set()  # on from the start of a process
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        for module in (driver, racing):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(racing, "frames_compiled", lambda: 0)
        monkeypatch.setattr(driver, "facts_of", lambda *_: None)
        monkeypatch.setattr(driver, "scene_of", lambda *_: Scene())
        self.patch = monkeypatch

    @property
    def on(self) -> set[str]:
        return {s.fix.code for s in self.switches if s.on} | self.always

    def row(self) -> Any:
        self.now += self.step_s(self.on) * self.random.lognormvariate(0, self.noise)
        return Row(0, round(self.now * 1e9), 0, None)

    def fixes(self, **kinds: dict[str, Any]) -> list[type[Fix]]:
        """Makes a catalogue; what each one has is given by name."""
        base = {"world": self}
        made = [
            type(code, (Simulated,), {"code": code, "name": f"fix-{code.lower()}", **base, **has})
            for code, has in kinds.items()
        ]
        self.patch.setattr(driver, "FIXES", tuple(made))
        return made

    def tune(self, tmp_path: Any, most: int = 1_000_000, **options: Any) -> dict[str, Any]:
        """Returns the trials by code of one process, which ends after `most` steps at the latest."""
        self.switches = []
        codes = [fix.code for fix in driver.FIXES]
        given = {"budget_s": 3600, "per_fix_s": 60, "fixes": codes, "aa": None, **options}
        looks: list[str] = []
        roots = SimpleNamespace(
            settled=True, autocast=None, keep_inputs=False, take_inputs=object,
            look_away=lambda: looks.append("away"), watch_again=lambda: looks.append("back"),
        )  # fmt: skip
        session: Any = SimpleNamespace(
            config=SimpleNamespace(folder=tmp_path), roots=roots, rows=[0] * 9, live=True,
            boundaries_known=lambda: True, device=torch.device("cpu"), plan=None,
        )  # fmt: skip
        self.subject = driver.Driver(session, given)
        self.complete = run(self.subject._all(), self.row, most)
        if self.complete:
            assert looks == ["away", "back"] * (len(looks) // 2)
        assert session.live
        return {trial.fix: trial for trial in self.subject.trials}


@dataclasses.dataclass
class Row:
    flags: int
    end_ns: int
    data_ns: int
    event: Any

    def _replace(self, **changes: Any) -> Row:
        return dataclasses.replace(self, **changes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes simulated trainings."""
    return functools.partial(World, monkeypatch)
