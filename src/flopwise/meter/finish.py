"""From raw rows to the rank record: which intervals are the measurement, and what else the process has to tell."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import platform
import resource
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flopwise.meter.rows import COMPILED, COUNTED, EPOCH, EVALUATION, SAVE, SKIPPED, TIMED, Row
from flopwise.records import rank as records
from flopwise.records.rank import FlopCount, RankRecord, StepRow, Telemetry
from flopwise.records.store import write as write_record

if TYPE_CHECKING:
    from flopwise.meter.session import Session

WARMUP_RULE = (
    "warm-up ends after at least 5 steps and the FLOP count, when no step of the last two compiled anything and the "
    "last three agree within 25 % (or at step 20); leading steps above 1.5x the median of the rest are dropped too"
)
#: Above this share of intervals an evaluation, a save or a loader start is part of the step, not a pause.
PART_OF_THE_STEP_FRAC = 0.5


@dataclasses.dataclass
class Snapshot:
    """Everything a record is made of, taken at one moment so that a thread can build it later."""

    session: Session
    status: str
    rows: list[Row]
    flops: list[FlopCount]
    losses: list[torch.Tensor]
    steps_seen: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None

    @classmethod
    def of(cls, session: Session, status: str) -> Snapshot:
        """Returns a snapshot of `session`."""
        counts = list(session.graphs.counts.values()) or list(session.counting.counts.values())
        on_cuda = session.device.type == "cuda"
        return cls(
            session=session,
            status=status,
            rows=list(session.rows),
            flops=counts,
            losses=list(session.losses),
            steps_seen=session.boundaries.total,
            allocated_peak_bytes=torch.cuda.max_memory_allocated(session.device)
            if on_cuda
            else None,
            reserved_peak_bytes=torch.cuda.max_memory_reserved(session.device) if on_cuda else None,
        )


def write(snapshot: Snapshot) -> None:
    """Writes the record of a snapshot into the run folder, if there is anything to tell."""
    session = snapshot.session
    folder = session.config.folder
    if folder is None or (not snapshot.rows and not snapshot.steps_seen):
        return
    record = build(snapshot)
    ranks = Path(folder) / "ranks"
    ranks.mkdir(exist_ok=True)
    write_record(ranks / f"{record.host}-{record.pid}.json", record)


def leave_message(session: Session, text: str) -> None:
    """Leaves a failure of ours where the parent finds it."""
    if session.config.folder is not None:
        path = Path(session.config.folder) / f"failed-{os.getpid()}.txt"
        path.write_text(text + "\n", encoding="utf-8")


def build(snapshot: Snapshot) -> RankRecord:
    """Returns the rank record. Waits (without spinning) until the device has passed the last event."""
    session = snapshot.session
    rows, clock = step_rows(snapshot.rows, session.config.warmup)
    on_cuda = session.device.type == "cuda"
    rank, world, local_rank = identity()
    index = session.device.index if on_cuda else None
    if on_cuda and index is None:
        index = torch.cuda.current_device()
    notes = list(session.notes)
    losses = _finite(snapshot.losses)
    if len(losses) < len(snapshot.losses):
        notes.append(f"the loss is not a finite number at step {len(losses) + 1}: the training has diverged")
    boundary = session.mode or "none"
    if boundary == "optimizer":
        boundary = "graph replay" if session.graphs.counts else session.boundaries.describe()
    elif boundary == "backward":
        notes.append(
            "no optimizer that torch knows has stepped: a step is taken to be a backward pass on fresh gradients; "
            "mark steps with flopwise.step() if that is wrong"
        )
    return RankRecord(
        schema=records.SCHEMA,
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        argv=list(sys.argv),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=_nccl_version() if on_cuda else None,
        device_type=session.device.type,
        device_name=torch.cuda.get_device_name(index) if on_cuda else None,
        device_index=index,
        cpu_threads=torch.get_num_threads(),
        cpu_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        boundary=boundary,
        status=snapshot.status,
        clock=clock,
        steps_seen=snapshot.steps_seen,
        rows=rows,
        flops=snapshot.flops,
        telemetry=session.window.telemetry or Telemetry(reason="no device telemetry was taken"),
        allocated_peak_bytes=snapshot.allocated_peak_bytes,
        reserved_peak_bytes=snapshot.reserved_peak_bytes,
        device_total_bytes=torch.cuda.get_device_properties(index).total_memory
        if on_cuda
        else None,
        host_rss_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        attach_ns=session.attach_ns,
        losses=losses,
        patches=list(dict.fromkeys(session.patches.names)),
        notes=notes,
        warmup_rule=WARMUP_RULE
        if session.config.warmup is None
        else f"the first {session.config.warmup} steps are dropped (--warmup)",
        warmup_by_hand=session.config.warmup is not None,
        counted_from=_counted_from(session, snapshot.rows),
        float32_matmul_precision=_matmul_precision(),
    )


def step_rows(raw: Sequence[Row], warmup_by_hand: int | None) -> tuple[list[StepRow], str]:
    """Returns the intervals between the step ends in `raw` as step rows, and the clock that timed them.

    The first step has no beginning that anyone saw; so n raw rows give n - 1 intervals.
    """
    raw, spans, clock = _device_spans(raw)
    kinds = classify(raw, spans, warmup_by_hand)
    rows = []
    for before, row, span, kind in zip(raw, raw[1:], spans, kinds, strict=False):
        skipped = bool(row.flags & SKIPPED)
        if row.found_inf is not None:
            skipped = skipped or float(row.found_inf) > 0
        rows.append(
            StepRow(
                ns=span,
                host_ns=row.end_ns - before.end_ns,
                kind=kind,
                shape=row.shape,
                micro_batches=row.micro_batches,
                samples=row.samples,
                tokens=row.tokens,
                real_tokens=row.real_tokens,
                skipped=skipped,
                data_ns=row.data_ns,
                forward_ns=row.forward_ns or None,
                backward_ns=row.backward_ns,
                optimizer_ns=row.optimizer_ns,
                own_ns=row.own_ns,
                pause_ns=row.pause_ns,
                data_dry=row.data_dry,
            )
        )
    return rows, clock


def _device_spans(raw: Sequence[Row]) -> tuple[list[Row], list[int], str]:
    """Returns the rows whose end the device has reached, the spans between them in ns, and the clock's name."""
    rows = list(raw)
    if not rows or rows[-1].event is None:
        return (
            rows,
            [b.end_ns - a.end_ns for a, b in itertools.pairwise(rows)],
            "host clock",
        )
    deadline = time.monotonic() + 15
    while not rows[-1].event.query():
        if time.monotonic() > deadline:  # the device is stuck: keep what it has passed
            while rows and (rows[-1].event is None or not rows[-1].event.query()):
                rows.pop()
            break
        time.sleep(0.002)
    spans = []
    for before, row in itertools.pairwise(rows):
        if before.event is None or row.event is None:
            spans.append(row.end_ns - before.end_ns)
        else:
            spans.append(round(before.event.elapsed_time(row.event) * 1e6))
    return rows, spans, "cuda events"


def classify(raw: Sequence[Row], spans: Sequence[int], warmup_by_hand: int | None) -> list[str]:
    """Returns the kind of each interval (one fewer than rows): what it is, and so whether it is measured."""
    flags = [row.flags for row in raw[1:]]
    n = len(flags)
    pauses = []
    for bit, kind in ((EVALUATION, "evaluation"), (SAVE, "checkpoint"), (EPOCH, "epoch_start")):
        if sum(bool(f & bit) for f in flags) <= PART_OF_THE_STEP_FRAC * n:
            pauses.append((bit, kind))
    kinds = []
    for i, f in enumerate(flags):
        if f & COUNTED:
            kinds.append("counted")
        elif f & COMPILED:
            kinds.append("compile")
        else:
            held = [kind for bit, kind in pauses if f & bit]
            if held:
                kinds.append("+".join(held))
            elif warmup_by_hand is not None:
                kinds.append("timed" if i + 1 >= warmup_by_hand else "warmup")
            else:
                kinds.append("timed" if f & TIMED else "warmup")
    if warmup_by_hand is None:
        _use_what_there_is(kinds)
        _drop_slow_lead(kinds, spans)
    return kinds


def _use_what_there_is(kinds: list[str]) -> None:
    """A script that ended before the warm-up rule was met is measured on its last steps, all but the first two."""
    if "timed" in kinds:
        return
    for i in range(min(2, len(kinds) - 1), len(kinds)):
        if kinds[i] == "warmup":
            kinds[i] = "timed"


def _drop_slow_lead(kinds: list[str], spans: Sequence[int]) -> None:
    timed = [i for i, kind in enumerate(kinds) if kind == "timed"]
    if len(timed) < 5:
        return
    median = statistics.median(spans[i] for i in timed)
    for i in timed[: len(timed) // 2]:
        if spans[i] <= 1.5 * median:
            return
        kinds[i] = "warmup"


def identity() -> tuple[int, int, int]:
    """Returns (rank, world size, local rank) of this process."""
    rank, world = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return rank, world, int(os.environ.get("LOCAL_RANK") or rank)


def agree_on_last_step(session: Session) -> int | None:
    """Returns the step at which every rank ends the script, or None while that is not decided.

    Rank 0 writes it into the run folder a few steps ahead; the others look there, so that all stop at the same one.
    """
    rank, world, _ = identity()
    if world == 1 or session.config.folder is None:
        return session.boundaries.total
    path = Path(session.config.folder) / "stop"
    if rank == 0:
        stop = session.boundaries.total + 5
        temporary = path.with_suffix(".tmp")
        temporary.write_text(str(stop), encoding="ascii")
        temporary.replace(path)
        return stop
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _finite(losses: Sequence[torch.Tensor]) -> list[float]:
    """Returns the losses up to the first that is not a finite number, which JSON cannot hold."""
    values = []
    for loss in losses:
        value = float(loss)
        if not math.isfinite(value):
            break
        values.append(value)
    return values


def _counted_from(session: Session, rows: Sequence[Row]) -> str | None:
    if session.loaders and any(row.samples for row in rows):
        return "leading dimension of the loader's batches"
    if any(row.samples for row in rows):
        axis = "leading" if session.reading.batch_first else "second"
        return f"{axis} dimension of the model's first input"
    return None


def _matmul_precision() -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return "per backend"


def _nccl_version() -> str | None:
    try:
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def read_launch(folder: str) -> dict[str, Any]:
    """Returns the options that the parent left in the run folder."""
    with open(os.path.join(folder, "launch.json"), encoding="utf-8") as stream:
        options: dict[str, Any] = json.load(stream)
    return options
