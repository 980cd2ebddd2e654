"""The findings of a job: what its ranks have in common, who holds them up, and what they send for nothing."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from flopwise.diagnosis.ledger.findings import worth_frac
from flopwise.diagnosis.ranks.traffic import LATENCY_BYTES
from flopwise.records.finding import Alternative, Finding
from flopwise.records.job import JobRecord, RankRecord, Redundant, Straggler
from flopwise.units import duration, percent, size

#: Less of the step than this is no finding: what a ledger's lines can show is about as fine.
SHOWN_FRAC = 0.01
#: A link that carries less than this of what it can, in calls of more than a megabyte, is slow. Source: all-reduces of large
#: messages reach 78 to 82 % of NVLink's rate (stas00/ml-engineering network/README.md).
SLOW_FRAC = 0.6
MEASURED, SEEN = "measured", "seen"
#: Said of a late host in profiled steps.
PROFILED = ". These steps were profiled, which slows hosts, and not all alike: how much of it is left without a profiler is not known"
#: What shortens the moving of data.
_EARLIER = (
    "start them earlier and in larger pieces (DDP: bucket_cap_mb, gradient_as_bucket_view; FSDP: prefetch), accumulate with no_sync, "
    "send 16 bit"
)
#: Findings of a rank's own ledger that are of what it is late by, by the reason of a straggler.
_SAME = {
    "host": ("launch-bound", "host-read"),
    "input": ("input-wait",),
    "clock": ("low-clock",),
}
_WHY = {
    "host": "its host is late: look at its CPU's load, pinning and frequency, and at what only this rank does (logging, checkpoints)",
    "input": "it waits for its batches: look at its share of the data, its disk, and its loader's workers",
    "kernels": "what it computes takes it longer, most of all what is named: look at what that does there, and at the device (memory errors, neighbours)",
    "clock": "its clock is lower: look at its temperature, power limit and throttling",
    "work": "it has more to do: even out the batches (by tokens, not by samples), or the layers of the pipeline",
    "not known": "what it does meanwhile is not in the trace",
}


def findings_of(job: JobRecord) -> list[Finding]:
    """Returns the findings of a job, what is worth most first."""
    found = [] if "ledger" in job.health.withheld else _of_ranks(job.ranks)
    if job.stragglers:
        found = [_pointing(one, job) for one in _without_waiting(found, job)]
    found += [_straggler(one, job) for one in job.stragglers]
    found += [_redundant(one, job) for one in job.redundant if _share(one, job) >= SHOWN_FRAC]
    slow = _slow(job)
    if slow is not None:
        found.append(slow)
    return sorted(found, key=lambda finding: -worth_frac(finding))


def _of_ranks(ranks: list[RankRecord]) -> list[Finding]:
    """Returns the findings of the ranks' ledgers, each cause once: its share and gain are the mean over all ranks."""
    by_cause: dict[tuple[str, str], list[tuple[int, Finding]]] = defaultdict(list)
    have = [one for one in ranks if one.ledger is not None]
    for one in have:
        for finding in one.ledger.findings if one.ledger else ():
            by_cause[finding.code, finding.cause].append((one.rank, finding))
    out = []
    for (code, cause), of in by_cause.items():
        rank, worst = max(of, key=lambda pair: pair[1].share_frac or 0.0)
        gains = [f.predicted_gain_frac for _, f in of if f.predicted_gain_frac is not None]
        shares = [f.share_frac for _, f in of if f.share_frac is not None]
        n = len({number for number, _ in of})
        who = "all ranks" if n == len(have) else f"{n} of {len(have)} ranks"
        out.append(
            Finding(
                code=code,
                cause=cause,
                share_frac=sum(shares) / len(have) if shares else None,
                where=worst.where,
                evidence=f"on {who}; most on rank {rank}: {worst.evidence}"
                if len(have) > 1
                else worst.evidence,
                advice=worst.advice,
                predicted_gain_frac=sum(gains) / len(have) if gains else None,
                certainty=worst.certainty,
                alternatives=_alternatives([f for _, f in of], worst, len(have)),
            )
        )
    return out


def _alternatives(of: list[Finding], worst: Finding, ranks: int) -> list[Alternative]:
    """Returns the other cures of the worst rank, each with the mean of its gain over all ranks."""
    gains: dict[str, list[float]] = defaultdict(list)
    for other in (other for finding in of for other in finding.alternatives):
        if other.predicted_gain_frac is not None:
            gains[other.advice].append(other.predicted_gain_frac)
    return [
        Alternative(one.advice, sum(gains[one.advice]) / ranks if gains[one.advice] else None)
        for one in worst.alternatives
    ]


def _without_waiting(found: list[Finding], job: JobRecord) -> list[Finding]:
    """Returns the findings with exposed communication less the waiting in it, which is told of the rank that is waited for."""
    share = {line.name: line.share_frac for line in job.lines if line.family == "communication"}
    waiting = share.get("comm_wait")
    if not waiting:
        return found
    moving = share.get("comm_transfer", 0.0)
    unsplit = share.get("comm_unsplit", 0.0)
    left = moving + unsplit
    who = ", ".join(str(one.rank) for one in job.stragglers)
    said = (
        f"{percent(left + waiting)} of the step is collectives that no compute hides, mean over ranks: {percent(waiting)} waiting for "
        f"other ranks, most of all for rank {who} (J101), which is not counted here; {percent(moving)} moving data"
    )
    if unsplit >= SHOWN_FRAC:
        said += f"; {percent(unsplit)} of which it is not known"
    out = []
    for one in found:
        if one.cause != "exposed-communication":
            out.append(one)
        elif left >= SHOWN_FRAC:
            gain = one.predicted_gain_frac
            out.append(
                dataclasses.replace(
                    one,
                    share_frac=left,
                    evidence=said,
                    advice=_EARLIER,
                    predicted_gain_frac=None if gain is None else min(gain, left),
                )
            )
    return out


def _pointing(one: Finding, job: JobRecord) -> Finding:
    """Returns a finding of the ranks; where the others wait for a rank by the same cause, it says so: there are not two of them."""
    have = {
        rank.rank
        for rank in job.ranks
        if rank.ledger is not None
        and any(of.cause == one.cause and of.code == one.code for of in rank.ledger.findings)
    }
    late = [
        str(straggler.rank)
        for straggler in job.stragglers
        if straggler.rank in have and one.cause in _SAME.get(straggler.reason, ())
    ]
    if not late:
        return one
    said = f"on rank {', '.join(late)} it is also what the other ranks wait for (J101): one cause, not two"
    return dataclasses.replace(one, evidence=f"{one.evidence}; {said}")


def _straggler(one: Straggler, job: JobRecord) -> Finding:
    doubtful = one.reason == "host"  # a profiler was on as calls were recorded, in a live run too
    return Finding(
        code="J101",
        cause="straggler",
        share_frac=None if one.per_step_s is None else _of_step(one.per_step_s, job),
        where=one.where,
        evidence=f"{_waited(one, len(job.ranks))}{PROFILED if doubtful else ''}",
        advice=_WHY.get(one.reason, _WHY["not known"]),
        predicted_gain_frac=None,
        certainty=SEEN if doubtful else MEASURED,
    )


def _waited(one: Straggler, ranks: int) -> str:
    """Returns what the ranks wait for one of them, in words."""
    how_long = "" if one.per_step_s is None else f" {duration(one.per_step_s)} a step"
    return (
        f"mean over {ranks} ranks, a rank waits{how_long} for rank {one.rank}: {percent(one.share_frac)} of all waiting. "
        f"It {one.evidence.removeprefix('it ')}"
    )


def _of_step(s: float, job: JobRecord) -> float | None:
    """Returns the share of a step that seconds are which were recorded with it: of a live run not of an undisturbed one."""
    step_s = job.step_of_calls_s
    return s / step_s if step_s else None


def _share(one: Redundant, job: JobRecord) -> float:
    s = one.s if one.exposed_s is None else min(one.s, one.exposed_s)
    return _of_step(s, job) or 0.0


def _redundant(one: Redundant, job: JobRecord) -> Finding:
    return Finding(
        code="J102",
        cause="redundant-communication",
        share_frac=_share(one, job),
        where=[],
        evidence=f"{percent(one.frac)} of the bytes, {size(one.nbytes)} a step and rank in {one.calls:.3g} calls: {one.evidence}",
        advice=one.advice,
        predicted_gain_frac=None,
        certainty=MEASURED,
    )


def _slow(job: JobRecord) -> Finding | None:
    large = [
        one
        for one in job.collectives
        if one.of_link_frac is not None and one.nbytes is not None and one.nbytes >= LATENCY_BYTES
    ]
    transfer = sum(one.transfer_s or 0.0 for one in large)
    if not transfer:
        return None
    used = sum((one.of_link_frac or 0.0) * (one.transfer_s or 0.0) for one in large) / transfer
    exposed = _of_step(sum(one.exposed_transfer_s or 0.0 for one in large), job) or 0.0
    if used >= SLOW_FRAC or exposed < SHOWN_FRAC:
        return None
    worst = max(large, key=lambda one: one.transfer_s or 0.0)
    return Finding(
        code="J103",
        cause="slow-link",
        share_frac=exposed,
        where=[],
        evidence=f"while data moves, calls of 1 MiB and more use {percent(used)} of {job.links.name}; the longest: {worst.op} of "
        f"{size(worst.nbytes or 0)} at {size(worst.bus_bytes_per_s or 0.0)}/s bus bandwidth",
        advice="larger buckets (DistributedDataParallel(..., bucket_cap_mb=...)), fewer and larger messages; check that NCCL takes the "
        "fast link (NCCL_DEBUG=INFO) and has its channels (NCCL_MIN_NCHANNELS)",
        predicted_gain_frac=None,
        certainty=MEASURED,
    )
