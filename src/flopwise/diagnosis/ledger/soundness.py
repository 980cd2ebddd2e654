"""What of a trace cannot be used, in words: what costs trust, and what is only said."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flopwise.trace import health
from flopwise.trace.health import Sifted
from flopwise.trace.launches import Launches
from flopwise.trace.steps import Steps
from flopwise.trace.table import Events

SHORT = 60  # characters of a kernel's name, whose template arguments may fill a page
#: Unusable kernels that may have run for more than this share of the steps cost trust.
MISSING_FRAC = 0.01
#: So many of the starts at the launch's own nanosecond are no chance.
COPIED_STARTS_FRAC = 0.2
#: A stream's work runs one after the other: more overlap than this share of the busy time is no rounding.
OVERLAP_FRAC = 0.02


@dataclass
class Soundness:
    """How far the events of one trace can be trusted."""

    first: int  # the first step that counts
    missing_s: float = 0.0  # for how long unusable work may have run, a step
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(events: Events, sifted: Sifted, work: Launches, marks: Steps) -> Soundness:
    """Returns what is wrong with a trace.

    Args:
        events: all of them, the unusable ones included.
        sifted: those that can be used.
        work: of the device that the ledger is about.
        marks: its steps.
    """
    partly = marks.first_from_mark and len(marks) > 1
    found = Soundness(first=int(partly))
    if partly:
        found.notes.append(
            "the first step is left out: the trace does not show when the device began it"
        )
    _unusable(found, sifted, marks)
    _lost(found, events, marks)
    _outside(found, work, marks)
    _timeline(found, sifted, work)
    return found


def _unusable(found: Soundness, sifted: Sifted, marks: Steps) -> None:
    found.missing_s = sifted.missing_ns * 1e-9 / len(marks)
    if sifted.graph_rows:
        found.notes.append(
            f"{_counted(sifted.graph_rows, 'row stands', 'rows stand')} for a whole CUDA graph beside the kernels of "
            "it: the kernels are counted, once"
        )
    if sifted.host:
        found.notes.append(
            f"{_counted(sifted.host, 'event', 'events')} of the host with an impossible time left out"
        )
    if not sifted.dropped:
        return
    reasons = ", ".join(f"{n} {reason}" for reason, n in sifted.unusable.items())
    text = (
        f"{sifted.dropped} of {sifted.work} kernels and copies are unusable "
        f"({sifted.dropped / sifted.work:.1%}) and left out: {reasons} ({', '.join(map(_short, sifted.names))})"
    )
    each = float(np.diff(marks.bounds_ns).mean())
    if each and sifted.missing_ns / len(marks) / each > MISSING_FRAC:
        found.doubts.append(f"{text}. They may have run for {sifted.missing_ns * 1e-6:.3g} ms")
    else:
        found.notes.append(text)


def _lost(found: Soundness, events: Events, marks: Steps) -> None:
    lost = health.lost_launches(events)
    if not len(lost):
        return
    text = f"{_counted(len(lost), 'launch has', 'launches have')} no kernel"
    whole = health.first_whole(events, marks, lost)
    left_out = whole > found.first
    if left_out:
        found.first = whole
        found.notes.append(
            f"{text}: the first work of the recording is missing, and steps 1 to {whole} are left out: the device only "
            "seems idle there. Record after a step of warm-up"
        )
    low, high = int(marks.host_ns[found.first]), int(marks.host_ns[-1])
    at = events.start_ns[lost]
    inside = int(((at >= low) & (at < high)).sum())
    if inside:
        found.doubts.append(
            f"{text}, {inside} of them in these steps: their work is missing, and the device only seems idle there"
        )
    elif not left_out:
        found.notes.append(f"{text}, all of them outside of these steps")


def _outside(found: Soundness, work: Launches, marks: Steps) -> None:
    """Old profilers kept the kernels of their warm-up, seconds before the first step."""
    early = work.end_ns <= marks.bounds_ns[0]
    if early.any() and marks.by != "whole trace" and marks.first_from_mark:
        ns = int((work.end_ns - work.start_ns)[early].sum())
        found.notes.append(
            f"{_counted(int(early.sum()), 'kernel or copy', 'kernels and copies')} before the first step "
            f"({ns * 1e-6:.3g} ms) are left out"
        )


def _timeline(found: Soundness, sifted: Sifted, work: Launches) -> None:
    copied = health.starts_at_launch(work)
    launched = int((work.runtime >= 0).sum())
    if launched and copied / launched > COPIED_STARTS_FRAC:
        found.doubts.append(
            f"the device's start equals the launch's start for {copied}/{launched} pieces of work: a converter wrote "
            "over the times, and what overlaps or idles cannot be told from them"
        )
    busy = int((work.end_ns - work.start_ns).sum())
    over = health.overlap_ns(sifted.events, work)
    if busy and over / busy > OVERLAP_FRAC:
        found.doubts.append(
            f"work of one stream overlaps for {over * 1e-6:.3g} ms ({over / busy:.1%} of the busy time): a stream does "
            "one thing after the other, so these times are not the device's"
        )
    replayed = int(work.replayed.sum())
    if replayed:
        calls = len(np.unique(work.runtime[work.replayed]))
        found.notes.append(
            f"graph replay: {_counted(calls, 'launch', 'launches')} of CUDA graphs started {replayed} kernels; which "
            "operators they belong to is not in the trace"
        )


def _short(name: str) -> str:
    return name if len(name) <= SHORT else name[: SHORT - 1] + "…"


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"
