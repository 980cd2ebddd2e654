"""Steps of exports of Nsight Systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopwise.trace.chrome import Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import launches
from flopwise.trace.nsys import notes_of
from flopwise.trace.steps import steps

PID, TID = 4711, 4712
THREAD, PROCESS = (1 << 48) + (PID << 24) + TID, (1 << 48) + (PID << 24)


def names(trace: Trace, *kinds: Kind) -> list[str]:
    events = trace.events.where(trace.events.of(*kinds))
    return [events.name_of(row) for row in range(len(events))]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("suffix", ["", "_V2", "_V3"])
def test_names_by_number_or_text_and_tables_with_a_suffix(
    make_export: Any, tmp_path: Path, inline: bool, suffix: str
) -> None:
    e = make_export(tmp_path / "e.sqlite", suffix, inline)
    for i in range(4):
        e.step(i)
        e.range(f"step {i}", 1_000_000 * (i + 1) - 1, 1_000_000 * (i + 1) + 900_000, by_id=i % 2 == 1)  # fmt: skip
    trace = e.read()
    assert names(trace, Kind.KERNEL) == ["gemm", "relu"] * 4
    assert names(trace, Kind.ANNOTATION) == [f"ProfilerStep#{i}" for i in range(4)]
    marks = steps(trace.events, launches(trace.events, 0))
    assert (marks.by, marks.numbers) == ("profiler marks", (0, 1, 2, 3))
    assert marks.bounds_ns.tolist()[1:] == [1_700_000, 2_700_000, 3_700_000, 4_700_000]
    assert "steps are the 4 NVTX ranges named like 'step 0'" in notes_of(trace)


def test_ranges_that_overlap_are_no_steps(export: Any) -> None:
    export.step(0)
    export.range("step 0", 0, 900_000)
    export.range("step 1", 800_000, 1_900_000)
    trace = export.read()
    assert names(trace, Kind.ANNOTATION) == ["step 0", "step 1"]
    assert any("not taken for steps" in note for note in notes_of(trace))
