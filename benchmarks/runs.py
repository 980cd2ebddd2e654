"""Runs scripts in processes of their own, each with a time limit, on lanes: a GPU and a part of the cores each."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GPU = ROOT / "benchmarks" / "gpu"
LARGEST_KEPT = 2_000_000  # bytes of one file that goes into the archive
ARCHIVE_BYTES = 14_000_000


@dataclass(frozen=True)
class Lane:
    """Where processes run, one after the other."""

    gpu: int | None = None  # None: whichever CUDA takes first
    cores: frozenset[int] | None = None  # None: all


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None  # None: it was over its limit
    wall_s: float
    tail: str  # the end of its output, on one line

    @property
    def problem(self) -> str | None:
        """What went wrong, in words; None where nothing did."""
        if self.code == 0:
            return None
        how = "over its time limit" if self.code is None else f"exit code {self.code}"
        return f"{how} after {self.wall_s:.0f} s: {self.tail}"


def lanes(count: int) -> list[Lane]:
    """Returns so many lanes, each with a GPU and an equal part of this process's cores; one lane has all."""
    if count == 1:
        return [Lane()]
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    return [Lane(k, frozenset(cores[k * each : (k + 1) * each])) for k in range(count)]


def execute(
    argv: Sequence[str],
    folder: Path,
    limit_s: float,
    lane: Lane,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a command to its end, or to its limit; its output goes to `folder`/output.txt. Never raises for what it does."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})}
    if lane.gpu is not None:
        variables["CUDA_VISIBLE_DEVICES"] = str(lane.gpu)
    began = time.monotonic()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            list(argv),
            cwd=ROOT,
            env=variables,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if lane.cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process.pid, lane.cores)
    code: int | None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own group: what it left running, too
        process.wait()
    return Ended(code, time.monotonic() - began, tail(output))


def tail(path: Path, lines: int = 6) -> str:
    """Returns the last lines of a text file on one line, "" where there is none."""
    if not path.exists():
        return ""
    return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])[-600:]


def measured(
    script: Sequence[str],
    folder: Path,
    limit_s: float,
    lane: Lane,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any] | None, str | None, float]:
    """Runs a script under `flopwise run`.

    Returns:
        The run record, without its heat maps, which are large; what went wrong, if anything did; the seconds it took.
    """
    folder.mkdir(parents=True, exist_ok=True)
    json_path = folder / "run.json"
    argv = [sys.executable, "-m", "flopwise", "run", "--out", str(folder / "run")]
    argv += ["--json", str(json_path), *flags, *script]
    ended = execute(argv, folder, limit_s, lane, env)
    if not json_path.exists():
        return None, ended.problem or f"no record was written: {ended.tail}", ended.wall_s
    record = json.loads(json_path.read_text())
    if record.get("ledger"):
        record["ledger"].pop("heat", None)
    return record, ended.problem, ended.wall_s


def in_lanes(jobs: Sequence[Callable[[Lane], None]], free: Sequence[Lane]) -> None:
    """Runs jobs in order, as many at a time as there are lanes. A job must not raise."""
    waiting: queue.Queue[Callable[[Lane], None]] = queue.Queue()
    for job in jobs:
        waiting.put(job)

    def work(lane: Lane) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            job(lane)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in free]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def chosen(names: Sequence[str], only: str | None) -> list[str]:
    """Returns the names that `only` picks: names with commas, a final * standing for any ending.

    Raises:
        SystemExit: it picks none.
    """
    if only is None:
        return list(names)
    wanted = only.split(",")
    starts = tuple(word[:-1] for word in wanted if word.endswith("*"))
    found = [name for name in names if name in wanted or (starts and name.startswith(starts))]
    if not found:
        raise SystemExit(f"--only {only}: there are {', '.join(names)}")
    return found


def archive(work: Path, path: Path) -> None:
    """Packs what the runs left behind, up to some megabytes: small files first, traces only while they fit."""
    files = sorted((p for p in work.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with tarfile.open(path, "w:gz") as packed:
        for file in files:
            if file.stat().st_size > LARGEST_KEPT or path.stat().st_size > ARCHIVE_BYTES:
                break
            packed.add(file, file.relative_to(work))


def environment() -> dict[str, Any]:
    """Returns what a result was measured on, without loading torch here."""
    code = (
        "import json, torch; c = torch.cuda.is_available(); "
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, "
        "'device': torch.cuda.get_device_name() if c else 'cpu'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    return {**found, "cores": len(os.sched_getaffinity(0))}
