"""The ledger of a live run, from the profiled windows in its run folder."""

from __future__ import annotations

import gzip
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from flopwise.diagnosis.ledger.build import Given, LedgerError
from flopwise.diagnosis.ledger.counted import Counted
from flopwise.diagnosis.ledger.live import Undisturbed, live_ledger
from flopwise.diagnosis.ledger.windows import Window
from flopwise.errors import FlopwiseError
from flopwise.hardware.accelerators import Peak
from flopwise.measurement.counters import contradictions
from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord, Live, Profiled
from flopwise.records.rank import PROFILE_FOLDER, Profile, ProfiledWindow, RankRecord
from flopwise.records.run import RunRecord
from flopwise.summary.context import Context
from flopwise.trace.chrome import Trace, read
from flopwise.trials.interval import Interval, mean_interval

PACKED = ".gz"


def with_ledger(record: RunRecord, ledger: LedgerRecord | None, reason: str | None) -> RunRecord:
    """Returns the record with a ledger and what that finds, or with the reason why there is none."""
    if ledger is None:
        return replace(record, ledger_reason=reason)
    return replace(
        record,
        ledger=ledger,
        findings=_merged(record, ledger),
        notes=[*record.notes, *contradictions(record, ledger)],
    )


def ledger_or_reason(
    record: RunRecord, ranks: Sequence[RankRecord], folder: Path, context: Context
) -> tuple[LedgerRecord | None, str | None]:
    """Returns the ledger of the first rank, or why there is none."""
    try:
        return ledger_of(record, _first(ranks), folder, context), None
    except (FlopwiseError, OSError) as error:
        return None, str(error)
    except Exception as error:  # a trace that nobody has seen yet must not cost the report
        return None, f"it could not be made ({type(error).__name__}: {error})"


def ledger_of(record: RunRecord, rank: RankRecord, folder: Path, context: Context) -> LedgerRecord:
    """Returns the ledger of one rank.

    Raises:
        LedgerError: there are no windows, or no work in them.
        TraceError: a window cannot be read.
    """
    profile = rank.profile
    if profile is None:
        raise LedgerError("no windows were profiled (--no-profile)")
    noted = {window.kind: window for window in profile.windows}
    if "heavy" not in noted:
        raise LedgerError(f"operators were not profiled: {_why_none(profile)}")
    windows = {kind: _window(folder, window) for kind, window in noted.items() if kind != "stacks"}
    heavy = windows["heavy"]
    light = windows.get("light")
    if isinstance(heavy, str):
        raise LedgerError(heavy)
    if rank.device_type == "cuda" and (light is None or isinstance(light, str)):
        raise LedgerError(light or f"the device was not profiled: {_why_none(profile)}")
    each_s = [row.ns * 1e-9 for row in rank.rows if row.kind == "timed"]
    if not sum(each_s) > 0:
        raise LedgerError("no step was timed")
    ledger = live_ledger(
        heavy,
        light if isinstance(light, Window) else None,
        _stacks(folder, noted.get("stacks")),
        Undisturbed(
            each_s,
            record.phases.data_s,
            record.clocks,
            record.energy.watts,
            rank.preempted_frac,
        ),
        _live(profile, each_s),
        Given(
            counted=_counted(rank),
            padding_frac=record.throughput.padding_frac or None,
            ceilings=context.ceilings,
            sm_mhz=rank.telemetry.sm_mhz,
            peak=_peak(record, context),
        ),
        rank.device_index if rank.device_type == "cuda" else None,
    )
    path = noted["heavy"].file + PACKED  # as it lies there once the run has ended
    return replace(
        ledger,
        trace=path,
        rank=rank.rank,
        world_size=rank.world_size,
        notes=[*ledger.notes, *profile.notes, *_of_one(rank)],
    )


def _of_one(rank: RankRecord) -> list[str]:
    """Returns that a ledger is one rank's, where there are others."""
    if rank.world_size == 1:
        return []
    return [
        f"the ledger is that of rank {rank.rank} of {rank.world_size}: flopwise analyze of the run folder lays all of them on one another"
    ]


def window_bytes(ranks: Sequence[RankRecord]) -> int:
    """Returns how many bytes of traces the first rank's ledger is made of."""
    profile = _first(ranks).profile
    return sum(window.bytes for window in profile.windows) if profile else 0


def _first(ranks: Sequence[RankRecord]) -> RankRecord:
    return min(ranks, key=lambda rank: rank.rank)


def pack(folder: Path, ranks: Sequence[RankRecord]) -> None:
    """Compresses the traces of the windows; whoever opens them can read both forms."""
    for rank in ranks:
        for window in rank.profile.windows if rank.profile is not None else ():
            path = _inside(folder, window.file)
            ours = path is not None and path.parent == (folder / PROFILE_FOLDER).resolve()
            if path is not None and ours and not (folder / window.file).is_symlink():
                _compress(path)


def _compress(path: Path) -> None:
    packed = path.with_name(path.name + PACKED)
    packed.unlink(missing_ok=True)  # what a link of this name points to is not ours
    try:
        with open(path, "rb") as plain, gzip.open(packed, "wb", compresslevel=3) as small:
            shutil.copyfileobj(plain, small, 1 << 20)
    except BaseException:
        packed.unlink(missing_ok=True)
        raise
    path.unlink()


def _why_none(profile: Profile) -> str:
    state, _, why = profile.state.partition(": ")
    if state == "pending":
        return "the record was written before they were complete"
    return why or "each window of them was cut short"


def _window(folder: Path, noted: ProfiledWindow) -> Window | str:
    """Returns a window, or why it has none to show."""
    try:
        return Window.of(read_window(folder, noted), noted)
    except LedgerError as error:
        return str(error)


def read_window(folder: Path, noted: ProfiledWindow) -> Trace:
    """Returns the trace of a window, packed or not.

    Raises:
        LedgerError: it is not there.
        TraceError: it cannot be read.
    """
    for name in (noted.file, noted.file + PACKED):
        path = _inside(folder, name)
        if path is not None:
            return read(path)
    raise LedgerError(
        f"the trace of the {noted.kind} window is not in the run folder ({noted.file or 'not written'})"
    )


def _inside(folder: Path, name: str) -> Path | None:
    """Returns the file of this name if it lies below the folder."""
    try:
        path = (folder / name).resolve()
        found = path.is_file() and folder.resolve() in path.parents
    except (OSError, ValueError, RuntimeError):  # no name of a file, or a link to itself
        return None
    return path if found else None


def _stacks(folder: Path, noted: ProfiledWindow | None) -> Window | None:
    """Returns the window with Python's functions, if it can be had: it only shows the user's lines."""
    if noted is None:
        return None
    try:
        return Window.of(read_window(folder, noted), noted)
    except FlopwiseError:
        return None


def _counted(rank: RankRecord) -> Counted | None:
    """Returns the FLOPs of a step where all timed steps do the same work."""
    shapes = {row.shape for row in rank.rows if row.kind == "timed" and row.sampled}
    counts = [count for count in rank.flops if count.shape in shapes] or rank.flops
    if len(counts) != 1 or len(shapes) > 1:
        return None
    sampled = [row.micro_batches for row in rank.rows if row.kind == "timed" and row.sampled]
    mean = sum(sampled) / len(sampled) if sampled else 0.0
    times = mean / counts[0].micro_batches if mean and counts[0].micro_batches else 1.0
    return Counted.of(counts[0], times)


def _peak(record: RunRecord, context: Context) -> Peak | None:
    """Returns a peak that the table of accelerators does not give: the user's."""
    return context.peak if record.mfu.peak_kind == "given" else None


def _live(profile: Profile, each_s: Sequence[float]) -> Live:
    windows = []
    for window in profile.windows:
        steps = list(zip(pairwise(window.marks_ns), window.flags, strict=False))
        each = [(high - low) * 1e-9 for (low, high), flag in steps[window.lead :] if not flag]
        mean = sum(each) / len(each) if each else None
        windows.append(Profiled(window.kind, len(window.flags), mean, window.cost_ns * 1e-9))
    before = mean_interval(list(each_s))
    after_s = after_frac = after_ci95 = None
    if len(profile.after_ns) >= 3:
        after = mean_interval([ns * 1e-9 for ns in profile.after_ns])
        after_s, after_frac = after.mean, after.mean / before.mean - 1
        widths = _width_frac(before), _width_frac(after)
        if widths[0] is not None and widths[1] is not None:
            off = math.hypot(widths[0], widths[1]) * (1 + after_frac)
            after_ci95 = after_frac - off, after_frac + off
    interval = None if before.low is None or before.high is None else (before.low, before.high)
    return Live(
        step_s=before.mean,
        step_s_ci95=interval,
        steps=len(each_s),
        windows=windows,
        idle_from="",
        after_step_s=after_s,
        after_frac=after_frac,
        after_ci95=after_ci95,
        torn_down=profile.torn_down,
    )


def _width_frac(interval: Interval) -> float | None:
    """Returns half of an interval, over its mean; None where there is none."""
    if interval.low is None or interval.high is None:
        return None
    return max(interval.high - interval.mean, interval.mean - interval.low) / interval.mean


def _merged(record: RunRecord, ledger: LedgerRecord) -> list[Finding]:
    """Returns the findings of the run and of its ledger; of one cause the ledger's, which saw the device."""
    own = {finding.cause: finding for finding in record.findings}
    found = [_joined(finding, own.get(finding.cause)) for finding in ledger.findings]
    seen = {finding.cause for finding in found}
    return [*found, *(finding for finding in record.findings if finding.cause not in seen)]


def _joined(finding: Finding, of_run: Finding | None) -> Finding:
    """Returns a finding of the ledger with what only the run itself knows: lines, how loaders are set, and what to set.

    Its share is the device's, and no gain is more than that, where only the run predicts one.
    """
    if of_run is None:
        return finding
    gain = finding.predicted_gain_frac
    if gain is None and of_run.predicted_gain_frac is not None:
        gain = min(of_run.predicted_gain_frac, finding.share_frac or 0.0)
    return replace(
        finding,
        where=finding.where or of_run.where,
        evidence="; ".join(filter(None, (finding.evidence, of_run.evidence))),
        advice=of_run.advice or finding.advice,
        predicted_gain_frac=gain,
    )
