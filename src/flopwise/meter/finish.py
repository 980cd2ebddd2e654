"""From raw rows to the rank record: which intervals are the measurement, and what else the process has to tell."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flopwise.meter.clock import Stamp
from flopwise.meter.rows import (
    COMPILED,
    COUNTED,
    EPOCH,
    EVALUATION,
    SAVE,
    SKIPPED,
    TIMED,
    Brief,
    Row,
)
from flopwise.records import rank as records
from flopwise.records.rank import FlopCount, Profile, RankRecord, StepRow, Telemetry
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
    rows: list[Row | Brief]
    waits: list[tuple[int, int]]
    flops: list[FlopCount]
    losses: list[torch.Tensor]
    steps_seen: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    profile: Callable[[], Profile] | None  # waits until the device has passed the last step

    @classmethod
    def of(cls, session: Session, status: str) -> Snapshot:
        """Returns a snapshot of `session`."""
        held = session.graphs.counts if session.mode == "replay" else session.counting.counts
        counts: list[FlopCount] = list(held.values())
        on_cuda = session.device.type == "cuda"
        return cls(
            session=session,
            status=status,
            rows=list(session.rows),
            waits=list(session.waits),
            flops=counts,
            losses=list(session.losses),
            steps_seen=session.boundaries.total,
            allocated_peak_bytes=torch.cuda.max_memory_allocated(session.device)
            if on_cuda
            else None,
            reserved_peak_bytes=torch.cuda.max_memory_reserved(session.device) if on_cuda else None,
            profile=session.profiling.snapshot() if session.config.profile else None,
        )


def write(snapshot: Snapshot) -> RankRecord | None:
    """Writes the record of a snapshot into the run folder and returns it; None where there is nothing to tell."""
    session = snapshot.session
    folder = session.config.folder
    if folder is None or (not snapshot.rows and not snapshot.steps_seen):
        return None
    record = build(snapshot)
    _put(record, folder)
    return record


def write_record_of(record: RankRecord, folder: str | None, profile: Profile) -> None:
    """Writes a record again, with its profiled windows."""
    if folder is not None:
        _put(dataclasses.replace(record, profile=profile), folder)


def _put(record: RankRecord, folder: str) -> None:
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
    rows, clock = step_rows(
        snapshot.rows,
        session.config.warmup,
        () if session.draws_apart else snapshot.waits,
        lead=session.enough,
    )
    on_cuda = session.device.type == "cuda"
    rank, world, local_rank = identity_of(session)
    index = session.device.index if on_cuda else None
    if on_cuda and index is None:
        index = torch.cuda.current_device()
    notes = [*session.notes, *_lacking(session, rows)]
    losses = _finite(snapshot.losses)
    if len(losses) < len(snapshot.losses):
        notes.append(_not_finite(len(losses) + 1, scaled=session.uses_scaler))
    several = session.trainers.several
    boundary = session.mode or "none"
    if several is not None and boundary != "mark":
        boundary = session.trainers.boundary
    elif boundary == "optimizer":
        boundary = session.boundaries.describe()
    elif boundary == "replay":
        boundary = "graph replay"
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
        argv=[str(word) for word in getattr(sys, "argv", [])],
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
        host_rss_peak_bytes=_rss_peak_bytes(),
        attach_ns=session.attach_ns,
        losses=losses,
        patches=list(dict.fromkeys(session.patches.names)),
        notes=notes,
        warmup_rule=WARMUP_RULE
        if session.config.warmup is None
        else f"the first {session.config.warmup} steps are dropped (--warmup), and those until the FLOPs are counted",
        warmup_by_hand=session.config.warmup is not None,
        brief_own_ns=session.brief_own_ns(snapshot.rows),
        started_ns=time.time_ns() - time.perf_counter_ns() + snapshot.rows[0].end_ns
        if snapshot.rows
        else 0,
        launch=_launch() if world > 1 else "",
        counted_from=_counted_from(session, rows),
        float32_matmul_precision=_matmul_precision(),
        surroundings=session.surroundings.record(),
        several=several,
        draws_apart=session.draws_apart,
        preempted_frac=session.preemption.frac,
        profile=snapshot.profile() if snapshot.profile is not None else None,
    )


def step_rows(
    raw: Sequence[Row | Brief],
    warmup_by_hand: int | None,
    waits: Sequence[tuple[int, int]] = (),
    *,
    lead: bool = False,
) -> tuple[list[StepRow], str]:
    """Returns the intervals between the step ends in `raw` as step rows, and the clock that timed them.

    The first step has no beginning that anyone saw; so n raw rows give n - 1 intervals. `waits` are the waits for data
    of the brief ones, by their beginnings and ends. With `lead` the timed ones stay so that lead slowly.
    """
    last = _last_passed(raw)
    host = [after.end_ns - before.end_ns for before, after in pairwise(raw)]
    spans, mixed = _device_spans(raw, host, last) if last is not None else (host, set())
    kinds = classify(raw, spans, warmup_by_hand, mixed, lead=lead)
    waited = _waited(raw, waits)
    rows = [
        _step_row(row, span, host_ns, kind, data_ns)
        for row, span, host_ns, kind, data_ns in zip(
            raw[1:], spans, host, kinds, waited[1:], strict=True
        )
    ]
    return rows, "cuda events" if last is not None else "host clock"


def kinds_so_far(
    raw: Sequence[Row | Brief], warmup_by_hand: int | None, *, lead: bool
) -> list[str]:
    """Returns the kind of each interval while the device may still be at work: what it has not passed, the host timed.

    It waits for nothing.
    """
    host = [after.end_ns - before.end_ns for before, after in pairwise(raw)]
    spans, mixed = host, set[int]()
    stamped = [i for i, row in enumerate(raw) if _stamp(row) is not None]
    if stamped:
        passed = next((i for i in reversed(stamped) if _passed(raw[i])), 0)
        spans, mixed = _device_spans(raw, host, stamped[-1], passed)
    kinds = _kinds(raw, mixed)
    if warmup_by_hand is None and not lead:
        _drop_slow_lead(kinds, spans)
    return kinds


def _lacking(session: Session, rows: Sequence[StepRow]) -> list[str]:
    """Returns what is to be said where a script has ended before as many steps were timed as were asked for."""
    asked, timed = session.config.steps, sum(row.kind == "timed" for row in rows)
    if asked is None or session.enough or not session.ended or timed >= asked:
        return []
    return [f"--steps {asked}: the script ended after {timed} timed steps"]


def _waited(raw: Sequence[Row | Brief], waits: Sequence[tuple[int, int]]) -> list[int]:
    """Returns for each row how long the interval that it ends waited for data, where `waits` tells."""
    ends = [row.end_ns for row in raw]
    total = [0] * len(ends)
    for entered, left in waits:
        at = bisect_left(ends, left)
        if at < len(ends):
            total[at] += left - entered
    return total


def _step_row(row: Row | Brief, span_ns: int, host_ns: int, kind: str, waited: int) -> StepRow:
    skipped = bool(row.flags & SKIPPED)
    if row.found_inf is not None:
        skipped = skipped or float(row.found_inf) > 0
    if isinstance(row, Brief):
        return StepRow(span_ns, host_ns, kind, skipped=skipped, data_ns=waited, sampled=False)
    return StepRow(
        ns=span_ns,
        host_ns=host_ns,
        kind=kind,
        skipped=skipped,
        shape=row.shape,
        micro_batches=row.micro_batches,
        samples=row.samples,
        tokens=row.tokens,
        real_tokens=row.real_tokens,
        data_ns=row.data_ns,
        forward_ns=row.forward_ns or None,
        backward_ns=row.backward_ns,
        optimizer_ns=row.optimizer_ns,
        own_ns=row.own_ns,
        pause_ns=row.pause_ns,
        data_dry=row.data_dry,
    )


def _stamp(row: Row | Brief) -> Stamp | None:
    return row.event if isinstance(row, Row) else None


def _passed(row: Row | Brief) -> bool:
    stamp = _stamp(row)
    return stamp is not None and stamp.passed()


def _last_passed(raw: Sequence[Row | Brief]) -> int | None:
    """Returns the last row whose stamp the device has passed (waits for it, without spinning); None: no device."""
    stamped = [i for i, row in enumerate(raw) if _stamp(row) is not None]
    deadline = time.monotonic() + 15
    while stamped:
        if _passed(raw[stamped[-1]]):
            return stamped[-1]
        if time.monotonic() > deadline:  # the device is stuck: what it has passed stands
            stamped.pop()
        else:
            time.sleep(0.002)
    return None


def _device_spans(
    raw: Sequence[Row | Brief], host: Sequence[int], last: int, passed: int | None = None
) -> tuple[list[int], set[int]]:
    """Returns the device time of each interval, and those of which it cannot be told.

    `last` is the last row whose stamp counts, and `passed` the last that the device is known to have passed, if that
    is another: between the two the host's time stands in.

    Between two stamps the device time is known as a whole. It is split by the host times of the steps in it; that is
    no use where one of them held a pause, since nobody knows how much of the span was the pause's. Nothing is known
    of what comes after the last stamp that the device has passed.
    """
    spans = list(host)
    mixed = set(range(last, len(host)))
    start: int | None = None  # the row of the stamp before
    for end, row in enumerate(raw[: last + 1]):
        stamp = _stamp(row)
        if stamp is None:
            continue
        if start is not None:
            inside = range(start, end)  # intervals between the two stamps
            device_ns = stamp.resolve() if passed is None or end <= passed else None
            total = sum(host[i] for i in inside) or 1
            if device_ns is not None:
                for i in inside:
                    spans[i] = round(device_ns * host[i] / total)
            if len(inside) > 1 and any(raw[i + 1].flags & ~TIMED & ~SKIPPED for i in inside):
                mixed.update(i for i in inside if not raw[i + 1].flags & ~TIMED & ~SKIPPED)
        start = end
    return spans, mixed


def classify(
    raw: Sequence[Row | Brief],
    spans: Sequence[int],
    warmup_by_hand: int | None,
    mixed: Collection[int] = (),
    *,
    lead: bool = False,
) -> list[str]:
    """Returns the kind of each interval (one fewer than rows): what it is, and so whether it is measured.

    With `lead` the timed ones stay so that lead slowly: the meter has given up those that it could make up for.
    """
    kinds = _kinds(raw, mixed)
    _use_what_there_is(kinds, 3 if warmup_by_hand is None else warmup_by_hand)
    if warmup_by_hand is None and not lead:
        _drop_slow_lead(kinds, spans)
    return kinds


def _kinds(raw: Sequence[Row | Brief], mixed: Collection[int]) -> list[str]:
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
            elif f & TIMED:
                kinds.append("mixed" if i in mixed else "timed")
            else:
                kinds.append("warmup")
    return kinds


def _use_what_there_is(kinds: list[str], warmup: int) -> None:
    """A script that ended before the warm-up was over is measured on its last steps, all but the first `warmup`."""
    if "timed" in kinds:
        return
    for i in range(max(0, min(warmup - 1, len(kinds) - 1)), len(kinds)):
        if kinds[i] == "warmup":
            kinds[i] = "timed"


def _drop_slow_lead(kinds: list[str], spans: Sequence[int]) -> None:
    timed = [i for i, kind in enumerate(kinds) if kind == "timed"]
    if len(timed) < 5:
        return
    ordered = sorted(spans[i] for i in timed)
    median = (ordered[(len(timed) - 1) // 2] + ordered[len(timed) // 2]) / 2
    for i in timed[: len(timed) // 2]:
        if spans[i] <= 1.5 * median:
            return
        kinds[i] = "warmup"


def identity() -> tuple[int, int, int]:
    """Returns (rank, world size, local rank) of this process."""
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return rank, world, _number("LOCAL_RANK", rank)


def identity_of(session: Session) -> tuple[int, int, int]:
    """Returns the same of a session, whose process group may be gone."""
    found = identity()
    return session.identity if found[1] == 1 and session.identity is not None else found


def _number(name: str, otherwise: int) -> int:
    """Returns a variable of the environment as a number; what is none was not set by a launcher."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def _launch() -> str:
    """Returns what tells one launch of several ranks from another, and one attempt of torchrun from the next."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(os.environ.get(name, "-") for name in names)


def _finite(losses: Sequence[torch.Tensor]) -> list[float]:
    """Returns the losses up to the first that is not a finite number, which JSON cannot hold."""
    values = []
    for loss in losses:
        value = float(loss)
        if not math.isfinite(value):
            break
        values.append(value)
    return values


def _not_finite(step: int, *, scaled: bool) -> str:
    """Returns what a loss says that is not finite; a scaled one may pass the range of its dtype and mean nothing."""
    if scaled:
        return f"the loss times the GradScaler's scale is not a finite number at step {step}"
    return f"the loss is not a finite number at step {step}: the training has diverged"


def _counted_from(session: Session, rows: Sequence[StepRow]) -> str | None:
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
        version: Any = torch.cuda.nccl.version()
    except Exception:
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _rss_peak_bytes() -> int:
    """Returns the largest resident size that this process has had."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
            for line in stream:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not at the top: a script may have a resource.py of its own

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_launch(folder: str) -> dict[str, Any]:
    """Returns the options that the parent left in the run folder."""
    with open(os.path.join(folder, "launch.json"), encoding="utf-8") as stream:
        options: dict[str, Any] = json.load(stream)
    return options
