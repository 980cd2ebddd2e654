"""Holds what flopwise says of the ranks of a job against what the job saw by its own clock. Arithmetic on records only; no torch.

What the job saw is `jobs/ddp.py`'s: where steps end, the tail of each backward pass, the faults, and blocks of steps in turns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from truth_compare import Outcome as Rows
from truth_compare import find_shift

from flopwise.records.job import JobRecord, RankRecord
from flopwise.trials.interval import independent_ratio, student_t_quantile

STEP_LIMIT_FRAC = 0.005
IDENTITY_LIMIT_FRAC = 1e-6
RESIDUAL_LIMIT_FRAC = 0.02  # what a trusted ledger may have
UNATTRIBUTED_LIMIT_FRAC = 0.05
WAIT_LIMIT_FRAC = 0.15  # of what was injected
#: Of exposed communication, and of the time in which data moves; and what is too short to be told.
MOVING_LIMIT_FRAC, MOVING_LIMIT_MS = 0.15, 0.2
OVERHEAD_LIMIT_FRAC = 0.01
BANDWIDTH_LIMIT_FRAC = 0.05
BETWEEN_CALLS_MS = (
    0.01  # of the direct time of a call: from the end of one to the start of the next
)
COMMUNICATION = ("comm_wait", "comm_transfer", "comm_unsplit")
#: Which reasons of a straggler fit a fault.
REASONS = {"host": ("host",), "matmul": ("work", "kernels")}

Truth = dict[str, Any]


def timed_rows(rank: dict[str, Any]) -> dict[int, float]:
    """Returns the steps that flopwise timed, by the number of their rows, milliseconds.

    Raises:
        LookupError: it timed none.
    """
    rows = {k: row["ns"] / 1e6 for k, row in enumerate(rank["rows"]) if row["kind"] == "timed"}
    if not rows:
        raise LookupError("no step was timed")
    return rows


def timed(rank: dict[str, Any], truth: Truth) -> dict[int, int]:
    """Returns which of the truth's intervals flopwise timed, by row: but for those behind which it did something of its own, between the
    end of its step and the script's mark.

    Raises:
        LookupError: it timed none, or some outside of the truth.
    """
    rows = timed_rows(rank)
    shift = find_shift(Rows("steps"), rank, rows, truth["step_ms"])
    if min(rows) + shift < 0 or max(rows) + shift >= len(truth["step_ms"]):
        raise LookupError(f"rows {min(rows)} to {max(rows)} have no truth")
    return {k: k + shift for k in rows if k + 1 in rows}


def mean_of(values: Sequence[float], steps: Iterable[int], ahead: int = 0) -> float:
    """Returns the mean over these intervals; `ahead` 1 for what is counted by steps, since interval k is step k + 1."""
    return statistics.fmean(values[k + ahead] for k in steps)


def in_turns(truth: Truth) -> dict[str, float] | None:
    """Returns how much longer a step is with than without, with its 95 % interval, milliseconds; None where it was not tried."""
    arms = truth.get("arms_ms") or {}
    differences = [
        on - off for on, off in zip(arms.get("on", []), arms.get("off", []), strict=True)
    ]
    n = len(differences)
    if n < 2:
        return None
    mean = statistics.fmean(differences)
    half = student_t_quantile(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    off = statistics.fmean(arms["off"])
    return {"ms": mean, "low_ms": mean - half, "high_ms": mean + half, "off_ms": off, "pairs": n}


def rank_figures(found: RankRecord, rank: dict[str, Any], truth: Truth) -> dict[str, Any]:
    """Returns what is said of one rank beside its truth; times in milliseconds a step.

    Raises:
        LookupError: it has no ledger, or its steps have no truth.
    """
    ledger = found.ledger
    if ledger is None:
        raise LookupError(f"rank {found.rank} has no ledger: {found.ledger_reason}")
    same = timed(rank, truth)
    rows, steps = timed_rows(rank), list(same.values())
    lines = {line.name: 1e3 * line.s for line in ledger.lines}
    halves = {line.name: 1e3 * (line.ci95[1] - line.ci95[0]) / 2 for line in ledger.lines}
    step_ms = 1e3 * ledger.step_s
    true_ms = mean_of(truth["step_ms"], steps)
    copies = truth.get("copies_ms") or {}
    tail = mean_of(truth["tail_ms"], steps, 1)
    return {
        "rank": found.rank,
        "step_ms": step_ms,
        "true_step_ms": true_ms,
        "step_ratio": statistics.fmean(rows[k] for k in same) / true_ms,
        "of_rows_ratio": step_ms / statistics.fmean(rows.values()),
        "steps": len(steps),
        "identity_error_frac": math.fsum(lines.values()) / step_ms - 1,
        "residual_frac": lines.get("residual", 0.0) / step_ms,
        "unattributed_frac": lines.get("unattributed", 0.0) / step_ms,
        "trusted": ledger.trusted,
        "untrusted_because": list(ledger.untrusted_because),
        "lines_ms": lines,
        "lines_half_ms": halves,
        "exposed_ms": math.fsum(lines.get(name, 0.0) for name in COMMUNICATION),
        "tail_ms": tail,
        "tail_without_copies_ms": tail - math.fsum(copies.values()),
        "copies_ms": copies,
        "in_turns": in_turns(truth),
        "fault_ms": mean_of(truth["fault_ms"], steps, 1) if truth["fault_ms"] else None,
        "matched": [found.matched, found.calls],
        "recorded_wait_ms": None if found.wait_s is None else 1e3 * found.wait_s,
        "findings": [[one.code, one.cause, one.share_frac] for one in ledger.findings],
    }


def job_figures(job: JobRecord) -> dict[str, Any]:
    """Returns what is said of the job."""
    transfer = [one.transfer_s for one in job.collectives if one.transfer_s is not None]
    return {
        "step_ms": None if job.step_s is None else 1e3 * job.step_s,
        "recorded_step_ms": None if job.recorded_step_s is None else 1e3 * job.recorded_step_s,
        "mfu": job.mfu,
        "lines_ms": {line.name: 1e3 * line.s for line in job.lines},
        "transfer_ms": 1e3 * math.fsum(transfer) if transfer else None,
        "collectives": [
            {
                "op": one.op,
                "nbytes": one.nbytes,
                "calls": one.calls,
                "ms": 1e3 * one.s,
                "wait_ms": None if one.wait_s is None else 1e3 * one.wait_s,
                "transfer_ms": None if one.transfer_s is None else 1e3 * one.transfer_s,
                "bus_bytes_per_s": one.bus_bytes_per_s,
                "of_link_frac": one.of_link_frac,
            }
            for one in job.collectives
        ],
        "stragglers": [
            {
                "rank": one.rank,
                "reason": one.reason,
                "per_step_ms": None if one.per_step_s is None else 1e3 * one.per_step_s,
                "delay_ms": 1e3 * one.delay_s,
                "share_frac": one.share_frac,
                "evidence": one.evidence,
            }
            for one in job.stragglers
        ],
        "stragglers_reason": job.stragglers_reason,
        "findings": [
            [one.code, one.cause, one.share_frac, one.evidence, one.advice] for one in job.findings
        ],
        "withheld": job.health.withheld,
        "defects": [[one.code, one.defect, one.rank, one.count] for one in job.health.defects],
        "untrusted_because": job.untrusted_because,
    }


def _alike(ms: float, true_ms: float) -> bool:
    return abs(ms - true_ms) <= MOVING_LIMIT_FRAC * abs(true_ms) + MOVING_LIMIT_MS


def withheld(job: dict[str, Any]) -> list[str]:
    """Returns what is not said of the job, and for which defects."""
    return [f"{what} is withheld by {', '.join(codes)}" for what, codes in job["withheld"].items()]


def judge_ledger(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what is wrong with the ledgers of a job without a fault; [] where nothing is."""
    wrong = []
    for one in ranks:
        who = f"rank {one['rank']}"
        if abs(one["step_ratio"] - 1) > STEP_LIMIT_FRAC:
            wrong.append(f"{who}: the step is {one['step_ratio']:.4f} of the true one")
        if abs(one["of_rows_ratio"] - 1) > IDENTITY_LIMIT_FRAC:
            wrong.append(f"{who}: the ledger's step is not the mean of the timed ones")
        if abs(one["identity_error_frac"]) > IDENTITY_LIMIT_FRAC:
            wrong.append(f"{who}: lines sum to the step but for {one['identity_error_frac']:.1e}")
        if abs(one["residual_frac"]) > RESIDUAL_LIMIT_FRAC:
            wrong.append(f"{who}: the residual is {one['residual_frac']:.2%}")
        if one["unattributed_frac"] > UNATTRIBUTED_LIMIT_FRAC:
            wrong.append(f"{who}: {one['unattributed_frac']:.2%} is unattributed")
        if one["matched"][0] < one["matched"][1]:
            wrong.append(f"{who}: {one['matched'][0]} of {one['matched'][1]} calls are matched")
        wrong += [f"{who}: {reason}" for reason in _exposed(one)]
    return wrong


def _exposed(one: dict[str, Any]) -> list[str]:
    """Returns what is wrong with the exposed communication: it is no less than the tail, no more than the step lacks without any."""
    low, turns, ms = one["tail_without_copies_ms"], one["in_turns"], one["exposed_ms"]
    found = []
    if ms < low and not _alike(ms, low):
        found.append(f"{ms:.2f} ms of exposed communication, and the tail alone is {low:.2f}")
    if turns is not None and ms > turns["high_ms"] and not _alike(ms, turns["high_ms"]):
        found.append(
            f"{ms:.2f} ms of exposed communication, and without any {turns['ms']:.2f} less"
        )
    return found


def judge_fault(
    kind: str,
    slow: int,
    job: dict[str, Any],
    ranks: Sequence[dict[str, Any]],
    base: dict[str, Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the wait beside what was injected, and what is wrong; [] where nothing is.

    Args:
        kind: of the fault.
        slow: the rank that has it.
        job: its `job_figures`.
        ranks: their `rank_figures`.
        base: the part without a fault, with `job` and `ranks`; None: waiting is taken to be nothing there.
    """
    by_rank = {one["rank"]: one for one in ranks}
    before = {one["rank"]: one for one in base["ranks"]} if base else {}
    turns = by_rank[slow]["in_turns"]
    true_ms = turns["ms"] if turns else by_rank[slow]["fault_ms"]
    others = [one for rank, one in by_rank.items() if rank != slow]
    waits = [one["lines_ms"].get("comm_wait", 0.0) for one in others]
    usual = [before[one["rank"]]["lines_ms"].get("comm_wait", 0.0) for one in others if before]
    wait_ms = statistics.fmean(waits) - (statistics.fmean(usual) if usual else 0.0)
    longer_ms = statistics.fmean(
        one["exposed_ms"] - (before[one["rank"]]["exposed_ms"] if before else 0.0) for one in others
    )
    first = job["stragglers"][0] if job["stragglers"] else None
    found = {
        "injected_ms": by_rank[slow]["fault_ms"],
        "step_longer_ms": turns,
        "wait_of_others_ms": wait_ms,
        "wait_ratio": wait_ms / true_ms,
        "exposed_longer_ms": longer_ms,
        "exposed_ratio": longer_ms / true_ms,
        "wait_of_slow_ms": by_rank[slow]["lines_ms"].get("comm_wait", 0.0),
        "named": first
        and {key: first[key] for key in ("rank", "reason", "per_step_ms", "delay_ms")},
        "finding": next((one for one in job["findings"] if one[0] == "J101"), None),
        "transfer_ms": job["transfer_ms"],
        "transfer_ms_without": base["job"]["transfer_ms"] if base else None,
    }
    wrong = []
    if first is None or first["rank"] != slow:
        wrong.append(f"rank {slow} is not named: {job['stragglers_reason'] or first}")
    elif first["reason"] not in REASONS[kind]:
        wrong.append(f"the reason is {first['reason']}")
    # While the others wait they have nothing left to compute: data that moves then is hidden no more.
    hidden_ms = job["transfer_ms"] or 0.0
    low_ms, high_ms = (true_ms * (1 + sign * WAIT_LIMIT_FRAC) for sign in (-1, 1))
    if not low_ms <= longer_ms <= high_ms:
        wrong.append(
            f"others have {longer_ms:.2f} ms more of communication, true are {true_ms:.2f}"
        )
    if not low_ms - hidden_ms <= wait_ms <= high_ms:
        wrong.append(f"others wait {wait_ms:.2f} ms a step longer, true are {true_ms:.2f}")
    if first is not None and not low_ms - hidden_ms <= first["delay_ms"] <= high_ms:
        wrong.append(
            f"the straggler is said to delay by {first['delay_ms']:.2f} ms, true are {true_ms:.2f}"
        )
    moved, without = found["transfer_ms"], found["transfer_ms_without"]
    if moved is not None and without is not None and not _alike(moved, without):
        wrong.append(f"data moves for {moved:.2f} ms a step, and {without:.2f} without the fault")
    for one in ranks:
        if abs(one["identity_error_frac"]) > IDENTITY_LIMIT_FRAC:
            wrong.append(f"rank {one['rank']}: the lines do not sum to the step")
    return found, wrong


def judge_overhead(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> tuple[dict[str, Any], list[str]]:
    """Returns the ratio of the steps under `flopwise run` to those without, and what is wrong.

    Args:
        pairs: (without, with), each with `step_ms` of the same steps, `all_ms`, `code` and `stdout`.
    """
    found: dict[str, Any] = {"pairs": len(pairs)}
    wrong = []
    for name in ("step_ms", "all_ms"):
        if len(pairs) >= 3:
            ratio = independent_ratio([a[name] for a, _ in pairs], [b[name] for _, b in pairs])
            found[name] = {
                "ratio": ratio.ratio,
                "low": ratio.low,
                "high": ratio.high,
                "values": [[a[name], b[name]] for a, b in pairs],
            }
    if "step_ms" not in found:
        wrong.append(f"{len(pairs)} pairs, and 3 are needed")
    elif found["step_ms"]["low"] - 1 > OVERHEAD_LIMIT_FRAC:
        wrong.append(f"steps take {found['step_ms']['ratio'] - 1:+.2%}")
    found["codes_equal"] = all(a["code"] == b["code"] == 0 for a, b in pairs)
    found["stdout_equal"] = all(a["stdout"] == b["stdout"] for a, b in pairs)
    if not found["codes_equal"]:
        wrong.append(f"exit codes: {[(a['code'], b['code']) for a, b in pairs]}")
    if not found["stdout_equal"]:
        wrong.append("what the script prints differs")
    return found, wrong


def judge_bandwidth(
    job: JobRecord, truths: Sequence[dict[str, Any]], ranks: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the bus bandwidth of each size by the traces and by the job's own clock, and what is wrong."""
    factor = 2 * (ranks - 1) / ranks
    found, wrong = [], []
    for size in truths[0]["ms"]:
        ms = statistics.median(value for one in truths for value in one["ms"][size])
        bus = int(size) / (ms * 1e-3) * factor
        row: dict[str, Any] = {"nbytes": int(size), "true_ms": ms, "true_bus_bytes_per_s": bus}
        for one in job.collectives:
            if one.op == "all_reduce" and one.nbytes == int(size) and one.algorithm_bytes_per_s:
                row["bus_is_told"] = one.bus_bytes_per_s is not None  # Gloo's groups have no size
                ours = one.bus_bytes_per_s or factor * one.algorithm_bytes_per_s
                row |= {"bus_bytes_per_s": ours, "of_link_frac": one.of_link_frac}
                row |= {"calls": one.calls, "ms": 1e3 * one.s / one.calls}
                row |= {"wait_frac": (one.wait_s or 0.0) / one.s, "ratio": ours / bus}
                row["transfer_ms"] = factor * int(size) / ours * 1e3
        most_ms = BANDWIDTH_LIMIT_FRAC * ms + BETWEEN_CALLS_MS
        if abs(row.get("transfer_ms", 0.0) - ms) > most_ms:
            said = f"{row['ratio']:.3f}" if "ratio" in row else "none"
            wrong.append(f"{int(size) / 2**20:g} MiB: {said} of the true bandwidth")
        found.append(row)
    return found, wrong
