"""Ledgers of well-known training jobs on an H200: do they add up, is the device as busy as its trace, are gains true?

python benchmarks/ledger_jobs.py --part table --prewarm --out ledger_table.json [--only gpt2*,resnet50*] [--lanes 2]
python benchmarks/ledger_jobs.py --part gains --out ledger_gains.json
python benchmarks/ledger_jobs.py --device cpu --part gains --only gpt2-naive

table: every job of gpu/jobs, and tuned ones of gpu/ladders, under `flopwise run`: all lines with their intervals, and what
trust rests on; the device's busy time of the ledger against that of the raw trace, read with the standard library.
gains: for some rungs of the ladders the predicted gain of each finding, against what the step saves with exactly that
fix added, both arms in turns in one process. Results are written after each job; --resume leaves out what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

import raw_trace
from ledger_compare import (
    BUSY_LIMIT_FRAC,
    Gain,
    lines_of,
    put_prediction,
    put_saving,
    trust_figures,
)
from runs import GPU, Lane, archive, chosen, environment, execute, in_lanes, lanes, measured
from step_truth import jobs as truth_jobs
from step_truth import tiny_jobs

IDENTITY_LIMIT_FRAC = 1e-6
IDLE_LIMIT_FRAC = 0.05  # of a job that keeps its device busy
MANY_STEPS = 20_000  # more than any run gets to
PREWARM_AT_ONCE = 4  # on one GPU

SHAPE = ("odd-shape",)
ATTENTION = ("unfused-attention", "needless-mask")
TRAFFIC = ("unfused-pointwise", "excess-traffic")
LAYOUT = ("nchw-layout",)


@dataclass(frozen=True)
class Job:
    """One script with its flags."""

    name: str
    script: str  # below benchmarks/gpu
    flags: tuple[str, ...] = ()
    timed: int = 40  # steps that flopwise times
    limit_s: float = 120.0
    compiled: bool = False
    busy: bool = False  # known to keep the device busy: it may not be reported idle


@dataclass(frozen=True)
class Fix:
    """What is added to a base, and the causes that it cures."""

    name: str
    causes: tuple[str, ...]
    advice: str = ""  # what the finding's other cure begins with, where the fix is that one
    rounds: int = 4
    seconds: float = 20.0
    limit_s: float = 70.0


@dataclass(frozen=True)
class Base:
    """A rung of a ladder, and the fixes that are each added to it alone."""

    job: Job
    fixes: tuple[Fix, ...]
    having: str = ""  # the fixes it has, with commas


@dataclass
class Outcome:
    """What came of one job."""

    name: str
    verdict: str = "not run"  # "pass" | "FAIL" | "not run" | "left out"
    reasons: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    raw_busy: dict[str, Any] | None = None  # of the light trace, by the standard library
    busy_ratio: float | None = None  # ledger over raw
    gains: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] | None = None


def table_jobs() -> list[Job]:
    """Returns the jobs whose step times were held against the truth, and tuned ones; the most telling first."""
    timed = {"gpt2": 15, "llama": 6, "efficientnet-b4": 20, "llama-compiled": 25}
    known = {
        job.name: Job(
            job.name,
            f"jobs/{job.script}",
            (*job.flags, "--steps", str(MANY_STEPS)),
            timed.get(job.name, job.timed),
            job.limit_s + 40,
            compiled="--compile" in job.flags or "reduce-overhead" in job.flags,
            busy=job.name == "resnet50-compiled",
        )
        for job in truth_jobs()
    }
    all_gpt2 = "bf16,sdpa,vocab,fused,no-item,compile"
    all_images = "bf16,no-item,channels_last,fused,compile,resident"
    tuned = [
        Job("gpt2-tuned", "ladders/gpt2.py", ("--with", all_gpt2), 60, 150, True, True),
        Job("resnet50-tuned", "ladders/images.py", ("--with", all_images), 60, 180, True, True),
        Job(
            "efficientnet-b4-tuned",
            "ladders/images.py",
            ("--b4", "--with", all_images),
            40,
            240,
            True,
        ),
        Job(
            "llama-tuned",
            "ladders/llama_like.py",
            ("--with", "bf16,fused,no-item,compile"),
            25,
            220,
            True,
            True,
        ),
        Job("bert-naive", "ladders/bert.py", (), 8),
        Job(
            "bert-tuned",
            "ladders/bert.py",
            ("--with", "bf16,fused,no-item,vocab,no-mask,compile"),
            40,
            200,
            True,
        ),
    ]
    first = ["gpt2", "gpt2-compiled", "resnet50", "resnet50-compiled", "cudagraph-whole"]
    return [
        *(known.pop(name) for name in first),
        *tuned[:2],
        *known.values(),
        *tuned[2:],
    ]


def bases() -> list[Base]:
    """Returns the rungs whose predicted gains are held against what the fixes save."""
    bf16 = Fix("bf16", ("slow-dtype",))
    tf32 = Fix("tf32", ("slow-dtype",), "TF32")
    vocab = Fix("vocab", SHAPE)
    fused = Fix("fused", ("unfused-optimizer",))
    sdpa = Fix("sdpa", ATTENTION)
    item = Fix("no-item", ("host-read", "metric-read"))
    compiled = Fix("compile", (*TRAFFIC, "launch-bound"), limit_s=130.0)
    layout = Fix("channels_last", LAYOUT)
    workers = Fix("workers", ("input-wait",), rounds=3, seconds=45.0, limit_s=110.0)
    pinned = Fix("pinned", ("exposed-copy", "pageable-copy"), rounds=3)
    gpt2, images = "ladders/gpt2.py", "ladders/images.py"
    fed = "bf16,workers,pinned,no-item"
    return [
        _base("gpt2-naive", gpt2, "", (bf16, sdpa, vocab, fused, item), 12),
        _base("gpt2-sdpa", gpt2, "bf16,no-item,sdpa", (vocab, fused, compiled), 50),
        _base("resnet50-naive", images, "", (workers, *_longer(bf16, layout, pinned)), 15),
        _base("resnet50-fed", images, fed, (layout, fused, compiled), 40),
        _base("resnet50-last", images, f"{fed},channels_last", (compiled,), 60),
        _base("bert-bf16", "ladders/bert.py", "bf16,no-item", (fused, vocab), 30),
        _base("llama-bf16", "ladders/llama_like.py", "bf16,no-item", (fused, compiled), 15),
        _base("gpt2-tf32", gpt2, "tf32", (bf16, sdpa), 20),
        _base("bert-naive", "ladders/bert.py", "", (bf16, tf32), 8),
    ]


def _longer(*fixes: Fix) -> tuple[Fix, ...]:
    """Returns fixes whose savings take longer to see: the step waits for a loader, which is not steady."""
    return tuple(replace(fix, rounds=8, seconds=60.0, limit_s=110.0) for fix in fixes)


def _base(name: str, script: str, having: str, fixes: tuple[Fix, ...], timed: int) -> Base:
    compiled = "compile" in having.split(",")
    return Base(Job(name, script, ("--with", having), timed, 110, compiled=compiled), fixes, having)


def small_jobs() -> list[Job]:
    """Returns jobs for a CPU core: does the machinery run?"""
    return [
        Job(job.name, f"jobs/{job.script}", (*job.flags, "--steps", str(MANY_STEPS)), 20, 90)
        for job in tiny_jobs()
    ]


def small_bases() -> list[Base]:
    """Returns rungs for a CPU core."""
    cpu = ("--device", "cpu", "--small")
    fixes = (
        Fix("sdpa", ATTENTION, rounds=3, seconds=6),
        Fix("fused", ("unfused-optimizer",), rounds=3, seconds=6),
    )
    return [Base(Job("gpt2-naive", "ladders/gpt2.py", (*cpu, "--with", ""), 20), fixes)]


def measure(job: Job, folder: Path, lane: Lane, limit_s: float) -> Outcome:
    """Returns what came of one job under `flopwise run`. Never raises."""
    outcome = Outcome(job.name)
    began = time.monotonic()
    flags = ("--stop-after", "--quiet", "--steps", str(job.timed))
    try:
        record, problem, _ = measured(
            [str(GPU / job.script), *job.flags], folder, min(job.limit_s, limit_s), lane, flags
        )
        if record is None:
            missing = "is not installed" in (problem or "")
            outcome.verdict = "left out" if missing else "FAIL"
            outcome.reasons.append(problem or "")
            return outcome
        if problem is not None:
            outcome.reasons.append(problem)
        outcome.record = record
        outcome.figures = trust_figures(record)
        read_raw(outcome, folder / "run")
        judge(outcome, job)
    except Exception as error:  # the other jobs go on
        outcome.verdict = "FAIL"
        outcome.reasons.append(f"{type(error).__name__}: {error}")
    finally:
        outcome.wall_s = time.monotonic() - began
    return outcome


def read_raw(outcome: Outcome, run: Path) -> None:
    """Fills in the device's busy time as the raw light trace has it; leaves it out where there is no such trace."""
    for path in sorted((run / "ranks").glob("*.json")):
        profile = json.loads(path.read_text()).get("profile") or {}
        for window in profile.get("windows", []):
            if window["kind"] != "light":
                continue
            trace = run / window["file"]
            trace = trace if trace.exists() else trace.with_name(trace.name + ".gz")
            try:
                found = raw_trace.busy(trace, len(window["flags"]), window["lead"])
            except (LookupError, OSError, ValueError) as error:
                outcome.reasons.append(f"the raw trace: {error}")
                return
            outcome.raw_busy = found
            ours_s = outcome.figures["busy_frac"] * outcome.figures["step_ms"] / 1e3
            outcome.busy_ratio = ours_s / found["busy_s"]
            return


def judge(outcome: Outcome, job: Job) -> None:
    """Sets the verdict: the lines sum to the step, busy is the trace's, distrust has its reason, a busy job is not idle."""
    figures = outcome.figures
    if abs(figures["identity_error_frac"]) > IDENTITY_LIMIT_FRAC:
        outcome.reasons.append(
            f"lines sum to the step but for {figures['identity_error_frac']:.2e}"
        )
    if outcome.busy_ratio is not None and abs(outcome.busy_ratio - 1) > BUSY_LIMIT_FRAC:
        outcome.reasons.append(f"busy time is {outcome.busy_ratio:.4f} of the raw trace's")
    if not figures["trusted"] and not figures["untrusted_because"]:
        outcome.reasons.append("not trusted, and no reason is given")
    if job.busy and figures["idle_frac"] > IDLE_LIMIT_FRAC:
        outcome.reasons.append(f"reported {figures['idle_frac']:.1%} idle, and it is busy")
    outcome.verdict = "FAIL" if outcome.reasons else "pass"


def add_gains(outcome: Outcome, base: Base, folder: Path, lane: Lane, end: float) -> None:
    """Fills in the predicted and the true gain of each fix of a base."""
    for fix in base.fixes:
        gain = Gain(base.job.name, fix.name, list(fix.causes))
        try:
            if end - time.monotonic() < fix.seconds + 10:
                gain.reason = "no time left in the budget"
                continue
            put_saving(gain, saving(base, fix, folder / fix.name, lane, end))
            if outcome.record is None:
                gain.reason = "the base has no record"
                continue
            lines_of(outcome.record)
            put_prediction(gain, outcome.record, fix.advice)
        except Exception as error:  # the other fixes go on
            gain.reason = f"{type(error).__name__}: {error}"
        finally:
            outcome.gains.append(asdict(gain))
            print(gain_text(outcome.gains[-1]), flush=True)


def saving(base: Base, fix: Fix, folder: Path, lane: Lane, end: float) -> dict[str, Any]:
    """Returns what a base's step takes more than with one fix added, both in turns in one process.

    Raises:
        RuntimeError: the process failed.
    """
    fixed = ",".join(name for name in (base.having, fix.name) if name)
    path = folder / "truth.json"
    argv = [sys.executable, str(GPU / base.job.script), *base.job.flags, "--against", fixed]
    argv += ["--alternate", str(fix.rounds), "--seconds", str(fix.seconds)]
    limit_s = min(fix.limit_s, max(5.0, end - time.monotonic()))
    ended = execute(argv, folder, limit_s, lane, {"TRUTH_JSON": str(path)})
    if ended.problem is not None:
        raise RuntimeError(ended.problem)
    truth: dict[str, Any] = json.loads(path.read_text())
    return truth


def prewarm(jobs: Sequence[Job], folder: Path, free: Sequence[Lane], limit_s: float) -> None:
    """Compiles all jobs that are compiled, several at once and a few steps each, to warm the compile cache."""
    began = time.monotonic()

    def job_of(job: Job) -> Callable[[Lane], None]:
        flags = [flag for flag in job.flags if flag != str(MANY_STEPS)]
        flags = flags[:-1] if flags and flags[-1] == "--steps" else flags
        argv = [sys.executable, str(GPU / job.script), *flags, "--steps", "3"]

        def work(lane: Lane) -> None:
            left = limit_s - (time.monotonic() - began)
            if left > 5:
                env = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
                ended = execute(argv, folder / job.name, left, Lane(lane.gpu), env)
                print(f"prewarm {job.name}: {ended.problem or f'{ended.wall_s:.0f} s'}", flush=True)

        return work

    in_lanes([job_of(job) for job in jobs if job.compiled], list(free) * PREWARM_AT_ONCE)
    print(f"prewarm: {time.monotonic() - began:.0f} s", flush=True)


def percent(value: float | None, form: str = ".2%") -> str:
    """Returns a share in per cent, "-" where there is none."""
    return "-" if value is None else format(value, form)


def text(outcome: Outcome) -> str:
    """Returns what came of a job, with every line of its ledger, its interval and its share."""
    said = [f"{outcome.name}: {outcome.verdict} in {outcome.wall_s:.0f} s"]
    said += [f"    {reason}" for reason in outcome.reasons]
    if outcome.record is None or not outcome.figures:
        return "\n".join(said)
    figures, ledger = outcome.figures, outcome.record["ledger"]
    said.append(
        f"    step {figures['step_ms']:.3f} ms, residual {percent(figures['residual_frac'])}, "
        f"unattributed {percent(figures['unattributed_frac'])}, idle_other {percent(figures['idle_other_frac'])}, "
        f"idle {percent(figures['idle_frac'])}, busy {percent(figures['busy_frac'])}, coverage {percent(figures['coverage_frac'])}"
    )
    if outcome.raw_busy is not None:
        said.append(
            f"    busy of the raw trace {1e3 * outcome.raw_busy['busy_s']:.3f} ms a step over {outcome.raw_busy['steps']} "
            f"steps of {1e3 * outcome.raw_busy['step_s']:.3f} ms; ledger over raw {outcome.busy_ratio:.4f}"
        )
    said.append(
        f"    trusted: {figures['trusted']}; {'; '.join(figures['untrusted_because'] or [])}"
    )
    for line in ledger["lines"]:
        half = (line["ci95"][1] - line["ci95"][0]) / 2
        said.append(
            f"    {line['name']:16s} {1e3 * line['s']:10.4f} +- {1e3 * half:8.4f} ms {line['share_frac']:8.2%}"
        )
    return "\n".join(said)


def gain_text(gain: dict[str, Any]) -> str:
    """Returns one pair as a line."""
    over = gain["overstated_frac"]
    return (
        f"    {gain['base']:16s} + {gain['fix']:14s} predicted {percent(gain['predicted_frac']):>8s} "
        f"saved {percent(gain['saved_frac']):>8s} ({percent(gain['saved_low'])} to {percent(gain['saved_high'])}) "
        f"overstated {'-' if over is None else format(over, '+.2f'):>6s}  {gain['verdict']}"
        f"  {gain['code'] or ''} {gain['cause'] or ''} {gain['reason']}"
    )


def parse() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description="ledgers of well-known training jobs")
    add = parser.add_argument
    add("--part", choices=("table", "gains"), default="table")
    add("--out", type=Path, help="default: ledger_PART.json")
    add("--work", type=Path, help="folder for what the runs write (default: a new temporary one)")
    add("--only", help="names, with commas; NAME* stands for all that begin so")
    add("--fixes", help="fixes of the bases that are measured, with commas (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--lanes", type=int, default=1, help="jobs at a time, each on a GPU of its own")
    add("--budget", type=float, default=560, help="seconds for everything")
    add("--prewarm", action="store_true", help="compile all jobs at once beforehand")
    add("--resume", action="store_true", help="leave out what passed or failed in --out already")
    flags = parser.parse_args()
    flags.out = flags.out or Path(f"ledger_{flags.part}.json")
    return flags


def main() -> int:
    """Runs the chosen jobs; returns 0 where all passed."""
    flags = parse()
    cpu = flags.device == "cpu"
    rungs = small_bases() if cpu else bases()
    plain = [Base(job, ()) for job in (small_jobs() if cpu else table_jobs())]
    every = {base.job.name: base for base in (rungs if flags.part == "gains" else plain)}
    names = chosen(list(every), flags.only)
    if flags.fixes is not None:
        wanted = flags.fixes.split(",")
        every = {
            name: replace(base, fixes=tuple(fix for fix in base.fixes if fix.name in wanted))
            for name, base in every.items()
        }
    work = flags.work or Path(tempfile.mkdtemp(prefix="ledger-jobs-"))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    outcomes = {name: Outcome(name, reasons=["no time left in the budget"]) for name in names}
    if flags.resume and flags.out.exists():
        for kept in json.loads(flags.out.read_text())["outcomes"]:
            if kept["verdict"] != "not run":
                outcomes[kept["name"]] = Outcome(**kept)
    end = time.monotonic() + flags.budget
    result: dict[str, Any] = {"environment": environment(), "part": flags.part}
    lock = threading.Lock()
    free = lanes(flags.lanes)
    due = [name for name in names if outcomes[name].verdict == "not run"]
    if flags.prewarm:
        prewarm([every[n].job for n in due], work / "prewarm", free, min(170.0, flags.budget / 3))

    def job_of(name: str) -> Callable[[Lane], None]:
        def job(lane: Lane) -> None:
            left = end - time.monotonic()
            if left < 25:
                return
            base = every[name]
            outcome = measure(base.job, work / name, lane, left)
            if base.fixes and outcome.verdict != "left out":
                add_gains(outcome, base, work / name, lane, end)
            with lock:
                outcomes[name] = outcome
                print(text(outcome), flush=True)
                result["outcomes"] = [asdict(one) for one in outcomes.values()]
                flags.out.write_text(json.dumps(result))

        return job

    in_lanes([job_of(name) for name in due], free)
    archive(work, flags.out.with_suffix(".tar.gz"))
    return report(list(outcomes.values()))


def report(outcomes: list[Outcome]) -> int:
    """Prints the table at the end; returns 0 where every job passed and no gain was overstated."""
    print(
        f"\n{'job':24s} {'verdict':8s} {'step ms':>9s} {'idle':>7s} {'unattr':>7s} {'residual':>8s} {'raw busy':>8s} trusted"
    )
    for one in outcomes:
        figures = one.figures
        step = f"{figures['step_ms']:.3f}" if figures else "-"
        busy = "-" if one.busy_ratio is None else f"{one.busy_ratio:.4f}"
        shares = [percent(figures.get(f"{n}_frac")) for n in ("idle", "unattributed", "residual")]
        print(
            f"{one.name:24s} {one.verdict:8s} {step:>9s} {shares[0]:>7s} {shares[1]:>7s} {shares[2]:>8s} {busy:>8s} "
            f"{figures.get('trusted', '-')}"
        )
    gains = [gain for one in outcomes for gain in one.gains]
    for gain in gains:
        print(gain_text(gain))
    bad = [one for one in outcomes if one.verdict not in ("pass", "left out")]
    over = [gain for gain in gains if gain["verdict"] == "FAIL"]
    print(f"{len(bad)} jobs did not pass, {len(over)} gains overstated", flush=True)
    return 1 if bad or over else 0


if __name__ == "__main__":
    sys.exit(main())
