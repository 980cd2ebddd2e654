"""Steps of captures without a profiler's marks: NVTX ranges that people number."""

from __future__ import annotations

import re

import numpy as np

from flopwise.trace.kinds import Kind
from flopwise.trace.table import Events

#: How people name the ranges of their steps.
_STEP = re.compile(
    r"(?:train(?:ing)?[ _]?)?(?:step|iter(?:ation)?|batch)[ _#:]*(\d{1,9})", re.IGNORECASE
)
_SIGNS_OF_STEPS = re.compile(r"ProfilerStep\s*#?\s*\d|Optimizer\.step#")


def numbered_steps(events: Events) -> tuple[Events, list[str]]:
    """Returns the events with numbered ranges named as the profiler names steps, where nothing else tells them; and words on it."""
    if not len(events) or any(_SIGNS_OF_STEPS.match(name) for name in events.names):
        return events, []
    numbers = {i: m for i, name in enumerate(events.names) if (m := _STEP.fullmatch(name))}
    rows = np.flatnonzero(events.of(Kind.ANNOTATION) & np.isin(events.name, [*numbers]))
    if len(rows) < 2:
        return events, []
    apart = events.end_ns[rows][:-1] <= events.start_ns[rows][1:]
    if not apart.all() or len(np.unique(events.lane[rows])) > 1:
        return events, [
            f"ranges such as {events.name_of(int(rows[0]))!r} overlap or lie on several threads: not taken for steps"
        ]
    said = f"steps are the {len(rows)} NVTX ranges named like {events.name_of(int(rows[0]))!r}"
    for i, match in numbers.items():
        events.names[i] = f"ProfilerStep#{match[1]}"
    return events, [said]
