"""Stored sample records, and records with anything in them."""

from __future__ import annotations

import dataclasses
import math
import random
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from flopwise.diagnosis.ledger import build
from flopwise.records import job as job_records
from flopwise.records import run, store, verdict
from flopwise.records.finding import Finding
from flopwise.records.job import JobRecord
from flopwise.records.ledger import Line

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def sample():
    """A function from the name of a stored record to the record."""

    def load(name: str) -> run.RunRecord | verdict.TuneRecord:
        data = (DATA / f"{name}.json").read_bytes()
        tuned = name.startswith("tune")
        kind, schema = (
            (verdict.TuneRecord, verdict.SCHEMA) if tuned else (run.RunRecord, run.SCHEMA)
        )
        return store.decode(data, kind, schema, name)

    return load


@pytest.fixture(scope="session")
def any_record():
    """A function from a class of records to a strategy that fills every field, hostile text included."""
    hostile = st.one_of(
        st.text(st.characters(), max_size=12),  # every category, lone surrogates too
        st.text("a漢é\u0301👩\u200d🚀\u202e\x1b[]/\\\n\t\r\x07\x9b\u2028 ·█", max_size=200),
        st.sampled_from(
            [
                "[red]x[/]",
                "[link=http://a]b[/link]",
                "\x1b[2J\x1b]0;owned\x07",
                "a" * 300,
                "漢" * 150,
                "x " * 150,
                "complete",
                "cpu",
                ":warning:",
            ]
        ),
    )
    leaves = {
        str: hostile,
        int: st.integers(-(10**25), 10**25),
        float: st.floats(),
        bool: st.booleans(),
        type(None): st.none(),
    }

    def strategy(hint):
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            return st.builds(hint, **{name: strategy(part) for name, part in hints.items()})
        if hint in leaves:
            return leaves[hint]
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is list:
            return st.lists(strategy(parts[0]), max_size=3)
        if origin is dict:
            return st.dictionaries(strategy(parts[0]), strategy(parts[1]), max_size=3)
        if origin is tuple:
            return st.tuples(*map(strategy, parts))
        assert origin is types.UnionType, hint
        return st.one_of(*map(strategy, parts))

    return strategy


@pytest.fixture
def job(training: Any) -> Callable[..., JobRecord]:
    """Returns a function that makes the record of a job whose rank 1 is late, clean unless told otherwise."""
    ledger = build.ledger(training(4).read())

    def make(n: int = 8, **fields: Any) -> JobRecord:
        ranks = []
        for rank in range(n):
            idle = 0.3e-3 if rank == 1 else 0.05e-3
            lines = [
                Line("ideal", "useful", 0.4e-3, (0.4e-3, 0.4e-3), 0.4, 40.0),
                Line("comm_unsplit", "communication", 0.6e-3 - idle, (0.5e-3 - idle, 0.7e-3 - idle), 0.6 - idle / 1e-3, 20.0),
                Line("idle_launch", "pipeline", idle, (idle, idle), idle / 1e-3, 5.0),
            ]  # fmt: skip
            one = dataclasses.replace(
                ledger, rank=rank, world_size=n, lines=lines, step_s=1e-3, mfu=0.4
            )
            ranks.append(
                job_records.RankRecord(
                    rank=rank, path=f"run/rank{rank}.json.gz", device_name="NVIDIA H200", step_s=1e-3 + 1e-6 * rank,
                    steps=4, ledger=one, ledger_reason=None, calls=76, matched=56, communication_s=0.5e-3,
                    exposed_s=0.25e-3, wait_s=0.13e-3 if rank == 1 else 0.35e-3,
                    clock_offset_s=20e-6 * rank, clock_error_s=1e-6 if rank else 0.0,
                )
            )  # fmt: skip
        lines = [
            Line("ideal", "useful", 0.4e-3, (0.39e-3, 0.41e-3), 0.4, 40.0),
            Line("comm_unsplit", "communication", 0.5e-3, (0.4e-3, 0.6e-3), 0.5, 50.0),
            Line("idle_launch", "pipeline", 0.1e-3, (0.1e-3, 0.1e-3), 0.1, 10.0),
        ]
        kinds = [
            job_records.CollectiveKind(
                op="all_reduce", group="0", group_size=n, ranks=list(range(n)), dtype="bf16", nbytes=25_000_000,
                calls=10.0, s=0.4e-3, wait_s=0.3e-3, transfer_s=0.1e-3, exposed_s=0.2e-3,
                algorithm_bytes_per_s=2.5e11, bus_bytes_per_s=2.25e11, of_link_frac=0.5, kernels=["ncclDevKernel"],
            ),
            job_records.CollectiveKind(
                op="broadcast", group="", group_size=None, ranks=None, dtype=None, nbytes=None, calls=1.5, s=0.1e-3,
                wait_s=0.05e-3, transfer_s=0.05e-3, exposed_s=0.05e-3, algorithm_bytes_per_s=None,
                bus_bytes_per_s=None, of_link_frac=None, redundant="the same buffers in every step",
            ),
        ]  # fmt: skip
        made: dict[str, Any] = {
            "schema": job_records.SCHEMA, "flopwise": "1.0", "sources": [one.path for one in ranks], "world_size": n,
            "device_name": "NVIDIA H200", "step_s": 1e-3, "steps": 4, "ranks": ranks, "lines": lines,
            "families": {"useful": 0.4e-3, "communication": 0.5e-3, "pipeline": 0.1e-3}, "lines_reason": None,
            "health": job_records.Health(True, ["missing kernels", "impossible durations", "cut files"], [], {}),
            "collectives": kinds,
            "links": job_records.Links("NVLink 4", 450e9, "data sheet", 0.12, 0.5, None),
            "redundant": [
                job_records.Redundant(
                    "buffers", 1e6, 0.04, 0.05e-3, 0.05e-3, 1.5, "64 buffers, unchanged", "broadcast_buffers=False"
                )
            ],
            "redundant_bytes_frac": 0.04,
            "stragglers": [
                job_records.Straggler(
                    1, 0.28e-3, (0.25e-3, 0.31e-3), 0.84, 0.2, "host", {"host": 0.25e-3, "kernels": 0.03e-3},
                    "its device idles 0.3 ms a step for its host, others 0.05 ms", ["train.py:88"], 0.14e-3,
                    0.07e-3, (0.06e-3, 0.08e-3),
                )
            ],
            "stragglers_reason": None,
            "findings": [
                Finding("J101", "straggler", 0.28, ["train.py:88"], "rank 1 is late", "pin its host", 0.2, "measured")
            ],
            "notes": ["4 steps show differences of 2 % and more"],
        }  # fmt: skip
        return job_records.JobRecord(**({"mfu": 0.4} | made | fields))

    return make


HOSTILE = [
    "", "0", "host", "ledger", "ideal", "a" * 300, "漢" * 150, "x " * 150, "[red]x[/]", ":warning:", "e\u0301👩\u200d🚀",
    "\x1b[2J\x1b]0;owned\x07", "\ud800\u202e\x9b\u2028\r\n\x00", "</script><script>alert(1)</script>\"'><!--", "&lt;]]>-->",
]  # fmt: skip
NUMBERS = [0.0, -0.0, 1e-3, 0.5, 1.0, -2.5, 1e-320, 1e300, math.inf, -math.inf, math.nan]


@pytest.fixture(scope="session")
def any_job() -> Callable[[int], JobRecord]:
    """Returns a function that makes a job with anything in it, another one for each seed."""

    def value(hint: Any, draw: random.Random) -> Any:
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            return hint(**{name: value(part, draw) for name, part in hints.items()})
        leaves: dict[Any, Callable[[], Any]] = {
            str: lambda: draw.choice(HOSTILE),
            int: lambda: draw.choice([0, 1, 2, 3, -1, 10**25, -(10**25), draw.randrange(100)]),
            float: lambda: draw.choice([*NUMBERS, draw.uniform(-1, 2)]),
            bool: lambda: draw.random() < 0.5,
            type(None): lambda: None,
        }
        if hint in leaves:
            return leaves[hint]()
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        n = draw.randrange(4)
        if origin is list:
            return [value(parts[0], draw) for _ in range(n)]
        if origin is dict:
            return {value(parts[0], draw): value(parts[1], draw) for _ in range(n)}
        if origin is tuple:
            return tuple(value(part, draw) for part in parts)
        assert origin is types.UnionType, hint
        return value(draw.choice(parts), draw)

    return lambda seed: value(JobRecord, random.Random(seed))


@pytest.fixture
def damaged(job: Callable[..., JobRecord]) -> JobRecord:
    """Returns a job that lost events on ranks 2 and 3, and whose clocks cannot be aligned."""
    made = job()
    held = ["ledger", "mfu", "idle"]
    defects = [
        job_records.Defect("H101", "missing-kernels", 2, "run/rank2.json.gz", 300, 0.3, "300 of 1000 launches have none", held, what="launches"),
        job_records.Defect("H101", "missing-kernels", 3, "run/rank3.json.gz", 200, 0.2, "200 of 1000 launches have none", held, what="launches"),
        job_records.Defect("H120", "clocks", None, None, 8, None, "ends lie 5 ms apart", ["waits", "stragglers"]),
        job_records.Defect("H130", "legal-overlaps", 0, "run/rank0.json.gz", 30, 0.001, "30 of 2 us", [], what="kernels and copies"),
    ]  # fmt: skip
    ranks = [
        dataclasses.replace(
            one, wait_s=None, clock_offset_s=None, clock_error_s=None,
            **({"ledger": None, "ledger_reason": "kernels are missing (H101)"} if one.rank in (2, 3) else {}),
        )
        for one in made.ranks
    ]  # fmt: skip
    withheld = {"waits": ["H120"], "stragglers": ["H120"]}
    kinds = [
        dataclasses.replace(one, wait_s=None, transfer_s=None, bus_bytes_per_s=None, of_link_frac=None)
        for one in made.collectives
    ]  # fmt: skip
    return dataclasses.replace(
        made, ranks=ranks, health=job_records.Health(False, made.health.checked, defects, withheld), stragglers=[],
        collectives=kinds, world_size=16, stragglers_reason="clocks differ by 5 ms",
        links=job_records.Links("NVLink 4", 450e9, "data sheet", 0.12, None, "no transfer time is known"),
    )  # fmt: skip
