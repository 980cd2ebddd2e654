"""What of one device's work has times that cannot be true: too long, too early, over each other, or copied from the launch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flopwise.diagnosis.ledger.soundness import (
    COPIED_STARTS_FRAC,
    MISSING_FRAC,
    OVERLAP_FRAC,
)
from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.diagnosis.ranks.health_seen import Seen, called, calls_of, so_many_calls
from flopwise.records.job import Defect
from flopwise.trace import health
from flopwise.trace.families import communicates
from flopwise.trace.kinds import Kind

#: So many pieces of work may begin before their launch before a conclusion is withheld: what a ledger's lines can show is about
#: as fine.
EARLY_FRAC = 0.01
EARLY_NS = 1_000  # clocks of whole microseconds round by so much
#: A kernel that fills more than this share of the device's time from its first event to its last is one that a window of
#: several steps cannot hold.
MOST_FRAC = 0.5


def unusable(seen: Seen) -> Iterator[Defect]:
    """Yields that work of the device cannot be used, and how much time it may have taken."""
    sifted = seen.sifted
    reasons = {reason: n for reason, n in sifted.unusable.items() if reason != health.OUTLASTING}
    if not reasons:
        return
    dropped = sum(reasons.values())
    bounds = seen.marks.bounds_ns
    covered = int(bounds[-1] - bounds[0])
    share = sifted.missing_ns / covered if covered else 1.0
    calls = calls_of(seen, np.setdiff1d(sifted.rows, sifted.outlasting))
    said = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    yield defect(
        "H101",
        f"{dropped} of {sifted.work} kernels and copies cannot be used: {said}; they may have run for "
        f"{sifted.missing_ns * 1e-6:.3g} ms, {share:.2%} of the steps{so_many_calls(calls)}",
        count=dropped,
        of=sifted.work,
        matters=share > MISSING_FRAC or calls > 0,
        calls=calls > 0,
    )


def outlasting(seen: Seen) -> Iterator[Defect]:
    """Yields that work lasts far longer than others of its name: left out, or over most of the trace."""
    events = seen.events
    rows = seen.sifted.outlasting
    if len(rows):
        longest = int(rows[np.argmax(events.duration_ns[rows])])
        calls = calls_of(seen, rows)
        yield defect(
            "H102",
            f"{called(events.name_of(longest))} lasts {1e-6 * int(events.duration_ns[longest]):.4g} ms, more than "
            f"{health.OUTLASTING_TIMES} times its name's median, while its stream goes on with other work; left out"
            f"{so_many_calls(calls)}",
            count=len(rows),
            of=seen.sifted.work,
            matters=calls > 0 or bool(seen.counted(rows).any()),
            calls=calls > 0,
        )
        return
    work = seen.usable.of(Kind.KERNEL) & (seen.usable.device == seen.work.device)
    span = int(seen.work.end_ns.max() - seen.work.start_ns.min())
    for row in health.outliers(seen.usable, work)[:1]:
        name, duration = seen.usable.name_of(row), int(seen.usable.duration_ns[row])
        if duration > MOST_FRAC * span and not communicates(name):
            yield defect(
                "H102",
                f"{called(name)} lasts {1e-6 * duration:.4g} ms, more than {health.OUTLASTING_TIMES} times its name's median "
                f"and {duration / span:.0%} of the trace",
                count=1,
                of=seen.sifted.work,
            )


def times(seen: Seen) -> Iterator[Defect]:
    """Yields starts and ends that cannot be the device's."""
    work = seen.work
    calls = bool(seen.calls.any())
    known = int((work.runtime >= 0).sum())
    copied = health.starts_at_launch(work)
    if copied:
        yield defect(
            "H108",
            f"{copied} of {known} pieces of work start in the nanosecond of their launch: a converter wrote over the "
            "device's times",
            count=copied,
            of=known,
            matters=copied > COPIED_STARTS_FRAC * known,
            calls=calls,
        )
    busy = int((work.end_ns - work.start_ns).sum())
    over = health.overlap_ns(seen.usable, work)
    if over:
        yield defect(
            "H109",
            f"work of one stream overlaps by more than {health.OVERLAP_NS * 1e-3:.0f} us each, for {over * 1e-6:.3g} ms in all, "
            f"{over / busy:.2%} of the busy time",
            count=health.overlaps(seen.usable, work),
            of=len(work.rows),
            matters=over > OVERLAP_FRAC * busy,
            calls=calls,
        )
    early = (work.runtime >= 0) & (work.start_ns < work.launched_ns - EARLY_NS)
    if early.any():
        by = int((work.launched_ns - work.start_ns)[early].max())
        yield defect(
            "H110",
            f"{int(early.sum())} of {known} pieces of work start before their launch, by up to {by * 1e-6:.3g} ms: the clocks "
            "of host and device are apart",
            count=int(early.sum()),
            of=known,
            matters=int(early.sum()) > EARLY_FRAC * known,
        )
