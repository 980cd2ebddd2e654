"""From rank records to the run record: means over ranks, intervals, throughput, MFU, cost. Concludes, measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from flopwise._version import __version__
from flopwise.diagnosis import explain
from flopwise.diagnosis.findings import find as find_causes
from flopwise.hardware.host import cpu_model
from flopwise.records import run as records
from flopwise.records.rank import RankRecord, StepRow
from flopwise.records.run import RunRecord
from flopwise.records.trainings import one_per_rank
from flopwise.summary.context import Context
from flopwise.summary.devices import Devices
from flopwise.summary.peaks import device_match
from flopwise.summary.phases import phases_of
from flopwise.summary.power import clocks_of, cost_of, energy_of
from flopwise.summary.steps import (
    LOOKS,
    looked_at,
    mean_step_s,
    own_ns_a_step,
    size_error_frac,
    step_time_of,
    steps_of,
    too_few_looks,
)
from flopwise.summary.trainings import lead_of, missing_ranks, other_trainings
from flopwise.summary.work import mfu_of, throughput_of
from flopwise.units import percent

__all__ = ["Context", "device_match", "one_per_rank", "summarise"]


def summarise(ranks: Sequence[RankRecord], context: Context) -> RunRecord:
    """Returns the run record.

    Raises:
        NothingMeasuredError: no rank has a single interval to measure.
    """
    everything, ranks = ranks, one_per_rank(ranks)
    lead = lead_of(ranks)
    timed = {r.rank: [row for row in r.rows if row.kind == "timed"] for r in ranks}
    ranks_timed = [r for r in ranks if timed[r.rank]]
    means = [mean_step_s(timed[r.rank]) for r in ranks_timed]
    step_s = statistics.fmean(means)
    sampled = {r.rank: looked_at(r, timed[r.rank]) for r in ranks_timed}
    steps = steps_of(lead, timed[lead.rank], step_s)
    missing = missing_ranks(ranks, ranks_timed, lead.world_size)
    devices = Devices.of(ranks_timed)
    several = any(r.several for r in ranks_timed)
    few = next((why for r in ranks_timed if (why := too_few_looks(r, timed[r.rank]))), None)
    unknown = missing or ("several threads train" if several else few)
    throughput = throughput_of(ranks_timed, sampled, step_s, lead.counted_from, unknown)
    own = statistics.fmean(own_ns_a_step(r, timed[r.rank]) for r in ranks_timed)
    host = statistics.fmean(row.host_ns for r in ranks_timed for row in timed[r.rank])
    others = other_trainings(everything, ranks)
    notes = list(dict.fromkeys([*context.notes, *others, *_notes(ranks, timed), *devices.notes]))
    mfu = mfu_of(ranks_timed, timed, step_s, context, notes, devices, missing)
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
        step_s=step_time_of(timed[lead.rank], step_s, lead.clock),
        throughput=throughput,
        mfu=mfu,
        phases=phases_of(ranks_timed, timed, sampled),
        memory=records.Memory(
            allocated_peak_bytes=_largest(r.allocated_peak_bytes for r in ranks),
            reserved_peak_bytes=_largest(r.reserved_peak_bytes for r in ranks),
            device_total_bytes=lead.device_total_bytes,
            host_rss_peak_bytes=max(r.host_rss_peak_bytes for r in ranks),
        ),
        clocks=clocks_of(lead),
        energy=energy_of(devices, step_s, throughput.samples_per_step, missing),
        cost=cost_of(context.price_usd_per_hour, devices.priced, step_s, throughput, missing),
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
        device_metrics=lead.telemetry.device_metrics,
    )
    return replace(
        record,
        notes=[*notes, *explain.notes(ranks_timed, record)],
        findings=[] if several else find_causes(ranks_timed, record),
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
                step_s_mean=mean_step_s(steps) if steps else 0.0,
                data_s=_wait_s(r, steps),
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


def _wait_s(rank: RankRecord, rows: Sequence[StepRow]) -> float | None:
    """Returns the mean wait for data in a step, None where nobody knows whose it was."""
    if rank.several is not None:
        return None
    if rank.draws_apart:
        rows = looked_at(rank, rows)
    return statistics.fmean(row.data_ns for row in rows) * 1e-9 if rows else 0.0


def _notes(ranks: Sequence[RankRecord], timed: dict[int, list[StepRow]]) -> list[str]:
    notes = []
    lead = lead_of(ranks)
    for r in ranks:
        notes += r.notes
        if r.status != "complete":
            notes.append(f"rank {r.rank}: {r.status}")
    if not any(row.kind == "warmup" for row in lead.rows) or len(timed[lead.rank]) < 10:
        notes.append(
            f"only {len(timed[lead.rank])} steps were timed: the interval is wide, and warm-up may be in it"
        )
    if any(r.draws_apart for r in ranks):
        notes.append(
            "a thread that does not train draws the batches: the wait for them, if there is one, is in other"
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
    if len(close) < min(LOOKS, len(timed[lead.rank])):
        notes.append(
            f"{len(close)} of {len(timed[lead.rank])} timed steps were looked at: that the inputs of the others are "
            "alike is taken for granted. Run for longer, or give --steps"
        )
    elif len(shapes) > 1 and len(close) < len(timed[lead.rank]):
        notes.append(
            f"{len(shapes)} input shapes: the FLOPs and samples of a step are means over the {len(close)} of "
            f"{len(timed[lead.rank])} timed steps that were looked at{_how_well(timed[lead.rank])}"
        )
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


def _how_well(timed: Sequence[StepRow]) -> str:
    error = size_error_frac(timed)
    return f" (their size is known to ± {percent(error)})" if error else ""
