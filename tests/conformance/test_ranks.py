"""Real traces of several ranks, whose answers are known: `make conformance TRACES=FOLDER`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flopwise.measurement.jobs import analyse
from flopwise.records.job import JobRecord
from flopwise.trace.sources import find

TRACES = os.environ.get("FLOPWISE_TRACES", "")


def folder(name: str) -> Path:
    path = Path(TRACES) / name
    if not TRACES or not path.is_dir():
        pytest.skip(
            f"no traces: $FLOPWISE_TRACES names no folder with {name} in it (make conformance TRACES=FOLDER)"
        )
    return path


@pytest.fixture(scope="module")
def jobs() -> Any:
    """Returns a function that returns the job of a folder, made once."""
    made: dict[str, JobRecord] = {}

    def of(name: str) -> JobRecord:
        path = folder(name)
        if name not in made:
            made[name] = analyse(find([path]))
        return made[name]

    return of


class TestEightRanksOfOneHost:
    """Eight H100s train a small GPT; the host of rank 1 is late."""

    def test_it_is_clean(self, jobs: Any) -> None:
        job = jobs("nano8")
        assert job.health.clean
        assert job.health.withheld == {}
        assert (job.world_size, len(job.ranks)) == (8, 8)

    def test_rank_1_is_named_by_the_time_it_causes_with_the_host_as_its_reason(
        self, jobs: Any
    ) -> None:
        first, *others = jobs("nano8").stragglers
        assert (first.rank, first.reason) == (1, "host")
        assert first.caused_s == pytest.approx(28.3e-3, abs=0.5e-3)
        assert first.share_frac == pytest.approx(28.3 / 33.6, abs=0.02)
        assert 5 not in {one.rank for one in others}  # which is last most often

    @pytest.mark.parametrize("rank", range(8))
    def test_the_share_of_waiting(self, jobs: Any, rank: int) -> None:
        found = jobs("nano8").ranks[rank].wait_frac
        assert found is not None
        if rank == 1:
            assert found == pytest.approx(0.26, abs=0.02)
        else:
            assert 0.65 - 0.02 <= found <= 0.71 + 0.02

    def test_all_common_calls_are_matched_from_the_end(self, jobs: Any) -> None:
        ranks = jobs("nano8").ranks
        assert [one.calls for one in ranks] == [76, 76, 76, 76, 81, 84, 84, 84]
        assert all(one.matched == 76 for one in ranks)
        assert all(abs(one.clock_offset_s) < 188e-6 for one in ranks)

    def test_lines_sum_to_the_step_of_the_job(self, jobs: Any) -> None:
        job = jobs("nano8")
        assert sum(line.s for line in job.lines) == pytest.approx(job.step_s, rel=1e-9)
        exposed = sum(line.s for line in job.lines if line.name.startswith("comm_"))
        assert exposed == pytest.approx(sum(one.exposed_s for one in job.ranks) / 8, rel=1e-6)


class TestTwoRanksOverNVLink:
    """DDP on two H200s; both hosts are late, that of rank 0 more."""

    def test_the_exposed_share_is_plausible(self, jobs: Any) -> None:
        job = jobs("h200_ddp2")
        assert job.health.clean
        lines = {line.name: line.share_frac for line in job.lines}
        # Alone 21.7 ms a step, with both 25.0: of undisturbed steps at most 13 % are exposed transfer.
        assert 0 < lines["comm_transfer"] < 0.13
        assert [one.rank for one in job.stragglers] == [0]

    def test_the_bandwidth_is_that_of_all_reduces_of_that_size(self, jobs: Any) -> None:
        job = jobs("h200_ddp2")
        by_size = {one.nbytes: one for one in job.collectives}
        # Measured on this host: 25 MB in 113 us, which is 221 GB/s for two ranks, and 310 GB/s for 500 MB.
        assert by_size[28351488].bus_bytes_per_s == pytest.approx(
            28351488 / 113e-6 * 25 / 28.35, rel=0.25
        )
        assert 220e9 < by_size[176593920].bus_bytes_per_s < 330e9
        assert 0.3 < job.links.in_collectives_frac < 0.8


def test_two_single_ranks_of_different_jobs_name_nobody(jobs: Any) -> None:
    job = jobs("hta_pair")
    assert job.stragglers == []
    assert "stragglers" in job.health.withheld
    assert any(one.defect == "jobs-differ" for one in job.health.defects)


@pytest.mark.parametrize("name", ["a100_rank3.json.gz", "v100_rank1.json.gz"])
def test_a_single_rank_of_a_larger_job_names_nobody(name: str) -> None:
    job = analyse(find([folder("hta_pair") / name]))
    assert job.stragglers == []
    assert job.stragglers_reason is not None
    assert "one rank of" in job.stragglers_reason
    assert job.ranks[0].ledger is not None


def test_an_export_of_nsight_systems_reads(jobs: Any) -> None:
    job = jobs("nsys")
    (one,) = job.ranks
    assert one.device_name == "Tesla T4"
    assert one.ledger is not None
    assert sum(line.s for line in one.ledger.lines) == pytest.approx(one.ledger.step_s, rel=1e-9)
