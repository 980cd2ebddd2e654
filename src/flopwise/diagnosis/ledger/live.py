"""The ledger of a live run: operators from the heavy window, durations and idle time from the light one, and the step
from the steps that nothing disturbed.

Each kernel of the heavy window is given the mean duration that kernels of its name have in the light one, so that the
lines of the heavy window sum to the busy time of the light one. What remains of the undisturbed step is idle, or residual.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flopwise.diagnosis.ledger import build
from flopwise.diagnosis.ledger.build import Given, Taken, record_of, take
from flopwise.diagnosis.ledger.findings import findings
from flopwise.diagnosis.ledger.heat import heat
from flopwise.diagnosis.ledger.reconcile import Idle, block_means, idle_of
from flopwise.diagnosis.ledger.replay import at_work_ns
from flopwise.diagnosis.ledger.where import Places
from flopwise.diagnosis.ledger.windows import (
    Busy,
    Window,
    as_long_as,
    busy,
    differing_frac,
    durations,
    take_light,
)
from flopwise.records.ledger import FAMILIES, Bandwidth, LedgerRecord, Line, Live
from flopwise.records.run import Clocks
from flopwise.trace.idle import CAUSES
from flopwise.trace.kinds import Kind
from flopwise.trace.ownership import Owner

RESAMPLES = 400
#: The conditions of a trusted ledger, as shares of the step.
RESIDUAL_FRAC = 0.02
BUSY_FRAC = 1.01
DIFFERING_FRAC = 0.02
#: A CPU has no window that disturbs less than the one with operators: so far off, what they took is no measure.
STRETCHED_FRAC = 0.10
#: More of a step than this without a core, and the rest of it was not undisturbed either.
PREEMPTED_FRAC = 0.10
#: Unless the profiler explains it: it takes so much an event at most. Source: measured with torch 2.13 on an AMD EPYC,
#: 0.4 to 1.5 us an event with shapes.
PROFILER_NS = 3_000
#: A clock that the device's limits keep moving is read so much too high or too low. Source: the FLOPs a clock of sustained
#: products on an H200 at its power limit, by reading, over those at its highest clock: 0.982 to 1.001 in five dtypes.
CLOCK_FRAC = 0.02
#: What FLOPs need at the rates of the device, however long they took.
NEEDED = ("ideal", "precision", "hardware", "ceiling", "clock")
LINES_OF = {Owner.COMMUNICATION: ("comm_unsplit",), Owner.COPY: ("exposed_copy",)}


@dataclass(frozen=True)
class Undisturbed:
    """What is known of the steps that nothing disturbed."""

    each_s: Sequence[float]  # their lengths
    input_s: float | None  # mean time in which the host waited for a batch
    clocks: Clocks | None = None
    watts: float | None = None
    preempted_frac: float | None = None  # the training thread waited for a core; None: not known

    @property
    def step_s(self) -> float:
        """T: their mean."""
        return float(np.mean(self.each_s))


def live_ledger(
    heavy: Window,
    light: Window | None,
    stacks: Window | None,
    undisturbed: Undisturbed,
    live: Live,
    given: Given,
    device: int | None,
) -> LedgerRecord:
    """Returns the ledger of one rank of a live run.

    Args:
        heavy: operators and shapes.
        light: the device's activities alone; None on a CPU, where the heavy window stands in.
        stacks: Python's functions, too; None: the user's lines are those that the heavy window shows.
        undisturbed: the timed steps.
        live: what is recorded of them and of the windows.
        given: what the run knows beside its traces.
        device: the number of the rank's device; None: the busiest.

    Raises:
        LedgerError: there is no work in the steps of a window.
    """
    lighter = take_light(light, device) if light is not None else None
    measured = busy(lighter) if lighter is not None else None
    given = dataclasses.replace(given, cut=heavy.cut)
    before = None
    if measured is not None:
        kernels = measured.kernels
        given = dataclasses.replace(
            given, lengths=lambda events, work: as_long_as(kernels, events, work, heavy.cut)
        )
    taken = take(heavy.trace, device, given)
    taken_away = 0.0  # the share of an undisturbed step in which the training thread had no core
    kept = 1.0  # the share of a profiled step in which it had one
    if measured is None:
        measured = _of_lines(taken)
        if heavy.preempted_frac is not None and undisturbed.preempted_frac is not None:
            measured = measured.less(heavy.preempted_frac)
            taken_away, kept = undisturbed.preempted_frac, 1 - heavy.preempted_frac
    elif taken.host is not None:
        before = _differ(measured, taken)
    for window, ran_ns in ((light or heavy, measured.busy_ns), (heavy, taken.tally.kernel_ns)):
        if not ran_ns > 0:
            raise build.LedgerError(f"{window.trace.path}: nothing ran in the steps of this window")
    lines, idle = _Lines(taken, measured, undisturbed, taken_away).reconciled()
    recorded = record_of(taken)
    record = _overlaid(recorded, taken, measured, undisturbed, lines, idle, before, kept)
    taken = _shorter(taken, kept)
    scene = dataclasses.replace(
        build.scene_of(taken, record),
        stacks=Places(stacks.trace.events) if stacks is not None else None,
        clocks=undisturbed.clocks,
        watts=undisturbed.watts,
        host_pace=_host_pace(lighter, taken),
    )
    if lighter is not None:
        drawn = heat(lighter.job, lighter.marks, lighter.sound.first)
        record = dataclasses.replace(record, heat=drawn, partition=lighter.share)
    lengths = {"light": measured.step_ns * 1e-9, "heavy": recorded.step_s}
    live = dataclasses.replace(
        live,
        idle_from=_idle_from(idle, light is None),
        windows=[
            dataclasses.replace(one, step_s=lengths.get(one.kind, one.step_s))
            for one in live.windows
        ],
    )
    return dataclasses.replace(record, live=live, findings=findings(scene))


def _shorter(taken: Taken, kept: float) -> Taken:
    """Returns it with work that takes a share of its time: what findings say of it then agrees with the lines."""
    if kept == 1:
        return taken
    work = taken.job.work
    length = np.maximum(1, np.rint((work.end_ns - work.start_ns) * kept)).astype(np.int64)
    job = dataclasses.replace(
        taken.job, work=dataclasses.replace(work, end_ns=work.start_ns + length)
    )
    faster = {k: ns * kept for k, ns in taken.tally.faster.items()}
    return dataclasses.replace(
        taken, job=job, tally=dataclasses.replace(taken.tally, faster=faster)
    )


def _host_pace(light: Taken | None, heavy: Taken) -> float | None:
    """Returns how long the host is at work in a step of the light window, over a step of the heavy one; None: not known."""
    found = [
        at_work_ns(one.host, one.marks, one.sound.first)
        for one in (light, heavy)
        if one is not None and one.host is not None
    ]
    if len(found) < 2 or not found[0] or not found[1]:
        return None
    return found[0] / found[1]


def _of_lines(taken: Taken) -> Busy:
    """Returns what the heavy window itself tells of the busy time: there is no lighter one on a CPU."""
    lines = taken.tally.lines
    bounds = taken.marks.bounds_ns[taken.sound.first :]
    idle = {
        cause: np.asarray([step.get(f"idle_{cause}", 0.0) for step in lines]) for cause in CAUSES
    }
    step = np.diff(bounds).astype(float)
    owned = np.zeros((len(lines), len(Owner)))
    owned[:, Owner.COMMUNICATION] = [one.get("comm_unsplit", 0.0) for one in lines]
    owned[:, Owner.COMPUTE] = step - sum(idle.values()) - owned[:, Owner.COMMUNICATION]
    return Busy(step, owned, idle)


def _differ(light: Busy, taken: Taken) -> float:
    """Returns by which share of kernel time both windows ran different kernels."""
    bounds = taken.marks.bounds_ns[taken.sound.first :]
    heavy = durations(
        taken.job.events, taken.job.work, int(bounds[0]), int(bounds[-1]), len(bounds) - 1
    )
    return differing_frac(light.kernels, heavy)


class _Lines:
    """The lines of the undisturbed step, and their spread over steps."""

    def __init__(
        self, taken: Taken, light: Busy, undisturbed: Undisturbed, taken_away: float
    ) -> None:
        self.light = light
        self.taken_away = taken_away
        self.phi = _moving_phi(taken, undisturbed.clocks)
        self.each_ns = np.asarray(undisturbed.each_s) * 1e9
        self.input_ns = undisturbed.input_s * 1e9 if undisturbed.input_s is not None else None
        self.names = [
            name for name in FAMILIES if not name.startswith(("idle_", "residual", "preempted"))
        ]
        self.heavy = np.asarray(
            [[step.get(name, 0.0) for name in self.names] for step in taken.tally.lines]
        )
        self.owner = np.asarray([_owner_of(name) for name in self.names])
        self.needed = np.isin(self.names, NEEDED)
        self.excess = self.names.index("gemm_excess")

    def reconciled(self) -> tuple[list[Line], Idle]:
        """Returns the lines with their 95 % intervals, and how the idle time was told."""
        step_ns = float(self.each_ns.mean())
        values, idle = self._at(self.heavy.mean(axis=0), self.light, step_ns)
        spread = self._spread()
        total = step_ns or 1.0
        lines = []
        for name, ns in values.items():
            low, high = (float(q) for q in np.quantile(spread[name], (0.025, 0.975)))
            if self.phi is not None and name in ("clock", "gemm_excess"):
                low, high = _with_clock(name, low, high, values, self.phi)
            if idle.estimated and name.startswith("idle_"):
                off = abs(self.light.step_ns - step_ns * (1 - self.taken_away))
                low, high = max(0.0, min(low, ns - off)), max(high, ns + off)
            share = ns / total
            lines.append(
                Line(name, FAMILIES[name], ns * 1e-9, (low * 1e-9, high * 1e-9), share, 100 * share)
            )
        kept = [line for line in lines if line.s or line.name in ("ideal", "residual")]
        return kept, idle

    def _at(self, heavy: np.ndarray, light: Busy, step_ns: float) -> tuple[dict[str, float], Idle]:
        """Returns the lines for mean lines of the heavy window, a light window and a step."""
        owned = light.owned.mean(axis=0)
        values = heavy.copy()
        for owner in Owner:
            mine = self.owner == owner
            have = values[mine].sum()
            if have > 0:
                values[mine] *= owned[owner] / have
                if owner == Owner.COMPUTE:  # it is the time that differs: what FLOPs need does not
                    values[self.excess] += values[self.needed].sum() - heavy[self.needed].sum()
                    values[self.needed] = heavy[self.needed]
                continue
            values[mine] = 0.0
            if owned[owner] > 0:  # the heavy window has none of it
                name = LINES_OF.get(owner, ("unattributed",))[0]
                values[self.names.index(name)] = owned[owner]
        idle = idle_of(step_ns * (1 - self.taken_away), light, self.input_ns)
        found = dict(zip(self.names, values.tolist(), strict=True))
        found |= {f"idle_{cause}": ns for cause, ns in idle.by_cause.items()}
        found["preempted"] = step_ns * self.taken_away
        found["residual"] = idle.residual_ns
        return {name: found.get(name, 0.0) for name in FAMILIES}, idle

    def _spread(self) -> dict[str, list[float]]:
        """Returns the lines of resampled steps: heavy, light and undisturbed ones, each on its own."""
        coin = np.random.default_rng(0)
        undisturbed = block_means(self.each_ns, coin, RESAMPLES)
        found: dict[str, list[float]] = defaultdict(list)
        for step_ns in undisturbed.tolist():
            heavy = self.heavy[coin.integers(0, len(self.heavy), len(self.heavy))].mean(axis=0)
            n = len(self.light.step)
            light = self.light.resampled(coin.integers(0, n, n))
            for name, ns in self._at(heavy, light, step_ns)[0].items():
                found[name].append(ns)
        return found


def _moving_phi(taken: Taken, clocks: Clocks | None) -> float | None:
    """Returns the clock over the stated one where it is below the highest; None where it is not, or no line hangs on it."""
    phi = taken.scale.phi if taken.scale and taken.scale.eta else None
    if clocks is None or clocks.sm_mhz is None or clocks.sm_max_mhz is None:
        return None
    return phi if clocks.sm_mhz < clocks.sm_max_mhz else None


def _with_clock(
    name: str, low: float, high: float, values: dict[str, float], phi: float
) -> tuple[float, float]:
    """Returns the interval of `clock` or of `gemm_excess`, which share what the clock's reading leaves open."""
    at_stated = values["ideal"] + values["precision"] + values["ceiling"]
    slack = CLOCK_FRAC * at_stated / phi
    # The clock cannot explain more than there is.
    more = min(slack, max(0.0, values["gemm_excess"]))
    return (low - slack, high + more) if name == "clock" else (low - more, high + slack)


def _owner_of(line: str) -> Owner:
    if line == "exposed_copy":
        return Owner.COPY
    return Owner.COMMUNICATION if line.startswith("comm") else Owner.COMPUTE


def _overlaid(
    record: LedgerRecord,
    taken: Taken,
    light: Busy,
    undisturbed: Undisturbed,
    lines: list[Line],
    idle: Idle,
    differing: float | None,
    kept: float,
) -> LedgerRecord:
    """Returns the heavy window's record with the lines of the undisturbed step."""
    step_s = undisturbed.step_s
    by_name = {line.name: line.s for line in lines}
    reason = build.no_mfu(taken.scale, taken.reason, record.coverage_frac, by_name, step_s)
    mfu = None
    if taken.scale and reason is None and record.model_flops_per_step is not None:
        mfu = record.model_flops_per_step / (step_s * taken.scale.reference_flops_per_s)
    ratio = step_s and kept * record.step_s / step_s
    doubts = [*taken.sound.doubts, *_doubts(by_name, step_s, light, differing)]
    doubts += build.doubts_of(
        by_name, step_s, record.coverage_frac, taken.scale, taken.reason, profiled=False
    )
    notes = [note for note in record.notes if not note.startswith(build.PROFILED)]
    if taken.host is None:
        doubt, note = _stretched(taken, light, step_s - by_name.get("preempted", 0.0))
        doubts += doubt
        notes += note
    return dataclasses.replace(
        record,
        steps=len(undisturbed.each_s),
        step_s=step_s,
        step_s_each=list(undisturbed.each_s),
        profiled=False,
        mfu=mfu,
        mfu_reason=reason,
        lines=lines,
        families=build.families_of(lines),
        busy_frac=light.busy_ns * 1e-9 / step_s,
        busy_most_frac=None,
        operators=[
            dataclasses.replace(one, s=one.s * kept, share_frac=one.share_frac * ratio)
            for one in record.operators
        ],
        blocking=[],
        hot=[
            dataclasses.replace(one, s=one.s * kept, share_frac=one.share_frac * ratio)
            for one in record.hot
        ],
        bandwidth=_over(record.bandwidth, ratio),
        residual_frac=by_name["residual"] / step_s,
        trusted=not doubts,
        untrusted_because=doubts,
        notes=notes,
    )


def _over(bandwidth: Bandwidth | None, ratio: float) -> Bandwidth | None:
    """Returns the use of the bandwidth over another step, `ratio` times as short."""
    if bandwidth is None:
        return None
    used = bandwidth.used_frac
    return dataclasses.replace(
        bandwidth,
        used_frac=None if used is None else used * ratio,
        copies=[
            dataclasses.replace(one, share_frac=one.share_frac * ratio) for one in bandwidth.copies
        ],
    )


def _stretched(taken: Taken, heavy: Busy, step_s: float) -> tuple[list[str], list[str]]:
    """Returns what to doubt, and what to say, where a CPU's profiled steps are not as long as undisturbed ones.

    What the profiler itself takes an event lies between operators, for the most part: there the undisturbed step has none
    of it, and what operators took for themselves stands.
    """
    more_ns = heavy.step_ns - step_s * 1e9
    frac = more_ns / (step_s * 1e9)
    low, high = (int(taken.marks.bounds_ns[i]) for i in (taken.sound.first, -1))
    events = taken.job.events
    inside = (events.start_ns >= low) & (events.start_ns < high)
    recorded = int((inside & events.of(Kind.OP, Kind.ANNOTATION)).sum()) / len(heavy.step)
    each_ns = more_ns / recorded if recorded else 0.0
    if frac > STRETCHED_FRAC and each_ns <= PROFILER_NS:
        return [], [
            f"the profiled steps were {frac:.0%} longer, {each_ns * 1e-3:.2g} us for each of the {recorded:.0f} events "
            "of a step: the profiler, between operators, which the undisturbed steps have none of"
        ]
    if abs(frac) <= STRETCHED_FRAC:
        return [], []
    return [
        f"the profiled steps differ by {frac:+.0%} from an undisturbed one: what operators took in them is not what "
        "they take (other work on this machine, or another clock)"
    ], []


def _doubts(
    lines: dict[str, float], step_s: float, light: Busy, differing: float | None
) -> list[str]:
    found = []
    busy_frac = light.busy_ns * 1e-9 / step_s
    if busy_frac > BUSY_FRAC:
        found.append(
            f"the device was busy for {busy_frac:.1%} of an undisturbed step while it was profiled: the windows are not "
            "of the same steps, or the profiler slows them"
        )
    residual = abs(lines["residual"]) / step_s
    if residual > RESIDUAL_FRAC:
        found.append(f"the residual is {residual:.1%} of the step (at most {RESIDUAL_FRAC:.0%})")
    if differing is not None and differing > DIFFERING_FRAC:
        found.append(
            f"the windows ran different kernels, {differing:.1%} of their time (at most {DIFFERING_FRAC:.0%})"
        )
    lost = lines.get("preempted", 0.0) / step_s
    if lost > PREEMPTED_FRAC:
        found.append(
            f"other work had the cores for {lost:.0%} of the step (at most {PREEMPTED_FRAC:.0%}): how long the rest takes "
            "alone is not sure"
        )
    return found


def _idle_from(idle: Idle, cpu: bool) -> str:
    window = "the window of operators" if cpu else "the light window"
    if idle.estimated:
        return f"the undisturbed step less the busy time of {window}, which the profiler stretched: causes are estimates"
    if not idle.divided:
        return f"{window}; it is too little to tell causes"
    return window
