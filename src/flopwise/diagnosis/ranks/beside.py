"""What lies beside the traces of a job: dumps of flight recorders say where it hangs, logs of NCCL what its messages go through."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.finding import Finding
from flopwise.trace.flight import Dump
from flopwise.trace.hang import Stuck, stuck
from flopwise.trace.nccl_records import NcclLog

SEEN = "seen"
SHOWN = 8  # ranks, or warnings, that one sentence names


def hangs(dumps: Sequence[Dump]) -> list[Finding]:
    """Returns where the ranks of a hung job parted, the earliest first; nothing where all calls ended.

    Raises:
        TraceError: it is not known whose a dump is, or two are of one rank.
    """
    return [
        Finding(
            code="J104",
            cause="hang",
            share_frac=None,
            where=list(dict.fromkeys(one.where.values()))[:3],
            evidence=one.evidence,
            advice=_cure(one),
            predicted_gain_frac=None,
            certainty=SEEN,
        )
        for one in stuck(dumps)
    ]


def _cure(one: Stuck) -> str:
    if one.verdict == "mismatched":
        return "let all ranks of the group call the same operations with the same sizes in the same order"
    if one.verdict == "missing":
        ranks = ", ".join(map(str, sorted(one.behind)[:SHOWN]))
        return (
            f"look at what rank {ranks} does instead: an exception that was caught, another branch, fewer batches than the others "
            "(join(), drop_last), or a process that is gone"
        )
    return "all ranks called it: look at the network and the devices (NCCL_DEBUG=INFO, dmesg, nvidia-smi)"


def routes(logs: Sequence[NcclLog]) -> tuple[list[Finding], list[str]]:
    """Returns slow routes as findings, and what else logs say as notes."""
    found: list[Finding] = []
    notes: list[str] = []
    for log in logs:
        through = ", ".join(f"{name} {n}" for name, n in log.transports.items()) or "none is named"
        notes.append(
            f"{log.path}: NCCL {', '.join(log.versions) or 'of a version that it does not say'}, connections through {through}"
        )
        notes += [
            f"{log.path}: NCCL warned {one.count} times: {one.text[:200]}"
            if one.count > 1
            else f"{log.path}: NCCL warned: {one.text[:200]}"
            for one in log.warnings[:SHOWN]
        ]
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


def _route(evidence: str, advice: str) -> Finding:
    return Finding("J105", "slow-route", None, [], evidence, advice, None, SEEN)
