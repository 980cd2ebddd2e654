"""Reading one side of a comparison: a trace, a run folder, or a record that was written with --json."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flopwise.diagnosis.ledger.build import SHOWN, Given, record_of, take
from flopwise.diagnosis.ledger.tally import Tally
from flopwise.errors import FlopwiseError
from flopwise.hardware.accelerators import Peak
from flopwise.records import job as job_records
from flopwise.records import ledger as ledger_records
from flopwise.records import run as run_records
from flopwise.records import store, verdict
from flopwise.records.comparison import Side
from flopwise.records.job import JobRecord
from flopwise.records.ledger import Hot, LedgerRecord, Line, Spent
from flopwise.records.run import RunRecord
from flopwise.trace.chrome import Trace, read
from flopwise.trace.nsys import read_nsys
from flopwise.trace.nsys_database import MAGIC
from flopwise.trials.interval import BATCHES, mean_interval, student_t_quantile

#: Of a file that is a record of ours: its first field says so.
_RECORD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"flopwise\.')
HEAD_BYTES = 4096
#: A record is read as a whole. Source: one rank's ledger takes 0.1 MB, so this is a job of some thousand ranks.
MOST_BYTES = 512_000_000
#: How many kernels a ledger lists (`Hot`); fewer of them are all there are.
HOT = 15
#: How the note of a ledger begins that says where its ceilings come from.
CEILINGS = "ceilings: "
#: Steps at the head of each profiled window that its lines are not made of. Source: docs/ledger.md, the windows.
LEAD = 2


class ComparisonError(FlopwiseError):
    """There is nothing to compare at a path, or two sides cannot be held against each other."""


@dataclass(frozen=True)
class Mean:
    """A mean step and how well it is known."""

    s: float
    error_s: float  # standard error
    df: float  # degrees of freedom that it rests on; 0: it is not known


@dataclass(frozen=True, eq=False)
class Measured:
    """One side, with all that is compared."""

    side: Side
    step: Mean
    lines: list[Line]
    lines_reason: str | None
    lines_steps: int  # that the intervals of its lines rest on
    coverage_frac: float | None
    operators: list[Spent]
    operators_all: bool  # these are all that there are
    kernels: list[Hot]
    kernels_all: bool
    ceilings: str | None = None  # where the rates come from that products are held against
    damaged: str | None = None
    withheld: list[str] = field(default_factory=list)  # conclusions that its traces do not bear


def measured(
    path: Path, peak: Peak | None = None, progress: Callable[[int], None] | None = None
) -> Measured:
    """Returns what there is to compare at a path.

    Args:
        path: a trace of the PyTorch profiler or an export of Nsight Systems, a folder of `flopwise run`, or a record of one of `flopwise run`,
            `flopwise analyze`.
        peak: of the device of a trace, instead of the table's.
        progress: is told how many bytes of a trace were read.

    Raises:
        ComparisonError: there is nothing of this kind.
        RecordError: a record is damaged, or of another version.
        TraceError: a trace cannot be read.
        LedgerError: a trace has no work of a device.
    """
    file = _file(path)
    head = _head(file)
    if head.startswith(MAGIC):
        return _of_trace(read_nsys(file, progress), str(path), peak)
    if not _RECORD.match(head):
        return _of_trace(read(file, progress), str(path), peak)
    data = file.read_bytes()
    schema = store.schema_of(data, str(file))
    if schema == run_records.SCHEMA:
        return of_run(store.decode(data, RunRecord, schema, str(file)), str(path))
    if schema == ledger_records.SCHEMA:
        return of_ledger(store.decode(data, LedgerRecord, schema, str(file)), str(path), "ledger")
    if schema == job_records.SCHEMA:
        return of_job(store.decode(data, JobRecord, schema, str(file)), str(path))
    raise ComparisonError(_not_comparable(file, schema))


def of_ledger(record: LedgerRecord, path: str, kind: str) -> Measured:
    """Returns the side that a ledger is.

    Raises:
        ComparisonError: its step takes no time, which no ledger that can be compared says.
    """
    step = _mean(record.step_s, record.step_s_each, path)
    side = Side(
        path=path,
        kind=kind,
        device_name=record.device_name,
        rank=record.rank,
        world_size=record.world_size,
        profiled=record.profiled,
        steps=record.steps,
        steps_by=record.steps_by,
        step_s=step.s,
        step_ci95=_ci95(step),
        mfu=record.mfu,
        mfu_reason=record.mfu_reason,
        model_flops_per_step=record.model_flops_per_step,
        peak_flops_per_s=record.peak_flops_per_s,
        trusted=record.trusted,
        untrusted_because=record.untrusted_because,
        software={"flopwise": record.flopwise},
    )
    return Measured(
        side=side,
        step=step,
        lines=record.lines,
        lines_reason=None,
        lines_steps=_lines_steps(record),
        coverage_frac=record.coverage_frac,
        operators=record.operators,
        operators_all=len(record.operators) < SHOWN,
        kernels=record.hot,
        kernels_all=len(record.hot) < HOT,
        ceilings=next((note for note in record.notes if note.startswith(CEILINGS)), None),
    )


def of_run(record: RunRecord, path: str) -> Measured:
    """Returns the side that a run is: its ledger where it has one, else its step alone.

    Raises:
        ComparisonError: its step takes no time.
    """
    env = record.env
    software = {
        "torch": env.torch,
        "CUDA": env.cuda,
        "driver": env.driver,
        "NCCL": env.nccl,
        "flopwise": record.flopwise,
    }
    known = {name: value for name, value in software.items() if value is not None}
    if record.ledger is not None:
        found = of_ledger(record.ledger, path, "run")
        return replace(found, side=replace(found.side, cpu=env.cpu, software=known))
    step = _mean_of(record.step_s, record.steps.timed, path)
    mfu = record.mfu
    ranks = len(record.ranks) or 1
    flops = mfu.model_flops_per_step
    side = Side(
        path=path,
        kind="run",
        device_name=env.gpus[0] if env.gpus else "CPU",
        rank=None,
        world_size=ranks,
        profiled=False,
        steps=record.steps.timed,
        steps_by=record.steps.boundary,
        step_s=step.s,
        step_ci95=record.step_s.ci95,
        mfu=mfu.value,
        mfu_reason=mfu.reason,
        model_flops_per_step=None if flops is None else flops / ranks,
        peak_flops_per_s=mfu.peak_flops_per_s,
        trusted=None,
        untrusted_because=[],
        cpu=env.cpu,
        software=known,
    )
    return _bare(side, step, record.ledger_reason or "the run has no ledger")


def of_job(record: JobRecord, path: str) -> Measured:
    """Returns the side that a job of several ranks is: means over its ranks.

    Raises:
        ComparisonError: its step is withheld.
    """
    if record.step_s is None:
        codes = record.health.withheld.get("steps", [])
        because = f" ({', '.join(codes)})" if codes else ""
        raise ComparisonError(
            f"{path}: the length of its steps is withheld{because}, so there is nothing to compare. "
            "See `health` in the record"
        )
    ledgers = [rank.ledger for rank in record.ranks if rank.ledger is not None]
    step = _mean(record.step_s, _mean_each([one.step_s_each for one in ledgers]), path)
    flops = [one.model_flops_per_step for one in ledgers if one.model_flops_per_step is not None]
    doubts = [defect.evidence for defect in record.health.defects if defect.withholds]
    doubts += record.untrusted_because
    side = Side(
        path=path,
        kind="job",
        device_name=record.device_name,
        rank=None,
        world_size=record.world_size,
        profiled=record.profiled,
        steps=record.steps,
        steps_by=ledgers[0].steps_by if ledgers else None,
        step_s=step.s,
        step_ci95=_ci95(step),
        mfu=record.mfu,
        mfu_reason=record.mfu_reason,
        model_flops_per_step=math.fsum(flops) / len(flops)
        if flops and len(flops) == len(record.ranks)
        else None,
        peak_flops_per_s=ledgers[0].peak_flops_per_s if ledgers else None,
        trusted=not doubts if record.lines else None,
        untrusted_because=doubts,
        software={"flopwise": record.flopwise},
    )
    bare = _bare(side, step, record.lines_reason or "the job has no lines")
    return replace(
        bare,
        lines=record.lines,
        lines_reason=None if record.lines else bare.lines_reason,
        lines_steps=min([record.steps, *map(_lines_steps, ledgers)]),
        coverage_frac=min((one.coverage_frac for one in ledgers), default=None),
        withheld=sorted(record.health.withheld),
    )


def _of_trace(trace: Trace, path: str, peak: Peak | None) -> Measured:
    taken = take(trace, None, Given(peak=peak))
    found = of_ledger(record_of(taken), path, "trace")
    operators = _all_operators(taken.tally, found.side.steps, found.step.s)
    return replace(
        found, operators=operators, operators_all=True, damaged=trace.damage.ends_early or None
    )


def _all_operators(tally: Tally, steps: int, step_s: float) -> list[Spent]:
    """Returns all operators of a trace: a record names the largest only."""
    return [
        Spent(name, s, s / step_s, calls=tally.calls.get(name, 0.0) / steps)
        for name, s in ((name, ns * 1e-9 / steps) for name, ns in tally.operators.items())
    ]


def _bare(side: Side, step: Mean, reason: str) -> Measured:
    return Measured(
        side=side,
        step=step,
        lines=[],
        lines_reason=reason,
        lines_steps=0,
        coverage_frac=None,
        operators=[],
        operators_all=False,
        kernels=[],
        kernels_all=False,
    )


def _lines_steps(record: LedgerRecord) -> int:
    """Returns how many steps the intervals of the lines rest on: those of the shortest window, of a live run."""
    if record.live is None:
        return record.steps
    windows = [
        max(2, window.steps - LEAD)
        for window in record.live.windows
        if window.kind in ("light", "heavy")
    ]
    return min([record.steps, *windows])


def _mean(s: float, each_s: Sequence[float], path: str) -> Mean:
    """Returns the mean step with the error of batch means, as `trials.interval.mean_interval` has it."""
    _check(s, path)
    if not each_s or not all(math.isfinite(one) for one in each_s):
        return Mean(s, 0.0, 0)
    interval = mean_interval(each_s)
    if interval.high is None:
        return Mean(s, 0.0, 0)
    df = interval.batches - 1
    return Mean(s, (interval.high - interval.mean) / student_t_quantile(0.975, df), df)


def _mean_of(step: run_records.StepTime, steps: int, path: str) -> Mean:
    """Returns the same from an interval of that kind."""
    _check(step.mean, path)
    df = min(steps, BATCHES) - 1
    if step.ci95 is None or df < 1:
        return Mean(step.mean, 0.0, 0)
    half = max(0.0, step.ci95[1] - step.mean)
    return Mean(step.mean, half / student_t_quantile(0.975, df), df)


def _check(s: float, path: str) -> None:
    if not (math.isfinite(s) and s > 0):
        raise ComparisonError(f"{path}: its steps take {s} s, so there is nothing to compare")


def _ci95(step: Mean) -> tuple[float, float] | None:
    if not step.df:
        return None
    half = student_t_quantile(0.975, step.df) * step.error_s
    return step.s - half, step.s + half


def _mean_each(each: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean over ranks of each step; nothing where ranks do not have as many."""
    if len({len(one) for one in each}) != 1:
        return []
    return [math.fsum(steps) / len(steps) for steps in zip(*each, strict=True)]


def _file(path: Path) -> Path:
    """Returns the file to read for a path: the record of a run folder, or the file itself."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _in_folder(path)
        if not stat.S_ISREG(mode):
            raise ComparisonError(f"{path}: neither a folder nor a regular file")
    except (OSError, ValueError) as error:
        raise ComparisonError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}). Give a trace (.json, .json.gz or .sqlite), "
            "the folder of a run, or a record that was written with --json"
        ) from error
    return path


def _in_folder(folder: Path) -> Path:
    if (folder / "run.json").is_file():
        return folder / "run.json"
    if (folder / "tune.json").is_file():
        raise ComparisonError(_not_comparable(folder / "tune.json", verdict.SCHEMA))
    inside = sorted(p.parent.name for p in folder.glob("*/run.json"))[:8]
    if inside:
        raise ComparisonError(f"{folder}: no run.json, but runs inside: {', '.join(inside)}")
    traces = sorted(p.name for p in folder.glob("*.json*"))[:8]
    if traces:
        raise ComparisonError(
            f"{folder}: no run.json, so it is not the folder of a run. Give one of its files: {', '.join(traces)}"
        )
    raise ComparisonError(f"{folder}: no run.json, so it is not the folder of a run")


def _head(file: Path) -> bytes:
    try:
        with open(file, "rb") as stream:
            head = stream.read(HEAD_BYTES)
        size = file.stat().st_size
    except OSError as error:
        raise ComparisonError(f"{file}: cannot be read ({error.strerror or error})") from error
    if _RECORD.match(head) and size > MOST_BYTES:
        raise ComparisonError(
            f"{file}: {size / 1e6:.0f} MB, and a record has {MOST_BYTES / 1e6:.0f} MB at most"
        )
    return head


def _not_comparable(file: Path, schema: str) -> str:
    kind, _, version = schema.rpartition("/")
    known = (run_records.SCHEMA, ledger_records.SCHEMA, job_records.SCHEMA)
    for one in known:
        if kind == one.rpartition("/")[0]:
            return (
                f"{file}: written as {kind}/{version[:20]}, and this flopwise reads {one}. "
                "Read it with the flopwise that wrote it, or update this one"
            )
    if schema == verdict.SCHEMA:
        return f"{file}: a tune, which is a comparison already (flopwise report prints it)"
    return (
        f"{file}: a record of another kind ({schema[:60]}). Give a trace (.json or .json.gz), the folder of a run, or "
        "what --json of run or analyze wrote"
    )
