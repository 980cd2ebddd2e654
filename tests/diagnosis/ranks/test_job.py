"""The job: its ranks together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ranks.collect import Wanted, summary_of
from flopwise.diagnosis.ranks.job import job_of
from flopwise.records import store
from flopwise.trace.chrome import read

STEP = 1000.0


WORDS = {
    "Collective name": "allreduce",
    "In msg nelems": 1_000_000,
    "Out msg nelems": 1_000_000,
    "dtype": "Float",
    "Process Group Name": "0",
}
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def write(
    timeline: Any, name: str, rank: int, world: int, late: float, n: int = 8, update: float = 200
) -> Path:
    """A rank of a job. Each step: a kernel of 300 and `late`, an all-reduce that ends at 700, the optimizer's kernel."""
    words = {**WORDS, "Group size": world, "Process Group Ranks": str(list(range(world)))}
    for k in range(n):
        at = 1000.0 + STEP * k
        timeline.kernel("gemm", at + 20, 300 + late, at=at)
        op = timeline.op("record_param_comms", at + 300, 10, **words)
        timeline.kernel(NCCL, at + 330 + late, 370 - late, at=at + 302, op=op, stream=20, **words)
        timeline.optimizer(at + 705, 40)
        timeline.kernel("update", at + 720, update, at=at + 710)
    timeline.on("NVIDIA H100 80GB HBM3")
    timeline.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    written: Path = timeline.write(name)
    return written


@pytest.fixture
def summaries(timelines: Any) -> Any:
    """Returns a function that returns the summaries of a job whose ranks come so late to their calls, in us."""

    def make(*late: float, world: int | None = None) -> list[Any]:
        found = []
        for r, us in enumerate(late):
            path = write(timelines(), f"rank{r}.json", r, world or len(late), us)
            found.append(summary_of(read(path), Wanted(str(path))))
        return found

    return make


def test_the_lines_of_the_job_are_the_mean_and_sum_to_the_step(summaries: Any) -> None:
    ranks = summaries(0, 200, 0, 0)
    job = job_of(ranks)
    assert (job.world_size, len(job.ranks), job.step_s) == (4, 4, pytest.approx(STEP * 1e-6))
    assert sum(line.s for line in job.lines) == pytest.approx(job.step_s)
    assert sum(job.families.values()) == pytest.approx(job.step_s)
    lines = {line.name: line.s for line in job.lines}
    assert lines["comm_wait"] == pytest.approx(200e-6 * 3 / 4)
    assert lines["comm_transfer"] == pytest.approx((3 * 370 + 170) / 4 * 1e-6 - 150e-6)
    assert "comm_unsplit" not in lines


def test_two_calls_at_once_are_exposed_once_and_their_parts_sum_to_the_line(timelines: Any) -> None:
    """While a call of one group waits, one of another moves data: the device is not kept by the waiting."""
    found = []
    for r, late in enumerate((0, 100)):
        t = timelines()
        for k in range(6):
            at = 1000.0 + STEP * k
            t.kernel("gemm", at + 20, 200, at=at)
            for name, start, end in (("0", 320 + late, 520), ("1", 340, 500)):
                words = {
                    **WORDS, "Process Group Name": name, "Group size": 2, "Process Group Ranks": "[0, 1]"
                }  # fmt: skip
                op = t.op("record_param_comms", at + 250 + 20 * int(name), 10, **words)
                t.kernel(
                    NCCL, at + start, end - start, at=at + 252 + 20 * int(name), op=op,
                    stream=20 + int(name), **words,
                )  # fmt: skip
            t.optimizer(at + 705, 40)
            t.kernel("update", at + 720, 200, at=at + 710)
        t.on("NVIDIA H100 80GB HBM3")
        t.header["distributedInfo"] = {"backend": "nccl", "rank": r, "world_size": 2}
        path = t.write(f"rank{r}.json")
        found.append(summary_of(read(path), Wanted(str(path))))
    whole = {line.name: line.s for line in found[0].ledger.lines}["comm_unsplit"]
    assert whole == pytest.approx(200e-6)
    first = job_of(found).ranks[0]
    lines = {line.name: line.s for line in first.ledger.lines}  # type: ignore[union-attr]
    assert lines["comm_wait"] == pytest.approx(20e-6)  # until the other group's call began
    assert lines["comm_transfer"] == pytest.approx(180e-6)
    assert lines["comm_wait"] + lines["comm_transfer"] == pytest.approx(whole, rel=1e-12)
    assert first.communication_s == first.exposed_s == pytest.approx(200e-6)
    assert first.wait_s == pytest.approx(20e-6)
    assert first.wait_frac == pytest.approx(100 / 360)  # of its calls, each by itself


def test_the_straggler_is_named_with_its_reason_and_amount(summaries: Any) -> None:
    job = job_of(summaries(0, 200, 0, 0))
    (found,) = job.stragglers
    assert (found.rank, found.reason) == (1, "kernels")
    assert found.delay_s == pytest.approx(200e-6, rel=0.15)
    assert found.per_step_s == pytest.approx(150e-6)  # three of four ranks wait
    shares = {one.cause: one.share_frac for one in job.findings}
    assert shares["straggler"] == pytest.approx(0.15)
    # of 320 us that no compute hides 150 are the straggler's
    assert shares["exposed-communication"] == pytest.approx(0.17)
    assert [one.wait_s for one in job.ranks] == pytest.approx([200e-6, 0, 200e-6, 200e-6])
    assert job.ranks[0].wait_frac == pytest.approx(200 / 370)


def test_calls_before_the_others_recordings_begin_do_not_dilute_the_waiting(
    timelines: Any,
) -> None:
    found = []
    for r, steps in ((0, 8), (1, 6), (2, 4)):
        timeline = timelines()
        path = write(timeline, f"rank{r}.json", r, 3, 200 if r == 1 else 0, steps)
        for event in timeline.events:
            event["ts"] += STEP * (8 - steps)  # all recordings end together
        timeline.write(path.name)
        found.append(summary_of(read(path), Wanted(str(path))))
    job = job_of(found)
    assert [one.matched for one in job.ranks] == [4, 4, 4]
    assert [one.wait_s for one in job.ranks] == pytest.approx([200e-6, 0, 200e-6])
    (straggler,) = job.stragglers
    assert (straggler.rank, straggler.delay_s) == (1, pytest.approx(200e-6))


def test_a_lower_clock_is_told_though_its_collectives_are_shorter(timelines: Any) -> None:
    found = []
    for r in range(3):  # all kernels of rank 1 take 10 % longer
        late, update = (30.0, 220.0) if r == 1 else (0.0, 200.0)
        path = write(timelines(), f"rank{r}.json", r, 3, late, update=update)
        found.append(summary_of(read(path), Wanted(str(path))))
    assert set(found[1].kernels) == {"gemm", "update"}
    (straggler,) = job_of(found).stragglers
    assert (straggler.rank, straggler.reason) == (1, "clock")
    assert "longer there: gemm 330 µs a step (300 µs on the others)" in straggler.evidence
    assert "nccl" not in straggler.evidence


def test_even_ranks_have_no_straggler(summaries: Any) -> None:
    job = job_of(summaries(0, 0, 0))
    assert job.stragglers == []
    assert job.stragglers_reason is not None
    assert all(one.wait_s == 0 for one in job.ranks)


def test_one_rank_alone_names_nobody(summaries: Any) -> None:
    job = job_of(summaries(200, world=8))
    assert (job.stragglers, job.redundant_bytes_frac) == ([], 0.0)
    assert job.stragglers_reason is not None
    assert "one rank of 8 was read" in job.stragglers_reason
    lines = {line.name for line in job.ranks[0].ledger.lines}  # type: ignore[union-attr]
    assert "comm_unsplit" in lines
    assert "comm_wait" not in lines


def test_the_order_of_the_files_does_not_matter(summaries: Any) -> None:
    ranks = summaries(0, 200, 50)
    one, other = job_of(ranks), job_of(ranks[::-1])
    assert dataclasses.asdict(one) == dataclasses.asdict(other)


def test_a_record_can_be_written_and_read_again(summaries: Any, tmp_path: Path) -> None:
    from flopwise.records.job import SCHEMA, JobRecord

    job = job_of(summaries(0, 200))
    (tmp_path / "job.json").write_text(store.encode(job))
    assert store.read(tmp_path / "job.json", JobRecord, SCHEMA) == job
