"""What moves between the ranks: by operation and size, how fast against the link, and what of it moves nothing new."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.summary import Calls, RankSummary
from flopwise.diagnosis.ranks.waits import Waits
from flopwise.hardware.accelerators import Accelerator
from flopwise.records.job import CollectiveKind, Links, Redundant
from flopwise.trace.collectives import bus_factor

Ints = npt.NDArray[np.int64]
#: A message so small is bound by latency, not by the link. Source: NCCL's bus bandwidth on NVLink is below half of its best
#: under about 1 MB (NVIDIA/nccl-tests result tables).
LATENCY_BYTES = 1 << 20
ACCUMULATION, REPEATED, BUFFERS, WIDE = "accumulation", "repeated", "buffers", "wide-gradients"
#: Dtypes of token numbers, labels and lengths.
WHOLE_NUMBERS = frozenset(("i64", "i32", "i8", "u8"))
#: Products in slower dtypes cost, beyond what they would in 16 bit, less than this of the useful time: the model is one of 16 bit.
SLOWER_MOST_FRAC = 0.5


@dataclass(eq=False)
class _Sum:
    calls: int = 0
    ns: float = 0.0
    exposed_ns: float = 0.0
    exposed_transfer_ns: float = 0.0
    wait_ns: float = 0.0
    matched_ns: float = 0.0
    matched: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    members: tuple[int, ...] = ()
    redundant: str | None = None


def steps_of(one: RankSummary) -> int:
    """Returns how many of a rank's steps count."""
    return max(0, len(one.bounds_ns) - 1)


def kinds(
    ranks: Sequence[RankSummary],
    waits: Waits | None,
    link_bytes_per_s: float | None,
    redundant: dict[tuple[int, int], str],
) -> list[CollectiveKind]:
    """Returns the calls of the steps that count by operation, size and group, the longest first.

    Args:
        ranks: those that were read.
        waits: None: waiting cannot be told from transferring.
        link_bytes_per_s: of one device, in one direction.
        redundant: (position, call) -> why it moves nothing new.
    """
    sums: dict[tuple[str, str, int, str, int], _Sum] = defaultdict(_Sum)
    steps = sum(steps_of(one) for one in ranks)
    for p, one in enumerate(ranks):
        calls = one.calls
        for i in np.flatnonzero(calls.step >= 0).tolist():
            key = (
                calls.op[i],
                calls.group[i],
                int(calls.group_size[i]),
                calls.dtype[i],
                int(calls.nbytes[i]),
            )
            mine = sums[key]
            ns = int(calls.end_ns[i] - calls.start_ns[i])
            mine.calls += 1
            mine.ns += ns
            mine.exposed_ns += int(calls.exposed_ns[i])
            mine.kernels[calls.kernel[i]] += ns
            mine.members = calls.members[i]
            mine.redundant = mine.redundant or redundant.get((p, i))
            if waits is not None and waits.wait_ns[p][i] >= 0:
                mine.wait_ns += int(waits.wait_ns[p][i])
                mine.matched_ns += ns
                mine.exposed_transfer_ns += _exposed_ns(calls, i, p, waits)
                mine.matched += 1
    found = [_kind(key, mine, steps, link_bytes_per_s) for key, mine in sums.items()]
    return sorted(found, key=lambda one: -one.s)


def _kind(
    key: tuple[str, str, int, str, int], mine: _Sum, steps: int, link: float | None
) -> CollectiveKind:
    op, group, size, dtype, nbytes = key
    whole = mine.matched == mine.calls and mine.calls > 0
    transfer_ns = mine.matched_ns - mine.wait_ns
    rate = bus = None
    if mine.matched and transfer_ns > 0 and nbytes > 0:
        rate = nbytes * mine.matched / (transfer_ns * 1e-9)
        factor = bus_factor(op, size)
        bus = None if factor is None else rate * factor
    each = 1e-9 / steps if steps else 0.0
    return CollectiveKind(
        op=op,
        group=group,
        group_size=size if size > 0 else None,
        ranks=list(mine.members) or None,
        dtype=dtype or None,
        nbytes=nbytes if nbytes >= 0 else None,
        calls=mine.calls / steps if steps else 0.0,
        s=mine.ns * each,
        wait_s=mine.wait_ns * each if whole else None,
        transfer_s=transfer_ns * each if whole else None,
        exposed_s=mine.exposed_ns * each,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=bus,
        of_link_frac=bus / link if bus and link else None,
        kernels=[name for name, _ in mine.kernels.most_common(3)],
        redundant=mine.redundant,
        exposed_transfer_s=mine.exposed_transfer_ns * each if whole else None,
    )


def links(
    ranks: Sequence[RankSummary], found: Sequence[CollectiveKind], row: Accelerator | None
) -> Links:
    """Returns how much of the link between the devices was used, over the step and while data moved."""
    step_s = float(np.mean([step_s_of(one) for one in ranks])) if ranks else 0.0
    speed = row.link_gb_per_s * 1e9 if row is not None and row.link_gb_per_s else None
    name = row.link if row is not None else None
    known = [one for one in found if one.bus_bytes_per_s and one.transfer_s]
    reason = None
    if speed is None:
        reason = "the link of this device is not known"
    elif not known:
        reason = "no call tells its size and its transfer time"
    moved = sum((one.bus_bytes_per_s or 0.0) * (one.transfer_s or 0.0) for one in known)
    transfer = sum(one.transfer_s or 0.0 for one in known)
    good = speed is not None and known
    return Links(
        name=name,
        bytes_per_s=speed,
        source=row.source if row is not None and speed else None,
        step_average_frac=moved / step_s / speed if good and speed and step_s else None,
        in_collectives_frac=moved / transfer / speed if good and speed and transfer else None,
        reason=reason,
    )


def step_s_of(one: RankSummary) -> float:
    """Returns the mean of a rank's recorded steps."""
    n = steps_of(one)
    return float(one.bounds_ns[-1] - one.bounds_ns[0]) * 1e-9 / n if n else 0.0


# ---------------------------------------------------------------------- what moves nothing new


@dataclass(eq=False)
class _Found:
    """Calls of one kind of redundant traffic: (position, call) -> which part of its bytes is."""

    parts: dict[tuple[int, int], float] = field(default_factory=dict)
    evidence: str = ""


def redundant(
    ranks: Sequence[RankSummary], waits: Waits | None
) -> tuple[list[Redundant], float | None, dict[tuple[int, int], str]]:
    """Returns the traffic that moves nothing new, which share of all bytes that is, and the calls that it is in.

    None for the share where no call tells its size. A call is counted once, for the first of: accumulation, repeated, buffers,
    wide gradients.
    """
    kinds_of = {
        ACCUMULATION: _accumulated(ranks),
        REPEATED: _repeated(ranks),
        BUFFERS: _buffers(ranks),
        WIDE: _wide(ranks),
    }
    total = sum(
        int(one.calls.nbytes[(one.calls.step >= 0) & (one.calls.nbytes > 0)].sum()) for one in ranks
    )
    if not total:
        return [], None, {}
    taken: dict[tuple[int, int], str] = {}
    out: list[Redundant] = []
    steps = sum(steps_of(one) for one in ranks)
    for kind, found in kinds_of.items():
        mine = {call: part for call, part in found.parts.items() if call not in taken}
        if not mine:
            continue
        taken.update(dict.fromkeys(mine, kind))
        nbytes = sum(int(ranks[p].calls.nbytes[i]) * part for (p, i), part in mine.items())
        out.append(
            Redundant(
                kind=kind,
                nbytes=nbytes / steps,
                frac=nbytes / total,
                s=sum(
                    _transfer_ns(ranks[p].calls, i, p, waits) * part
                    for (p, i), part in mine.items()
                )
                * 1e-9
                / steps,
                exposed_s=sum(
                    _exposed_ns(ranks[p].calls, i, p, waits) * part for (p, i), part in mine.items()
                )
                * 1e-9
                / steps,
                calls=len(mine) / steps,
                evidence=found.evidence,
                advice=ADVICE[kind],
            )
        )
    return out, sum(one.frac for one in out), taken


ADVICE = {
    ACCUMULATION: "run all micro-batches but the last under model.no_sync()",
    REPEATED: "leave out the second call: nothing was computed since the first one",
    BUFFERS: "DistributedDataParallel(..., broadcast_buffers=False), if the buffers need not agree (batch norm in training: use "
    "SyncBatchNorm, or none)",
    WIDE: "register_comm_hook(None, bf16_compress_hook), or keep the gradients in 16 bit: half the bytes",
}


def _transfer_ns(calls: Calls, i: int, p: int, waits: Waits | None) -> float:
    ns = int(calls.end_ns[i] - calls.start_ns[i])
    if waits is not None and waits.wait_ns[p][i] >= 0:
        ns -= int(waits.wait_ns[p][i])
    return float(ns)


def _exposed_ns(calls: Calls, i: int, p: int, waits: Waits | None) -> float:
    """Returns how long a call moved data that no compute hid; with its waiting where that cannot be told apart."""
    ns = int(calls.exposed_ns[i])
    if waits is not None and waits.exposed_ns[p][i] >= 0:
        ns -= int(waits.exposed_ns[p][i])
    return float(ns)


def _gradients(calls: Calls, i: int) -> bool:
    return calls.op[i] == "all_reduce" and calls.backward_pass[i] >= 0 and calls.nbytes[i] > 0


def _accumulated(ranks: Sequence[RankSummary]) -> _Found:
    """Gradients that are summed over the ranks in each micro-batch: all but the last of a step, where they are the same ones."""
    found = _Found()
    passes_seen: Counter[int] = Counter()
    for p, one in enumerate(ranks):
        calls = one.calls
        for step in range(steps_of(one)):
            by_pass: dict[int, list[int]] = defaultdict(list)
            for i in np.flatnonzero(calls.step == step).tolist():
                if _gradients(calls, i):
                    by_pass[int(calls.backward_pass[i])].append(i)
            if len(by_pass) < 2:
                continue
            sizes = [
                Counter((calls.group[i], int(calls.nbytes[i])) for i in of)
                for of in by_pass.values()
            ]
            first, last = (
                sizes[0],
                sizes[-1],
            )  # the last may have more: the norm of all gradients, say
            if any(one_of != first for one_of in sizes[:-1]) or first - last:
                continue
            passes_seen[len(sizes)] += 1
            for of in list(by_pass.values())[:-1]:
                found.parts.update({(p, i): 1.0 for i in of})
    if found.parts:
        n = passes_seen.most_common(1)[0][0]
        found.evidence = f"a step has {n} backward passes, and each sums the same gradients over the ranks: once is enough"
    return found


def _repeated(ranks: Sequence[RankSummary]) -> _Found:
    """A call like the one before it on its stream and group, between which the device computed nothing."""
    found = _Found()
    example = ""
    for p, one in enumerate(ranks):
        calls = one.calls
        for i in np.flatnonzero(calls.step >= 0).tolist():
            if not i or calls.nbytes[i] < LATENCY_BYTES or calls.step[i - 1] != calls.step[i]:
                continue
            same = (
                calls.op[i] == calls.op[i - 1]
                and calls.nbytes[i] == calls.nbytes[i - 1]
                and calls.group[i] == calls.group[i - 1]
                and calls.tensors[i] == calls.tensors[i - 1] != ()
            )
            computed = int(calls.before[i][0])
            if same and computed == 0:
                found.parts[p, i] = 1.0
                example = example or f"{calls.op[i]} of {calls.nbytes[i] / 1e6:.3g} MB"
    if found.parts:
        found.evidence = (
            f"the same buffer is moved twice in a row with nothing computed between: {example}"
        )
    return found


def _buffers(ranks: Sequence[RankSummary]) -> _Found:
    """Broadcasts in every step, but those of whole numbers, which are batches, and those of an optimizer that updates a part of the
    parameters on each rank (torch.distributed.optim.ZeroRedundancyOptimizer).
    """
    found = _Found()
    for p, one in enumerate(ranks):
        calls = one.calls
        steps = steps_of(one)
        mine = [
            i
            for i in np.flatnonzero(calls.step >= 0).tolist()
            if calls.op[i] == "broadcast"
            and calls.nbytes[i] > 0
            and not calls.updates[i]
            and calls.dtype[i] not in WHOLE_NUMBERS
        ]
        in_steps = {int(calls.step[i]) for i in mine}
        if steps >= 2 and len(in_steps) == steps:
            found.parts.update({(p, i): 1.0 for i in mine})
    if found.parts:
        found.evidence = "every step broadcasts: buffers that all ranks have, or parameters that all ranks have already"
    return found


def _wide(ranks: Sequence[RankSummary]) -> _Found:
    """Gradients of 32 bit, where most products ran in 16 bit."""
    found = _Found()
    for p, one in enumerate(ranks):
        if not _in_16_bit(one):
            continue
        calls = one.calls
        for i in np.flatnonzero(calls.step >= 0).tolist():
            if _gradients(calls, i) and calls.dtype[i] == "f32":
                found.parts[p, i] = 0.5
    if found.parts:
        found.evidence = "gradients are summed in 32 bit while the products run in 16 bit: in 16 bit they are half of the bytes, and their sum is rounded otherwise"
    return found


def _in_16_bit(one: RankSummary) -> bool:
    """Whether most of a rank's products run in 16 bit: its ledger has no line for a slower dtype, or a small one."""
    if one.ledger is None or one.ledger.device < 0:
        return False
    lines = {line.name: line.s for line in one.ledger.lines}
    ideal, slower = lines.get("ideal", 0.0), lines.get("precision", 0.0)
    return ideal > 0 and slower < SLOWER_MOST_FRAC * ideal
