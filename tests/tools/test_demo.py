"""tools/demo.py: its exit code and its words follow from what the two tunes found, and it leaves nothing running."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flopwise.records import store
from flopwise.records.run import SCHEMA as RUN_SCHEMA
from flopwise.records.run import RunRecord
from flopwise.records.verdict import SCHEMA as TUNE_SCHEMA
from flopwise.records.verdict import Trial, TuneRecord

Tool = Callable[[str], ModuleType]
DATA = Path(__file__).parents[1] / "reports" / "data"
DECLINED = Trial("FW103", "channels-last", "declined", "the model has no Conv2d")
TOO_LATE = Trial("FW105", "compile-model", "declined", "the time for trials was used up before")
KEPT = Trial("FW104", "bf16-autocast", "kept", "faster", ratio=0.6, ci95=(0.5, 0.7))
NOT_KEPT = Trial("FW102", "fused-optimizer", "not kept", "no gain shown", ratio=0.95)


def tuned(outcome: str | None, *trials: Trial) -> TuneRecord:
    record: TuneRecord = store.decode(
        (DATA / "tune.json").read_bytes(), TuneRecord, TUNE_SCHEMA, "tune.json"
    )
    assert record.proof is not None
    proof = replace(record.proof, comparison=replace(record.proof.comparison, outcome=outcome))
    return replace(
        record,
        trials=list(trials),
        proof=proof if outcome else None,
        plan="plan.toml" if outcome == "faster" else None,
    )


@pytest.fixture
def show(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[list[str]]]]:
    """Runs the demo against tunes that are given, one a call; returns exit code, output and commands."""
    demo = tool("demo")
    run: RunRecord = store.decode(
        (DATA / "cpu.json").read_bytes(), RunRecord, RUN_SCHEMA, "cpu.json"
    )
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "find_device", lambda: ("cpu", "a CPU"))

    def play(*tunes: TuneRecord | None, measured: bool = True) -> tuple[int, str, list[list[str]]]:
        left = list(tunes)
        commands: list[list[str]] = []

        def flopwise(self: Any, words: Sequence[str], log: Path | None = None) -> int:
            commands.append(list(words))
            out = tmp_path / words[words.index("--out") + 1]
            out.mkdir()
            if words[0] == "run":
                if measured:
                    store.write(out / "run.json", run)
                return 0
            record = left.pop(0)
            if record is None:
                return 2
            store.write(out / "tune.json", record)
            return 0

        monkeypatch.setattr(demo.Demo, "flopwise", flopwise)
        code = demo.main()
        return code, " ".join(capsys.readouterr().out.split()), commands

    return play


def test_all_is_shown_when_one_fix_is_proven_and_one_declined(show: Any) -> None:
    code, said, commands = show(tuned("faster", KEPT, DECLINED), tuned(None, NOT_KEPT))
    assert code == 0
    assert "PROVEN bf16-autocast:" in said
    assert "declined channels-last: the model has no Conv2d" in said
    assert "not kept fused-optimizer: no gain shown" in said
    assert "All shown" in said
    assert [words[0] for words in commands[:4]] == ["run", "run", "tune", "tune"]


def test_a_proof_that_shows_nothing_is_tried_again_and_then_said(show: Any) -> None:
    code, said, commands = show(
        tuned("not shown", KEPT, DECLINED), tuned(None, DECLINED), tuned("not shown", KEPT)
    )
    assert code == 1
    assert "not proven bf16-autocast: faster in the trial, but fresh processes do not tell" in said
    assert "No fix was proven" in said
    assert "declined channels-last" in said
    assert commands[-1][:3] == ["tune", "--fixes", "bf16-autocast"]


def test_a_second_try_can_prove_one_fix_and_claims_no_other(show: Any) -> None:
    also = replace(NOT_KEPT, verdict="kept", reason="5 % less time a step")
    code, said, _ = show(
        tuned("not shown", also, KEPT, DECLINED), tuned(None, DECLINED), tuned("faster", KEPT)
    )
    assert code == 0
    assert "PROVEN bf16-autocast:" in said
    assert "not proven fused-optimizer: 5 % less time a step in the trial" in said


def test_a_fix_that_only_had_no_time_is_not_counted_as_declined(show: Any) -> None:
    slow = replace(TOO_LATE, reason="the 15 s for one fix ended after 2 of the 7 pairs of blocks")
    code, said, _ = show(tuned("faster", KEPT, TOO_LATE), tuned("faster", KEPT, slow))
    assert code == 1
    assert "No fix was declined for a reason of the script's" in said


def test_a_tune_that_fails_is_said(show: Any) -> None:
    code, said, _ = show(tuned("faster", KEPT, DECLINED), None)
    assert code == 1
    assert "train_cnn.py: the tune came to no end (exit code 2)" in said


def test_a_script_that_was_not_measured_is_not_tuned(show: Any) -> None:
    code, said, commands = show(measured=False)
    assert code == 1
    assert "train_gpt.py: it was not measured" in said
    assert [words[0] for words in commands] == ["run", "run"]


def test_old_folders_do_not_matter(tool: Tool, tmp_path: Path) -> None:
    demo = tool("demo")
    folders = [demo.new_folder(tmp_path / ".demo") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() for folder in folders)


def test_ending_a_command_ends_all_below_it(tool: Tool, tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    script = f"(trap '' TERM; while :; do touch {mark}; sleep 0.05; done) & wait"
    child = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    deadline = time.monotonic() + 10
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    tool("demo").end(child)
    mark.unlink()
    time.sleep(0.3)
    assert child.poll() is not None
    assert not mark.exists()
