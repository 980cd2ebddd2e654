"""Jobs of several CPU processes with one fault each, under `flopwise run`: right rank, reason and amount?

python benchmarks/gloo_faults.py --out gloo_faults.json [--ranks 2,4] [--only forward,loader]

`gloo/train.py` has the faults. A rank that sleeps makes the others wait for as long as it sleeps in a step: `delay_s` of the named
straggler has to be within 15 % of that, its reason has to fit, and no other rank may cost half as much. Gradients that are summed in
each of four micro-batches are three quarters of the bytes; a buffer of a MiB that is sent around in each step is what it is of
all bytes. Without a fault nobody may cost more than a tenth of what the faults cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runs import Lane, chosen, environment, execute

from flopwise.measurement.jobs import analyse
from flopwise.records.job import JobRecord
from flopwise.trace.sources import find

TRAIN = Path(__file__).resolve().parent / "gloo" / "train.py"
LIMIT_FRAC = 0.15
SLOW_RANK = 1
#: Bytes a step and rank of the net's gradients, float32, and of the constant buffer.
GRADIENTS = 4 * (2 * (512 * 512 + 512) + 512 * 10 + 10)
BUFFER = 4 << 18


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    reasons: tuple[str, ...] = ()  # of the straggler, any of them
    micro: int = 1
    redundant: tuple[str, float] | None = None  # kind, and its share of all bytes


CASES = (
    Case("none"),
    Case("forward", ("host", "kernels")),  # a custom function's own time counts as an operator's
    Case("backward", ("host", "kernels")),
    Case("loader", ("input",)),
    Case("no-sync", micro=4, redundant=("accumulation", 0.75)),
    Case("broadcast", redundant=("buffers", BUFFER / (BUFFER + GRADIENTS))),
)


@dataclass
class Outcome:
    """What came of one fault."""

    name: str
    ranks: int
    verdict: str = "not run"
    reasons: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    injected_s: float | None = None
    delay_s: float | None = None
    rank: int | None = None
    reason: str | None = None
    share_frac: float | None = None
    redundant: dict[str, float] = field(default_factory=dict)
    evidence: str = ""


def run(case: Case, ranks: int, seconds: float, folder: Path) -> Outcome:
    """Returns what came of one fault. Never raises: what went wrong is a reason."""
    out = Outcome(case.name, ranks)
    began = time.monotonic()
    argv = [
        sys.executable,
        "-m",
        "flopwise",
        "run",
        "--nproc-per-node",
        str(ranks),
        "--quiet",
        "--stop-after",
    ]
    argv += [
        "--out",
        str(folder / "run"),
        str(TRAIN),
        "--fault",
        case.name,
        "--seconds",
        str(seconds),
    ]
    ended = execute(
        [*argv, "--micro", str(case.micro)], folder, 240, Lane(), {"OMP_NUM_THREADS": "1"}
    )
    try:
        judge(out, case, seconds, analyse(find([folder / "run"])))
    except Exception as error:  # the other faults go on
        out.reasons.append(f"{type(error).__name__}: {error}; {ended.problem}")
    out.verdict = "FAIL" if out.reasons else "pass"
    out.wall_s = time.monotonic() - began
    return out


def judge(out: Outcome, case: Case, seconds: float, job: JobRecord) -> None:
    """Fills in what was found, and what is wrong with it."""
    out.redundant = {one.kind: one.frac for one in job.redundant}
    first = job.stragglers[0] if job.stragglers else None
    if first is not None:
        out.rank, out.reason, out.delay_s = first.rank, first.reason, first.delay_s
        out.share_frac, out.evidence = first.share_frac, first.evidence
    if case.reasons:
        out.injected_s = seconds
        if first is None or first.rank != SLOW_RANK:
            out.reasons.append(f"rank {SLOW_RANK} is not named: {job.stragglers_reason or first}")
        else:
            if first.reason not in case.reasons:
                out.reasons.append(f"the reason is {first.reason}")
            if abs(first.delay_s / seconds - 1) > LIMIT_FRAC:
                out.reasons.append(
                    f"{first.delay_s:.4f} s a step are {first.delay_s / seconds:.2f} of what it sleeps"
                )
        if any(one.delay_s > first.delay_s / 2 for one in job.stragglers[1:] if first):
            out.reasons.append("another rank is named that costs half as much")
    elif first is not None and first.delay_s > 0.1 * seconds and case.name == "none":
        out.reasons.append(f"rank {first.rank} is named, {first.delay_s:.4f} s a step")
    kind, frac = case.redundant or ("", 0.0)
    if kind and abs(out.redundant.get(kind, 0.0) / frac - 1) > LIMIT_FRAC:
        out.reasons.append(
            f"{kind} is {out.redundant.get(kind, 0.0):.3f} of the bytes, not {frac:.3f}"
        )
    other = {name: part for name, part in out.redundant.items() if name != kind and part > 0.01}
    if other:
        out.reasons.append(f"found, too: {other}")


def text(one: Outcome) -> str:
    """Returns an outcome as lines."""
    straggler = (
        "nobody"
        if one.rank is None
        else f"rank {one.rank} ({one.reason}) {1e3 * (one.delay_s or 0):.2f} ms a step"
    )
    injected = "" if one.injected_s is None else f" of {1e3 * one.injected_s:.0f} injected"
    said = f"{one.ranks} ranks, {one.name:10s} {one.verdict:5s} {straggler}{injected}; redundant {one.redundant or 'nothing'}"
    return said + "".join(f"\n    {reason}" for reason in one.reasons)


def main() -> int:
    """Runs the chosen faults; returns 0 where all passed."""
    parser = argparse.ArgumentParser(
        description="stragglers and redundant traffic against known faults"
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("gloo_faults.json"))
    add("--only", help="names of faults, with commas")
    add("--ranks", default="2,4")
    add(
        "--seconds",
        default="0.04,0.1",
        help="what the slow rank sleeps a step, for each number of ranks",
    )
    flags = parser.parse_args()
    names = chosen([case.name for case in CASES], flags.only)
    found: list[Outcome] = []
    result: dict[str, Any] = {"environment": environment()}
    with tempfile.TemporaryDirectory(prefix="gloo-faults-") as folder:
        for ranks, seconds in zip(flags.ranks.split(","), flags.seconds.split(","), strict=True):
            for case in CASES:
                if case.name in names:
                    found.append(
                        run(case, int(ranks), float(seconds), Path(folder) / f"{ranks}-{case.name}")
                    )
                    print(text(found[-1]), flush=True)
                    result["outcomes"] = [asdict(one) for one in found]
                    flags.out.write_text(json.dumps(result, indent=1) + "\n")
    passed = sum(one.verdict == "pass" for one in found)
    print(f"{passed} of {len(found)} pass")
    return 0 if passed == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
