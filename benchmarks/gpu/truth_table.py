"""Runs scripts under `flopwise run` and tabulates how its records compare with their truth."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from truth_compare import Outcome, compare

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).resolve().parent / "jobs"
COLUMNS = (
    # attribute, title, width, format
    ("timed", "timed", 5, "d"),
    ("ours_ms", "ours ms", 10, ".4f"),
    ("truth_ms", "truth ms", 10, ".4f"),
    ("step_ratio", "ratio", 8, ".5f"),
    ("mfu", "MFU", 8, ".5f"),
    ("mfu_by_hand", "by hand", 8, ".5f"),
    ("mfu_ratio", "ratio", 8, ".5f"),
    ("worst_step_frac", "worst", 7, ".4f"),
    ("wall_s", "wall s", 6, ".1f"),
)


@dataclass(frozen=True)
class Job:
    """One script with its flags, and what a step of it costs by hand."""

    name: str
    script: str
    flags: list[str]
    flops_per_step: int
    timed: int  # steps that flopwise is asked to time
    steps: int  # steps that the script makes
    limit_s: float


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, with everything it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def start(job: Job, folder: Path, bare: bool) -> subprocess.Popen[bytes]:
    """Starts a job, under flopwise or bare; its output goes to `folder`/output.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = ["-m", "flopwise", "run", "--steps", str(job.timed), "--out", str(folder / "run")]
    ours += ["--json", str(folder / "run.json")]
    script = [str(JOBS / job.script), *job.flags, "--steps", str(job.steps)]
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
    env = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TRUTH_JSON": str(folder / "truth.json")}
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *([] if bare else ours), *script],
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def tail(path: Path, lines: int = 6) -> str:
    """Returns the last lines of a text file on one line, "" where there is none."""
    if not path.exists():
        return ""
    return " | ".join(path.read_text(errors="replace").strip().splitlines()[-lines:])


def rank_record(folder: Path) -> dict[str, Any]:
    """Returns the rank record found in a run folder.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and str(data.get("schema", "")).startswith("flopwise.rank/"):
            return data
    raise FileNotFoundError(f"no rank record in {folder}")


def finish(outcome: Outcome, job: Job, folder: Path, bare: bool, peak: float | None) -> None:
    """Fills in the outcome of a job that has ended well."""
    truth = json.loads((folder / "truth.json").read_text())
    outcome.model, outcome.device = truth["model"], truth["device"]
    if bare:
        outcome.truth_ms = statistics.median(truth["step_ms"])
        outcome.reason = f"bare: median of {len(truth['step_ms'])} steps"
        return
    record = json.loads((folder / "run.json").read_text())
    rank = rank_record(folder / "run")
    compare(outcome, record, rank, truth["step_ms"], job.flops_per_step, peak)


def run(job: Job, folder: Path, bare: bool, peak: float | None) -> Outcome:
    """Returns the outcome of one job. Never raises: what went wrong is the outcome's reason."""
    outcome = Outcome(job.name)
    output = folder / "output.txt"
    began = time.monotonic()
    process = start(job, folder, bare)
    try:
        code = process.wait(job.limit_s)
        if code == 0:
            finish(outcome, job, folder, bare, peak)
        else:
            outcome.verdict, outcome.reason = "FAIL", f"exit code {code}: {tail(output)}"
    except subprocess.TimeoutExpired:
        outcome.verdict, outcome.reason = "FAIL", f"over {job.limit_s:.0f} s: {tail(output)}"
    except Exception as error:  # the other jobs go on
        outcome.verdict, outcome.reason = "FAIL", f"{type(error).__name__}: {error}"
    finally:
        kill_group(process)
        outcome.wall_s = time.monotonic() - began
    return outcome


def prewarm(jobs: list[Job], folder: Path, limit_s: float) -> None:
    """Runs the compiled jobs bare, two steps each and all at once, to warm the compile cache."""
    processes = [
        start(replace(job, steps=2), folder / f"prewarm-{job.name}", bare=True)
        for job in jobs
        if "--compile" in job.flags
    ]
    began = time.monotonic()
    try:
        for process in processes:
            process.wait(max(0.0, began + limit_s - time.monotonic()))
        print(f"prewarm: {len(processes)} jobs in {time.monotonic() - began:.0f} s", flush=True)
    except subprocess.TimeoutExpired:
        print(f"prewarm: not all compiled within {limit_s:.0f} s", flush=True)
    finally:
        for process in processes:
            kill_group(process)


def line(outcome: Outcome) -> str:
    """Returns the outcome as one row of the table."""
    cells = [f"{outcome.name:25s} {outcome.verdict:8s}"]
    for attribute, _, width, form in COLUMNS:
        value = getattr(outcome, attribute)
        cells.append(f"{'-' if value is None else format(value, form):>{width}s}")
    return " ".join(cells) + f"  {outcome.reason}"


def table(
    jobs: list[Job], out: Path, work: Path, budget_s: float, bare: bool, peak: float | None
) -> int:
    """Runs the jobs in order within the budget; prints the table, and writes it after every job.

    The table goes to `out`, what the jobs wrote to `work`.

    Returns:
        0 where every job passed, 1 otherwise.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    outcomes = [Outcome(job.name) for job in jobs]
    end = time.monotonic() + budget_s
    titles = [f"{title:>{width}s}" for _, title, width, _ in COLUMNS]
    print(" ".join([f"{'job':25s} {'verdict':8s}", *titles]), flush=True)
    for k, job in enumerate(jobs):
        left = end - time.monotonic()
        if left < 20:
            outcomes[k].reason = "no time left in the budget"
        else:
            limited = replace(job, limit_s=min(job.limit_s, left))
            outcomes[k] = run(limited, work / job.name, bare, peak)
        print(line(outcomes[k]), flush=True)
        rows = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
        out.write_text(rows)
    return 0 if all(outcome.verdict == "pass" for outcome in outcomes) else 1
