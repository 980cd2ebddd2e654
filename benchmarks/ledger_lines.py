"""Every line of the ledger against a program whose fault is known: does the line move by it, is it named?

python benchmarks/ledger_lines.py --out ledger_lines.json [--only odd_vocabulary,nchw] [--lanes 2] [--budget 560]
python benchmarks/ledger_lines.py --device cpu --only sleep_in_loader,checkpointing

For each program of gpu/lines: the truth, which is the difference of a step with the fault and one without, in turns in one
process; `flopwise run` on the program with the fault, and on the one without; then the movement of the named lines
between these two ledgers against the truth (within 15 %), and the first finding against the fault's name. With
--lanes 2, on a machine with two GPUs, two programs run at a time, each on its own GPU and cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ledger_compare import Row, compare, judge_harmless, put_truth
from runs import GPU, Lane, archive, chosen, environment, execute, in_lanes, lanes, measured

PRODUCTS = ("precision", "hardware", "ceiling", "clock", "gemm_bytes", "gemm_excess")
MEMORY = ("memory_bound", "memory_excess", "memory_unsplit")
HARMLESS = (
    "input-wait",
    "host-read",
    "metric-read",
    "launch-bound",
    "exposed-copy",
    "unfused-optimizer",
)
SHORTEST_S = 25.0  # a program is not begun with less time left


@dataclass(frozen=True)
class Program:
    """One program, what its fault moves, and what a finding may call it."""

    name: str
    lines: tuple[str, ...]  # that share the truth
    causes: tuple[str, ...]  # any of them names the fault; none: there is no fault
    on_cpu: bool = False
    rounds: int = 6
    truth_s: float = 10.0  # no round begins later
    flags: tuple[str, ...] = ()
    script: str = ""  # "" is the name

    @property
    def path(self) -> str:
        """Returns where the script is."""
        return str(GPU / "lines" / f"{self.script or self.name}.py")


def programs() -> list[Program]:
    """Returns all programs; why these lines: the docstring of each."""
    return [
        Program("sleep_in_loader", ("idle_input",), ("input-wait",), True, 10),
        Program(
            "item_each_step", ("idle_sync", "idle_launch"), ("host-read", "metric-read"), False, 14
        ),
        Program("tiny_kernels", ("idle_launch", *MEMORY), ("launch-bound",), True, 24, 14.0),
        Program("fp32_matmul", PRODUCTS, ("slow-dtype",)),
        Program("odd_vocabulary", ("gemm_excess",), ("odd-shape",)),
        Program("nchw", ("gemm_excess", "gemm_bytes", *MEMORY), ("nchw-layout",)),
        Program("unfused_chain", MEMORY, ("unfused-pointwise",)),
        Program(
            "pageable_copy",
            ("exposed_copy", "idle_sync", "idle_launch"),
            ("exposed-copy", "pageable-copy"),
        ),
        Program("hot_clock", ("clock",), ("low-clock",), rounds=4, truth_s=25.0),
        Program("padding", ("padding",), ("padding",), on_cpu=True),
        Program("checkpointing", ("recompute",), ("recompute",), on_cpu=True),
        Program("slow_optimizer", ("optimizer", "idle_launch"), ("unfused-optimizer",)),
        Program("needless_mask", ("ideal", *PRODUCTS), ("needless-mask",)),
        Program("cuda_graph", (), ()),
        Program("cuda_graph_inductor", (), (), flags=("--inductor",), script="cuda_graph"),
    ]


def run(program: Program, flags: argparse.Namespace, work: Path, lane: Lane, end: float) -> Row:
    """Returns what came of one program. Never raises: what went wrong is a reason."""
    row = Row(program.name)
    began = time.monotonic()
    try:
        _fill(row, program, flags, work / program.name, lane, end)
    except Exception as error:  # the other programs go on
        row.verdict = "FAIL"
        row.reasons.append(f"{type(error).__name__}: {error}")
    row.wall_s = time.monotonic() - began
    return row


def _fill(
    row: Row, program: Program, flags: argparse.Namespace, folder: Path, lane: Lane, end: float
) -> None:
    script = [program.path, "--device", flags.device, *(["--small"] * (flags.device == "cpu"))]
    script += program.flags
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {}

    def keep(name: str, value: dict[str, Any]) -> None:
        kept[name] = value
        (folder / "records.json").write_text(json.dumps(kept))

    if program.causes:
        keep("truth", _truth(program, script, folder / "truth", lane, flags, end))
        put_truth(row, kept["truth"])
    for arm in ("on", "off") if program.causes else ("on",):
        record, problem, _ = measured(
            [*script, "--fault", arm, "--seconds", str(flags.limit)],
            folder / arm,
            min(flags.limit + 60, _left(end)),
            lane,
            ("--stop-after", "--quiet", *flags.run_flags.split()),
        )
        if record is None:
            raise RuntimeError(f"with the fault {arm}: {problem}")
        if problem is not None:
            row.reasons.append(f"with the fault {arm}: {problem}")
        keep(arm, record)
    if program.causes:
        compare(row, kept["truth"], kept["on"], kept["off"], program.lines, program.causes)
    else:
        judge_harmless(row, kept["on"], HARMLESS)


def _truth(
    program: Program,
    script: Sequence[str],
    folder: Path,
    lane: Lane,
    flags: argparse.Namespace,
    end: float,
) -> dict[str, Any]:
    path = folder / "truth.json"
    seconds = program.truth_s * flags.truth_scale
    argv = [sys.executable, *script, "--alternate", str(program.rounds), "--seconds", str(seconds)]
    limit_s = min(seconds + 60, _left(end))
    ended = execute(argv, folder, limit_s, lane, {"TRUTH_JSON": str(path)})
    if ended.problem is not None:
        raise RuntimeError(f"the truth: {ended.problem}")
    truth: dict[str, Any] = json.loads(path.read_text())
    return truth


def _left(end: float) -> float:
    return max(5.0, end - time.monotonic())


def ms(seconds: float | None, form: str = ".3f") -> str:
    """Returns seconds as milliseconds, "-" where there are none."""
    return "-" if seconds is None else format(1e3 * seconds, form)


def share(value: float | None, form: str = ".1%") -> str:
    """Returns a share in per cent, "-" where there is none."""
    return "-" if value is None else format(value, form)


TITLE = (
    f"{'program':20s} {'verdict':8s} {'with':>8s} {'without':>8s} {'truth ms':>9s} {'+-':>6s} {'moved ms':>9s} "
    f"{'ratio':>6s} {'low':>6s} {'high':>6s} {'rest ms':>8s} {'place':>5s}  first finding"
)


def text(row: Row) -> str:
    """Returns a row as one line of the table; what failed stands below it."""
    half = (row.truth_ci95[1] - row.truth_ci95[0]) / 2 if row.truth_ci95 else None
    ratios = ["-" if r is None else f"{r:.3f}" for r in (row.ratio, row.ratio_low, row.ratio_high)]
    place = "-" if row.place is None else str(row.place)
    line = (
        f"{row.name:20s} {row.verdict:8s} {ms(row.on_s):>8s} {ms(row.off_s):>8s} {ms(row.truth_s):>9s} {ms(half):>6s} "
        f"{ms(row.moved_s):>9s} {ratios[0]:>6s} {ratios[1]:>6s} {ratios[2]:>6s} {ms(row.rest_s):>8s} {place:>5s}  "
        f"{row.first or '-'}"
    )
    if len(row.by_line_s) > 1:
        line += "\n    lines (ms): " + ", ".join(f"{n} {ms(s)}" for n, s in row.by_line_s.items())
    if row.place is not None:
        line += f"\n    gain: predicted {share(row.predicted_gain_frac)}, true {share(row.true_gain_frac)}"
        line += f"; {', '.join(row.where)}" if row.where else ""
    for arm, because in row.untrusted_because.items():
        if because:
            line += f"\n    {arm} not trusted: {'; '.join(because)}"
    return line + "".join(f"\n    {reason}" for reason in row.reasons)


def parse() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description="lines of the ledger against known faults")
    add = parser.add_argument
    add("--out", type=Path, default=Path("ledger_lines.json"))
    add("--work", type=Path, help="folder for what the runs write (default: a new temporary one)")
    add("--only", help="names, with commas; NAME* stands for all that begin so")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--lanes", type=int, default=1, help="programs at a time, each on a GPU of its own")
    add("--budget", type=float, default=560, help="seconds for everything")
    add("--limit", type=float, default=75, help="seconds for one measured run, its end not counted")
    add("--truth-scale", type=float, default=1.0, help="times the seconds of each truth")
    add("--run-flags", default="", help="more flags of `flopwise run`")
    return parser.parse_args()


def main() -> int:
    """Runs the chosen programs; prints the table and writes it after each; returns 0 where all passed."""
    flags = parse()
    every = {p.name: p for p in programs() if flags.device == "cuda" or p.on_cpu}
    names = chosen(list(every), flags.only)
    work = flags.work or Path(tempfile.mkdtemp(prefix="ledger-lines-"))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {name: Row(name, reasons=["no time left in the budget"]) for name in names}
    end = time.monotonic() + flags.budget
    result = {"environment": environment(), "rows": [], "raw": {}}
    lock = threading.Lock()
    print(TITLE, flush=True)

    def job_of(name: str) -> Any:
        def job(lane: Lane) -> None:
            if end - time.monotonic() < SHORTEST_S:
                return
            row = run(every[name], flags, work, lane, end)
            with lock:
                rows[name] = row
                print(text(row), flush=True)
                kept = work / name / "records.json"
                if kept.exists():
                    result["raw"][name] = json.loads(kept.read_text())
                result["rows"] = [asdict(r) for r in rows.values()]
                flags.out.write_text(json.dumps(result))

        return job

    in_lanes([job_of(name) for name in names], lanes(flags.lanes))
    archive(work, flags.out.with_suffix(".tar.gz"))
    passed = sum(row.verdict == "pass" for row in rows.values())
    print(
        f"{passed} of {len(rows)} pass; {flags.budget - (end - time.monotonic()):.0f} s", flush=True
    )
    left = [name for name, row in rows.items() if row.verdict == "not run"]
    if left:
        print(f"not run: {', '.join(left)}", flush=True)
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
