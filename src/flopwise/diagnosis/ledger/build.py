"""From a trace to the ledger of one of its devices."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise._version import __version__
from flopwise.diagnosis.ledger.counted import Counted
from flopwise.diagnosis.ledger.findings import findings
from flopwise.diagnosis.ledger.heat import heat
from flopwise.diagnosis.ledger.replay import Player, Replay, Serial
from flopwise.diagnosis.ledger.roofline import roofline
from flopwise.diagnosis.ledger.scale import Scale, scale_of, scale_of_cpu
from flopwise.diagnosis.ledger.scene import Scene
from flopwise.diagnosis.ledger.soundness import Soundness, judge
from flopwise.diagnosis.ledger.tally import Job, Tally, Times, tallied
from flopwise.errors import FlopwiseError
from flopwise.hardware.accelerators import Peak
from flopwise.records.ceilings import CeilingsRecord
from flopwise.records.ledger import FAMILIES, SCHEMA, LedgerRecord, Line, Share, Spent
from flopwise.trace import cpu
from flopwise.trace.chrome import Trace
from flopwise.trace.health import Sifted, sift
from flopwise.trace.idle import Host
from flopwise.trace.launches import Launches, launches
from flopwise.trace.ownership import Owner, own
from flopwise.trace.partition import Partition, devices, partition
from flopwise.trace.steps import Steps, finished, steps, steps_at
from flopwise.trace.table import Events

RESAMPLES = 400  # of the bootstrap over steps
#: How the note begins that is not one of a live run.
PROFILED = "the steps were profiled"
SHOWN = 12  # operators and calls that the record names
#: The conditions of a trusted ledger, as shares of the step.
UNEXPLAINED_FRAC = 0.05
NEGATIVE_FRAC = 0.01
COVERAGE_FRAC = 0.98


class LedgerError(FlopwiseError):
    """A trace has nothing that a ledger could be made of."""


@dataclass(frozen=True, eq=False)
class Given:
    """What is known beside a trace."""

    counted: Counted | None = None  # the FLOPs of one step, as a live run counted them
    padding_frac: float | None = None  # of the tokens, as a live run knows it
    ceilings: CeilingsRecord | None = None  # what this device was measured to reach
    sm_mhz: float | None = None  # its mean SM clock while the steps ran
    peak: Peak | None = None  # one that the user gave, instead of the table's
    cut: Cut | None = None  # where the steps end, as a live run saw it
    #: Puts other durations into the work of a device: those of a window that disturbed it less.
    lengths: Callable[[Events, Launches], Launches] | None = None


@dataclass(frozen=True, eq=False)
class Cut:
    """Which of the steps between known ends count: those from `first` to before `last`."""

    marks_ns: npt.NDArray[np.int64]  # on the host, in the trace's time, shape (n + 1,)
    first: int
    last: int

    def of(self, found: Steps) -> Steps:
        """Returns the steps up to the last one that counts."""
        return dataclasses.replace(
            found,
            bounds_ns=found.bounds_ns[: self.last + 1],
            host_ns=found.host_ns[: self.last + 1],
        )


@dataclass(frozen=True, eq=False)
class Taken:
    """A trace, taken apart for the ledger of one of its devices."""

    trace: Trace  # with the events that can be used
    device: int
    properties: dict[str, Any]
    job: Job
    host: Host | None  # None: a job on a CPU
    replay: Callable[[], Player]  # makes what plays its steps again, which takes a while
    marks: Steps
    sound: Soundness
    tally: Tally
    scale: Scale | None
    reason: str  # why there is no scale
    share: Share
    given: Given
    sifted: Sifted | None = None  # None: a job on a CPU


def ledger(trace: Trace, device: int | None = None, given: Given | None = None) -> LedgerRecord:
    """Returns the ledger of a device of a trace, the busiest one where none is named.

    Raises:
        LedgerError: no work of the device is in the trace.
    """
    taken = take(trace, device, given or Given())
    record = record_of(taken)
    return dataclasses.replace(record, findings=findings(scene_of(taken, record)))


def scene_of(taken: Taken, record: LedgerRecord) -> Scene:
    """Returns what findings look at: a trace taken apart, and the lines of the record."""
    return Scene(
        taken.job,
        taken.tally,
        taken.host,
        taken.replay(),
        {line.name: line for line in record.lines},
        record.step_s,
        taken.marks,
        first=taken.sound.first,
        scale=taken.scale,
        profiled=record.profiled,
        padding_frac=taken.given.padding_frac,
    )


def tracks_of(
    taken: Taken,
) -> tuple[list[int], list[dict[str, float]], list[tuple[int, int, str]]]:
    """Returns what can be drawn beside a trace: bounds of its steps, each step's lines in ns, and idle stretches with their cause.

    Times are ns of the trace's own time.
    """
    bounds = taken.marks.bounds_ns[taken.sound.first :]
    low, high = int(bounds[0]), int(bounds[-1])
    pieces = taken.job.why_idle(own(taken.job.work, taken.job.kind, low, high).idle).pieces
    idle = [(one.start_ns, one.end_ns, one.cause) for one in sorted(pieces)]
    return bounds.tolist(), taken.tally.lines, idle


def take(trace: Trace, device: int | None, given: Given, *, peel: bool = True) -> Taken:
    """Returns a trace taken apart: by device work, or by a CPU's operators where there is none.

    Without `peel` the lines of its tally are left out.

    Raises:
        LedgerError: no work of the device is in the trace.
    """
    sifted = sift(trace.events)
    events = sifted.events
    found = devices(events)
    if not found and not sifted.work and device is None:
        shown = cpu.elsewhere(trace.events, trace.header)
        if shown is not None:
            raise LedgerError(_not_recorded(trace, shown))
        taken = _take_cpu(trace, given)
        if taken is not None:
            return taken
    if not found:
        raise LedgerError(_nothing(trace, sifted))
    device = found[0] if device is None else device
    if device not in found:
        raise LedgerError(f"{trace.path}: no work of device {device}; there is {found}")
    properties = _properties(trace, device)
    scale, reason = scale_of(
        properties.get("name"),
        properties.get("totalGlobalMem"),
        ceilings=given.ceilings,
        sm_mhz=given.sm_mhz,
        peak=given.peak,
    )
    work = launches(events, device)
    cut = given.cut
    marks = steps(events, work) if cut is None else cut.of(steps_at(work, cut.marks_ns))
    if trace.damage.ends_early:
        marks = finished(marks, work)
    sound = judge(trace.events, sifted, work, marks)
    if cut is not None:
        sound.first = max(sound.first, cut.first)
    if sound.first >= len(marks):
        raise LedgerError(f"{trace.path}: no whole step is left")
    host = Host(events, work, watched=cut is not None)
    replay = partial(Replay, events, work, host, marks, sound.first)
    if given.lengths is not None:
        work = given.lengths(events, work)
        if cut is not None:
            marks = cut.of(steps_at(work, cut.marks_ns))
    job = Job.of_device(events, work, host, peel=peel)
    return Taken(
        trace=dataclasses.replace(trace, events=events),
        device=device,
        properties=properties,
        job=job,
        host=host,
        replay=replay,
        marks=marks,
        sound=sound,
        tally=tallied(
            job, marks, sound.first, scale or _unit_scale(), given.counted, given.padding_frac
        )
        if peel
        else Tally(),
        scale=scale,
        reason=reason,
        share=_share(partition(events, device)),
        given=given,
        sifted=sifted,
    )


def _take_cpu(trace: Trace, given: Given) -> Taken | None:
    """Returns a trace of a job on a CPU taken apart; None where no operator is in it.

    Raises:
        LedgerError: no step is left of it.
    """
    events = trace.events
    work = cpu.work(events)
    if not len(work.rows):
        return None
    cut = given.cut
    if cut is None:
        marks = cpu.steps(events, work)
        first = 1 if marks.first_from_mark and len(marks) > 1 else 0
    else:
        marks = cut.of(
            Steps(cut.marks_ns, cut.marks_ns, "the run's own marks", first_from_mark=False)
        )
        first = cut.first
    if trace.damage.ends_early:
        marks = finished(marks, work)
    if first >= len(marks):
        raise LedgerError(f"{trace.path}: no whole step is left")
    job = Job.of_cpu(events, work)
    scale, reason = scale_of_cpu(given.ceilings, given.peak)
    whole = own(work, job.kind, int(work.start_ns.min()), int(work.end_ns.max()))
    span_ns = (whole.high_ns - whole.low_ns) or 1
    return Taken(
        trace=trace,
        device=cpu.DEVICE,
        properties={"name": "CPU"},
        job=job,
        host=None,
        replay=partial(Serial, work, marks, first, job.kind == Owner.COMPUTE),
        marks=marks,
        sound=Soundness(
            first, notes=["a job on a CPU: what its operators take for themselves is the work"]
        ),
        tally=tallied(job, marks, first, scale or _unit_scale(), given.counted, given.padding_frac),
        scale=scale,
        reason=reason,
        share=Share(
            span_ns * 1e-9,
            whole.owned_ns[Owner.COMPUTE] / span_ns,
            whole.owned_ns[Owner.COMMUNICATION] / span_ns,
            0.0,
            whole.idle_ns / span_ns,
        ),
        given=given,
    )


def _not_recorded(trace: Trace, shown: str) -> str:
    return (
        f"{trace.path}: no kernel or copy of a device is in it, but it is no job on a CPU: it has {shown}. Its operators' times are "
        "those of the host that launches, not of the work. Record it with device activities (ProfilerActivity.CUDA; profilers of "
        "CUDA, ROCm and XPU devices are read)"
    )


def _nothing(trace: Trace, sifted: Sifted) -> str:
    if sifted.work:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sifted.unusable.items())
        return f"{trace.path}: none of its {sifted.work} kernels and copies can be used: {reasons}"
    return (
        f"{trace.path}: no kernel or copy of a device is in it ({len(trace.events)} events). "
        "Record it with device activities (ProfilerActivity.CUDA)"
    )


def _unit_scale() -> Scale:
    """Stands in for a device whose rates are not known: nothing can be divided by them."""
    return Scale(math.inf, "none")


def record_of(taken: Taken) -> LedgerRecord:
    """Returns the ledger of the recorded steps, without findings."""
    trace, marks, sound, tally = taken.trace, taken.marks, taken.sound, taken.tally
    scale, reason = taken.scale, taken.reason
    each = np.diff(marks.bounds_ns[sound.first :]).astype(float) * 1e-9
    n = len(each)
    step_s = float(each.mean())
    lines = [_line(name, tally, step_s) for name in FAMILIES]
    lines = [_stretched(line) for line in lines if line.s or (scale and line.name == "ideal")]
    by_name = {line.name: line.s for line in lines}
    coverage = tally.covered_ns / tally.kernel_ns if tally.kernel_ns else 0.0
    mfu_reason = no_mfu(scale, reason, coverage, by_name, step_s)
    mfu = None
    if scale and mfu_reason is None:
        mfu = tally.flops / n / (step_s * scale.reference_flops_per_s)
    distributed = trace.header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    busy = sum(line.s for line in lines if not line.name.startswith("idle_"))
    doubts = sound.doubts + doubts_of(by_name, step_s, coverage, scale, reason)
    most = min(1.0, (busy + sound.missing_s) / step_s) if sound.missing_s and step_s else None
    hot, bandwidth = roofline(taken.job, marks, sound.first, scale)
    return LedgerRecord(
        schema=SCHEMA,
        flopwise=__version__,
        trace=trace.path,
        device=taken.device,
        device_name=taken.properties.get("name"),
        rank=_integer(distributed.get("rank")),
        world_size=_integer(distributed.get("world_size")),
        steps=n,
        steps_in_trace=len(marks),
        steps_by=marks.by,
        step_s=step_s,
        step_s_each=[float(s) for s in each],
        profiled=True,
        mfu=mfu,
        mfu_reason=mfu_reason,
        model_flops_per_step=tally.flops / n,
        peak_flops_per_s=scale.reference_flops_per_s if scale else None,
        peak_source=scale.source if scale else None,
        coverage_frac=coverage,
        lines=lines,
        families=families_of(lines),
        busy_frac=busy / step_s if step_s else 0.0,
        busy_most_frac=most,
        partition=taken.share,
        operators=_spent(tally.operators, tally.calls, tally.kernels, n, step_s),
        blocking=_spent(tally.blocking, {}, {}, n, step_s),
        residual_frac=None,
        trusted=not doubts,
        untrusted_because=doubts,
        notes=[*_notes(trace, marks, sound, tally, n), *(scale.notes if scale else ())],
        heat=heat(taken.job, marks, sound.first),
        hot=hot,
        bandwidth=bandwidth,
    )


def families_of(lines: Sequence[Line]) -> dict[str, float]:
    """Returns the seconds a step of each family of lines."""
    families: dict[str, float] = defaultdict(float)
    for line in lines:
        families[line.family] += line.s
    return dict(families)


def no_mfu(
    scale: Scale | None, reason: str, coverage: float, lines: dict[str, float], step_s: float
) -> str | None:
    """Returns why there is no MFU, None where there is one."""
    if scale is None:
        return reason
    if not step_s:
        return "the steps take no time"
    if coverage < COVERAGE_FRAC:
        return f"{coverage:.1%} of kernel time has a known cost, {COVERAGE_FRAC:.0%} is needed"
    at_peak_s = lines.get("ideal", 0.0) + lines.get("precision", 0.0)
    if at_peak_s > step_s:
        return (
            f"the FLOPs of a step need {at_peak_s / step_s:.3g} times as long as it took, at the peaks of their "
            "dtypes: the shapes in the trace, the device's name or the times are wrong"
        )
    return None


def _line(name: str, tally: Tally, step_s: float) -> Line:
    values = [step.get(name, 0.0) * 1e-9 for step in tally.lines]
    mean = statistics.fmean(values)
    share = mean / step_s if step_s else 0.0
    return Line(name, FAMILIES[name], mean, _bootstrap(values), share, 100 * share)


def _stretched(line: Line) -> Line:
    """The profiler makes every call of the host slower: without it the host might not have been late at all."""
    if line.name != "idle_launch":
        return line
    return dataclasses.replace(line, ci95=(0.0, line.ci95[1]))


def _bootstrap(values: list[float]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean over steps by resampling them. Source: Efron & Tibshirani (1993), ch. 13."""
    if len(values) < 2:
        return values[0], values[0]
    coin = random.Random(0)
    means = sorted(statistics.fmean(coin.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def doubts_of(
    lines: dict[str, float],
    step_s: float,
    coverage: float,
    scale: Scale | None,
    reason: str,
    *,
    profiled: bool = True,
) -> list[str]:
    """Returns which conditions of a trusted ledger its lines fail."""
    doubts = []
    if scale is None:
        doubts.append(f"no peak to measure against: {reason}")
    unexplained = lines.get("unattributed", 0.0) + lines.get("idle_other", 0.0)
    if step_s and unexplained / step_s > UNEXPLAINED_FRAC:
        doubts.append(
            f"operators without a known cost (unattributed) and idle time without a seen cause (idle_other) are {unexplained / step_s:.1%} of the step "
            f"(at most {UNEXPLAINED_FRAC:.0%})"
        )
    late = lines.get("idle_launch", 0.0)
    if profiled and step_s and late / step_s > UNEXPLAINED_FRAC:
        doubts.append(
            f"the host was late for {late / step_s:.1%} of these profiled steps: the profiler slows the host, and no "
            "undisturbed steps stand beside them. It is at most so much, and may be nothing"
        )
    negative = -min(0.0, lines.get("gemm_excess", 0.0))
    if step_s and negative / step_s > NEGATIVE_FRAC:
        doubts.append(f"products were {negative / step_s:.1%} of the step faster than their floor")
    if coverage < COVERAGE_FRAC:
        doubts.append(
            f"{coverage:.1%} of kernel time has a known cost (at least {COVERAGE_FRAC:.0%})"
        )
    return doubts


def _notes(trace: Trace, marks: Steps, sound: Soundness, tally: Tally, n: int) -> list[str]:
    notes = [
        f"{PROFILED}: without undisturbed ones beside them, how much the profiler stretched them is "
        "not known; host-bound steps can be twice as long under it"
    ]
    notes += sound.notes
    if marks.by == "whole trace":
        notes.append(
            "no step is marked and no optimizer named: all of the trace is taken as one step"
        )
    damage = trace.damage
    if damage.events:
        what = (
            "1 damaged event was" if damage.events == 1 else f"{damage.events} damaged events were"
        )
        notes.append(f"{what} left out ({damage.described[0]})")
    if damage.ends_early:
        events = trace.events
        ms = 1e-6 * int(events.end_ns.max() - events.start_ns.min())
        notes.append(
            f"the file ends early, after {len(events)} events over {ms:.4g} ms: {damage.ends_early}"
        )
    notes += tally.remarks
    for note, ns in _largest(tally.notes, 4):
        notes.append(f"{ns * 1e-6 / n:.3g} ms a step: {note}")
    return notes


def _largest(times: Times, n: int) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda pair: (-pair[1], pair[0]))[:n]


def _spent(
    times: Times, calls: Times, kernels: dict[str, Times], n: int, step_s: float
) -> list[Spent]:
    return [
        Spent(
            name,
            ns * 1e-9 / n,
            ns * 1e-9 / n / step_s if step_s else 0.0,
            [kernel for kernel, _ in _largest(kernels[name], 3)] if name in kernels else [],
            calls.get(name, 0.0) / n,
        )
        for name, ns in _largest(times, SHOWN)
    ]


def _share(part: Partition) -> Share:
    span = part.span_ns or 1
    return Share(
        span_s=part.span_ns * 1e-9,
        compute_frac=part.compute_ns / span,
        exposed_communication_frac=part.exposed_communication_ns / span,
        exposed_copy_frac=part.exposed_copy_ns / span,
        idle_frac=part.idle_ns / span,
    )


def _properties(trace: Trace, device: int) -> dict[str, Any]:
    found = trace.header.get("deviceProperties")
    if isinstance(found, list):
        for one in found:
            if (
                isinstance(one, dict)
                and one.get("id") == device
                and isinstance(one.get("name"), str)
            ):
                memory = one.get("totalGlobalMem")
                return {
                    "name": one["name"],
                    "totalGlobalMem": memory if isinstance(memory, int) else None,
                }
    return {}


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
