"""How fast traces are read, against Holistic Trace Analysis, and how much memory that takes.

python benchmarks/trace_reading.py ranks FOLDER --peer PYTHON [--rounds 3] [--out FILE]
python benchmarks/trace_reading.py large [--gigabytes 1] [--out FILE]

`ranks` loads all ranks of a folder (rank0.json.gz, ...) and divides each rank's device time into compute, exposed communication and
idle: flopwise and its peer in turns, each in a fresh process; the time is that of the work, without the imports. PYTHON is an
environment with HolisticTraceAnalysis. `large` writes a synthetic trace (real layout, kernels with their launches and operators
with shapes) and reads it in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OURS = """
import resource, sys, time
from pathlib import Path
from flopwise.trace.chrome import read
from flopwise.trace.partition import devices, partition
began = time.perf_counter()
found = {}
for path in sorted(Path(sys.argv[1]).glob("*rank*.json.gz")):
    events = read(path).events
    part = partition(events, devices(events)[0])
    found[path.name] = [part.span_ns, part.compute_ns, part.exposed_communication_ns, part.idle_ns]
took = time.perf_counter() - began
print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, found)
"""

PEER = """
import logging, resource, sys, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
analysis = TraceAnalysis(trace_dir=sys.argv[1])
found = analysis.get_temporal_breakdown(visualize=False)
took = time.perf_counter() - began
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + children, len(found))
"""

READ = """
import resource, sys, time
from pathlib import Path
from flopwise.trace.chrome import read
began = time.perf_counter()
trace = read(Path(sys.argv[1]))
took = time.perf_counter() - began
print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(trace.events), trace.raw_bytes)
"""


def run(python: str, code: str, path: Path) -> tuple[float, float, int]:
    """Returns the seconds and the largest resident memory in MB of one fresh process, and the number that it prints third."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    done = subprocess.run(
        [python, "-c", code, str(path)],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{python}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    words = done.stdout.strip().splitlines()[-1].split()
    third = int(words[2]) if len(words) > 2 and words[2].isdigit() else 0
    return float(words[0]), float(words[1]) / 1024, third


def ranks(folder: Path, peer: str, rounds: int) -> dict[str, Any]:
    """Returns times and memory of both, taken in turns."""
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run(sys.executable, OURS, folder))
        theirs.append(run(peer, PEER, folder))
    result = {
        "folder": folder.name,
        "cores": len(os.sched_getaffinity(0)),
        "flopwise_s": [one[0] for one in ours],
        "peer_s": [one[0] for one in theirs],
        "flopwise_mb": max(one[1] for one in ours),
        "peer_mb": max(one[1] for one in theirs),
    }
    result["times_faster"] = statistics.median(result["peer_s"]) / statistics.median(
        result["flopwise_s"]
    )
    result["memory_frac"] = result["flopwise_mb"] / result["peer_mb"]
    return result


def synthetic(path: Path, n_bytes: int) -> None:
    """Writes a trace of about that size in Kineto's layout: an operator, its launch and its kernel again and again."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "traceEvents": [\n')
        written, i = 0, 0
        while written < n_bytes:
            text = ",\n".join(json.dumps(event) for event in _triple(i))
            block = ("" if i == 0 else ",\n") + text.replace("}}, {", "}},\n  {")
            file.write(block)
            written += len(block)
            i += 1
        file.write('\n  ],\n  "traceName": "synthetic"\n}\n')


def _triple(i: int) -> list[dict[str, Any]]:
    at = 1_000_000_000_000 + 20.0 * i
    shape = [[16, 1024, 64 * (1 + i % 12)], [64 * (1 + i % 12), 768], []]
    operator = {
        "External id": i + 1,
        "Record function id": 0,
        "Concrete Inputs": ["", "", "1"],
        "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
        "Input Strides": [[1024, 64, 1], [768, 1], []],
        "Input Dims": shape,
        "Ev Idx": i,
    }
    call = {"External id": i + 1, "cbid": 211, "correlation": i + 1}
    kernel = {
        "External id": i + 1,
        "queued": 0,
        "device": 0,
        "context": 1,
        "stream": 7,
        "correlation": i + 1,
        "registers per thread": 32,
        "shared memory": 0,
        "blocks per SM": 31.030304,
        "warps per SM": 186.181824,
        "grid": [4096, 1, 1],
        "block": [192, 1, 1],
        "est. achieved occupancy %": 94,
    }
    name = f"void at::native::vectorized_elementwise_kernel<4, functor_{i % 97}>(int, char*)"
    return [
        _event("cpu_op", f"aten::op{i % 211}", 601, 601, at, 15.125, operator),
        _event("cuda_runtime", "cudaLaunchKernel", 601, 601, at + 4.5, 3.875, call),
        _event("kernel", name, 0, 7, at + 11.25, 8.5, kernel),
    ]


def _event(
    cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def large(gigabytes: float, rounds: int) -> dict[str, Any]:
    """Returns the speed and the memory of reading one large file, a process each time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        synthetic(path, round(gigabytes * 1e9))
        size = path.stat().st_size
        found = [run(sys.executable, READ, path) for _ in range(rounds)]
    seconds = statistics.median(one[0] for one in found)
    return {
        "bytes": size,
        "seconds": [one[0] for one in found],
        "mb_per_s": size / seconds / 1e6,
        "resident_mb": max(one[1] for one in found),
    }


def main() -> int:
    """Measures one of the two and prints it."""
    parser = argparse.ArgumentParser(description="how fast traces are read")
    parser.add_argument("what", choices=("ranks", "large"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--peer", help="python with HolisticTraceAnalysis")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    began = time.perf_counter()
    if flags.what == "large":
        result = large(flags.gigabytes, flags.rounds)
    elif flags.folder is None or flags.peer is None:
        parser.error("ranks: a folder and --peer are needed")
    else:
        result = ranks(flags.folder, flags.peer, flags.rounds)
    result["wall_s"] = round(time.perf_counter() - began, 1)
    text = json.dumps(result, indent=1)
    print(text)
    if flags.out is not None:
        flags.out.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
