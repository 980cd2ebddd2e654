"""Time to a target quality: training scripts as they are, under a plan of `flopwise tune`, and in each precision.

python benchmarks/time_to_quality.py --out time_to_quality.json                     # both examples, on this device
python benchmarks/time_to_quality.py --jobs gpt --seeds 3 --resume --out ...        # goes on where it was cut off
python benchmarks/time_to_quality.py --jobs gpt2 --budget 560 --resume --out ...    # on a GPU, in several calls
python benchmarks/time_to_quality.py --tiny --out tiny.json                         # do they run?

A job is tuned once (`flopwise tune`, no edit). Then each arm runs from three seeds, in random order within each: the script
as it is (fp32), under the plan (`flopwise run --plan`), and under plans of one precision fix each. What is judged is what
the script prints of an evaluation on data that it holds out; nothing is added to it. Times are those at which a line comes
out of the script: from its start, and from the end of its first step. All runs make the same number of steps, so that
the quality at equal steps can be told beside the time in which each came to the target.

Each run leaves its lines in MLPerf's log format (:::MLLOG, see github.com/mlcommons/logging) below --logs. It is no
submission: the jobs are not MLPerf's, and caches are not cleared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from flopwise import plans
from flopwise.errors import FlopwiseError
from flopwise.hardware.host import usable_cores
from flopwise.launch.command import job as command_of
from flopwise.records import plan as plan_records
from flopwise.records import store
from flopwise.records.plan import Plan, PlannedFix

ROOT = Path(__file__).resolve().parents[1]
SEED = 1337
NAIVE, TUNED = "naive", "tuned"
FIRST_STEP = re.compile(r"^step 1 loss ")
STEP = re.compile(r"^step (\d+) loss ")
#: The fix by which a script runs in another precision; None: flopwise has none.
PRECISIONS = {"tf32": "FW106", "bf16": "FW104", "fp16": None}
NO_FP16 = (
    "no fix of flopwise's brings fp16 in: where there is no bf16 it leaves the precision alone"
)
TEXT = sum(map(len, topics.values())) + 2 * (len(topics) - 1)


@dataclass(frozen=True)
class Job:
    """A script with its target."""

    name: str
    script: str
    arguments: tuple[str, ...]
    tune_arguments: tuple[str, ...]  # so that it runs for as long as a tune takes
    evaluation: re.Pattern[str]  # its two groups: step or epoch, and the value
    steps_per_count: int  # optimizer steps that the first group counts in
    metric: str
    target: float
    higher: bool
    batch: int
    train_samples: int
    eval_samples: int
    optimizer: str
    tiny: tuple[str, ...]
    fixes: str | None = None  # that a tune on a CPU tries; None: all

    def reached(self, value: float) -> bool:
        """Returns whether a value is as good as the target."""
        return value >= self.target if self.higher else value <= self.target


EXAMPLE_GPT = ("--n-layer", "2", "--n-head", "4", "--n-embd", "96", "--batch-size", "8")
LENGTH = 64
JOBS = {
    "gpt": Job(
        "gpt", "examples/train_gpt.py", (*EXAMPLE_GPT, "--steps", "640", "--eval-every", "40", "--eval-batches", "40"),
        (*EXAMPLE_GPT, "--steps", "100000", "--eval-every", "100000"), re.compile(r"^step (\d+) val loss (\S+)"), 1,
        "loss on text held out", 2.1, False, 8, int(0.9 * TEXT) - LENGTH - 1, 40 * 8, "adamw",
        (*EXAMPLE_GPT, "--steps", "40", "--eval-every", "20"), "bf16-autocast,fused-optimizer,loader-workers",
    ),
    "cnn": Job(
        "cnn", "examples/train_cnn.py", ("--width", "12", "--epochs", "6"), ("--width", "12", "--epochs", "10000"),
        re.compile(r"^epoch (\d+) .*test accuracy (\S+)"), 47, "accuracy on images held out", 0.85, True, 32, 1500, 297,
        "sgd", ("--width", "4", "--epochs", "2"), "bf16-autocast,fused-optimizer,loader-workers",
    ),
    "gpt2": Job(
        "gpt2", "benchmarks/gpu/naive/gpt2.py", ("--text", "reference", "--steps", "400", "--eval-every", "20"),
        ("--text", "reference", "--steps", "1000000"), re.compile(r"^step (\d+) val loss (\S+)"), 1,
        "loss on text held out", 2.0, False, 16, int(0.9 * TEXT) - 1025, 8 * 16, "adamw",
        ("--tiny", "--text", "reference", "--steps", "40", "--eval-every", "20"),
    ),
}  # fmt: skip


@dataclass
class Run:
    """One run, as its lines came out. Times are seconds since its start."""

    arm: str
    seed: int
    started_unix_s: float = 0.0
    first_step_s: float | None = None
    evaluations: list[list[float]] = field(
        default_factory=list
    )  # step, value, when it was printed, when it began
    wall_s: float = 0.0
    exit_code: int | None = None
    load: float = (
        0.0  # of the machine as it began: programs that wanted a core, over the last minute
    )
    notes: list[str] = field(default_factory=list)  # what the plan switched on, and what it did not


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every run came to its end, else 1."""
    options = _options(argv)
    deadline = time.monotonic() + options.budget
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    found = _begun(options.out) if options.resume else _facts(options.tiny)
    for name in options.jobs:
        if time.monotonic() < deadline:
            measure(JOBS[name], found, options, work, deadline)
    left = [name for name in options.jobs if not _complete(found["jobs"].get(name), options.seeds)]
    if left:
        print(f"not complete: {', '.join(left)}. Go on with --resume", file=sys.stderr)
    return 1 if left else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=["gpt", "cnn"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="MLPerf log lines (default: beside --out)")
    parser.add_argument("--work", type=Path, default=Path(".demo/time_to_quality"))
    parser.add_argument("--plan", action="append", default=[], metavar="JOB=PLAN.toml")
    parser.add_argument("--tune-budget", default="300s", help="for tuning one job (default: 300s)")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which no run is begun"
    )
    parser.add_argument("--resume", action="store_true", help="keep what --out has")
    parser.add_argument("--tiny", action="store_true", help="short runs that tell nothing")
    options = parser.parse_args(argv)
    options.logs = options.logs or options.out.with_suffix("")
    return options


def _facts(tiny: bool) -> dict[str, Any]:
    """Returns what is known of the machine."""
    return {
        "device": plans.device_name(),
        "kind": _kind(),
        "cores": usable_cores(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "torch": plans.torch_version(),
        "tiny": tiny,
        "jobs": {},
    }


def _kind() -> str:
    """Returns the kind of device that the scripts will use."""
    question = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", question], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1]


def _begun(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else _facts(tiny=False)


def _complete(job: dict[str, Any] | None, seeds: int) -> bool:
    if job is None:
        return False
    done = {(run["arm"], run["seed"]) for run in job["runs"]}
    return all((arm, SEED + k) in done for arm in job["arms"] for k in range(seeds))


def measure(
    job: Job, found: dict[str, Any], options: argparse.Namespace, work: Path, deadline: float
) -> None:
    """Runs what is missing of one job, and writes the results after each run."""
    given = dict(pair.split("=", 1) for pair in options.plan)
    entry = found["jobs"].get(job.name)
    if entry is None:
        plan = Path(given[job.name]) if job.name in given else _tune(job, work, options)
        entry = found["jobs"][job.name] = _entry(job, plan, options, found["kind"])
        _write(options.out, found)
    plans_of = _plans(job, entry, work)
    done = {(run["arm"], run["seed"]) for run in entry["runs"]}
    for seed in range(SEED, SEED + options.seeds):
        arms = [arm for arm in entry["arms"] if (arm, seed) not in done]
        random.Random(seed).shuffle(arms)
        for arm in arms:
            if time.monotonic() > deadline:
                return
            run = _run(job, arm, seed, plans_of.get(arm), work, options.tiny)
            entry["runs"].append(_told(job, run))
            _write(options.out, found)
            log = options.logs / f"{job.name}-{arm}-{seed}.txt"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("\n".join(mllog(job, run, found)) + "\n", encoding="utf-8")


def _entry(job: Job, plan: Path | None, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Returns a job without runs: its arms, and why others are none."""
    entry: dict[str, Any] = {
        "script": job.script,
        "arguments": list(job.tiny if options.tiny else job.arguments),
        "metric": job.metric,
        "target": job.target,
        "higher": job.higher,
        "batch": job.batch,
        "arms": [NAIVE],
        "left_out": {},
        "plan": None,
        "runs": [],
    }
    if plan is not None:
        known = plans.load(plan)
        entry["plan"] = {
            "text": plan.read_text("utf-8"),
            "fixes": [f"{fix.code} {fix.name}" for fix in known.fixes],
            "ratio": known.ratio,
            "ci95": list(known.ci95) if known.ci95 else None,
        }
        entry["arms"].append(TUNED)
    else:
        entry["left_out"][TUNED] = "the tune wrote no plan: nothing was proven faster"
    for precision, code in PRECISIONS.items():
        if code is None:
            entry["left_out"][precision] = NO_FP16
        elif precision == "tf32" and kind != "cuda":
            entry["left_out"][precision] = "no such arithmetic on a CPU"
        else:
            entry["arms"].append(precision)
    return entry


def _tune(job: Job, work: Path, options: argparse.Namespace) -> Path | None:
    """Returns the plan of a tune of the job, None where there is none."""
    folder = work / f"tune-{job.name}"
    words = ["tune", "--budget", options.tune_budget, "--per-fix", "90s", "--out", str(folder)]
    if job.fixes is not None and _kind() == "cpu":
        words += ["--fixes", job.fixes]
    if (folder / "state.json").exists():
        words = ["tune", "--budget", options.tune_budget, "--resume", str(folder)]
    if not (folder / "tune.json").exists():
        _flopwise([*words, *([] if "--resume" in words else [job.script, *job.tune_arguments])])
    plan = folder / "plan.toml"
    return plan if plan.exists() else None


def _flopwise(words: Sequence[str]) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "flopwise", *words], cwd=ROOT, env=_variables(), check=False
    )
    return done.returncode


def _variables() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
    warnings = os.environ.get("PYTHONWARNINGS", "ignore:Failed to initialize NumPy:UserWarning")
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": warnings}


def _plans(job: Job, entry: dict[str, Any], work: Path) -> dict[str, Path]:
    """Returns the plan of each arm that has one, as a file."""
    found = {}
    if entry["plan"] is not None:
        found[TUNED] = work / f"{job.name}-{TUNED}.toml"
        found[TUNED].write_text(entry["plan"]["text"], encoding="utf-8")
    names = dict(plans.FIXES)
    described = command_of([str(ROOT / job.script)])
    for precision, code in PRECISIONS.items():
        if precision not in entry["arms"] or code is None:
            continue
        plan = Plan(
            plan_records.SCHEMA, "0", "", job.script, plans.sha256_of(described), plans.torch_version() or "",
            plans.device_name(), [PlannedFix(code, names[code])],
        )  # fmt: skip
        found[precision] = work / f"{job.name}-{precision}.toml"
        found[precision].write_text(plans.dump(plan), encoding="utf-8")
    return found


def _run(job: Job, arm: str, seed: int, plan: Path | None, work: Path, tiny: bool) -> Run:
    """Runs one arm from one seed."""
    arguments = [*(job.tiny if tiny else job.arguments), "--seed", str(seed)]
    folder = work / f"{job.name}-{arm}-{seed}-{time.time_ns()}"
    words = [sys.executable]
    if plan is not None:
        words += [
            "-m",
            "flopwise",
            "run",
            "--quiet",
            "--no-profile",
            "--plan",
            str(plan),
            "--out",
            str(folder),
        ]
    print(f"{job.name} {arm} seed {seed}", flush=True)
    run = read(job, arm, seed, [*words, job.script, *arguments])
    if plan is not None:
        run.notes = _applied(folder)
    return run


def read(job: Job, arm: str, seed: int, words: Sequence[str]) -> Run:
    """Runs a command and returns what its lines say, each with the time at which it came."""
    run = Run(arm, seed, started_unix_s=time.time(), load=os.getloadavg()[0])
    began, last_step_s = time.monotonic(), 0.0
    child = subprocess.Popen(
        list(words),
        cwd=ROOT,
        env=_variables(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            at_s = time.monotonic() - began
            if FIRST_STEP.match(line):
                run.first_step_s = at_s
            if STEP.match(line):
                last_step_s = at_s
            if found := job.evaluation.match(line):
                step = int(found[1]) * job.steps_per_count
                run.evaluations.append([step, float(found[2]), at_s, last_step_s])
        run.exit_code = child.wait()
    finally:
        child.stdout.close()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    run.wall_s = time.monotonic() - began
    return run


def _applied(folder: Path) -> list[str]:
    """Returns what a run says of its plan."""
    try:
        notes = json.loads((folder / "run.json").read_text("utf-8"))["notes"]
    except (OSError, ValueError, KeyError):
        return ["its record cannot be read"]
    return [note for note in notes if note.startswith(("applied by the plan", "planned fix"))]


def _told(job: Job, run: Run) -> dict[str, Any]:
    """Returns a run as the results hold it."""
    hit = next((one for one in run.evaluations if job.reached(one[1])), None)
    first_s = run.first_step_s or 0.0
    return {
        "arm": run.arm,
        "seed": run.seed,
        "first_step_s": run.first_step_s,
        "evaluations": [[step, value, round(at_s, 3)] for step, value, at_s, _ in run.evaluations],
        "target_step": hit[0] if hit else None,
        "from_start_s": round(hit[2], 3) if hit else None,
        "from_first_step_s": round(hit[2] - first_s, 3) if hit else None,
        "wall_s": round(run.wall_s, 3),
        "exit_code": run.exit_code,
        "load": round(run.load, 2),
        "notes": run.notes,
    }


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        store.write_text(path, json.dumps(found, indent=1) + "\n")
    except FlopwiseError as error:
        sys.exit(str(error))


# ---------------------------------------------------------------------- MLPerf's log lines


def mllog(job: Job, run: Run, found: dict[str, Any]) -> Iterator[str]:
    """Yields a run's lines in MLPerf's format.

    Source: the fields and their order: mlperf_logging/mllog/mllog.py of github.com/mlcommons/logging; keys and what
    their metadata must hold: compliance_checker/training_5.0.0/common.yaml there.
    """
    begin, end, point = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"

    def line(at_s: float, kind: str, key: str, value: Any = None, **more: Any) -> str:
        entry = {
            "namespace": "",
            "time_ms": int(1e3 * (run.started_unix_s + at_s)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": job.script, "lineno": 0, **more},
        }
        return f":::MLLOG {json.dumps(entry)}"

    facts = {
        "submission_benchmark": job.name,
        "submission_division": "open",
        "submission_org": "none: not a submission",
        "submission_platform": f"{found['device']}, {found['cores']} cores, torch {found['torch']}",
        "seed": run.seed,
        "global_batch_size": job.batch,
        "gradient_accumulation_steps": 1,
        "opt_name": job.optimizer,
        "train_samples": job.train_samples,
        "eval_samples": job.eval_samples,
    }
    yield line(0, begin, "init_start")
    for key, value in facts.items():
        yield line(0, point, key, value)
    yield line(0, point, "arm", run.arm)
    first_s = run.first_step_s or 0.0
    yield line(first_s, end, "init_stop")
    yield line(first_s, begin, "run_start")
    began_s, before = first_s, 0
    for step, value, at_s, from_s in run.evaluations:
        samples = int(step) * job.batch
        count = samples - before
        yield line(began_s, begin, "block_start", samples_count=count)
        yield line(from_s, end, "block_stop", samples_count=count)
        yield line(from_s, begin, "eval_start", samples_count=samples)
        yield line(at_s, point, "eval_accuracy", value, samples_count=samples)
        yield line(at_s, end, "eval_stop", samples_count=samples)
        began_s, before = at_s, samples
        if job.reached(value):
            yield line(at_s, end, "run_stop", status="success", samples_count=samples)
            return
    yield line(run.wall_s, end, "run_stop", status="aborted", samples_count=before)


if __name__ == "__main__":
    sys.exit(main())
