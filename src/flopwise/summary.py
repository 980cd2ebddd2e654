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
from flopwise.records.rank import FlopCount, RankRecord, StepRow
from flopwise.records.run import RunRecord
from flopwise.trials.interval import mean_interval

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
    throughput = _throughput(ranks_timed, sampled, step_s, lead.counted_from)
    own = statistics.fmean(_own_ns(r, timed[r.rank]) for r in ranks_timed)
    host = statistics.fmean(row.host_ns for r in ranks_timed for row in timed[r.rank])
    others = _other_trainings(everything, ranks)
    notes = list(dict.fromkeys([*context.notes, *others, *_notes(ranks, timed)]))
    mfu = _mfu(ranks_timed, timed, step_s, context, notes)
    record = RunRecord(
        schema=records.SCHEMA,
        flopwise=__version__,
        created=context.created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=context.command,
        script=context.script,
        exit_code=context.exit_code,
        complete=all(r.status == "complete" for r in ranks) and len(ranks) == lead.world_size,
        env=_env(ranks),
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
        energy=_energy(ranks_timed, step_s, throughput.samples_per_step),
        cost=_cost(context.price_usd_per_hour, lead.world_size, step_s, throughput),
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
) -> records.Throughput:
    def per_step(name: str) -> float | None:
        total = 0.0
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
    )


def _phases(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    sampled: dict[int, list[StepRow]],
) -> records.Phases:
    """Returns the phases: the wait for data over all timed steps, the rest over those looked at closely."""
    rows = [row for r in ranks for row in sampled[r.rank]]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(row, name) or 0 for row in rows) * 1e-9

    backward_s, optimizer_s = mean("backward_ns"), mean("optimizer_ns")
    host_s = statistics.fmean(row.host_ns for r in ranks for row in timed[r.rank]) * 1e-9
    data_s = statistics.fmean(row.data_ns for r in ranks for row in timed[r.rank]) * 1e-9
    forward_s = mean("forward_ns") if any(row.forward_ns for row in rows) else None
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
) -> records.Mfu:
    lead = ranks[0]
    peak, dtype_peaks, why = _peak(ranks, context, notes)
    work = [_rank_work(r, timed[r.rank]) for r in ranks]
    counts = lead.flops
    reason = next((w.reason for w in work if w.reason), None)
    if reason is None and len(ranks) < lead.world_size:
        reason = f"{lead.world_size - len(ranks)} of {lead.world_size} ranks have no record"
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
    result = utilisations.utilisation(demand, own_s, reference, devices=len(ranks), ci95=ci95)
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
    """Returns how often a step does what was counted: a count on fake tensors is of one forward and backward."""
    return max(1.0, micro_batches) if count.method == "fake tensors" else 1.0


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


def _energy(ranks: Sequence[RankRecord], step_s: float, samples: float | None) -> records.Energy:
    boundary = "GPU boards only (NVML energy counters): no CPU, memory, network, cooling or power supply loss"
    reasons = [r.telemetry.reason or "not measured" for r in ranks if not r.telemetry.energy_j]
    if reasons:
        return records.Energy(None, None, None, None, boundary, reasons[0])
    watts = sum((r.telemetry.energy_j or 0.0) / (r.telemetry.window_s or 1.0) for r in ranks)
    return records.Energy(
        watts=watts,
        j_per_sample=watts * step_s / samples if samples else None,
        j_per_step=watts * step_s,
        window_s=min(r.telemetry.window_s or 0.0 for r in ranks),
        boundary=boundary,
        reason=None,
    )


def _cost(
    price: float | None, devices: int, step_s: float, throughput: records.Throughput
) -> records.Cost:
    if price is None:
        return records.Cost(None, None, None, None, "no price given (--price USD per device-hour)")
    per_s = price * devices / 3600

    def per_million(rate: float | None) -> float | None:
        return per_s / rate * 1e6 if rate else None

    return records.Cost(
        usd_per_device_hour=price,
        usd_per_1k_steps=per_s * step_s * 1000,
        usd_per_m_tokens=per_million(throughput.tokens_per_s),
        usd_per_m_samples=per_million(throughput.samples_per_s),
        price_source="--price",
    )


def _env(ranks: Sequence[RankRecord]) -> records.Env:
    lead = ranks[0]
    return records.Env(
        gpus=[r.device_name for r in ranks if r.device_name],
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
    threads = {host: [r for r in ranks if r.host == host] for host in {r.host for r in ranks}}
    for host, here in sorted(threads.items()):
        wanted = sum(r.cpu_threads for r in here)
        if lead.device_type == "cpu" and len(here) > 1 and wanted > here[0].cpu_cores:
            notes.append(
                f"{len(here)} ranks with {wanted} threads share {here[0].cpu_cores} cores of {host}: the peak is "
                "what one rank reaches alone, so that MFU cannot come near 100 %"
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
