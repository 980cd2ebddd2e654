"""Evidence made by hand: a rank with given steps and surroundings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flopwise.diagnosis.findings import find
from flopwise.records.finding import Finding
from flopwise.records.rank import RankRecord, StepRow, Telemetry
from flopwise.records.surroundings import LoaderFacts, Surroundings
from flopwise.summary import Context, summarise

MS = 1_000_000


@pytest.fixture
def loader() -> Callable[..., LoaderFacts]:
    """Returns a function that makes the facts of a loader; times in ms."""

    def make(workers: int, load: float | None = None, **more: Any) -> LoaderFacts:
        return LoaderFacts(
            where="train.py:9",
            num_workers=workers,
            prefetch_factor=2 if workers else None,
            pin_memory=False,
            persistent_workers=more.pop("persistent_workers", False),
            batch_size=8,
            batches=100,
            starts=1,
            loads=100 if load else 0,
            load_ns=int(load * MS) if load else None,
            load_cpu_ns=int(load * MS * more.pop("computing", 0.1)) if load else None,
            **more,
        )

    return make


@pytest.fixture
def surroundings() -> Callable[..., Surroundings]:
    """Returns a function that makes surroundings on a machine of four cores."""

    def make(**more: Any) -> Surroundings:
        return Surroundings(**{"machine_cores": 4, "usable_cores": 4, **more})

    return make


@pytest.fixture
def rank() -> Callable[..., RankRecord]:
    """Returns a function that makes a rank from pairs (wait, step) in ms, all of them timed."""

    def make(
        steps: Sequence[tuple[float, float]], around: Surroundings | None = None, **more: Any
    ) -> RankRecord:
        rows = more.pop("rows", None) or [
            StepRow(
                int(ms * MS), int(ms * MS), "timed", "8x4 float32", 1, 8, data_ns=int(wait * MS)
            )
            for wait, ms in steps
        ]
        fields: dict[str, Any] = {
            "schema": "flopwise.rank/1", "rank": 0, "world_size": 1, "local_rank": 0, "host": "h",
            "pid": 1, "argv": [], "python": "", "torch": "", "cuda": None, "nccl": None,
            "device_type": "cpu", "device_name": None, "device_index": None, "cpu_threads": 1,
            "cpu_cores": 4, "boundary": "optimizer", "status": "complete", "clock": "host clock",
            "steps_seen": len(rows) + 1, "rows": rows, "flops": [], "telemetry": Telemetry(),
            "allocated_peak_bytes": None, "reserved_peak_bytes": None, "device_total_bytes": None,
            "host_rss_peak_bytes": 1, "attach_ns": 1, "losses": [], "patches": [], "notes": [],
            "warmup_rule": "", "warmup_by_hand": False, "counted_from": None,
            "float32_matmul_precision": "highest", "surroundings": around,
        }  # fmt: skip
        return RankRecord(**{**fields, **more})

    return make


@pytest.fixture
def findings() -> Callable[..., list[Finding]]:
    """Returns a function from ranks to the findings of their run."""

    def run(*ranks: RankRecord) -> list[Finding]:
        record = summarise(ranks, Context([], ""))
        assert record.findings == find(ranks, record)
        return record.findings

    return run
