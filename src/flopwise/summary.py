"""From rank records to the run record: means over ranks, intervals, throughput, MFU, cost. Concludes, measures nothing."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from flopwise._version import __version__
from flopwise.diagnosis import explain
from flopwise.diagnosis.findings import find as find_causes
from flopwise.errors import NothingMeasuredError
from flopwise.flops import mfu as utilisations
from flopwise.hardware.accelerators import Match, Peak, lookup, peak_of, reference_peak
from flopwise.hardware.ceilings import measured_peak
from flopwise.hardware.host import cpu_model
from flopwise.records import run as records
from flopwise.records.ceilings import CeilingsRecord
from flopwise.records.rank import FlopCount, RankRecord, StepRow, Telemetry
from flopwise.records.run import RunRecord
from flopwise.trials.interval import mean_interval
from flopwise.units import percent

#: Share of the step that waits for data from which a job is called input-bound.
INPUT_BOUND_FRAC = 0.2
#: Strata shown one by one; the rest are summed.
STRATA = 8


@dataclass(frozen=True)
class Context:
    """What the parent knows besides the rank records."""

    command: list[str]
    script: str
    exit_code: int | None = None
    peak: Peak | None = None  # given by the user
    price_usd_per_hour: float | None = None
    ceilings: CeilingsRecord | None = None  # of this device, measured, where they are known
    notes: list[str] = field(default_factory=list)
    created: str = ""
    plan: str | None = None  # path of the plan that was applied


def summarise(ranks: Sequence[RankRecord], context: Context) -> RunRecord:
    """Returns the run record.

    Raises:
        NothingMeasuredError: no rank has a single interval to measure.
    """
    everything, ranks = ranks, one_per_rank(ranks)
    lead = _lead(ranks)
    timed = {r.rank: [row for row in r.rows if row.kind == "timed"] for r in ranks}
    ranks_timed = [r for r in ranks if timed[r.rank]]
    means = [_mean_s(timed[r.rank]) for r in ranks_timed]
    step_s = statistics.fmean(means)
    sampled = {r.rank: _looked_at(r, timed[r.rank]) for r in ranks_timed}
    steps = _steps(lead, timed[lead.rank], step_s)
    missing = _missing(ranks, ranks_timed, lead.world_size)
    devices = Devices.of(ranks_timed)
    throughput = _throughput(ranks_timed, sampled, step_s, lead.counted_from, missing)
    own = statistics.fmean(_own_ns(r, timed[r.rank]) for r in ranks_timed)
    host = statistics.fmean(row.host_ns for r in ranks_timed for row in timed[r.rank])
    others = _other_trainings(everything, ranks)
    notes = list(dict.fromkeys([*context.notes, *others, *_notes(ranks, timed), *devices.notes]))
    mfu = _mfu(ranks_timed, timed, step_s, context, notes, devices, missing)
    if mfu.value and throughput.padding_frac:
        share = percent(throughput.padding_frac)
        notes.append(f"{share} of the positions are padding; MFU counts what they compute, too")
    record = RunRecord(
        schema=records.SCHEMA,
        flopwise=__version__,
        created=context.created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=context.command,
        script=context.script,
        exit_code=context.exit_code,
        complete=all(r.status == "complete" for r in ranks) and len(ranks) == lead.world_size,
        env=_env(ranks, Devices.of(ranks)),
        steps=steps,
        step_s=_step_time(timed[lead.rank], step_s, lead.clock),
        throughput=throughput,
        mfu=mfu,
        phases=_phases(ranks_timed, timed, sampled),
        memory=records.Memory(
            allocated_peak_bytes=_largest(r.allocated_peak_bytes for r in ranks),
            reserved_peak_bytes=_largest(r.reserved_peak_bytes for r in ranks),
            device_total_bytes=lead.device_total_bytes,
            host_rss_peak_bytes=max(r.host_rss_peak_bytes for r in ranks),
        ),
        clocks=_clocks(lead),
        energy=_energy(devices, step_s, throughput.samples_per_step, missing),
        cost=_cost(context.price_usd_per_hour, devices.priced, step_s, throughput, missing),
        ranks=_ranks(ranks, timed, lead.world_size),
        overhead_frac=own / host,
        overhead=records.Overhead(
            host_frac=own / host,
            host_us_per_step=own / 1e3,
            attach_s=max(r.attach_ns for r in ranks) * 1e-9,
            method="time in our hooks and of calling them, over host time",
        ),
        patches=lead.patches,
        notes=notes,
        plan=context.plan,
        losses=lead.losses,
    )
    return replace(
        record,
        notes=[*notes, *explain.notes(ranks_timed, record)],
        findings=find_causes(ranks_timed, record),
    )


@dataclass(frozen=True)
class Devices:
    """The devices that some ranks ran on, each counted once."""

    shared_by: list[list[RankRecord]]  # the ranks by device; on a CPU each rank for itself
    count: float  # for MFU: on a CPU one is what the peak was measured on, the threads of one rank
    priced: int  # for cost: on a CPU one is a host
    notes: list[str]

    @classmethod
    def of(cls, ranks: Sequence[RankRecord]) -> Devices:
        """Returns the devices of these ranks, told apart by host and UUID; where that is unknown, each has its own."""
        by_host: dict[str, list[RankRecord]] = {}
        for r in ranks:
            by_host.setdefault(r.host, []).append(r)
        if all(r.device_type == "cpu" for r in ranks):
            count = sum(_cpus(here) for here in by_host.values())
            return cls([[r] for r in ranks], count, len(by_host), _crowding(by_host))
        found: dict[tuple[str, str], list[RankRecord]] = {}
        for r in ranks:
            found.setdefault((r.host, r.telemetry.uuid or f"of rank {r.rank}"), []).append(r)
        notes = [
            f"ranks {', '.join(str(r.rank) for r in group)} share one device of {host}: it counts once"
            for (host, _), group in found.items()
            if len(group) > 1
        ]
        notes += [
            f"which device each of the {len(here)} ranks on {host} used is not known, so each counts as one of its own: "
            "if ranks share a device, MFU is higher, and energy and cost are lower than given"
            for host, here in by_host.items()
            if len(here) > 1 and any(r.telemetry.uuid is None for r in here)
        ]
        return cls(list(found.values()), len(found), len(found), notes)


def _cpus(here: Sequence[RankRecord]) -> float:
    """Returns how many ranks' worth of threads the cores of one host hold, at most one a rank."""
    cores = _cores(here)
    wanted = sum(r.cpu_threads for r in here)
    if cores is None or wanted <= cores:
        return len(here)
    return min(len(here), max(1.0, cores / here[0].cpu_threads))


def _cores(here: Sequence[RankRecord]) -> int | None:
    """Returns the cores that ranks on one host may use together, None if not known of all of them."""
    facts = [r.surroundings for r in here if r.surroundings is not None and r.surroundings.masks]
    if len(facts) < len(here):
        return None
    together = {core for f in facts for core in f.masks[-1].cores}
    quotas = [f.usable_cores for f in facts if f.usable_cores < len(f.masks[-1].cores)]
    return min([len(together), *([max(quotas)] if quotas else [])])


def _crowding(by_host: dict[str, list[RankRecord]]) -> list[str]:
    """Returns what is to be said where ranks on one host want more cores than there are."""
    notes = []
    for host, here in sorted(by_host.items()):
        wanted, known = sum(r.cpu_threads for r in here), _cores(here)
        cores = here[0].cpu_cores if known is None else known
        if len(here) == 1 or wanted <= cores:
            continue
        shared = f"{len(here)} ranks with {wanted} threads share {cores} cores of {host}: "
        if known is None:
            shared += "the peak is what one rank reaches alone, so that MFU cannot come near 100 %"
        else:
            shared += f"they count as {_cpus(here):.3g} times what one rank reaches alone"
        notes.append(shared)
    return notes


def _missing(
    ranks: Sequence[RankRecord], ranks_timed: Sequence[RankRecord], world: int
) -> str | None:
    """Returns which ranks a sum over ranks would lack, None if there are none."""
    gone, idle = world - len(ranks), len(ranks) - len(ranks_timed)
    parts = [f"{gone} of {world} ranks have no record"] if gone > 0 else []
    parts += [f"{idle} of {world} ranks timed no step"] if idle > 0 else []
    return " and ".join(parts) or None


def _looked_at(rank: RankRecord, timed: Sequence[StepRow]) -> list[StepRow]:
    """Returns the rows that tell what is in a timed step: those looked at closely, or the last ones before them.

    A script may end so soon that none of the timed steps was looked at.
    """
    before = [row for row in rank.rows if row.sampled and row.kind in ("warmup", "counted")]
    return [row for row in timed if row.sampled] or before[-3:] or list(timed)


def _own_ns(rank: RankRecord, rows: Sequence[StepRow]) -> float:
    """Returns the mean time a step inside our hooks, over steps looked at closely and steps only counted."""
    close = sum(row.own_ns for row in rows if row.sampled)
    brief = sum(not row.sampled for row in rank.rows)
    share = sum(not row.sampled for row in rows) / brief if brief else 0.0
    return (close + rank.brief_own_ns * share) / len(rows)


def one_per_rank(ranks: Sequence[RankRecord]) -> list[RankRecord]:
    """Returns the records of one training, in order of rank: of several in one job, the one that was timed longest."""
    return max(_trainings(ranks), key=_weight)


def _trainings(ranks: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Returns the records by training, in order of their start.

    A job may train several times, one after another or side by side. Records belong together that come from one
    launch and hold each rank once.
    """
    found: list[dict[int, RankRecord]] = []
    newest: dict[tuple[str, int], dict[int, RankRecord]] = {}
    for record in sorted(ranks, key=lambda r: (r.started_ns, r.host, r.pid, r.rank, len(r.rows))):
        key = (record.launch, record.world_size)
        group = newest.get(key)
        if group is None or record.rank in group:
            group = newest[key] = {}
            found.append(group)
        group[record.rank] = record
    return [[group[rank] for rank in sorted(group)] for group in found]


def _weight(training: Sequence[RankRecord]) -> tuple[float, int]:
    """Returns the mean time over ranks that was timed, and the number of intervals seen."""
    timed = [sum(row.ns for row in r.rows if row.kind == "timed") for r in training]
    return statistics.fmean(timed), sum(len(r.rows) for r in training)


def _other_trainings(ranks: Sequence[RankRecord], chosen: Sequence[RankRecord]) -> list[str]:
    """Returns what is to be said about the trainings that this record is not about."""
    others = [t for t in _trainings(ranks) if t != list(chosen) and _weight(t)[0] > 0]
    if not others:
        return []

    def named(training: Sequence[RankRecord]) -> str:
        lead = training[0]
        n = sum(row.kind == "timed" for row in lead.rows)
        return f"process {lead.pid} ({os.path.basename(lead.argv[0] if lead.argv else '?')}, {n} steps timed)"

    rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [
        f"{len(others) + 1} trainings ran in this job. These figures are of the one that was timed longest, "
        f"{named(chosen)}, and not of {', '.join(map(named, others[:3]))}{rest}"
    ]


def _lead(ranks: Sequence[RankRecord]) -> RankRecord:
    with_rows = [r for r in ranks if any(row.kind == "timed" for row in r.rows)]
    if with_rows:
        return with_rows[0]
    seen = max((r.steps_seen for r in ranks), default=0)
    if seen == 0:
        raise NothingMeasuredError("no training step was seen: nothing to measure")
    kinds = Counter(row.kind for r in ranks for row in r.rows)
    held = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    raise NothingMeasuredError(
        f"{seen} training step{'s were' if seen > 1 else ' was'} seen, too few to time one: a step time needs at "
        f"least two step ends after the warm-up{f' (intervals seen: {held})' if held else ''}. "
        "Run it for some 10 steps or more, or give --warmup 1"
    )


def _mean_s(rows: Sequence[StepRow]) -> float:
    return statistics.fmean(row.ns for row in rows) * 1e-9


def _step_time(rows: Sequence[StepRow], mean_s: float, clock: str) -> records.StepTime:
    values = [row.ns * 1e-9 for row in rows]
    interval = mean_interval(values)
    shift = mean_s - interval.mean  # the mean over ranks; the spread of the lead rank
    ci95 = None
    if interval.low is not None and interval.high is not None:
        ci95 = (max(0.0, interval.low + shift), interval.high + shift)
    ordered = sorted(values)
    return records.StepTime(
        mean=mean_s,
        median=statistics.median(values),
        ci95=ci95,
        p10=ordered[int(0.1 * (len(ordered) - 1))],
        p90=ordered[int(0.9 * (len(ordered) - 1) + 0.5)],
        source=clock,
    )


def _steps(lead: RankRecord, timed: Sequence[StepRow], step_s: float) -> records.Steps:
    kinds = Counter(row.kind for row in lead.rows)
    close = [row for row in timed if row.sampled] or list(timed)
    pauses = []
    for kind in sorted(
        k for k in kinds if k not in ("timed", "warmup", "compile", "counted", "mixed")
    ):
        rows = [row for row in lead.rows if row.kind == kind]
        extra_s = sum(row.ns for row in rows) * 1e-9 - len(rows) * step_s
        pauses.append(
            records.Pause(
                kind,
                len(rows),
                max(0.0, extra_s),
                "; ".join(_EVIDENCE[part] for part in kind.split("+")),
            )
        )
    return records.Steps(
        total=lead.steps_seen,
        timed=len(timed),
        # The first step has no beginning that anyone saw: it is warm-up, too.
        dropped_warmup=kinds["warmup"] + max(0, lead.steps_seen - len(lead.rows)),
        dropped_compile=kinds["compile"],
        dropped_counted=kinds["counted"] + kinds["mixed"],
        dropped_pause=sum(p.count for p in pauses),
        skipped_by_scaler=sum(row.skipped for row in timed),
        boundary=lead.boundary,
        warmup_rule=lead.warmup_rule,
        micro_batches=statistics.fmean(row.micro_batches for row in _looked_at(lead, timed)),
        strata=_strata(close, {f.shape: f for f in lead.flops}),
        pauses=pauses,
        by_hand=lead.warmup_by_hand,
        note=None,
    )


_EVIDENCE = {
    "evaluation": "a trained module ran without gradient, or was switched to eval",
    "checkpoint": "torch.save was called",
    "epoch_start": "a loader was started",
}


def _strata(timed: Sequence[StepRow], counts: dict[str, FlopCount]) -> list[records.Stratum]:
    by_shape: dict[str, list[StepRow]] = {}
    for row in timed:
        by_shape.setdefault(row.shape, []).append(row)
    total_ns = sum(row.ns for row in timed)
    strata = [
        records.Stratum(
            shape=shape,
            steps=len(rows),
            mean_s=_mean_s(rows),
            share_frac=sum(row.ns for row in rows) / total_ns,
            model_flops_per_step=_model_flops(counts.get(shape), rows),
        )
        for shape, rows in by_shape.items()
    ]
    strata.sort(key=lambda s: -s.share_frac)
    if len(strata) > STRATA:
        rest = strata[STRATA - 1 :]
        n = sum(s.steps for s in rest)
        strata = strata[: STRATA - 1] + [
            records.Stratum(
                shape=f"{len(rest)} other shapes",
                steps=n,
                mean_s=sum(s.mean_s * s.steps for s in rest) / n,
                share_frac=sum(s.share_frac for s in rest),
                model_flops_per_step=None,
            )
        ]
    return strata


def _model_flops(count: FlopCount | None, rows: Sequence[StepRow]) -> int | None:
    if count is None:
        return None
    micro_batches = statistics.fmean(row.micro_batches for row in rows)
    return round(sum(count.needed.values()) * _times(count, micro_batches))


def _throughput(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    step_s: float,
    counted_from: str | None,
    missing: str | None,
) -> records.Throughput:
    """Returns the work a second; nothing but the steps where ranks are missing, whose work nobody saw."""

    def per_step(name: str) -> float | None:
        total = 0.0
        if missing is not None:
            return None
        for r in ranks:
            values = [getattr(row, name) for row in timed[r.rank]]
            known = [v for v in values if v is not None]
            if len(known) < len(values) / 2:
                return None
            total += sum(known) / len(values)
        return total

    samples, tokens, real = per_step("samples"), per_step("tokens"), per_step("real_tokens")
    return records.Throughput(
        steps_per_s=1 / step_s,
        samples_per_s=samples / step_s if samples else None,
        tokens_per_s=tokens / step_s if tokens else None,
        real_tokens_per_s=real / step_s if real else None,
        padding_frac=max(0.0, 1 - real / tokens) if real and tokens else None,
        samples_per_step=samples,
        tokens_per_step=tokens,
        counted_from=counted_from,
        reason=missing,
    )


def _phases(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    sampled: dict[int, list[StepRow]],
) -> records.Phases:
    """Returns the phases, which sum to the mean host time of a step.

    The wait for data is known of every timed step. What is left is split as in the steps that were looked at closely,
    in which our own hooks take longer.
    """
    rows = [row for r in ranks for row in sampled[r.rank]]
    every = [row for r in ranks for row in timed[r.rank]]
    host_s = statistics.fmean(row.host_ns for row in every) * 1e-9
    data_s = min(host_s, statistics.fmean(row.data_ns for row in every) * 1e-9)
    left_ns = sum(max(0, row.host_ns - row.data_ns) for row in rows)

    def part(name: str) -> float:
        ns: int = sum(getattr(row, name) or 0 for row in rows)
        return ns / max(left_ns, named_ns, 1) * (host_s - data_s)

    named = ("forward_ns", "backward_ns", "optimizer_ns")
    named_ns = sum(getattr(row, name) or 0 for row in rows for name in named)
    forward_s = part("forward_ns") if any(row.forward_ns for row in rows) else None
    backward_s, optimizer_s = part("backward_ns"), part("optimizer_ns")
    dry = [row.data_dry for row in rows if row.data_dry is not None]
    dry_frac = statistics.fmean(dry) if dry else None
    data_frac = data_s / host_s
    return records.Phases(
        data_s=data_s,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        other_s=max(0.0, host_s - data_s - (forward_s or 0.0) - backward_s - optimizer_s),
        data_frac=data_frac,
        device_idle_at_data_frac=dry_frac,
        verdict=_verdict(data_frac, dry_frac),
    )


def _verdict(data_frac: float, dry_frac: float | None) -> str | None:
    if data_frac < INPUT_BOUND_FRAC:
        return None
    share = f"{100 * data_frac:.0f} % of the step the script waits for data"
    if dry_frac is None:
        return f"input-bound: {share}"
    if dry_frac >= 0.5:
        return f"input-bound: {share}, and the device had run dry at {100 * dry_frac:.0f} % of these waits"
    return f"{share}, but the device still had work at {100 * (1 - dry_frac):.0f} % of these waits"


def _mfu(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    step_s: float,
    context: Context,
    notes: list[str],
    devices: Devices,
    missing: str | None,
) -> records.Mfu:
    lead = ranks[0]
    peak, dtype_peaks, why = _peak(ranks, context, notes)
    work = [_rank_work(r, timed[r.rank]) for r in ranks]
    counts = lead.flops
    reason = next((w.reason for w in work if w.reason), None) or missing
    coverage = min(counts, key=lambda c: c.coverage_frac) if counts else None
    if reason is not None:
        why = reason
    ceiling = (
        measured_peak(context.ceilings, sustained=lead.device_type == "cuda")
        if context.ceilings
        else None
    )
    demand = utilisations.Demand(
        needed=_sum(w.needed for w in work) if reason is None else {},
        needed_causal=_sum(w.needed_causal for w in work),
        executed=_sum(w.executed for w in work),
        by_op=_by_op(counts),
        coverage_frac=coverage.coverage_frac if coverage else None,
        coverage_basis=coverage.coverage_basis if coverage else None,
        uncovered=tuple(coverage.uncovered) if coverage else (),
        counted_by=", ".join(dict.fromkeys(c.method for c in counts)) or None,
        cross_check=next((c.cross_check for c in counts if c.cross_check), None),
    )
    reference = utilisations.Reference(
        flops_per_s=peak.flops_per_s if peak is not None and why is None else None,
        dtype=peak.dtype if peak else None,
        source=peak.source if peak else None,
        kind=peak.kind if peak else None,
        by_dtype=dtype_peaks,
        ceiling_flops_per_s=ceiling.flops_per_s if ceiling else None,
        reason=why,
    )
    own_s = statistics.fmean(w.step_s for w in work) if all(w.step_s for w in work) else step_s
    ci95 = _step_time(timed[lead.rank], step_s, lead.clock).ci95
    result = utilisations.utilisation(demand, own_s, reference, devices.count, ci95)
    return result if reason is None else replace(result, reason=reason)


@dataclass(frozen=True)
class _Work:
    needed: dict[str, float]
    needed_causal: dict[str, float]
    executed: dict[str, float]
    step_s: float
    reason: str | None


def _rank_work(rank: RankRecord, rows: Sequence[StepRow]) -> _Work:
    """Returns one rank's FLOPs per step and the step time they belong to, over the steps whose shape was counted."""
    counts = {f.shape: f for f in rank.flops}
    if not counts:
        return _Work(
            {}, {}, {}, 0.0, _first(rank.notes, "FLOPs not counted") or "FLOPs were not counted"
        )
    graph = rank.boundary == "graph replay"
    every = rows
    rows = _looked_at(rank, every)
    if graph or len({row.shape for row in rows}) == 1:
        only = counts.get(rows[0].shape) or (
            next(iter(counts.values())) if graph or len(counts) == 1 else None
        )
        pairs = [(row, only) for row in rows] if only is not None else []
        if only is not None and not graph and only.shape != rows[0].shape:
            pairs = []
    else:
        pairs = [(r, counts[r.shape]) for r in rows if r.shape in counts and r.kind == "timed"]
    if not pairs:
        return _Work(
            {},
            {},
            {},
            0.0,
            f"no timed step had the input shape that was counted ({', '.join(counts)})",
        )
    n = len(pairs)
    # With one shape every step did this work, the ones that were only counted, too.
    spans = every if n == len(rows) else [row for row, _ in pairs]
    unskipped = 1 - statistics.fmean(row.skipped for row in spans)

    def total(name: str) -> dict[str, float]:
        summed: dict[str, float] = {}
        for row, count in pairs:
            if count is not None:
                times = _times(count, row.micro_batches) * unskipped / n
                for dtype, flops in getattr(count, name).items():
                    summed[dtype] = summed.get(dtype, 0.0) + flops * times
        return summed

    return _Work(
        total("needed"),
        total("needed_causal"),
        total("executed"),
        statistics.fmean(row.ns for row in spans) * 1e-9,
        None,
    )


def _times(count: FlopCount, micro_batches: float) -> float:
    """Returns how often a step does what was counted: a count on fake tensors is of one forward and backward, one of
    an eager step of as many as that step had; another step may have fewer, at the end of an epoch."""
    return max(1.0, micro_batches) / count.micro_batches


def _peak(
    ranks: Sequence[RankRecord], context: Context, notes: list[str]
) -> tuple[Peak | None, dict[str, float], str | None]:
    """Returns the reference peak of one device, the peaks by dtype, and why there is none."""
    lead = ranks[0]
    names = sorted({r.device_name or r.device_type for r in ranks})
    if len(names) > 1 and context.peak is None:
        return None, {}, f"the ranks ran on different devices ({', '.join(names)})"
    if lead.device_type != "cuda":
        return _peak_without_table(lead, context)
    match = device_match(lead)
    notes += [w for w in match.warnings if w not in notes]
    by_dtype = {}
    if match.row is not None:
        for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
            value = peak_of(match.row, dtype)
            if value is not None:
                by_dtype[dtype] = value
    if context.peak is not None:
        return context.peak, _in_proportion(by_dtype, context.peak), None
    peak = reference_peak(match)
    return peak, by_dtype, None if peak is not None else match.reason


def _peak_without_table(
    lead: RankRecord, context: Context
) -> tuple[Peak | None, dict[str, float], str | None]:
    if context.peak is not None:
        return context.peak, _own_dtype(context.peak), None
    if lead.device_type != "cpu":
        return None, {}, f"no peak is known for {lead.device_type} devices: give --peak"
    peak = measured_peak(context.ceilings) if context.ceilings is not None else None
    if peak is None or context.ceilings is None:
        return (
            None,
            {},
            "no peak is known for this cpu: it is measured after the run, or give --peak",
        )
    return peak, {g.dtype: g.burst_flops_per_s for g in context.ceilings.gemm}, None


def device_match(rank: RankRecord) -> Match:
    """Returns what the table of accelerators says about a rank's CUDA device."""
    telemetry = rank.telemetry
    return lookup(
        rank.device_name or "",
        memory_bytes=rank.device_total_bytes,
        sm_count=telemetry.sm_count,
        mig=telemetry.mig,
        power_limit_w=telemetry.power_limit_w,
        power_limit_default_w=telemetry.power_limit_default_w,
    )


def _in_proportion(by_dtype: dict[str, float], given: Peak) -> dict[str, float]:
    """Returns the table's peaks moved to where a given peak puts its dtype (the 16-bit ones, if it names none).

    Of a peak that is not a 16-bit one only slower dtypes are left: a faster one would pass 1 against it.
    """
    known = by_dtype.get(given.dtype or "bf16") or by_dtype.get("fp16")
    if not known:
        return _own_dtype(given)
    all_of_them = given.dtype in (None, "bf16", "fp16")
    moved = given.flops_per_s / known
    return {d: rate * moved for d, rate in by_dtype.items() if all_of_them or rate <= known}


def _own_dtype(peak: Peak) -> dict[str, float]:
    return {peak.dtype: peak.flops_per_s} if peak.dtype else {}


def _by_op(counts: Sequence[FlopCount]) -> dict[str, int]:
    by_op: dict[str, int] = {}
    for count in counts:
        for op, flops in count.by_op.items():
            by_op[op] = max(by_op.get(op, 0), flops)
    return by_op


def _sum(parts: Any) -> dict[str, int]:
    total: dict[str, float] = {}
    for part in parts:
        for dtype, flops in part.items():
            total[dtype] = total.get(dtype, 0.0) + flops
    return {dtype: round(flops) for dtype, flops in total.items()}


def _clocks(lead: RankRecord) -> records.Clocks:
    t = lead.telemetry
    return records.Clocks(
        sm_mhz=t.sm_mhz,
        sm_max_mhz=t.sm_max_mhz,
        memory_mhz=t.memory_mhz,
        temperature_c=t.temperature_c,
        power_limit_w=t.power_limit_w,
        power_limit_default_w=t.power_limit_default_w,
        throttle=t.throttle,
        note=None if t.sm_mhz is not None else "not measured",
    )


def _energy(
    devices: Devices, step_s: float, samples: float | None, missing: str | None
) -> records.Energy:
    """Returns the energy of all devices; of a device that ranks share the longest window of one of them."""
    boundary = "GPU boards only (NVML energy counters): no CPU, memory, network, cooling or power supply loss"
    windows = [_longest_window(group) for group in devices.shared_by]
    reason = missing or next(
        (w.reason or "not measured" for w in windows if not w.energy_j or not w.window_s), None
    )
    if reason is not None:
        return records.Energy(None, None, None, None, boundary, reason)
    watts = sum((w.energy_j or 0.0) / (w.window_s or 1.0) for w in windows)
    return records.Energy(
        watts=watts,
        j_per_sample=watts * step_s / samples if samples else None,
        j_per_step=watts * step_s,
        window_s=min(w.window_s or 0.0 for w in windows),
        boundary=boundary,
        reason=None,
    )


def _longest_window(group: Sequence[RankRecord]) -> Telemetry:
    """Returns the telemetry with joules over the longest time, of ranks on one device."""
    return max(
        (r.telemetry for r in group),
        key=lambda t: (bool(t.energy_j), t.window_s or 0.0, t.energy_j or 0.0),
    )


def _cost(
    price: float | None,
    devices: int,
    step_s: float,
    throughput: records.Throughput,
    missing: str | None,
) -> records.Cost:
    if price is None:
        return records.Cost(None, None, None, None, "no price given (--price USD per device-hour)")
    if missing is not None:
        return records.Cost(price, None, None, None, "--price", reason=missing)
    per_s = price * devices / 3600

    def per_million(rate: float | None) -> float | None:
        return per_s / rate * 1e6 if rate else None

    return records.Cost(
        usd_per_device_hour=price,
        usd_per_1k_steps=per_s * step_s * 1000,
        usd_per_m_tokens=per_million(throughput.tokens_per_s),
        usd_per_m_samples=per_million(throughput.samples_per_s),
        price_source="--price",
        devices=devices,
    )


def _env(ranks: Sequence[RankRecord], devices: Devices) -> records.Env:
    lead = ranks[0]
    return records.Env(
        gpus=[group[0].device_name for group in devices.shared_by if group[0].device_name],
        torch=lead.torch,
        cuda=lead.cuda,
        nccl=lead.nccl,
        driver=lead.telemetry.driver,
        python=lead.python,
        device_type=lead.device_type,
        cpu=cpu_model(),
        cpu_threads=lead.cpu_threads,
        cpu_cores=lead.cpu_cores,
        host=lead.host,
    )


def _ranks(
    ranks: Sequence[RankRecord], timed: dict[int, list[StepRow]], world: int
) -> list[records.RankSummary]:
    rows = []
    for r in ranks:
        steps = timed[r.rank]
        rows.append(
            records.RankSummary(
                rank=r.rank,
                host=r.host,
                device=r.device_name or "CPU",
                pid=r.pid,
                steps=len(steps),
                step_s_mean=_mean_s(steps) if steps else 0.0,
                data_s=statistics.fmean(row.data_ns for row in steps) * 1e-9 if steps else 0.0,
                status=r.status,
            )
        )
    present = {r.rank for r in ranks}
    rows += [
        records.RankSummary(rank, "", "", 0, 0, 0.0, 0.0, "missing")
        for rank in range(world)
        if rank not in present
    ]
    return sorted(rows, key=lambda row: row.rank)


def _notes(ranks: Sequence[RankRecord], timed: dict[int, list[StepRow]]) -> list[str]:
    notes = []
    lead = _lead(ranks)
    for r in ranks:
        notes += r.notes
        if r.status != "complete":
            notes.append(f"rank {r.rank}: {r.status}")
    if not any(row.kind == "warmup" for row in lead.rows) or len(timed[lead.rank]) < 10:
        notes.append(
            f"only {len(timed[lead.rank])} steps were timed: the interval is wide, and warm-up may be in it"
        )
    present = len(ranks)
    if present < lead.world_size:
        notes.append(f"{lead.world_size - present} of {lead.world_size} ranks left no record")
    skipped = sum(row.skipped for row in timed[lead.rank])
    if skipped:
        notes.append(
            f"{skipped} of {len(timed[lead.rank])} timed steps were skipped by the GradScaler: their time counts, their FLOPs do not"
        )
    close = [row for row in timed[lead.rank] if row.sampled]
    shapes = {row.shape for row in close}
    counted = {f.shape for f in lead.flops}
    if len(shapes) > 1 and counted:
        known = sum(row.shape in counted for row in close)
        if known < len(close):
            notes.append(
                f"{len(shapes)} input shapes; FLOPs were counted for {len(shapes & counted)} of them: "
                f"MFU stands for {known} of {len(close)} timed steps that were looked at"
            )
    return notes


def _largest(values: Any) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _first(notes: Sequence[str], start: str) -> str | None:
    return next((note for note in notes if note.startswith(start)), None)
