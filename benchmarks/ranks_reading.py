"""How fast a job's ranks are laid on one another, against TraceLens and Holistic Trace Analysis, and how that grows.

python benchmarks/ranks_reading.py calls FOLDER --peer PYTHON [--rounds 5] [--out FILE]
python benchmarks/ranks_reading.py many FOLDER --peer PYTHON [--ranks 64] [--rounds 1] [--out FILE]
python benchmarks/ranks_reading.py growth FOLDER [--out FILE]

FOLDER holds one trace a rank (rank0.json.gz, ...). `calls`: the collectives of all ranks matched, with waiting and bandwidth;
PYTHON is an environment with TraceLens. `many`: so many ranks of 16 MB each, made of FOLDER's with all but the collectives twice; PYTHON has
HolisticTraceAnalysis, which divides each rank's time. In turns, each in a fresh process; the time is that of the work, without imports.
flopwise reads, judges the health of, matches and names stragglers in both, on all cores that there are. `growth`: 1 to 64 such ranks, 16 MB to 1 GB.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trace_reading import run

OURS = """
import resource, sys, time
from pathlib import Path
from flopwise.measurement.jobs import conclude, read_ranks
from flopwise.trace.sources import find
began = time.perf_counter()
sources = find([Path(sys.argv[1])])
job = conclude(sources, read_ranks(sources, ledgers=False))
took = time.perf_counter() - began
memory = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(took, memory, min((one.matched for one in job.ranks), default=0))
"""

TRACELENS = """
import glob, logging, resource, sys, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from TraceLens import NcclAnalyser
began = time.perf_counter()
files = sorted(glob.glob(sys.argv[1] + "/*.json.gz"))
calls = NcclAnalyser(files, len(files)).build_df_nccl_implicit_sync_cat()
took = time.perf_counter() - began
print("\\n", took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(calls))
"""

HTA = """
import logging, resource, sys, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
found = TraceAnalysis(trace_dir=sys.argv[1]).get_temporal_breakdown(visualize=False)
took = time.perf_counter() - began
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print("\\n", took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + children, len(found))
"""


def against(folder: Path, peer: str, code: str, rounds: int) -> dict[str, Any]:
    """Returns the times and memory of both, taken in turns."""
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run(sys.executable, OURS, folder))
        theirs.append(run(peer, code, folder))
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "flopwise_s": [one[0] for one in ours],
        "peer_s": [one[0] for one in theirs],
        "flopwise_mb": max(one[1] for one in ours),
        "peer_mb": max(one[1] for one in theirs),
        "flopwise_calls": ours[-1][2],
        "peer_rows": theirs[-1][2],
    }
    found["times_faster"] = statistics.median(found["peer_s"]) / statistics.median(
        found["flopwise_s"]
    )
    return found


def twice(source: Path, out: Path, ranks: int) -> int:
    """Writes so many ranks, of a folder's traces with all but their collectives twice; returns the bytes of one, uncompressed."""
    size = 0
    texts = [
        json.loads(gzip.decompress(path.read_bytes())) for path in sorted(source.glob("*.json.gz"))
    ]
    for rank, trace in zip(range(ranks), itertools.cycle(texts)):
        events = trace["traceEvents"]
        timed = [one for one in events if one.get("ph") == "X"]
        low = min(one["ts"] for one in timed)
        shift = max(one["ts"] + one.get("dur", 0) for one in timed) - low + 1000.0
        again = [one for one in events if one.get("ph") in ("X", "s", "f") and not _talks(one)]
        before = [_later(one, -shift) for one in again]
        about = {**trace.get("distributedInfo", {}), "rank": rank, "world_size": ranks}
        text = json.dumps({**trace, "distributedInfo": about, "traceEvents": [*before, *events]})
        size = len(text)
        with gzip.open(out / f"rank{rank}.json.gz", "wb", compresslevel=1) as stream:
            stream.write(text.encode())
    return size


def _talks(event: dict[str, Any]) -> bool:
    """Whether an event is a collective, or asks for one: there are as many as there were."""
    name = str(event.get("name"))
    return "nccl" in name or "record_param_comms" in name


def _later(event: dict[str, Any], shift: float) -> dict[str, Any]:
    """Returns an event with another time, and with other numbers for what it belongs to."""
    moved = {**event, "ts": event["ts"] + shift}
    if "id" in event:
        moved["id"] = event["id"] + 10_000_000
    args = event.get("args")
    if isinstance(args, dict):
        numbers = ("correlation", "External id")
        moved["args"] = {
            name: value + 10_000_000 if name in numbers and isinstance(value, int) else value
            for name, value in args.items()
        }
    return moved


def growth(source: Path) -> dict[str, Any]:
    """Returns the time of 1 to 64 ranks of 16 MB each."""
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "ranks": {}}
    for n in (1, 2, 4, 8, 16, 32, 64):
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            size = twice(source, Path(folder), n)
            seconds, memory, calls = run(sys.executable, OURS, Path(folder))
        found["ranks"][n] = {"bytes": n * size, "seconds": seconds, "mb": memory, "calls": calls}
        print(
            f"{n:3d} ranks, {n * size / 1e6:6.0f} MB: {seconds:6.2f} s, {memory:.0f} MB", flush=True
        )
    return found


def main() -> int:
    """Measures one of the three and prints it."""
    parser = argparse.ArgumentParser(description="how fast a job's ranks are laid on one another")
    parser.add_argument("what", choices=("calls", "many", "growth"))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--peer", help="python with TraceLens (calls), or HolisticTraceAnalysis (many)"
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    began = time.perf_counter()
    if flags.what == "growth":
        result = growth(flags.folder)
    elif flags.peer is None:
        parser.error("--peer is needed")
    elif flags.what == "calls":
        result = against(flags.folder, flags.peer, TRACELENS, flags.rounds or 5)
    else:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            size = twice(flags.folder, Path(folder), flags.ranks)
            result = {"ranks": flags.ranks, "bytes_each": size}
            result |= against(Path(folder), flags.peer, HTA, flags.rounds or 1)
    result["wall_s"] = round(time.perf_counter() - began, 1)
    text = json.dumps(result, indent=1)
    print(text)
    if flags.out is not None:
        flags.out.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
