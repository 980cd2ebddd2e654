"""When a measurement is reported, and when it is left at that."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.launch.command import Job
from flopwise.measurement import Measurement

Go = Callable[..., Any]

WAIT = """
import json
def wait_for(path, limit_s=10):
    started = time.monotonic()
    while not os.path.exists(path) and time.monotonic() < started + limit_s: time.sleep(0.01)
    return time.monotonic() - started
"""


def test_a_long_script_is_reported_while_it_still_runs(go: Go) -> None:
    done = go(
        WAIT + "train(60)\n"
        "while not any(n[0] != '.' for n in os.listdir('run/ranks')): time.sleep(0.01)\n"
        "waited_s = wait_for('run/run.json')\n"
        "seen = json.load(open('run/run.json'))\n"
        "print(waited_s < 2.6, seen['complete'], seen['exit_code'])",
        steps=10,
    )
    assert (done.code, done.out) == (0, "True True None\n")
    assert done.err.count("  throughput") == done.err.count("flopwise run script.py") == 1
    assert done.ours()[-1] == "flopwise: report above; saved run"
    assert done.record.exit_code == 0


def test_a_script_that_ends_soon_is_reported_once(go: Go) -> None:
    done = go("train(60)", steps=10)
    assert done.err.count("  throughput") == 1
    assert "report above" not in done.err


def test_a_job_that_is_not_measured_in_time_gets_a_provisional_report(go: Go) -> None:
    done = go(
        WAIT + "train(400, lambda step: time.sleep(0.004))\n"
        "wait_for('run/run.json')\n"
        "print(json.load(open('run/run.json'))['complete'])",
        steps=1000,
        first_report_s=0.2,
    )
    assert (done.code, done.out) == (0, "False\n")
    assert done.err.count("  throughput") == 2  # the provisional one, and the last
    assert "partial" in done.err


def test_the_next_command_is_the_jobs_own_words(go: Go) -> None:
    assert "next        flopwise tune script.py\n" in go("train(40)").err


@pytest.mark.parametrize(
    ("end", "asked"), [("sys.exit(1)", 1), ("os.kill(os.getpid(), signal.SIGINT)", 0)]
)
def test_after_an_interrupt_nothing_is_measured_any_more(
    go: Go, cached: dict[str, Any], end: str, asked: int
) -> None:
    done = go(f"train(40); {end}", peak=None)
    assert done.record.exit_code in (1, 128 + signal.SIGINT)
    assert len(cached["asked"]) == asked


@pytest.mark.parametrize(
    ("worlds", "ledger", "plan", "expected"),
    [
        ([1], True, None, "flopwise tune train.py --lr 1"),
        ([1], False, None, "flopwise tune train.py --lr 1"),
        ([1], True, "plan.json", None),
        ([2, 2], True, None, "flopwise analyze 'a run'"),
        ([2], True, "plan.json", "flopwise analyze 'a run'"),
        ([2, 2], False, None, None),  # nothing was recorded that could be laid on one another
    ],
)
def test_of_several_ranks_the_next_command_is_analyze(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worlds: list[int],
    ledger: bool,
    plan: str | None,
    expected: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("a run")
    folder.mkdir()
    (folder / "launch.json").touch()
    job = Job(["python", "train.py"], "train.py", "train.py", ["train.py", "--lr", "1"])
    found = Measurement(job, folder, {})
    monkeypatch.setattr(found, "ranks", lambda: [SimpleNamespace(world_size=n) for n in worlds])
    record: Any = SimpleNamespace(ledger=object() if ledger else None, plan=plan)
    assert found._next_command(record) == expected
    (folder / "launch.json").unlink()
    if max(worlds) > 1:
        assert found._next_command(record) is None
