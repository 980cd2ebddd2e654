"""What the profiled windows of a live run leave behind: is a step as fast after them as it was before?

python benchmarks/profile_residue.py --out profile_residue.json [--only host,device] [--pairs 4]
python benchmarks/profile_residue.py --device cpu

Processes run the same script in turns, one with profiled windows and one with --no-profile. Each keeps the script's own
clock: a CUDA event after every step. A process's figure is its steps long after the windows over those that were timed
before them; so long after the start the process without windows tells what drifts by itself, and the pairs' ratio what
the windows leave. Beside it stands what flopwise says of itself: the steps that it timed after its windows over those
before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runs import GPU, Lane, archive, chosen, environment, in_lanes, lanes, measured

from flopwise.trials.interval import FEWEST_RUNS, independent_ratio

LIMIT_FRAC = 0.01  # that a step may be slower or faster afterwards
FEWEST_STEPS = 5


@dataclass(frozen=True)
class Case:
    """A script whose steps are looked at."""

    name: str
    script: str  # below benchmarks/gpu
    flags: tuple[str, ...] = ()
    timed: int = 200


CASES = {
    "cuda": (
        Case("host", "lines/tiny_kernels.py", ("--fault", "off")),
        Case("device", "lines/odd_vocabulary.py", ("--fault", "off")),
        Case("graph", "lines/cuda_graph.py", ("--fault", "on")),
        Case("inductor", "lines/cuda_graph.py", ("--fault", "on", "--inductor")),
    ),
    "cpu": (
        Case("host", "lines/tiny_kernels.py", ("--fault", "off", "--small"), 400),
        Case("compute", "lines/checkpointing.py", ("--fault", "off", "--small"), 200),
    ),
}


@dataclass
class Process:
    """One process of a case."""

    arm: str  # "profiled" | "plain"
    problem: str | None = None
    before_s: float | None = None  # mean step by the script's clock
    after_s: float | None = None
    said_frac: float | None = None  # flopwise: after / before - 1
    said_ci95: list[float] | None = None
    torn_down: str | None = None
    windows: int = 0
    wall_s: float = 0.0

    @property
    def ratio(self) -> float | None:
        """After over before; None where something went wrong."""
        if self.problem is not None or self.before_s is None or self.after_s is None:
            return None
        return self.after_s / self.before_s


def split(truth: dict[str, Any], rows: int, timed: int, last_s: float) -> tuple[float, float]:
    """Returns the mean step while flopwise timed and in the last seconds, by the script's clock.

    Args:
        truth: `step_s`, the times between the script's marks, and `unix_s`, when each mark was made.
        rows: steps until the timed ones were over.
        timed: how many of them were timed.
        last_s: how long before the last mark the later steps begin.

    Raises:
        LookupError: too few steps on either side.
    """
    steps, unix_s = truth["step_s"], truth["unix_s"]
    before = steps[max(0, rows - timed - 1) : max(0, rows - 1)]
    since = unix_s[-1] - last_s
    after = [s for s, made in zip(steps, unix_s, strict=False) if made >= since]
    if min(len(before), len(after)) < FEWEST_STEPS:
        raise LookupError(f"{len(before)} steps before, {len(after)} after: too few")
    return statistics.fmean(before), statistics.fmean(after)


def read(process: Process, folder: Path, record: dict[str, Any], last_s: float) -> None:
    """Fills in a process from its record, its rank's record and the script's clock.

    Raises:
        LookupError: there is no rank's record, too few steps, or the windows reach into the last seconds.
    """
    ranks = sorted((folder / "run" / "ranks").glob("*.json"))
    if not ranks:
        raise LookupError("no record of a rank")
    rank = json.loads(ranks[0].read_text())
    truth = json.loads((folder / "truth.json").read_text())
    timed = sum(row["kind"] == "timed" for row in rank["rows"])
    process.before_s, process.after_s = split(truth, len(rank["rows"]), timed, last_s)
    profile = rank.get("profile") or {}
    windows = profile.get("windows", [])
    process.windows, process.torn_down = len(windows), profile.get("torn_down")
    if process.arm == "profiled" and not windows:
        raise LookupError(f"no window was profiled: {profile.get('state')}")
    if windows:
        over_s = (windows[-1]["marks_ns"][-1] + windows[-1]["cost_ns"]) / 1e9
        if over_s > truth["unix_s"][-1] - last_s:
            raise LookupError("the windows reach into the last seconds: a longer run is needed")
    live = (record.get("ledger") or {}).get("live") or {}
    process.said_frac, process.said_ci95 = live.get("after_frac"), live.get("after_ci95")
    if process.said_frac is None and profile.get("after_ns"):
        mean_ns = statistics.fmean(profile["after_ns"])
        process.said_frac = mean_ns / 1e9 / record["step_s"]["mean"] - 1


def run(case: Case, arm: str, folder: Path, flags: argparse.Namespace, lane: Lane) -> Process:
    """Returns what one process showed. Never raises."""
    process = Process(arm)
    folder.mkdir(parents=True, exist_ok=True)
    script = [str(GPU / case.script), *case.flags, "--device", flags.device]
    script += ["--seconds", str(flags.seconds)]
    ours = ["--quiet", "--steps", str(case.timed), *(["--no-profile"] * (arm == "plain"))]
    env = {"TRUTH_JSON": str(folder / "truth.json")}
    try:
        record, problem, process.wall_s = measured(
            script, folder, flags.seconds + 60, lane, ours, env
        )
        process.problem = problem
        if record is not None and problem is None:
            read(process, folder, record, flags.last)
    except Exception as error:  # the other processes go on
        process.problem = f"{type(error).__name__}: {error}"
    return process


def judge(processes: list[Process]) -> dict[str, Any]:
    """Returns the ratio of the profiled processes' figures to the plain ones', pair by pair, and a verdict."""
    pairs = [
        (a.ratio, b.ratio)
        for k in range(0, len(processes) - 1, 2)
        for a, b in [sorted(processes[k : k + 2], key=lambda process: process.arm)]
        if a.ratio is not None and b.ratio is not None
    ]  # by the name of the arm: plain, profiled
    said = [p.said_frac for p in processes if p.said_frac is not None]
    found: dict[str, Any] = {"pairs": len(pairs), "said_mean_frac": None}
    if said:
        found["said_mean_frac"] = statistics.fmean(said)
    if len(pairs) < FEWEST_RUNS:
        return {**found, "verdict": "not shown: too few pairs"}
    ratio = independent_ratio([plain for plain, _ in pairs], [profiled for _, profiled in pairs])
    found["ratio"] = asdict(ratio)
    found["verdict"] = verdict(ratio.low, ratio.high)
    return found


def verdict(low: float, high: float) -> str:
    """Returns "pass" where the whole interval is within 1 % of 1, "FAIL" where it is beyond, or that it is not shown."""
    if low >= 1 - LIMIT_FRAC and high <= 1 + LIMIT_FRAC:
        return "pass"
    if high < 1 - LIMIT_FRAC or low > 1 + LIMIT_FRAC:
        return "FAIL"
    if low <= 1 <= high:
        return f"not shown: no difference seen, but one of {max(1 - low, high - 1):.1%} could be"
    return "not shown: the limit lies in the interval"


def text(process: Process) -> str:
    """Returns a process as one line."""
    if process.problem is not None:
        return f"{process.arm:9s} {process.problem}"
    assert process.before_s is not None
    assert process.after_s is not None
    said = "-" if process.said_frac is None else f"{process.said_frac:+.2%}"
    between = process.said_ci95
    said += f" ({between[0]:+.2%} to {between[1]:+.2%})" if between else ""
    return (
        f"{process.arm:9s} before {1e3 * process.before_s:.4f} ms, after {1e3 * process.after_s:.4f} ms, "
        f"ratio {process.ratio:.4f}; flopwise says {said}; torn down: {process.torn_down or '-'}; {process.wall_s:.0f} s"
    )


def summary(found: dict[str, Any]) -> str:
    """Returns a case's ratio and verdict as a line."""
    ratio = found.get("ratio")
    if ratio is None:
        return str(found["verdict"])
    return f"ratio {ratio['ratio']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f}): {found['verdict']}"


def main() -> int:
    """Runs the cases; returns 0 where none fails."""
    parser = argparse.ArgumentParser(description="what profiled windows leave behind")
    add = parser.add_argument
    add("--out", type=Path, default=Path("profile_residue.json"))
    add("--work", type=Path, help="folder for what the runs write (default: a new temporary one)")
    add("--only", help="names, with commas")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--lanes", type=int, default=1, help="cases at a time, each on a GPU of its own")
    add("--pairs", type=int, default=4, help="pairs of processes, at least 3")
    add("--seconds", type=float, default=20.0, help="for the training of one process")
    add("--last", type=float, default=4.0, help="seconds at its end that are compared")
    flags = parser.parse_args()
    every = {case.name: case for case in CASES[flags.device]}
    names = chosen(list(every), flags.only)
    work = flags.work or Path(tempfile.mkdtemp(prefix="profile-residue-"))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment(), "cases": {}}
    lock = threading.Lock()

    def job_of(name: str) -> Callable[[Lane], None]:
        def job(lane: Lane) -> None:
            processes = []
            for pair in range(flags.pairs):
                order = ("profiled", "plain") if pair % 2 == 0 else ("plain", "profiled")
                for arm in order:
                    folder = work / name / f"{pair}-{arm}"
                    processes.append(run(every[name], arm, folder, flags, lane))
                    print(f"{name:9s} {text(processes[-1])}", flush=True)
            found = judge(processes)
            with lock:
                result["cases"][name] = {**found, "processes": [asdict(p) for p in processes]}
                flags.out.write_text(json.dumps(result, indent=1))
                print(f"{name}: {summary(found)}", flush=True)

        return job

    in_lanes([job_of(name) for name in names], lanes(flags.lanes))
    failed = sum(case["verdict"].startswith("FAIL") for case in result["cases"].values())
    archive(work, flags.out.with_suffix(".tar.gz"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
