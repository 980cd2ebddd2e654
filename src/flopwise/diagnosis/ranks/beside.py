"""What lies beside the traces of a job: dumps of flight recorders say where it hangs, logs of NCCL what its messages go through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flopwise.records.finding import Finding
from flopwise.trace.flight_records import Dump
from flopwise.trace.hang import Stuck, roots, stuck
from flopwise.trace.hang_groups import listed
from flopwise.trace.nccl_records import NcclLog

SEEN = "seen"
SHOWN = 8  # ranks, or warnings, that one sentence names


def hangs(dumps: Sequence[Dump]) -> list[Finding]:
    """Returns where the ranks of a hung job parted: the calls with which it began; nothing where all calls ended.

    Where no rank is at fault, the earliest calls that did not end. Of the others the first finding says how many there are.

    Raises:
        TraceError: it is not known whose a dump is, or two are of one rank.
    """
    found = stuck(dumps)
    shown = roots(found)[:SHOWN]
    more = len(found) - len(shown)
    rest = f"; {more} more calls did not end, which may be for this" if more else ""
    return [
        Finding(
            code="J104",
            cause="hang",
            share_frac=None,
            where=list(dict.fromkeys(one.where.values()))[:3],
            evidence=one.evidence + ("" if k else rest),
            advice=_cure(one),
            predicted_gain_frac=None,
            certainty=SEEN,
        )
        for k, one in enumerate(shown)
    ]


def ended(dumps: Sequence[Dump]) -> str | None:
    """Returns what dumps say in which no hang was found; None of none."""
    if not dumps:
        return None
    n, calls = len(dumps), sum(len(one.entries) for one in dumps)
    left = sum(len(one.open) for one in dumps)
    of = f"{n} dump{'s' * (n != 1)} of flight recorders"
    if left:
        return f"{of}: {left} of {calls} calls in them did not end, and for what they wait is not known"
    return f"{of}: all {calls} calls in them ended"


def _cure(one: Stuck) -> str:
    if one.verdict == "mismatched":
        return "let all ranks of the group call the same operations with the same sizes in the same order"
    if one.verdict == "missing":
        behind = one.idle or tuple(one.behind)
        return (
            f"look at what {listed(behind)} {'does' if len(behind) == 1 else 'do'} instead: an exception that was caught, another branch, "
            "fewer batches than the others (join(), drop_last), or a process that is gone"
        )
    if one.verdict == "partial":
        return (
            f"look at the device of {listed(one.waiting)}, where it did not end as it did on the others: an error that stops a "
            "device (Xid in dmesg), or work before it on the device that does not end"
        )
    if one.at:  # a send or a receive
        return f"look at what {listed(tuple(one.at))} does instead of the other half of it"
    if one.no_dump:
        return (
            f"see whether {listed(one.no_dump)} still {'runs' if len(one.no_dump) == 1 else 'run'}, and find the dumps: whether the call "
            "was made there is not known"
        )
    return "all ranks called it: look at the network and the devices (NCCL_DEBUG=INFO, dmesg, nvidia-smi)"


def routes(logs: Sequence[NcclLog]) -> tuple[list[Finding], list[str]]:
    """Returns slow routes as findings, and what else logs say as notes."""
    found: list[Finding] = []
    notes: list[str] = []
    for log in logs:
        through = _few([f"{name} {n}" for name, n in log.transports.items()]) or "none is named"
        versions = _few(log.versions) or "of a version that it does not say"
        notes.append(f"{log.path}: NCCL {versions}, connections through {through}")
        notes += [f"{log.path}: {said}" for said in _doubts(log)]
        notes += [
            f"{log.path}: NCCL warned {one.count} times: {one.text[:200]}"
            if one.count > 1
            else f"{log.path}: NCCL warned: {one.text[:200]}"
            for one in log.warnings[:SHOWN]
        ]
        if len(log.warnings) > SHOWN:
            notes.append(f"{log.path}: NCCL warned of {len(log.warnings) - SHOWN} more things")
        sockets = sum(n for name, n in log.transports.items() if name == "NET/Socket")
        if sockets:
            found.append(
                _route(
                    f"{sockets} of {sum(log.transports.values())} connections go through TCP sockets ({log.path})",
                    "let NCCL find the fast network: install its plugin or the InfiniBand drivers, and check NCCL_IB_DISABLE, NCCL_NET, "
                    "NCCL_SOCKET_IFNAME",
                )
            )
        elif log.gdrdma is False:
            found.append(
                _route(
                    f"network connections do not read device memory themselves: no GPUDirect RDMA ({log.path})",
                    "load nvidia_peermem (or use DMA-BUF), and check NCCL_NET_GDR_LEVEL",
                )
            )
    return found, notes


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _doubts(log: NcclLog) -> Iterator[str]:
    """Yields in what a log's ranks contradict each other, and what of it was not read."""
    if log.ends_early is not None:
        yield f"{log.ends_early}: what comes behind is not read"
    if log.unreadable:
        yield f"{log.unreadable} lines of NCCL's begin as known ones and cannot be read"
    yield from log.notes


def _route(evidence: str, advice: str) -> Finding:
    return Finding("J105", "slow-route", None, [], evidence, advice, None, SEEN)
