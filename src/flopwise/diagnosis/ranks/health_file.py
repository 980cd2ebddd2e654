"""What is wrong with a trace as a file: it ends early, or its events are damaged, have times that cannot be true, or no work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.records.job import Defect
from flopwise.trace import cpu, health
from flopwise.trace.chrome import Trace
from flopwise.trace.health import Sifted
from flopwise.trace.table import Events

#: So many of the events may be damaged before a conclusion is withheld: what a ledger's lines can show is about as fine.
DAMAGED_FRAC = 0.01


def of_file(trace: Trace, sifted: Sifted) -> Iterator[Defect]:
    """Yields what is wrong with the file, before any device is looked at."""
    damage, n = trace.damage, len(trace.events)
    if damage.ends_early:
        over = f"{1e-6 * int(_span(trace.events)):.4g} ms" if n else "no time"
        yield defect(
            "H105",
            f"the file ends early, after {n} events over {over}: {damage.ends_early}",
            count=1,
        )
    if damage.events:
        yield defect(
            "H106",
            f"{damage.events} of {n + damage.events} events are damaged and left out; the first at {damage.described[0]}",
            count=damage.events,
            of=n + damage.events,
            matters=damage.events > DAMAGED_FRAC * (n + damage.events),
            calls=True,
        )
    if damage.not_utf8:
        yield defect(
            "H107",
            f"{damage.not_utf8} events have bytes that are no UTF-8; they are read, with U+FFFD in place of these bytes",
            count=damage.not_utf8,
            of=n,
        )
    if sifted.host:
        hosts = n - sifted.work
        yield defect(
            "H111",
            f"{sifted.host} of {hosts} events of the host have times that cannot be true and are left out",
            count=sifted.host,
            of=hosts,
            matters=sifted.host > DAMAGED_FRAC * hosts,
        )
    if sifted.work and sifted.dropped == sifted.work:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sifted.unusable.items())
        yield defect(
            "H116",
            f"none of the {sifted.work} kernels and copies can be used: {reasons}",
            count=sifted.work,
            of=sifted.work,
            calls=True,
        )
    shown = None if sifted.work else cpu.elsewhere(trace.events, trace.header)
    if shown is not None:
        yield defect(
            "H116",
            f"no kernel or copy of a device is in it, but it is no job on a CPU: it has {shown}",
            count=n,
            of=n,
            calls=True,
            what="events",
        )


def _span(events: Events) -> int:
    good = (np.abs(events.start_ns) < health.NO_TIME_NS) & (
        np.abs(events.duration_ns) < health.LONGEST_HOST_NS
    )
    if not good.any():
        return 0
    return int(events.end_ns[good].max()) - int(events.start_ns[good].min())
