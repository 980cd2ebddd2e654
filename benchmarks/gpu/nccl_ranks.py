"""`flopwise run` under torchrun on several GPUs of one machine: ledgers of all ranks, a slow rank, what it costs, bandwidth.

python benchmarks/gpu/nccl_ranks.py --ranks 2 --out nccl_ranks.json [--only ledger-gpt2,host] [--budget-s 240]
python benchmarks/gpu/nccl_ranks.py --tiny --out tiny.json          # the same on CPUs over Gloo: does it run?

ledger-*: `jobs/ddp.py`, which knows nothing of flopwise; lines against the step by CUDA events, exposed communication against the tail
of the backward pass and against steps under no_sync, all in the same process. overhead: pairs of processes in turns, without flopwise
and with it; the first with it is ledger-gpt2's. host, matmul: rank 1 is late in each step, by a fault whose length events measure, and
whose cost blocks of steps with it and without, in the same process. bandwidth: all-reduces by traces and by events. The record is
written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import nccl_ranks_judge as judge
from runs import ROOT, chosen, environment, tail

from flopwise.measurement.jobs import analyse
from flopwise.trace.sources import find

JOBS = Path(__file__).resolve().parent / "jobs"
PARTS = ("ledger-gpt2", "overhead", "host", "matmul", "bandwidth", "ledger-resnet50", "one")
PAIRS = 3
MARK = "NCCL_RANKS_ID"
#: Less time than this is not worth the start of another process.
LEAST_S = 15.0


@dataclasses.dataclass(frozen=True)
class Size:
    """How long the jobs are."""

    tiny: bool
    steps: int  # of the script; flopwise has to be through with its windows by then
    timed: int
    rounds: str  # of blocks in turns, and the steps of a block
    seconds: float  # of the fault
    mib: str

    def flags(self) -> list[str]:
        """Returns the flags of the job."""
        return ["--tiny"] * self.tiny + ["--steps", str(self.steps)]


FULL = Size(False, 180, 35, "3,6", 0.010, "25,500")
TINY = Size(True, 130, 30, "2,6", 0.030, "1,4")


@dataclasses.dataclass
class Done:
    """One process that has ended, and what its ranks wrote."""

    code: int | None  # None: it was over its limit
    wall_s: float
    stdout: str
    tail: str  # of standard error
    truths: list[dict[str, Any]]


class Bench:
    """What the parts share: where they write, and how much time is left."""

    def __init__(self, work: Path, size: Size, ranks: int, budget_s: float) -> None:
        self.work, self.size, self.ranks = work, size, ranks
        self.end = time.monotonic() + budget_s
        self.id = uuid.uuid4().hex
        self.parts: dict[str, dict[str, Any]] = {}

    @property
    def left_s(self) -> float:
        """How many seconds are left."""
        return self.end - time.monotonic()

    def launch(
        self,
        name: str,
        script: str,
        words: Sequence[str],
        *,
        run: bool,
        rounds: str = "0,1",
        ranks: int = 0,
    ) -> tuple[Done, Path]:
        """Runs a script under torchrun, with `flopwise run` or without; returns what came of it, and its folder.

        Raises:
            RuntimeError: no time is left for it.
        """
        if self.left_s < LEAST_S:
            raise RuntimeError("no time left in the budget")
        ranks = ranks or self.ranks
        folder = self.work / name
        folder.mkdir(parents=True)
        options = ["--standalone", "--nproc-per-node", str(ranks)]
        argv = [sys.executable, "-m", "torch.distributed.run", *options]
        if run:
            argv = [sys.executable, "-m", "flopwise", "run", *options, "--quiet"]
            argv += ["--steps", str(self.size.timed), "--out", str(folder / "run")]
        argv += [str(JOBS / script), *words]
        code, wall_s = self._to_its_end(argv, folder, rounds)
        truths = [
            json.loads(path.read_text())
            for rank in range(ranks)
            if (path := folder / f"truth.json.rank{rank}").exists()
        ]
        stdout = (folder / "stdout.txt").read_text(errors="replace")
        return Done(code, wall_s, stdout, tail(folder / "stderr.txt"), truths), folder

    def _to_its_end(self, argv: list[str], folder: Path, rounds: str) -> tuple[int | None, float]:
        path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, "PYTHONPATH": path, MARK: self.id, "TRUTH_ROUNDS": rounds}
        env["TRUTH_JSON"] = str(folder / "truth.json")
        env.setdefault("OMP_NUM_THREADS", "1")
        began = time.monotonic()
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            process = subprocess.Popen(
                argv, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
            )
        try:
            code: int | None = process.wait(max(1.0, self.left_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.kill()
            process.wait()
        return code, time.monotonic() - began

    def kill(self) -> None:
        """Ends all processes that were started here and still run: torchrun's workers have sessions of their own."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.id}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)

    def words(self, model: str, fault: str = "none") -> list[str]:
        """Returns the command line of the job."""
        words = ["--model", model, *self.size.flags()]
        return (
            words
            if fault == "none"
            else [*words, "--fault", fault, "--seconds", str(self.size.seconds)]
        )


def measured(bench: Bench, name: str, model: str, fault: str = "none") -> dict[str, Any]:
    """Returns what `flopwise run` and the job itself say of its ranks.

    Raises:
        RuntimeError: the job failed.
        LookupError: a rank has no ledger.
    """
    done, folder = bench.launch(
        name, "ddp.py", bench.words(model, fault), run=True, rounds=bench.size.rounds
    )
    if done.code != 0 or len(done.truths) < bench.ranks:
        raise RuntimeError(f"exit code {done.code} after {done.wall_s:.0f} s: {done.tail}")
    records = rank_records(folder)
    began = time.monotonic()
    job = analyse(find([folder / "run"]))
    part: dict[str, Any] = {"wall_s": done.wall_s, "analyse_s": time.monotonic() - began}
    part["job"] = judge.job_figures(job)
    part["truths"] = done.truths
    part["ranks"] = [
        judge.rank_figures(one, records[one.rank], done.truths[one.rank]) for one in job.ranks
    ]
    part["run"] = {
        "code": done.code,
        "stdout": done.stdout,
        **of_steps(done.truths[0], judge.timed(records[0], done.truths[0]).values()),
    }
    part["windows_cost_s"] = sum(one["cost_ns"] for one in windows(records[0])) * 1e-9
    part["after"] = after(records[0])
    return part


def rank_records(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the rank records of a run by rank."""
    read = [json.loads(path.read_text()) for path in (folder / "run" / "ranks").glob("*.json")]
    return {one["rank"]: one for one in read}


def windows(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the profiled windows of a rank."""
    found: list[dict[str, Any]] = (rank.get("profile") or {}).get("windows") or []
    return found


def after(rank: dict[str, Any]) -> dict[str, Any]:
    """Returns the steps after the windows, as the meter saw them."""
    profile = rank.get("profile") or {}
    ns = profile.get("after_ns") or []
    mean_ms = sum(ns) / len(ns) / 1e6 if ns else None
    return {"state": profile.get("state"), "steps": len(ns), "mean_ms": mean_ms}


def of_steps(truth: dict[str, Any], steps: Iterable[int]) -> dict[str, Any]:
    """Returns the mean of the timed steps and of all of them, milliseconds."""
    every = truth["step_ms"]
    return {
        "steps": list(steps),
        "step_ms": judge.mean_of(every, steps),
        "all_ms": sum(every) / len(every),
    }


def ledger(bench: Bench, name: str) -> dict[str, Any]:
    """Measures a job without a fault."""
    part = measured(bench, name, name.partition("-")[2])
    part["reasons"] = [*judge.withheld(part["job"]), *judge.judge_ledger(part["ranks"])]
    return part


def fault(bench: Bench, name: str) -> dict[str, Any]:
    """Measures GPT-2 with a fault on rank 1."""
    part = measured(bench, name, "gpt2", name)
    base = bench.parts.get("ledger-gpt2")
    base = base if base and "job" in base else None
    part["fault"], wrong = judge.judge_fault(name, 1, part["job"], part["ranks"], base)
    part["reasons"] = [*judge.withheld(part["job"]), *wrong]
    return part


def overhead(bench: Bench, name: str) -> dict[str, Any]:
    """Measures pairs of processes, without flopwise and with it: run, bare, bare, run, run, bare, ..."""
    first = bench.parts.get("ledger-gpt2", {}).get("run")
    arms: dict[str, list[dict[str, Any]]] = {"run": [first] if first else [], "bare": []}
    part: dict[str, Any] = {"wall_s": 0.0}
    try:
        for k in range(1 if first else 0, 2 * PAIRS):
            arm = ("run", "bare", "bare", "run")[k % 4]
            done, folder = bench.launch(
                f"{name}-{k}-{arm}", "ddp.py", bench.words("gpt2"), run=arm == "run"
            )
            if done.code != 0:
                part["problem"] = f"{arm}: exit code {done.code}: {done.tail}"
                break
            part["wall_s"] += done.wall_s
            truth = done.truths[0]
            if arm == "run":
                steps = judge.timed(rank_records(folder)[0], truth).values()
            else:
                steps = arms["run"][0]["steps"]
            arms[arm].append({"code": done.code, "stdout": done.stdout, **of_steps(truth, steps)})
            print(f"  {arm}: {arms[arm][-1]['step_ms']:.3f} ms, {done.wall_s:.0f} s", flush=True)
            shutil.rmtree(folder / "run", ignore_errors=True)
    except RuntimeError as error:
        part["problem"] = str(error)
    part["overhead"], part["reasons"] = judge.judge_overhead(
        list(zip(arms["bare"], arms["run"], strict=False))
    )
    part["reasons"] += [part["problem"]] if "problem" in part else []
    return part


def bandwidth(bench: Bench, name: str) -> dict[str, Any]:
    """Measures all-reduces by traces and by events."""
    folder = bench.work / f"{name}-files"
    words = [
        "--mib",
        bench.size.mib,
        "--traces",
        str(folder / "traces"),
        "--out",
        str(folder / "direct"),
    ]
    words += ["--tiny"] * bench.size.tiny
    done, _ = bench.launch(name, "all_reduce.py", words, run=False)
    if done.code != 0:
        raise RuntimeError(f"exit code {done.code}: {done.tail}")
    truths = [json.loads(path.read_text()) for path in sorted(folder.glob("direct.rank*"))]
    job = analyse(find([folder / "traces"]))
    rows, reasons = judge.judge_bandwidth(job, truths, bench.ranks)
    return {
        "wall_s": done.wall_s,
        "sizes": rows,
        "truths": truths,
        "job": judge.job_figures(job),
        "reasons": reasons,
    }


def one(bench: Bench, name: str) -> dict[str, Any]:
    """Measures GPT-2 on one GPU: its step, and its ledger's residual, beside those of the ranks."""
    done, folder = bench.launch(name, "ddp.py", bench.words("gpt2"), run=True, ranks=1)
    if done.code != 0 or not done.truths:
        raise RuntimeError(f"exit code {done.code}: {done.tail}")
    record = json.loads((folder / "run" / "run.json").read_text())
    made = record.get("ledger") or {}
    lines = {line["name"]: 1e3 * line["s"] for line in made.get("lines", [])}
    figures = {
        "lines_ms": lines,
        "trusted": made.get("trusted"),
        "untrusted_because": made.get("untrusted_because"),
    }
    steps = of_steps(done.truths[0], judge.timed(rank_records(folder)[0], done.truths[0]).values())
    reasons = [] if lines else [f"no ledger: {record.get('ledger_reason')}"]
    return {"wall_s": done.wall_s, **steps, **figures, "reasons": reasons}


WORK: dict[str, Callable[[Bench, str], dict[str, Any]]] = {
    "ledger-gpt2": ledger,
    "overhead": overhead,
    "host": fault,
    "matmul": fault,
    "bandwidth": bandwidth,
    "ledger-resnet50": ledger,
    "one": one,
}


def text(name: str, part: dict[str, Any]) -> str:
    """Returns what came of a part, in lines."""
    said = [f"{name}: {part['verdict']} in {part.get('wall_s', 0.0):.0f} s"]
    said += [f"    {reason}" for reason in part["reasons"]]
    for rank in part.get("ranks", []):
        turns = rank["in_turns"]
        lines = ", ".join(
            f"{key[5:]} {rank['lines_ms'].get(key, 0.0):.2f}" for key in judge.COMMUNICATION
        )
        said.append(
            f"    rank {rank['rank']}: step {rank['step_ms']:.3f} ms, {rank['step_ratio']:.4f} of the true one; sum off by "
            f"{rank['identity_error_frac']:.0e}; residual {rank['residual_frac']:+.2%}; unattributed {rank['unattributed_frac']:.2%}; "
            f"exposed {rank['exposed_ms']:.2f} ({lines}), tail {rank['tail_ms']:.2f}, without copies {rank['tail_without_copies_ms']:.2f}"
            + (
                f", in turns {turns['ms']:+.2f} ({turns['low_ms']:+.2f} to {turns['high_ms']:+.2f})"
                if turns
                else ""
            )
        )
        said += [f"        not trusted: {reason}" for reason in rank["untrusted_because"]]
    for key in ("fault", "overhead", "sizes"):
        if key in part:
            said.append(f"    {json.dumps(part[key])}")
    if name == "one" and "step_ms" in part:
        said.append(f"    step {part['step_ms']:.3f} ms")
    return "\n".join(said)


def main() -> int:
    """Measures the chosen parts; returns 0 where all passed, of tiny ones where all were measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "nccl_ranks.json")
    add("--only", help=f"parts, with commas: {', '.join(PARTS)}")
    add("--ranks", type=int, default=2)
    add("--budget-s", type=float, default=240.0)
    add("--tiny", action="store_true", help="small models on CPUs, over Gloo")
    add("--resume", action="store_true", help="leave out what is measured in --out already")
    add("--keep", type=Path, help="folder for what the runs write (default: a temporary one)")
    flags = parser.parse_args()
    names = chosen(PARTS, flags.only)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    work = flags.keep or Path(tempfile.mkdtemp(prefix="nccl-ranks-"))
    bench = Bench(work.resolve(), TINY if flags.tiny else FULL, flags.ranks, flags.budget_s)
    result: dict[str, Any] = {
        "environment": environment(),
        "ranks": flags.ranks,
        "parts": bench.parts,
    }
    result["variables"] = {
        k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL"))
    }
    if flags.resume and flags.out.exists():
        kept = json.loads(flags.out.read_text())["parts"]
        bench.parts.update({name: part for name, part in kept.items() if part["measured"]})
    try:
        for name in names:
            if name in bench.parts:
                continue
            began = time.monotonic()
            try:
                part = WORK[name](bench, name)
            except Exception as error:  # the other parts go on
                part = {"reasons": [f"{type(error).__name__}: {error}"], "measured": False}
            part.setdefault("measured", True)
            judged = "FAIL" if part["reasons"] else "pass"
            part["verdict"] = "not judged" if flags.tiny else judged
            part["took_s"] = time.monotonic() - began
            bench.parts[name] = part
            print(text(name, part), flush=True)
            flags.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        bench.kill()
        if flags.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    good = "measured" if flags.tiny else "verdict"
    return 0 if all(one[good] in (True, "pass") for one in bench.parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
