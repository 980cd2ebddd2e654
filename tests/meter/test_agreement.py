"""Ranks profile from one step on, and end at one, by what they say to each other in the run folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.meter import agreement, finish
from flopwise.meter.agreement import NEVER, PROFILE, STOP, Agreed
from flopwise.meter.rows import TIMED, Brief

FLOPWISE = str(Path(sys.executable).with_name("flopwise"))


@dataclass
class Ranks:
    """Ranks of one job, each asked in turn."""

    folder: Path
    world: int
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, rank: int, function: Callable[..., Any], *args: Any, total: int = 7) -> Any:
        session: Any = SimpleNamespace(
            config=SimpleNamespace(folder=str(self.folder)),
            boundaries=SimpleNamespace(total=total),
            device=torch.device("cpu"),
            rows=[Brief(i * 500_000_000, TIMED, None) for i in range(10)],
        )
        self.monkeypatch.setattr(finish, "identity", lambda: (rank, self.world, rank))
        return function(session, *args)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return lambda world: Ranks(tmp_path, world, monkeypatch)


@pytest.mark.parametrize("purpose", [STOP, PROFILE])
def test_one_alone_decides_at_once(ranks: Any, purpose: str) -> None:
    alone = ranks(1)
    assert alone(0, agreement.agree, purpose, lambda: "a plan", total=12) == Agreed(12, "a plan")
    assert list(alone.folder.iterdir()) == []
    alone(0, agreement.refuse, purpose)
    assert list(alone.folder.iterdir()) == []


def test_rank_0_decides_once_all_are_ready(ranks: Any) -> None:
    three = ranks(3)
    assert three(0, agreement.agree, STOP) is None
    assert three(1, agreement.agree, STOP, total=9) is None
    assert three(0, agreement.agree, STOP) is None
    assert three(2, agreement.agree, STOP, total=8) is None
    assert three(0, agreement.agree, STOP, lambda: "3 4 5", total=10) == Agreed(15, "3 4 5")
    assert three(1, agreement.agree, STOP, lambda: "mine", total=11) == Agreed(15, "3 4 5")
    assert three(2, agreement.agree, STOP, total=40) == Agreed(15, "3 4 5")


def test_purposes_are_told_apart(ranks: Any) -> None:
    two = ranks(2)
    assert two(1, agreement.agree, PROFILE) is None
    assert two(0, agreement.agree, STOP) is None
    assert two(0, agreement.agree, PROFILE) == Agreed(12)
    assert two(1, agreement.agree, STOP) is None
    assert two(0, agreement.agree, STOP, total=30) == Agreed(35)
    assert two(1, agreement.agree, PROFILE) == Agreed(12)


def test_attempts_of_torchrun_are_told_apart(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two = ranks(2)
    two(1, agreement.agree, STOP)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert two(0, agreement.agree, STOP) is None


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_that_cannot_has_nobody_do_it(ranks: Any, who: int) -> None:
    three = ranks(3)
    others = [rank for rank in range(3) if rank != who]
    for rank in others:
        assert three(rank, agreement.agree, PROFILE) is None
        assert not three(rank, agreement.refused, PROFILE)
    three(who, agreement.refuse, PROFILE)
    for rank in sorted(others):
        assert three(rank, agreement.refused, PROFILE)
        assert three(rank, agreement.agree, PROFILE) == Agreed(NEVER)


def test_a_refusal_after_the_decision_does_not_change_it(ranks: Any) -> None:
    two = ranks(2)
    two(1, agreement.agree, STOP)
    assert two(0, agreement.agree, STOP) == Agreed(12)
    two(0, agreement.refuse, STOP)
    assert two(1, agreement.agree, STOP) == Agreed(12)
    assert two(1, agreement.refused, STOP)


@pytest.mark.parametrize("text", ["", "soon", "\xff", "1.5 x"])
def test_a_damaged_decision_is_none(ranks: Any, text: str) -> None:
    two = ranks(2)
    two(1, agreement.agree, STOP)
    (two.folder / "stop-0" / "step").write_text(text, encoding="latin-1")
    assert two(1, agreement.agree, STOP) is None


def test_what_an_earlier_job_has_said_is_forgotten(ranks: Any) -> None:
    two = ranks(2)
    two(1, agreement.agree, STOP)
    assert two(0, agreement.agree, STOP) == Agreed(12)
    two(1, agreement.refuse, PROFILE)
    for rank in (1, 0):  # the next job with this folder
        two(rank, agreement.begin)
    assert two(0, agreement.agree, STOP, total=3) is None
    assert two(1, agreement.agree, STOP, total=3) is None
    assert not two(0, agreement.refused, PROFILE)
    assert two(0, agreement.agree, STOP, total=20) == Agreed(25)
    assert two(1, agreement.agree, STOP, total=20) == Agreed(25)


def test_over_a_network_the_step_lies_a_minute_ahead(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ranks(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    two(1, agreement.agree, STOP)
    assert two(0, agreement.agree, STOP) == Agreed(7 + 120)  # of half a second each
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert two(0, agreement.agree, STOP) == Agreed(12)


def test_leaving_waits_for_the_others_but_not_for_ever(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ranks(2)
    registered: list[Any] = []
    monkeypatch.setattr(agreement.atexit, "register", registered.append)
    now = [0.0]
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(agreement.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    two(0, agreement.leave_together)
    assert now[0] == pytest.approx(agreement.LEAVING_S, abs=0.1)
    two(1, agreement.leave_together)
    assert now[0] == pytest.approx(agreement.LEAVING_S, abs=0.1)
    assert registered == [agreement._destroy_process_group] * 2


def test_nothing_half_written_is_left(ranks: Any) -> None:
    two = ranks(2)
    two(1, agreement.agree, STOP)
    two(0, agreement.agree, STOP)
    two(0, agreement.refuse, STOP)
    assert sorted(path.name for path in (two.folder / "stop-0").iterdir()) == [
        "rank-1", "refused-0", "step"
    ]  # fmt: skip


RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
step = 0
try:
    for step in range(1, int(sys.argv[1]) + 1):
        optimizer.zero_grad()
        net(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
finally:
    os.write(1, f"rank {rank} ends at {step}\\n".encode())
dist.destroy_process_group()  # Gloo's can abort a process that exits with one
"""


def torchrun(in_folder: Path, code: str, *words: str, options: tuple[str, ...] = ()) -> Any:
    (in_folder / "train.py").write_text(code)
    command = [FLOPWISE, "run", "--out", "run", "--peak", "1T", "--steps", "20", *options]
    for _ in range(3):
        done = subprocess.run(
            [*command, "--standalone", "--nproc-per-node", "2", "train.py", *words],
            capture_output=True, text=True, check=False, timeout=100, env={**os.environ},
        )  # fmt: skip
        # On a crowded machine Gloo now and then aborts a process that exits, with flopwise and without.
        if done.returncode == 0 or "terminate called without an active" not in done.stderr:
            break
        shutil.rmtree("run")
    records = [json.loads(path.read_text()) for path in Path("run/ranks").glob("*.json")]
    return done, sorted(records, key=lambda record: record["rank"])


def test_two_ranks_profile_from_one_step_on_and_end_at_one(in_folder: Path) -> None:
    done, records = torchrun(in_folder, RANKS, "100000", options=("--stop-after",))
    assert done.returncode == 0, done.stderr
    ends = dict(re.findall(r"rank (\d) ends at (\d+)", done.stdout))
    assert ends.keys() == {"0", "1"}
    assert ends["0"] == ends["1"] != "100000"
    assert [record["profile"]["state"] for record in records] == ["done", "done"]
    first, second = (record["profile"]["windows"] for record in records)
    assert [one["kind"] for one in first] == [one["kind"] for one in second] == ["heavy", "stacks"]
    for one, other in zip(first, second, strict=True):
        assert one["file"] != other["file"]
        assert len(one["flags"]) == len(other["flags"])
        # No rank ends a step before the other has ended the one before: they hold the same steps.
        for earlier, later in ((one, other), (other, one)):
            pairs = zip(earlier["marks_ns"], later["marks_ns"][1:], strict=False)
            assert all(before < after for before, after in pairs)
    record = json.loads(Path("run/run.json").read_text())
    assert record["complete"]
    assert record["ledger"] is not None, record["ledger_reason"]
    assert record["ledger"]["step_s"] > 0
    assert "  next        flopwise analyze run\n" in done.stderr
    assert "flopwise: " not in re.sub(r"flopwise: (measuring|report)[^\n]*", "", done.stderr)


def test_a_rank_that_profiles_by_itself_has_nobody_profile(in_folder: Path) -> None:
    own = RANKS.replace(
        "step = 0\n",
        "step = 0\n"
        "theirs = torch.profiler.profile() if rank == 1 else None\n"
        "if theirs: theirs.start()\n",
        1,
    ).replace("finally:\n", "finally:\n    if theirs: theirs.stop()\n")
    done, records = torchrun(in_folder, own, "200")
    assert done.returncode == 0, done.stderr
    assert [record["profile"]["state"] for record in records] == [
        "none: another rank could not", "none: the script was profiling by itself"
    ]  # fmt: skip
    assert json.loads(Path("run/run.json").read_text())["complete"]
