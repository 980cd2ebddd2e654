"""The trials of one process: what is done with an A/A control."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.fixes import driver
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
    monkeypatch.setattr(subject, "_blocks", lambda rows: None)
    steps = subject._judge(SimpleNamespace(code="FW102", name="fused-optimizer"), Twice(), None, [])  # type: ignore[arg-type]
    kept = []

    def to_the_end() -> Generator[None, Any, None]:
        kept.append((yield from steps))

    for _ in to_the_end():
        pass
    return kept[0], subject._trials[0]


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
    assert trial.reason.startswith("not believed: the A/A control is off: 1.050 (1.020-1.080, 8")


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
