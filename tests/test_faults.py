"""Whatever a script does: one clear message of ours, its own exit code, and nothing half-written behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans
from flopwise.cli import main

Go = Callable[..., Any]  # the fixture `go` of conftest.py


def test_a_run_is_measured_and_its_output_is_its_own(go: Go) -> None:
    done = go("train(60)\nprint('done')\nsys.exit(0)")
    assert (done.code, done.out) == (0, "done\n")
    assert done.record.steps.total == 60
    assert done.record.exit_code == 0
    assert done.record.throughput.samples_per_step == 4
    assert sorted(p.name.partition("-")[0] for p in done.folder.iterdir()) == [
        "attached", "launch.json", "ranks", "report.html", "run.json",
    ]  # fmt: skip


# ---------------------------------------------------------------------- too little to measure


def test_a_script_that_never_trains(go: Go) -> None:
    done = go("net(torch.ones(1, 8)); print('done'); sys.exit(4)")
    assert (done.code, done.out) == (4, "done\n")
    assert not done.ranks()
    assert done.ours()[-1].startswith(
        "flopwise run: no training step was stored: the script ended with exit code 4 before enough of them were "
        "timed. torch was imported in 1 process; a first record is written after ten timed steps"
    )
    assert len(done.ours()) == 2  # the start, and this


def test_a_script_that_never_trains_and_ends_well(go: Go) -> None:
    done = go("net(torch.ones(1, 8)); print('done')")
    assert (done.code, done.out) == (0, "done\n")
    assert done.ours()[-1].startswith(
        "flopwise run: no training step was seen: torch was imported in 1 process, but no optimizer stepped"
    )


def test_a_single_step(go: Go) -> None:
    done = go("train(1)")
    assert done.code == 0
    assert "1 training step was seen, too few to time one" in done.ours()[-1]
    assert not (done.folder / "run.json").exists()


def test_a_few_steps_are_little_and_said_to_be(go: Go) -> None:
    done = go("train(8)")
    timed = done.record.steps.timed
    assert 1 <= timed < 8
    assert not done.record.complete
    assert any(f"only {timed} steps were timed" in note for note in done.record.notes)


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise ValueError('theirs')", 1),
        ("sys.exit(3)", 3),
        ("sys.exit('their message')", 1),
        ("os._exit(0)", 0),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("os.kill(os.getpid(), signal.SIGINT)", -2),
        ("os.abort()", -6),
    ],
)
def test_any_end_in_the_middle_of_a_step_keeps_its_exit_code_and_what_was_measured(
    go: Go, end: str, code: int
) -> None:
    done = go(
        "def at(step):\n"
        "    time.sleep(0.002)\n"
        f"    if any(name[0] != '.' for name in os.listdir('run/ranks')): {end}\n"
        "train(900, at)",
        steps=800,
    )
    assert done.code == code
    record = done.record
    assert record.exit_code == (code if code >= 0 else 128 - code)
    assert not record.complete
    assert 10 <= record.steps.timed < 800
    assert done.ours() == [done.ours()[0], done.ours()[-1]]  # no complaint in between
    if code == 1:
        assert "theirs" in done.err or "their message" in done.err
    assert not list(done.folder.glob("failed-*"))


def test_killed_before_anything_was_stored(go: Go) -> None:
    done = go("train(5); os.kill(os.getpid(), signal.SIGKILL)")
    assert done.code == -9
    assert (
        "no training step was stored: the script was ended by SIGKILL before enough of them were timed"
        in done.ours()[-1]
    )


def test_an_error_in_the_optimizer_or_in_backward_is_theirs_alone(go: Go) -> None:
    done = go(
        "class Mine(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        if len(caught) < 3 and steps[0] % 10 == 9: raise KeyError('mine')\n"
        "        return super().step(closure)\n"
        "optimizer = Mine(net.parameters(), lr=0.1)\n"
        "caught, steps = [], [0]\n"
        "for steps[0] in range(60):\n"
        "    try: train(1)\n"
        "    except KeyError as error: caught.append(str(error))\n"
        "print(caught)"
    )
    assert (done.code, done.out) == (0, "[\"'mine'\", \"'mine'\", \"'mine'\"]\n")
    assert done.record.steps.total == 57
    assert len(done.ours()) == 2


# ---------------------------------------------------------------------- processes


def test_a_fork_that_trains_and_ends_by_os_exit(go: Go) -> None:
    done = go(
        "train(30)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    train(20)\n"
        "    os._exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "train(30)"
    )
    assert (done.code, done.out) == (0, "5\n")
    assert {r["steps_seen"] for r in done.ranks()} == {20, 60}
    assert done.record.steps.total == 60
    assert any(note.startswith("2 trainings ran in this job") for note in done.record.notes)
    assert len(done.ours()) == 2


def test_a_fork_before_any_training_is_measured_whichever_side_trains(go: Go) -> None:
    done = go("if os.fork():\n    os.wait()\n    os._exit(0)\ntrain(40)\n")
    assert done.code == 0
    assert [r["steps_seen"] for r in done.ranks()] == [40]


def test_ranks_that_were_forked_are_told_apart_after_their_process_group_has_gone(go: Go) -> None:
    done = go(
        "import torch.distributed as dist\n"
        "for rank in range(2):\n"
        "    if os.fork() == 0:\n"
        "        dist.init_process_group('gloo', f'file://{os.getcwd()}/meet', rank=rank, world_size=2)\n"
        "        train(30)\n"
        "        dist.destroy_process_group()\n"
        "        os._exit(0)\n"
        "for rank in range(2): os.wait()\n"
    )
    assert done.code == 0
    assert [(r.rank, r.status) for r in done.record.ranks] == [(0, "complete"), (1, "complete")]


def test_a_spawned_process_that_trains_is_measured(go: Go) -> None:
    done = go(
        "import multiprocessing\n"
        "def work():\n"
        "    for step in range(20):\n"
        "        for p in net.parameters(): p.grad = None\n"
        "        net(torch.ones(4, 8)).square().mean().backward()\n"
        "        with torch.no_grad():\n"
        "            for p in net.parameters(): p -= 0.1 * p.grad\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)"
    )
    assert done.code == 0
    (child,) = done.ranks()
    assert child["steps_seen"] in (19, 20)  # without an optimizer the first begins unseen
    assert len(list(done.folder.glob("attached-*"))) == 2
    assert len(done.ours()) == 2


def test_workers_and_children_that_never_step_leave_nothing(go: Go) -> None:
    done = go(
        "import multiprocessing\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def nothing(): torch.ones(2).sum()\n"
        "for epoch in range(4):\n"
        "    for (x,) in DataLoader(TensorDataset(torch.ones(40, 8)), 4, num_workers=2):\n"
        "        train(1)\n"
        "    child = multiprocessing.get_context('fork').Process(target=nothing)\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
        "print('done')"
    )
    assert (done.code, done.out) == (0, "done\n")
    assert [r["steps_seen"] for r in done.ranks()] == [40]
    assert len(list(done.folder.glob("attached-*"))) == 1
    assert not list(done.folder.glob("failed-*"))
    assert len(done.ours()) == 2


def test_two_trainings_one_after_another(go: Go) -> None:
    done = go(
        "train(int(sys.argv[1]))",
        command=lambda argv: ["bash", "-c", f"{' '.join(argv)} 25 && {' '.join(argv)} 70"],
    )
    assert done.code == 0
    assert done.record.steps.total == 70
    (note,) = [n for n in done.record.notes if "trainings ran in this job" in n]
    pids = {r["steps_seen"]: r["pid"] for r in done.ranks()}
    assert f"process {pids[70]} (" in note.split("and not of")[0]
    assert f"process {pids[25]} (" in note.split("and not of")[1]


# ---------------------------------------------------------------------- ranks

RANKS = """
import torch.distributed as dist
dist.init_process_group('gloo')
rank = dist.get_rank()
net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


@pytest.fixture
def two_ranks() -> Callable[[list[str]], list[str]]:
    """Returns what starts a script as two ranks and ends with the higher of their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def command(argv: list[str]) -> list[str]:
        script = " ".join(argv)
        return [
            "bash",
            "-c",
            f"export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}\n"
            f"RANK=0 {script} & first=$!\n"
            f"RANK=1 {script} & second=$!\n"
            "wait $first; a=$?; wait $second; b=$?; exit $((a > b ? a : b))",
        ]

    return command


def test_every_rank_is_measured_and_merged(go: Go, two_ranks: Any) -> None:
    done = go(RANKS + "train(60)\ndist.destroy_process_group()", command=two_ranks)
    assert done.code == 0
    record = done.record
    assert [(r.rank, r.status) for r in record.ranks] == [(0, "complete"), (1, "complete")]
    assert record.complete
    assert record.steps.total == 60
    assert record.throughput.samples_per_step == 8  # 4 on each
    one = json.loads((done.folder / "ranks" / os.listdir(done.folder / "ranks")[0]).read_text())
    assert record.mfu.model_flops_per_step == 2 * sum(one["flops"][0]["needed"].values())
    assert not [note for note in record.notes if "trainings" in note]
    assert len(done.ours()) in (2, 3)


@pytest.mark.parametrize("attempt", range(4))
def test_stopping_after_the_measurement_ends_all_ranks_at_one_step(
    go: Go, two_ranks: Any, attempt: int
) -> None:
    # One rank saves now and then; such steps are not timed, so that it is done well after the other.
    done = go(
        RANKS + f"uneven = rank == {attempt % 2}\n"
        "last = 0\n"
        "def at(step):\n"
        "    global last\n"
        "    last = step\n"
        "    if uneven and step % 3 == 0: torch.save({}, '/dev/null')\n"
        "try: train(100000, at)\n"
        "finally: open(f'rank{rank}', 'w').write(str(last))",
        command=two_ranks,
        steps=20,
        stop_after=True,
    )
    assert done.code == 0
    first, second = (int(Path(f"rank{rank}").read_text()) for rank in (0, 1))
    assert first == second < 100000
    assert done.record.complete
    ends = [sum(row["kind"] != "warmup" for row in r["rows"]) for r in done.ranks()]
    assert max(ends) > min(ends) + 5  # they did not need the same number of steps


@pytest.mark.parametrize(
    ("end", "codes"),
    [("os.kill(os.getpid(), signal.SIGKILL)", {137}), ("raise ValueError('theirs')", {1})],
)
def test_a_rank_that_dies_takes_the_job_with_it_and_is_named(
    go: Go, two_ranks: Any, end: str, codes: set[int]
) -> None:
    done = go(
        RANKS + "def at(step):\n"
        "    time.sleep(0.001)\n"
        f"    if rank == 1 and step == 8: {end}\n"
        "train(400, at)",
        command=two_ranks,
    )
    assert done.code in codes
    assert [r for r in done.ranks() if r["rank"] == 0]
    if done.code == 1:
        statuses = {r.rank: r.status for r in done.record.ranks}
        assert set(statuses.values()) == {"partial: the script ended first"}
    else:
        assert [r.status for r in done.record.ranks][1] == "missing"
        assert any("1 of 2 ranks left no record" in note for note in done.record.notes)
        assert done.record.mfu.value is None
    assert not done.record.complete


# ---------------------------------------------------------------------- signals to us


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_to_us_ends_the_script_or_leaves_it_alone(
    in_folder: Path, loaded_python: list[str], training_code: str, name: str
) -> None:
    (in_folder / "script.py").write_text(
        training_code + "train(1500, lambda step: time.sleep(0.001))\nopen('finished', 'w')"
    )
    options = ["run", "--no-profile", "--steps", "600", "--peak", "1T", "--out", "run", "--"]
    ours = subprocess.Popen(
        [sys.executable, "-m", "flopwise", *options, *loaded_python, "script.py"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: any((in_folder / "run" / "ranks").glob("*.json")))
    ours.send_signal(getattr(signal, name))
    if name == "SIGKILL":
        ours.wait()
        wait_until((in_folder / "finished").exists)  # the script does not even notice
        wait_until(lambda: "complete" in statuses(in_folder / "run"))
        ours.stderr.close()
        assert main(["report", "run"]) == 2
        return
    _, err = ours.communicate(timeout=30)
    number = getattr(signal, name)
    assert ours.returncode == -number
    record = json.loads((in_folder / "run" / "run.json").read_text())
    assert (record["exit_code"], record["complete"]) == (128 + number, False)
    assert record["steps"]["timed"] >= 10
    assert "partial" in err
    assert not (in_folder / "finished").exists()


def statuses(folder: Path) -> list[str]:
    return [json.loads(p.read_text())["status"] for p in (folder / "ranks").glob("*.json")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------- where the meter cannot get in


def test_an_isolated_python_below_a_shell_is_said(in_folder: Path, capfd: Any) -> None:
    line = ["run", "--", "bash", "-c", f"{sys.executable} -I -c 'print(1)'; exit 6"]
    assert main(line) == 6
    out, err = capfd.readouterr()
    assert out == "1\n"
    assert "python -I, -E and -S shut it out" in err


def test_a_python_without_torch(
    in_folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "lib").mkdir()
    (in_folder / "lib" / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    (in_folder / "train.py").write_text("import torch")
    monkeypatch.setenv("PYTHONPATH", "lib")
    assert main(["run", "train.py"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert "ModuleNotFoundError: No module named 'torch'" in lines
    assert lines[-1].startswith(
        "flopwise run: no training step was seen: the script ended with exit code 1; no Python process below"
    )


# ---------------------------------------------------------------------- files and folders


def test_a_script_that_goes_elsewhere_and_removes_where_it_was(go: Go, tmp_path: Path) -> None:
    done = go(
        "import tempfile\n"
        "folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)\n"
        "train(40)",
        out="run",
        json_path="out.json",
    )
    assert done.code == 0
    assert (tmp_path / "out.json").read_bytes() == (tmp_path / "run" / "run.json").read_bytes()
    assert done.record.steps.total == 40


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system can only be mounted by root, and not in every container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


FILL = """
def fill(path):
    with open(path, 'wb', buffering=0) as stream:
        try:
            while stream.write(b'x' * 512): pass
        except OSError: pass
"""


def test_a_disk_that_fills_up_during_the_run(go: Go, small_disk: Path) -> None:
    done = go(
        FILL + f"train(3); fill('{small_disk}/filler'); train(60); print('done')",
        out=str(small_disk / "run"),
    )
    assert (done.code, done.out) == (0, "done\n")
    assert not done.ranks()
    complaint, message = done.ours()[1:]
    assert "No space left on device" in complaint
    assert complaint.endswith("The script goes on unmeasured")
    assert message == (
        f"flopwise run: nothing was measured: the disk of {small_disk / 'run'} is full. Give --out on another"
    )


def test_a_disk_that_is_full_only_when_the_report_is_stored(
    go: Go, small_disk: Path, tmp_path: Path
) -> None:
    done = go(
        FILL + f"train(60)\nimport atexit\natexit._run_exitfuncs(); fill('{small_disk}/filler')",
        out=str(small_disk / "run"),
        json_path=str(tmp_path / "kept.json"),
    )
    assert done.code == 0
    assert "60" in done.err  # reported all the same
    assert "run.json: cannot be written (No space left on device)" in done.ours()[-1]
    assert not (done.folder / "run.json").exists()
    assert json.loads((tmp_path / "kept.json").read_text())["steps"]["total"] == 60


def test_a_full_disk_before_the_start(small_disk: Path, in_folder: Path, capfd: Any) -> None:
    (in_folder / "x.py").write_text("print('started')")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(b"x" * 10**6)
    assert main(["run", "--out", str(small_disk / "run"), "x.py"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "cannot be written (No space left on device). Nothing was started" in err
    assert not (small_disk / "run").exists()


def test_two_runs_into_one_folder(go: Go, capfd: pytest.CaptureFixture[str]) -> None:
    first = go("train(20)")
    before = {p: p.read_bytes() for p in first.folder.rglob("*") if p.is_file()}
    assert main(["run", "--out", str(first.folder), "script.py"]) == 2
    assert (
        "already holds a run. It is left as it is and nothing was started" in capfd.readouterr().err
    )
    assert {p: p.read_bytes() for p in first.folder.rglob("*") if p.is_file()} == before


def test_a_damaged_rank_record_is_named_and_left_out(go: Go) -> None:
    done = go(
        "train(40)\nimport atexit\natexit.register(open('run/ranks/a.json', 'w').write, '{\"schema')"
    )
    assert done.code == 0
    assert done.record.steps.total == 40
    assert any("a.json: not a readable record" in note for note in done.record.notes)


def test_a_corrupt_cache_of_ceilings_is_said_and_measured_anew(
    go: Go, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flopwise.errors import HardwareError
    from flopwise.hardware import ceilings

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    key = ceilings.cpu_key(1, plans.torch_version() or "")
    path = ceilings._path(key)
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": "flopwise.ceilings/1", "gemm"')
    asked = []

    def obtain(*arguments: Any, **options: Any) -> Any:
        asked.append(options["key"])
        raise HardwareError("not in a test")

    monkeypatch.setattr(ceilings, "obtain", obtain)
    done = go("train(40)", peak=None)
    assert done.code == 0
    assert asked == [key]
    assert any("could not be measured: not in a test" in note for note in done.record.notes)
    assert done.record.mfu.value is None
    assert "no peak is known for this cpu" in str(done.record.mfu.reason)


@pytest.mark.parametrize("code", [0, 5])
def test_a_run_folder_that_goes_away_before_anything_was_read(go: Go, code: int) -> None:
    done = go(f"train(3)\nimport shutil; shutil.rmtree('run')\ntrain(60); sys.exit({code})")
    assert done.code == code
    message = f"nothing was measured: the run folder {done.folder} went away while the script ran"
    assert message in done.ours()[-1]
    assert ("The script ended with exit code 5. " in done.ours()[-1]) == (code == 5)
    assert done.ours()[-1].endswith("Give --out a folder that the script leaves alone")
    assert not done.folder.exists()


def test_a_run_folder_that_goes_away_when_its_records_were_read(go: Go, tmp_path: Path) -> None:
    done = go(
        "import shutil\n"
        "train(60)\n"
        "while not os.path.exists('run/run.json'): time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "shutil.rmtree('run'); sys.exit(6)",
        steps=10,
        json_path=str(tmp_path / "kept.json"),
    )
    assert done.code == 6
    assert done.err.count("  throughput") == 1
    assert done.ours()[-2] == "flopwise: report above"
    assert done.ours()[-1].startswith(
        f"flopwise run: the run folder {done.folder} went away while the script ran, so nothing is stored there; "
        "the report is of what had been read before."
    )
    assert not done.folder.exists()
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert (kept["exit_code"], kept["steps"]["timed"]) == (6, 10)


def test_a_run_folder_that_was_made_anew_holds_what_was_measured(go: Go) -> None:
    done = go("train(3)\nimport shutil; shutil.rmtree('run'); os.mkdir('run')\ntrain(60)")
    assert done.code == 0
    assert done.record.steps.total == 63


# ---------------------------------------------------------------------- failures of ours


def test_a_failure_of_ours_is_one_message_and_the_script_goes_on(go: Go) -> None:
    done = go(
        "from flopwise.meter import marks\n"
        "def broken(*arguments): raise RuntimeError('ours')\n"
        "marks.current.boundaries.feed = broken\n"
        "train(40)\n"
        "print('done', marks.current)"
    )
    assert (done.code, done.out) == (0, "done None\n")
    assert "the meter failed (RuntimeError: ours" in done.ours()[1]
    assert "nothing was measured: RuntimeError: ours" in done.ours()[2]
    assert len(done.ours()) == 3


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_that_hold_no_data_are_not_measured(go: Go, kind: str) -> None:
    mode = {
        "meta": "torch.device('meta')",
        "fake": "torch._subclasses.fake_tensor.FakeTensorMode()",
    }[kind]
    done = go(
        f"with {mode}:\n"
        "    net = torch.nn.Linear(8, 4)\n"
        "    opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    for _ in range(40):\n"
        "        opt.zero_grad(); net(torch.ones(4, 8)).sum().backward(); opt.step()\n"
        "print('done')"
    )
    assert (done.code, done.out) == (0, "done\n")
    said = "the model's parameters hold no data (the meta device, or fake tensors): nothing is computed"
    assert done.ours()[1:] == [
        f"flopwise: {said}. The script goes on unmeasured",
        f"flopwise run: nothing was measured: {said}",
    ]


def test_words_and_ranks_that_are_none(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "many")
    done = go("sys.argv = [1, None]; train(40)")
    (rank,) = done.ranks()
    assert (rank["rank"], rank["world_size"], rank["local_rank"]) == (0, 1, 0)
    assert rank["argv"][1:] == ["None"]


def test_a_pipe_among_the_ranks_does_not_hold_us_up(go: Go, tmp_path: Path) -> None:
    done = go(f"os.mkfifo({str(tmp_path / 'run' / 'ranks' / 'x.json')!r}); train(40)")
    assert done.code == 0
    assert done.record.steps.total == 40
    assert any("x.json: cannot be read (not a regular file)" in n for n in done.record.notes)


def test_a_failure_of_the_report_is_one_message(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwise import summary

    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(summary, "summarise", broken)
    done = go("train(40); time.sleep(1.5); sys.exit(6)", steps=10)
    assert done.code == 6
    assert (
        "the report failed (ZeroDivisionError: ours). The script's result is untouched"
        in done.ours()[-1]
    )


def test_a_hook_that_this_torch_lacks_is_said_and_nothing_stays_behind(go: Go) -> None:
    done = go(
        "import torch.utils.data\n"
        "from flopwise import bootstrap\n"
        "from flopwise.meter import marks, patches, selftest\n"
        "marks.current.detach()\n"
        "before = torch.autograd.backward, torch.save\n"
        "selftest.missing_hooks = lambda: ['the hook is gone']\n"
        "bootstrap.attach()\n"
        "selftest.missing_hooks = lambda: []\n"
        "replace = patches.Patches.replace\n"
        "def broken(self, *arguments):\n"
        "    if len(self.names) > 5: raise TypeError('broken')\n"
        "    replace(self, *arguments)\n"
        "patches.Patches.replace = broken\n"
        "bootstrap.attach()\n"
        "train(12)\n"
        "print((torch.autograd.backward, torch.save) == before, marks.current)"
    )
    assert (done.code, done.out) == (0, "True None\n")
    assert "the hook is gone. The script runs unmeasured" in done.ours()[1]
    assert done.ours()[2] == "flopwise: TypeError: broken"


def test_a_run_folder_that_is_not_here(go: Go) -> None:
    done = go(
        "import shutil\n"
        "from flopwise import bootstrap\n"
        "from flopwise.meter import marks\n"
        "marks.current.detach()\n"
        "shutil.rmtree('run')\n"
        "bootstrap.attach()\n"
        "train(12); print('done')"
    )
    assert (done.code, done.out) == (0, "done\n")
    assert "run is not here; this process is not measured" in done.ours()[1]
    assert len(done.ours()) == 3
