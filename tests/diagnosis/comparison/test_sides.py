"""What can be compared: traces, run folders, records; and what cannot, in one message."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.comparison import sides
from flopwise.diagnosis.comparison.compare import compare
from flopwise.diagnosis.comparison.sides import ComparisonError, Measured, measured, of_job, of_run
from flopwise.diagnosis.ledger.build import ledger
from flopwise.errors import FlopwiseError, RecordError
from flopwise.hardware.accelerators import parse_peak
from flopwise.records import job, run, store
from flopwise.records.ledger import LedgerRecord, Live, Profiled
from flopwise.records.run import RunRecord

DATA = Path(__file__).parents[2] / "reports" / "data"


@pytest.fixture(scope="session")
def a_run() -> RunRecord:
    return store.read(DATA / "cpu.json", RunRecord, run.SCHEMA)


@pytest.fixture
def a_job(a_ledger: Callable[..., LedgerRecord]) -> Callable[..., job.JobRecord]:
    """Returns a function that makes a job of ranks with these ledgers."""

    def make(ledgers: list[LedgerRecord], **fields: Any) -> job.JobRecord:
        ranks = [
            job.RankRecord(
                i, f"rank{i}.json", "NVIDIA H200", one.step_s, one.steps, one, None, 0, 0,
                None, None, None, None, None,
            )
            for i, one in enumerate(ledgers)
        ]  # fmt: skip
        made = job.JobRecord(
            schema=job.SCHEMA,
            flopwise="0",
            sources=[],
            world_size=len(ranks),
            device_name="NVIDIA H200",
            step_s=sum(one.step_s for one in ledgers) / len(ledgers),
            steps=min(one.steps for one in ledgers),
            ranks=ranks,
            lines=ledgers[0].lines,
            families={},
            lines_reason=None,
            health=job.Health(True, [], [], {}),
            collectives=[],
            links=job.Links(None, None, None, None, None, None),
            redundant=[],
            redundant_bytes_frac=None,
            stragglers=[],
            stragglers_reason=None,
            findings=[],
            mfu=math.fsum(one.mfu or 0.0 for one in ledgers) / len(ledgers),
            profiled=any(one.profiled for one in ledgers),
        )
        return dataclasses.replace(made, **fields)

    return make


def test_a_trace_its_ledger_and_that_as_json_are_the_same_side(
    training: Any, tmp_path: Path
) -> None:
    t = training(5)
    path = t.write()
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    store.write(tmp_path / "ledger.json", ledger(t.read()))
    found = [measured(path), measured(tmp_path / "t.json.gz"), measured(tmp_path / "ledger.json")]
    assert [one.side.kind for one in found] == ["trace", "trace", "ledger"]
    for one in found:
        assert one.side.step_s == pytest.approx(1e-3)
        assert one.side.profiled
        assert one.lines == found[0].lines
        assert [(o.name, o.s, o.calls) for o in one.operators] == [
            (o.name, o.s, o.calls) for o in found[0].operators
        ]
        record = compare(found[0], one)
        assert record.conditions == []
        assert {line.difference_s for line in record.lines} == {0.0}


def test_all_operators_of_a_trace_are_there(training: Any) -> None:
    t = training(3)
    for i in range(3):
        for k in range(20):
            op = t.op(f"aten::op{k}", 10_082 + 100 * i + k * 0.5, 0.4)
            t.kernel(f"k{k}", 20_750 + 1000 * i + 5 * k, 5, at=10_082.1 + 100 * i + k * 0.5, op=op)
    found = measured(t.write())
    assert len(found.operators) == 23
    assert found.operators_all


def test_a_peak_is_given_to_a_trace(training: Any) -> None:
    path = training(4, device="NVIDIA X100").write()
    assert measured(path).side.mfu is None
    assert measured(path, parse_peak("bf16=1P")).side.peak_flops_per_s == 1e15


def test_progress_of_a_trace(training: Any) -> None:
    told: list[int] = []
    measured(training(4).write(), None, told.append)
    assert told


def test_a_run_by_its_folder_and_its_record(
    a_run: RunRecord, a_ledger: Callable[..., LedgerRecord], tmp_path: Path
) -> None:
    record = dataclasses.replace(a_run, ledger=a_ledger())
    store.write(tmp_path / "run.json", record)
    for path in (tmp_path, tmp_path / "run.json"):
        found = measured(path)
        assert (found.side.kind, found.side.path) == ("run", str(path))
        assert found.side.step_s == pytest.approx(0.01)
        assert found.side.software["torch"] == a_run.env.torch
        assert found.side.cpu == a_run.env.cpu
        assert found.lines_steps == 8


def test_a_run_without_a_ledger_has_its_step(a_run: RunRecord) -> None:
    record = dataclasses.replace(a_run, ledger=None, ledger_reason="none was asked for")
    found = of_run(record, "x")
    assert found.side.step_s == a_run.step_s.mean
    assert found.side.step_ci95 == a_run.step_s.ci95
    assert a_run.step_s.ci95 is not None
    t = 2.262157  # of 9 degrees of freedom
    assert found.step.error_s == pytest.approx(
        (a_run.step_s.ci95[1] - a_run.step_s.mean) / t, rel=1e-6
    )
    assert (found.lines, found.side.trusted) == ([], None)
    compared = compare(found, found)
    assert compared.lines_reason == "the old side has no ledger: none was asked for"
    assert (compared.lines, compared.rest_s, compared.operators) == ([], None, [])
    assert compared.step.ci95 is not None


def test_the_shortest_window_says_how_well_lines_are_known(
    a_ledger: Callable[..., LedgerRecord],
) -> None:
    windows = [
        Profiled("light", 32, None, 0),
        Profiled("heavy", 6, None, 0),
        Profiled("stacks", 3, None, 0),
    ]
    live = Live(0.01, None, 8, windows, "", None, None, None, None)
    assert sides.of_ledger(a_ledger(live=live), "x", "ledger").lines_steps == 4


def test_a_job_is_the_mean_over_its_ranks(
    a_ledger: Callable[..., LedgerRecord], a_job: Callable[..., job.JobRecord], tmp_path: Path
) -> None:
    ledgers = [a_ledger(each_ms=[10.0, 12.0, 11.0]), a_ledger(each_ms=[12.0, 13.0, 11.0], rank=1)]
    store.write(tmp_path / "job.json", a_job(ledgers))
    found = measured(tmp_path / "job.json")
    side = found.side
    assert (side.kind, side.world_size, side.rank, side.steps) == ("job", 2, None, 3)
    assert side.step_s == pytest.approx(11.5e-3)
    assert found.step.df == 2  # of steps of 11, 12.5 and 11 ms
    assert found.step.error_s == pytest.approx(0.5e-3)
    assert found.lines == ledgers[0].lines
    assert side.trusted
    assert side.mfu == pytest.approx((4 / 11 + 4 / 12) / 2)
    assert compare(found, found).lines[0].difference_s == 0


def test_ranks_with_other_numbers_of_steps_have_no_scatter(
    a_ledger: Callable[..., LedgerRecord], a_job: Callable[..., job.JobRecord]
) -> None:
    ledgers = [a_ledger(each_ms=[10.0, 11.0]), a_ledger(each_ms=[12.0, 11.0, 13.0])]
    assert of_job(a_job(ledgers), "x").step.df == 0


def test_what_is_withheld_of_a_job(
    a_ledger: Callable[..., LedgerRecord], a_job: Callable[..., job.JobRecord]
) -> None:
    withheld = job.Health(False, [], [], {"steps": ["H101"]})
    with pytest.raises(ComparisonError, match=r"withheld \(H101\)"):
        of_job(a_job([a_ledger()], step_s=None, health=withheld), "x")
    found = of_job(a_job([a_ledger()], lines=[], lines_reason="kernels are missing"), "x")
    assert found.lines_reason == "kernels are missing"
    assert found.side.trusted is None
    found = of_job(a_job([a_ledger()], untrusted_because=["rank 0: why"]), "x")
    assert (found.side.trusted, found.side.untrusted_because) == (False, ["rank 0: why"])


def test_one_rank_beside_a_job_is_said(
    a_side: Callable[..., Measured],
    a_ledger: Callable[..., LedgerRecord],
    a_job: Callable[..., job.JobRecord],
) -> None:
    found = of_job(a_job([a_ledger(world_size=2), a_ledger(world_size=2)]), "x")
    record = compare(found, a_side(world_size=2))
    assert [(one.code, one.voids) for one in record.conditions] == [("rank", ["lines"])]


def message(path: Path) -> str:
    with pytest.raises(FlopwiseError) as error:
        measured(path)
    return str(error.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in message(tmp_path / "none")
    assert "not the folder of a run" in message(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").touch()
    assert "runs inside: a" in message(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rank0.json.gz").touch()
    assert "Give one of its files: rank0.json.gz" in message(tmp_path / "b")
    assert "cannot be read" in message(tmp_path / ("x" * 5000))
    assert "cannot be read" in message(Path("a\0b"))


def test_a_pipe_does_not_have_us_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()
    assert "neither a folder nor a regular file" in message(tmp_path / "pipe")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("flopwise.run/9", "written as flopwise.run/9"),
        ("flopwise.ledger/2", "written as flopwise.ledger/2"),
        ("flopwise.job/0", "written as flopwise.job/0"),
        ("flopwise.tune/1", "a tune, which is a comparison already"),
        ("flopwise.comparison/1", "of another kind"),
        ("flopwise.ledger/1", "not a readable record"),
    ],
)
def test_records_that_are_not_compared(tmp_path: Path, schema: str, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"schema": schema, "x": 1}))
    assert said in message(path)


def test_a_tune_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "tune.json").touch()
    assert "a tune, which is a comparison already" in message(tmp_path)


def test_a_record_that_is_too_large(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "MOST_BYTES", 1000)
    path = tmp_path / "r.json"
    path.write_text('{"schema": "flopwise.ledger/1", "x": "' + "a" * 2000)
    assert "MB at most" in message(path)
    assert measured(training(4).write()).side.steps == 3  # a trace may be as large as it likes


@pytest.mark.parametrize("step_s", [0.0, -1.0, 1e400])
def test_steps_that_take_no_time(a_ledger: Callable[..., LedgerRecord], step_s: float) -> None:
    with pytest.raises(ComparisonError, match="nothing to compare"):
        sides.of_ledger(a_ledger(step_s=step_s), "x", "ledger")


def test_a_record_cut_short(tmp_path: Path, a_ledger: Callable[..., LedgerRecord]) -> None:
    text = store.encode(a_ledger())
    (tmp_path / "r.json").write_text(text[: len(text) // 2])
    with pytest.raises(RecordError, match="cut short"):
        measured(tmp_path / "r.json")


def test_what_fewer_than_all_are() -> None:
    """The lengths of full lists are those of the ledger."""
    from flopwise.diagnosis.ledger import roofline

    assert roofline.SHOWN == sides.HOT
