"""A copy of a trace with the ledger in it: tracks of steps, lines, idle time and findings that ui.perfetto.dev opens.

Source: Google, "Trace Event Format", for the kinds of events: M, B, E and i.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwise.errors import RunFolderError, UsageError
from flopwise.records.finding import Finding
from flopwise.reports.ledger import WORDS
from flopwise.reports.perfetto_copy import Copied, copy
from flopwise.reports.screen import visible

#: The process of our tracks, which no process of a trace can have. Source: Linux, include/linux/threads.h, PID_MAX_LIMIT is
#: 4 Mi; devices are counted from 0.
PID = 0x666C6F70
STEPS, LEDGER, IDLE, FINDINGS = range(1, 5)
TRACKS = {
    STEPS: "flopwise: steps",
    LEDGER: "flopwise: ledger",
    IDLE: "flopwise: idle",
    FINDINGS: "flopwise: findings",
}
IN_ORDER = "lines are drawn one after the other in the ledger's order, not when they happened"
_IDLE_WORDS = {
    cause: WORDS[f"idle_{cause}"] for cause in ("input", "sync", "launch", "device", "other")
}


def annotated(
    source: Path,
    out: Path,
    *,
    bounds_ns: Sequence[int],
    lines: Sequence[Mapping[str, float]] = (),
    findings: Sequence[Finding] = (),
    idle: Iterable[tuple[int, int, str]] = (),
    progress: Callable[[int], None] | None = None,
) -> Copied:
    """Writes a copy of a Kineto trace with tracks of ours, and returns what became of its events.

    The events of the trace are copied byte by byte and come first; ours are no complete ("X") events, so that the copy reads
    as the original does. The whole file is never in memory.

    Args:
        source: the trace, compressed or not.
        out: the copy, compressed where its name ends in `.gz`. Never half-written.
        bounds_ns: where steps begin and end, n + 1 times in ns of the trace's own time, ascending.
        lines: of each of the n steps, what the ledger's lines take in ns.
        findings: those of the ledger.
        idle: stretches in ns of the trace's own time that do not overlap, and their cause.
        progress: called now and then with the number of uncompressed bytes read so far.

    Raises:
        TraceError: the trace cannot be read, or is none.
        UsageError: `out` is the trace itself.
        RunFolderError: `out` cannot be written.
        ValueError: bounds do not ascend, or do not fit the lines.
    """
    _check(source, out, bounds_ns, lines, findings)
    read = 0

    def tell(piece: bytes) -> None:
        nonlocal read
        read += len(piece)
        if progress is not None:
            progress(read)

    half = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with half.open("xb") as file:
            packed = (
                gzip.GzipFile("", "wb", 6, file, mtime=0)
                if out.suffix == ".gz"
                else contextlib.nullcontext(file)
            )
            with packed as target:
                copied = copy(source, target.write, _added(bounds_ns, lines, findings, idle), tell)
        os.replace(half, out)
    except OSError as error:
        raise RunFolderError(
            f"{out}: cannot be written ({error.strerror or error}); nothing was left half-written"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
    return copied


def _check(
    source: Path,
    out: Path,
    bounds_ns: Sequence[int],
    lines: Sequence[Mapping[str, float]],
    findings: Sequence[Finding],
) -> None:
    if os.path.realpath(source) == os.path.realpath(out) or _same(source, out):
        raise UsageError(f"{out}: that is the trace itself. Nothing was written")
    if os.path.exists(out) and not os.path.isfile(out):
        raise RunFolderError(f"{out}: is no file. Nothing was written")
    if any(low > high for low, high in itertools.pairwise(bounds_ns)):
        raise ValueError("bounds_ns do not ascend")
    if (lines or findings) and (len(bounds_ns) < 2 or len(lines) not in (0, len(bounds_ns) - 1)):
        raise ValueError(f"{len(bounds_ns)} bounds do not fit the lines of {len(lines)} steps")


def _same(source: Path, out: Path) -> bool:
    try:
        return source.samefile(out)
    except OSError:
        return False


def _added(
    bounds_ns: Sequence[int],
    lines: Sequence[Mapping[str, float]],
    findings: Sequence[Finding],
    idle: Iterable[tuple[int, int, str]],
) -> Iterator[bytes]:
    """Yields our events, track by track."""
    yield _named("process_name", 0, {"name": "flopwise: ledger and findings"})
    yield _named("process_sort_index", 0, {"sort_index": -1})
    for track, name in TRACKS.items():
        yield _named("thread_name", track, {"name": name})
        yield _named("thread_sort_index", track, {"sort_index": track})
    for number, (low, high) in enumerate(itertools.pairwise(bounds_ns)):
        taken = lines[number] if lines else {}
        whole = {"step": number, "ms": (high - low) / 1e6, "lines_ms": _ms(taken)}
        yield from _slice(STEPS, f"step {number}", low, high, whole)
        yield from _ledger(taken, low, high)
    for low, high, cause in sorted(idle):
        named = _IDLE_WORDS.get(cause, f"idle: {cause}")
        yield from _slice(IDLE, named, low, high, {"cause": cause})
    for at, finding in enumerate(findings):
        # side by side, so that each can be clicked
        ns = bounds_ns[0] + (bounds_ns[-1] - bounds_ns[0]) * at // len(findings)
        yield _event("i", FINDINGS, f"{finding.code} {finding.cause}", ns, _told(finding), s="t")


def _ledger(taken: Mapping[str, float], low: int, high: int) -> Iterator[bytes]:
    """Yields the lines of a step one after the other, scaled so that they fill it; none can be drawn that is below 0."""
    drawn = [(name, ns) for name, ns in taken.items() if 0 < ns < math.inf]
    total = sum(ns for _, ns in drawn)
    done = 0.0
    at = low
    for name, ns in drawn:
        done += ns
        end = low + round((high - low) * min(done / total, 1.0))
        told = {"line": name, "ms": ns / 1e6, "share": ns / (high - low) if high > low else 0.0}
        yield from _slice(LEDGER, WORDS.get(name, name), at, end, {**told, "note": IN_ORDER})
        at = end


def _told(finding: Finding) -> dict[str, Any]:
    return {
        "evidence": finding.evidence,
        "do": finding.advice,
        "where": list(finding.where),
        "share": finding.share_frac,
        "predicted gain": finding.predicted_gain_frac,
        "certainty": finding.certainty,
        "note": "of the whole trace: where it stands means nothing",
    }


def _ms(taken: Mapping[str, float]) -> dict[str, float]:
    return {name: ns / 1e6 for name, ns in taken.items()}


def _slice(track: int, name: str, low: int, high: int, args: dict[str, Any]) -> Iterator[bytes]:
    """Yields the begin and the end of a stretch; nothing for an empty one."""
    if high > low:
        yield _event("B", track, name, low, args)
        yield _event("E", track, name, high, {})


def _named(kind: str, track: int, args: dict[str, Any]) -> bytes:
    return _event("M", track, kind, 0, args)


def _event(ph: str, track: int, name: str, ns: int, args: dict[str, Any], **more: str) -> bytes:
    """Returns one event as JSON in ASCII, its time in microseconds exact to the nanosecond."""
    event = {"ph": ph, "cat": "flopwise", "name": _safe(name), "pid": PID, "tid": track, **more}
    text = json.dumps({**event, "args": _safe(args)}, allow_nan=False)
    us, rest = divmod(abs(ns), 1000)
    return f'{text[:-1]}, "ts": {"-" if ns < 0 else ""}{us}.{rest:03d}}}'.encode("ascii")


def _safe(value: Any) -> Any:
    """Returns a value with its hidden characters as escapes, and None for what is no number."""
    if isinstance(value, str):
        return visible(value, ascii_only=False)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_safe(key): _safe(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_safe(one) for one in value]
    return value
