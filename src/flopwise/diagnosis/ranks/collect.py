"""The stage of one rank: its trace is read, its ledger made, its calls gathered. Ranks do not know each other here."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ledger.build import Given, LedgerError, Taken, record_of, scene_of, take
from flopwise.diagnosis.ledger.findings import findings
from flopwise.diagnosis.ledger.where import Places
from flopwise.diagnosis.ledger.windows import durations
from flopwise.diagnosis.ranks.health_rank import defects_of, unreadable
from flopwise.diagnosis.ranks.summary import Calls, RankSummary, no_calls
from flopwise.records.job import Defect
from flopwise.records.ledger import LedgerRecord
from flopwise.trace import cpu
from flopwise.trace.calls import tensors
from flopwise.trace.chrome import Progress, Trace, read
from flopwise.trace.collectives import DTYPE_WORDS, Moved, moved
from flopwise.trace.health import NO_TIME_NS, sift
from flopwise.trace.idle import CAUSES
from flopwise.trace.intervals import Spans, covered, subtract, union
from flopwise.trace.kinds import Kind
from flopwise.trace.ownership import Owner, own
from flopwise.trace.steps import optimizer_calls
from flopwise.trace.table import Events

Ints = npt.NDArray[np.int64]
#: How autograd's engine names what it runs. Source: torch/csrc/autograd/engine.cpp, `evaluate_function`.
ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Wanted:
    """What is asked of a rank's trace. Of `rank` and `world_size` the file's own word comes first."""

    path: str
    rank: int | None = None
    world_size: int | None = None
    device: int | None = None
    given: Given | None = None
    ledger: bool = True  # False: the calls alone, in less than half the time


def summarise(wanted: Wanted, progress: Progress | None = None) -> RankSummary:
    """Returns what one rank's trace comes down to.

    Raises:
        TraceError: the file cannot be read, or is no trace.
    """
    return summary_of(read(Path(wanted.path), progress), wanted)


def summary_of(trace: Trace, wanted: Wanted, ledger: LedgerRecord | None = None) -> RankSummary:
    """Returns what one rank's trace comes down to, where there is no work of a device with the reason and no calls.

    Args:
        trace: of the rank.
        wanted: what is asked of it.
        ledger: of undisturbed steps beside the trace, as a live run has them; None: that of the recorded steps is made.
    """
    try:
        taken = take(trace, wanted.device, wanted.given or Given(), peel=wanted.ledger)
    except LedgerError as error:
        known = _known(trace, wanted)
        wrong = defects_of(trace, sift(trace.events), rank=known.rank)
        return dataclasses.replace(
            no_ledger(known, str(error)), events=len(trace.events), defects=wrong
        )
    return summary_of_taken(trace, taken, wanted, ledger)


def summary_of_taken(
    trace: Trace, taken: Taken, wanted: Wanted, ledger: LedgerRecord | None = None
) -> RankSummary:
    """Returns what one rank's trace comes down to, once it is taken apart: `taken` has only the events that can be used.

    Arguments as in `summary_of`.
    """
    known = _known(trace, wanted)
    rank = known.rank
    record = ledger
    if record is None and wanted.ledger:
        record = record_of(taken)
        record.findings.extend(findings(scene_of(taken, record)))
    base_ns = _whole(trace.header.get("baseTimeNanoseconds"), NO_TIME_NS) or 0
    first = taken.sound.first
    bounds = taken.marks.bounds_ns[first:]
    defects: list[Defect] = []
    if taken.sifted is not None:
        defects = defects_of(
            trace, taken.sifted, rank=rank, device=taken.device, marks=taken.marks, first=first
        )
    calls = calls_of(taken, base_ns)
    kernels = durations(
        taken.job.events, taken.job.work, int(bounds[0]), int(bounds[-1]), len(bounds) - 1
    )
    talks = set(calls.kernel)  # which take as long as they wait
    return RankSummary(
        path=wanted.path,
        rank=rank,
        world_size=known.world_size,
        device=taken.device,
        device_name=taken.properties.get("name"),
        ledger=record,
        reason=None if record is not None else "not asked for",
        bounds_ns=bounds + base_ns,
        calls=calls,
        defects=defects,
        lines_ns=taken.tally.lines,
        kernels={name: of for name, of in kernels.items() if name not in talks},
        events=len(trace.events),
    )


def _known(trace: Trace, wanted: Wanted) -> Wanted:
    """Returns what is asked, with the rank and the size of the job that the trace's header says."""
    distributed = trace.header.get("distributedInfo")
    said = distributed if isinstance(distributed, dict) else {}
    rank, world_size = _whole(said.get("rank")), _whole(said.get("world_size"))
    return dataclasses.replace(
        wanted,
        rank=wanted.rank if rank is None else rank,
        world_size=wanted.world_size if world_size is None else world_size,
    )


def not_read(wanted: Wanted, why: str) -> RankSummary:
    """Returns the summary of a rank whose file cannot be read."""
    nothing = no_ledger(wanted, why)
    return dataclasses.replace(nothing, defects=[unreadable(wanted.path, why, wanted.rank)])


def no_ledger(wanted: Wanted, reason: str) -> RankSummary:
    """Returns the summary of a rank of which there is nothing but the reason."""
    return RankSummary(
        path=wanted.path,
        rank=wanted.rank,
        world_size=wanted.world_size,
        device=None,
        device_name=None,
        ledger=None,
        reason=reason,
        bounds_ns=np.zeros(0, np.int64),
        calls=no_calls(),
        defects=[],
    )


def _whole(value: object, limit: int = 2**31) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
    return value if good and isinstance(value, int) else None


def calls_of(taken: Taken, base_ns: int) -> Calls:
    """Returns the collectives and point-to-point calls of a device in the order of their start."""
    job, events = taken.job, taken.trace.events
    work = job.work
    kinds = (Kind.KERNEL, Kind.ANNOTATION)  # of a device; of threads of the host
    at = np.flatnonzero((job.kind == Owner.COMMUNICATION) & np.isin(events.kind[work.rows], kinds))
    if not len(at):
        return no_calls()
    rows, start, end = work.rows[at], work.start_ns[at], work.end_ns[at]
    words: list[Moved] = []
    labelled = np.zeros(len(at), bool)
    for i, k in enumerate(at.tolist()):
        said = _said(events, int(work.rows[k]), int(work.op[k]))
        labelled[i] = said >= 0
        name = events.name_of(int(work.rows[k]))
        if said < 0 and taken.device == cpu.DEVICE:
            words.append(_by_operands(events, int(work.rows[k]), name))
            labelled[i] = words[-1].nbytes >= 0
        else:
            words.append(moved(events.collectives[said] if said >= 0 else None, name))
    launched = work.launched_ns[at]
    if taken.device == cpu.DEVICE:
        launched = _launched_by_c10d(events, start, words)
    compute = _spans(work.start_ns, work.end_ns, job.kind == Owner.COMPUTE)
    bounds = taken.marks.bounds_ns
    covering, covered_from = _covering(compute, start, end)
    before, done = _did(taken, compute, start, end)
    step = np.searchsorted(bounds, start, "right") - 1 - taken.sound.first
    step[(step < 0) | (start >= bounds[-1])] = -1
    return Calls(
        start_ns=start + base_ns,
        end_ns=end + base_ns,
        launched_ns=launched + base_ns,
        stream=events.stream[rows],
        op=[one.op for one in words],
        nbytes=np.asarray([one.nbytes for one in words], np.int64),
        dtype=[one.dtype for one in words],
        group=[one.group for one in words],
        group_size=np.asarray([one.group_size for one in words], np.int64),
        members=[one.members for one in words],
        sequence=np.asarray([one.sequence for one in words], np.int64),
        peer=np.asarray([one.peer for one in words], np.int64),
        kernel=[events.name_of(int(row)) for row in rows],
        labelled=labelled,
        exposed_ns=(end - start) - covered(compute, start, end),
        covered=covering,
        covered_from=covered_from,
        step=step,
        backward_pass=_pass_of(backward_passes(events), launched),
        updates=_within(events, optimizer_calls(events), launched),
        tensors=[one.tensors for one in words],
        before=before,
        place=_places(events, work.op[at]),
        done=done,
    )


def _launched_by_c10d(events: Events, start: Ints, words: list[Moved]) -> Ints:
    """Returns when the training thread asked for collectives that other threads carry out: their own start where it is not known.

    The operator that asks and the range that carries out have no number in common: of those that move as much, the latest one
    before it that no later one has taken.
    """
    asked = np.flatnonzero(
        events.of(Kind.OP) & events.names_where(lambda n: n.startswith("c10d::"))
    )
    free: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in asked.tolist():
        one = _by_operands(events, row, events.name_of(row))
        free[one.op, one.nbytes].append(int(events.start_ns[row]))
    launched = start.copy()
    for i in np.argsort(start, kind="stable")[::-1].tolist():
        of = free.get((words[i].op, words[i].nbytes), [])
        at = bisect.bisect_right(of, int(start[i])) - 1
        if at >= 0:
            launched[i] = of[at]
            del of[at:]  # what lies between was asked for by nobody who is left
    found: Ints = launched
    return found


def _by_operands(events: Events, row: int, name: str) -> Moved:
    """Returns what a collective moves whose tensors are recorded: it is the range of a host thread."""
    number = int(events.operands[row])
    try:
        found = tensors(events.all_operands[number]) if number >= 0 else []
    except ValueError:
        found = []
    dtype = found[0].operand.dtype if found else ""
    nbytes = sum(one.operand.n_bytes for one in found) if found else -1
    return dataclasses.replace(
        moved(None, name), nbytes=nbytes, dtype=DTYPE_WORDS.get(dtype, dtype)
    )


def _said(events: Events, row: int, op: int) -> int:
    """Returns the number of what a call said about itself: on its kernel, else on its operator; -1: nothing."""
    own_words = int(events.collective[row])
    if own_words >= 0 or op < 0:
        return own_words
    return int(events.collective[op])


def _spans(start: Ints, end: Ints, rows: npt.NDArray[np.bool_]) -> Spans:
    return union(start[rows], end[rows])


def _covering(compute: Spans, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Returns the stretches of each call in which compute ran, from its start, and where those of each call begin."""
    pieces, counts = [np.zeros((0, 2), np.int64)], [0]
    first = np.searchsorted(compute.end, start, "right")
    last = np.searchsorted(compute.start, end, "left")
    for low, high, a, b in zip(start, end, first, last, strict=True):
        inside = np.stack([compute.start[a:b], compute.end[a:b]], axis=1) if b > a else pieces[0]
        pieces.append(np.clip(inside, low, high) - low)
        counts.append(len(inside))
    return np.concatenate(pieces), np.cumsum(counts)


def _did(taken: Taken, compute: Spans, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Returns what the rank did from the end of the last call before to the start of each one, shape (n, len(PARTS)), and since its first
    work by the start and by the end of each one, shape (n, 2, len(PARTS)).
    """
    job = taken.job
    work = job.work
    low = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    high = np.maximum(start, low)
    first = np.full(len(start), int(work.start_ns.min()), np.int64)
    copies = subtract(_spans(work.start_ns, work.end_ns, job.kind == Owner.COPY), compute)
    idle = own(work, job.kind, int(work.start_ns.min()), int(work.end_ns.max())).idle
    pieces = job.why_idle(idle).pieces
    parts = [compute, copies]
    for cause in CAUSES:
        mine = [piece for piece in pieces if piece.cause == cause]
        parts.append(
            union(
                np.asarray([piece.start_ns for piece in mine], np.int64),
                np.asarray([piece.end_ns for piece in mine], np.int64),
            )
        )
    before = np.stack([covered(spans, low, high) for spans in parts], axis=1)
    done = [[covered(spans, first, until) for spans in parts] for until in (start, end)]
    return before, np.asarray(done, np.int64).transpose(2, 0, 1)


def backward_passes(events: Events) -> Spans:
    """Returns the stretches of the host's time that belong to backward passes: each from where autograd begins to where the next
    forward does. What is asked for behind the last gradient, by a callback, is in it.
    """
    engine = events.names_where(lambda name: name.startswith(ENGINE)) & events.of(Kind.OP)
    spans = _spans(events.start_ns, events.end_ns, engine)
    if not spans:
        return spans
    outside = covered(spans, events.start_ns, events.start_ns + 1) == 0
    forward = np.sort(
        events.start_ns[events.of(Kind.OP) & ~engine & (events.sequence >= 0) & outside]
    )
    after = np.searchsorted(
        forward, spans.end
    )  # of each stretch, the first of the forward behind it
    first = np.concatenate([[True], np.searchsorted(forward, spans.start[1:]) > after[:-1]])
    last = np.append(first[1:], True)
    ends = np.append(forward, max(int(events.end_ns.max()), int(spans.end[-1])))
    return Spans(spans.start[first], np.maximum(spans.end[last], ends[after[last]]))


def _within(events: Events, rows: Ints, at_ns: Ints) -> npt.NDArray[np.bool_]:
    """Returns which instants lie in one of these events."""
    spans = union(events.start_ns[rows], events.end_ns[rows])
    found: npt.NDArray[np.bool_] = covered(spans, at_ns, at_ns + 1) > 0
    return found


def _pass_of(passes: Spans, launched_ns: Ints) -> Ints:
    """Returns the number of the backward pass in which something was launched, -1 for none."""
    if not passes:
        return np.full(len(launched_ns), -1, np.int64)
    number = np.searchsorted(passes.start, launched_ns, "right") - 1
    found: Ints = np.where((number >= 0) & (launched_ns < passes.end[number]), number, -1)
    return found


def _places(events: Events, ops: Ints) -> list[str]:
    if not (events.stack >= 0).any() and not events.of(Kind.PYTHON).any():
        return [""] * len(ops)
    places = Places(events)
    return [(places.of(int(op)) or "") if op >= 0 else "" for op in ops]
