"""The processes of a tune, for real: each starts from the user's files as they are, and leaves them so."""

from __future__ import annotations

import hashlib
import signal
import sys
from pathlib import Path

import pytest

from flopwise.errors import NothingMeasuredError
from flopwise.launch.command import Job
from flopwise.measurement import ceilings
from flopwise.records.verdict import Write
from flopwise.tuning.budget import Budget
from flopwise.tuning.processes import Processes

SCRIPT = """
import os, sys, torch
from pathlib import Path
print("found", sorted(os.listdir("ckpt")), Path("log.txt").read_text())
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
log = open("log.txt", "a")
for n in range(400):
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(n, loss.item(), file=log, flush=True)
    if n % 5 == 0:
        torch.save(model.state_dict(), f"ckpt/{n}.pt")
        for old in sorted(Path("ckpt").glob("*.pt"), key=os.path.getmtime)[:-2]:
            old.unlink()
    END
"""


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    project = tmp_path / "project"
    (project / "ckpt").mkdir(parents=True)
    (project / "ckpt" / "best.pt").write_text("mine")
    (project / "log.txt").write_text("first run")
    (project / "train.py").write_text(SCRIPT.replace("END", ""))
    monkeypatch.chdir(project)
    job = Job([sys.executable, "train.py"], "train.py", "train.py", ["train.py"])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(ceilings, "of_rank", lambda *_, **__: None)
    return Processes(job, tmp_path / "out", Budget(60, 3, 20), quiet=True)


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_two_processes_start_from_the_same_files_and_leave_them_as_they_are(
    processes: Processes, tmp_path: Path
) -> None:
    before = digests(tmp_path / "project")
    options = {"stop_after": True, "steps": 20}
    for name in ("a", "b"):
        measurement = processes.start(name, options, "", 60)
        assert processes.conclude(measurement).steps.timed == 20
        output = (measurement.folder / "output.txt").read_text()
        assert output.startswith("found ['best.pt'] first run")  # not what the one before has left
        assert not (measurement.folder / "apart").exists()
    assert digests(tmp_path / "project") == before
    for writes in processes.writes:
        what = {Path(w.path).relative_to(tmp_path / "project"): w.what for w in writes}
        assert what[Path("log.txt")] == "written"
        assert what[Path("ckpt/best.pt")] == "removed"
        assert "changed in spite of it" not in what.values()


@pytest.mark.parametrize(
    ("end", "limit_s", "words"),
    [
        ("os.kill(os.getpid(), 9)", 60, "was ended by SIGKILL"),
        ("import time; time.sleep(60)", 12, "was ended by flopwise at its time limit of 12 s"),
        ("os._exit(3)", 60, "ended with exit code 3"),
        ("raise OSError(28, 'No space left on device')", 60, "ended with exit code 1"),
    ],
)
def test_one_that_is_killed_hangs_or_fails_leaves_them_too(
    processes: Processes, tmp_path: Path, end: str, limit_s: float, words: str
) -> None:
    script = tmp_path / "project" / "train.py"
    script.write_text(SCRIPT.replace("END", f"if n == 2: {end}"))
    before = digests(tmp_path / "project")
    measurement = processes.start("a", {"stop_after": True, "steps": 20}, "", limit_s)
    assert measurement.ending() == words
    assert digests(tmp_path / "project") == before
    assert not (measurement.folder / "apart").exists()
    (writes,) = processes.writes
    assert Write(str(tmp_path / "project" / "ckpt" / "0.pt"), "written", 0).path in {w.path for w in writes}  # fmt: skip
    assert measurement.overdue == (limit_s == 12)
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_write_that_was_refused_is_said_where_nothing_was_measured(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "project" / "train.py").write_text("import torch; raise PermissionError(13, 'Permission denied')")  # fmt: skip
    measurement = processes.start("a", {"stop_after": True, "steps": 20}, "", 60)
    with pytest.raises(NothingMeasuredError) as caught:
        processes.conclude(measurement)
    assert "--allow-writes DIR lets it write below a folder" in str(caught.value)
