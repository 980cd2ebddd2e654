"""A tune that was cut off: it goes on where it stood, on what it had measured, and refuses where that does not hold any more."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans, tuning
from flopwise.errors import PlanError, RecordError, UsageError
from flopwise.records.verdict import Comparison, Trial, Write
from flopwise.tuning import state as states
from flopwise.tuning.budget import Budget

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
KEPT = [Trial("FW101", "loader-workers", "kept", "50 % less"), Trial("FW102", "fused-optimizer", "kept", "9 % less")]  # fmt: skip


class Cut(BaseException):
    """Stands for whatever ends us."""


@pytest.fixture
def resume(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tuning, "Budget", functools.partial(Budget, clock=lambda: stage.now))

    def resume(budget_s: float | None = None, *, force: bool = False) -> tuning.Tuning:
        stage.cuts.clear()
        return tuning.resume(stage.folder, budget_s=budget_s, force=force, quiet=True)

    return resume


@pytest.mark.parametrize(
    "at", ["baseline", "trials-1", "proof-1-old", "proof-2-new", "proof-3-old"]
)
def test_wherever_it_was_cut_off_it_goes_on_there(stage: Stage, resume: Any, at: str) -> None:
    stage.trials, stage.cuts = [(KEPT, AA, ["said"])], {at: Cut()}
    with pytest.raises(Cut):
        stage.tune()
    assert not (stage.folder / "tune.json").exists()
    done = [name for name in stage.options if name != at]
    record = resume().run()
    assert record.kept == ["FW101 loader-workers", "FW102 fused-optimizer"]
    assert (record.sessions, record.resume) == (2, None)
    assert record.notes == ["said"]
    # What was complete ran once, what was cut off once more, in a folder of its own; but that trial process was through.
    names = list(stage.options)
    assert names[: len(done) + 1] == [*done, at]
    assert (f"{at}-2" in names) == (at != "trials-1")
    assert len(names) == 1 + 1 + 6 + (at != "trials-1")
    assert not (stage.folder / "state.json").exists()


def test_what_a_trial_process_had_found_when_it_was_cut_off_stands(
    stage: Stage, resume: Any
) -> None:
    stage.trials, stage.cuts = [(KEPT[:1], AA, []), (KEPT[1:], None, [])], {"trials-1": Cut()}
    with pytest.raises(Cut):
        stage.tune()
    record = resume().run()
    assert [t.fix for t in record.trials] == ["FW101", "FW102"]
    second = stage.options["trials-2"]
    assert second["trial"]["fixes"] == ["FW102"]
    assert second["trial"]["aa"] is not None
    assert second["apply"] == [{"code": "FW101", "setting": {}}]


def test_the_time_of_all_sessions_is_counted_and_a_new_budget_is_for_the_rest(
    stage: Stage, resume: Any
) -> None:
    stage.trials, stage.takes_s = [(KEPT, AA, [])], {"proof-": 25.0}
    record = stage.tune(budget_s=110)
    assert (record.plan, record.resume) == (None, str(stage.folder))
    assert "was not finished" in record.notes[0]
    done = len(stage.options)
    again = resume(budget_s=300)
    assert again.budget.given_s == 110 + 300
    record = again.run()
    assert record.plan is not None
    assert (
        len(stage.options) == done + 3
    )  # of six runs of the proof three were done, and one cut off
    assert record.wall_s == 110 + 3 * 25
    assert record.notes == []


def test_fixes_for_which_there_was_no_time_are_open_again(stage: Stage, resume: Any) -> None:
    late = Trial("FW102", "fused-optimizer", "declined", "the time for trials was used up before it was tried")  # fmt: skip
    gone = Trial("FW101", "loader-workers", "declined", "no DataLoader")
    stage.trials = [([gone, late], AA, [])]
    assert stage.tune().resume == str(stage.folder)
    stage.trials = [(KEPT[1:], None, [])]
    record = resume().run()
    assert [(t.fix, t.verdict) for t in record.trials] == [("FW101", "declined"), ("FW102", "kept")]


def test_a_tune_that_came_to_its_end_cannot_be_taken_up(stage: Stage, resume: Any) -> None:
    stage.trials = [(KEPT, AA, [])]
    stage.tune()
    with pytest.raises(UsageError, match=r"that tune is complete\. Nothing was started"):
        resume()
    with pytest.raises(UsageError, match=r"no tune was begun there \(it has no state.json\)"):
        tuning.resume(stage.folder.parent, budget_s=None, force=False, quiet=True)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("script", "train.py has changed since"),
        ("torch", "torch is 9.9, it was "),
        ("device", "the device is another, it was "),
        ("folder", "the working folder is /, it was "),
    ],
)
def test_what_has_changed_is_refused_unless_it_is_forced(
    stage: Stage, resume: Any, monkeypatch: pytest.MonkeyPatch, what: str, said: str
) -> None:
    stage.trials, stage.cuts = [(KEPT, AA, [])], {"proof-1-old": Cut()}
    with pytest.raises(Cut):
        stage.tune(cwd=os.getcwd())
    if what == "script":
        Path(stage.asked().file).write_text("print('other')")
    elif what == "torch":
        monkeypatch.setattr(plans, "torch_version", lambda: "9.9")
    elif what == "device":
        monkeypatch.setattr(plans, "device_name", lambda: "another")
    else:
        monkeypatch.chdir("/")
    with pytest.raises(PlanError) as caught:
        resume()
    assert said in str(caught.value)
    assert "Nothing was started; tune anew, or give --force" in str(caught.value)
    assert any(said in note for note in resume(force=True).run().notes)


@pytest.mark.parametrize("damage", ["", "{", '{"schema": "flopwise.tune-state/1"}', "\0", '{"schema": "x"}'])  # fmt: skip
def test_a_damaged_state_is_one_clear_error(stage: Stage, resume: Any, damage: str) -> None:
    stage.cuts = {"baseline": Cut()}
    with pytest.raises(Cut):
        stage.tune()
    (stage.folder / "state.json").write_text(damage)
    with pytest.raises(RecordError) as caught:
        resume()
    assert str(caught.value).startswith(str(stage.folder / "state.json"))
    assert str(caught.value).endswith("start a new tune with another --out. Nothing was started")


def test_a_run_of_an_earlier_session_that_is_damaged_is_said(stage: Stage, resume: Any) -> None:
    stage.trials, stage.cuts = [(KEPT, AA, [])], {"proof-3-old": Cut()}
    with pytest.raises(Cut):
        stage.tune()
    (stage.folder / "proof-1-new" / "run.json").write_text("{")
    with pytest.raises(RecordError, match="An earlier session's run is needed to go on"):
        resume().run()


def test_what_a_process_that_was_cut_off_has_written_is_listed_and_removed(
    stage: Stage, resume: Any
) -> None:
    stage.trials, stage.cuts = [(KEPT, AA, [])], {"trials-1": Cut()}
    with pytest.raises(Cut):
        stage.tune()
    left = stage.folder / "trials-1" / "apart" / "files" / "home" / "me"
    left.mkdir(parents=True)
    (left / "model.pt").write_text("weights")
    record = resume().run()
    assert Write("/home/me/model.pt", "written", 7) in record.writes
    assert not (stage.folder / "trials-1" / "apart").exists()


def test_every_part_is_kept_at_once_and_whole(stage: Stage) -> None:
    seen: list[dict[str, Any]] = []

    def look(name: str) -> None:
        seen.append(json.loads((stage.folder / "state.json").read_text()))
        assert seen[-1]["running"] == name

    stage.trials, stage.looks = [(KEPT, AA, [])], look
    stage.tune()
    assert [len(s["trials"]) for s in seen] == [0, 0, 2, 2, 2, 2, 2, 2]
    assert [s["baseline"] is not None for s in seen] == [False] + 7 * [True]
    assert [sum(map(len, s["runs"].get("proof", {}).values())) for s in seen] == [0, 0, 0, 1, 2, 3, 4, 5]  # fmt: skip
    assert [s["tried"] for s in seen] == [False, False] + 6 * [True]


def test_a_full_disk_ends_the_tune_with_one_message_and_leaves_what_was_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flopwise.errors import RunFolderError
    from flopwise.records import store

    stage.trials = [(KEPT, AA, [])]
    put, full = store._put, []

    def no_room(path: Path, text: str) -> None:
        if full:
            raise OSError(28, "No space left on device")
        put(path, text)

    monkeypatch.setattr(store, "_put", no_room)
    stage.looks = lambda name: full.append(name) if name == "proof-2-old" else None
    with pytest.raises(RunFolderError, match="No space left on device"):
        stage.tune()
    kept = states.load(stage.folder)
    assert kept.tried
    assert len(kept.runs["proof"]["old"]) + len(kept.runs["proof"]["new"]) in (2, 3)


def test_an_interrupt_says_how_to_go_on(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.cuts = {"trials-1": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        tuning.tune_command(stage.tuning(), json_path=None)
    said = capsys.readouterr().err
    assert f"interrupted. Go on with: flopwise tune --resume {stage.folder}" in said


def test_a_trial_process_that_is_killed_takes_nothing_else_with_it(stage: Stage) -> None:
    stage.trials, stage.ends = [([KEPT[1]], AA, [])], {"trials-1": -signal.SIGKILL, "trials-2": -signal.SIGKILL}  # fmt: skip
    record = stage.tune()
    assert record.plan is not None
    assert record.kept == ["FW102 fused-optimizer"]
