"""The ranks of a run folder, each with the ledger of its undisturbed steps and the calls of its heavy window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ranks.job import job_of
from flopwise.errors import RunFolderError
from flopwise.hardware.accelerators import parse_peak
from flopwise.measurement.jobs import analyse, conclude, read_ranks
from flopwise.measurement.ranks import summary_of_rank
from flopwise.records import store
from flopwise.records.rank import Profile, Telemetry
from flopwise.reports.job_words import step, title
from flopwise.trace.sources import find

WORLD = 2
WORDS = {
    "Collective name": "allreduce", "In msg nelems": 1_000_000, "Out msg nelems": 1_000_000, "dtype": "Float",
    "Process Group Name": "0", "Group size": WORLD, "Process Group Ranks": "[0, 1]",
}  # fmt: skip
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LATE_US = 40.0


@pytest.fixture
def folder(window: Any, make_rank: Callable[..., Any], tmp_path: Path) -> Path:
    """A run of two ranks whose steps take 1 ms, 1.25 ms while operators are profiled. In each an all-reduce ends 950 us into the step;
    rank 0 begins it at 800, rank 1 40 us later.
    """

    def reduces(late: float) -> Callable[[Any, float], None]:
        def extra(t: Any, at: float) -> None:
            op = t.op("record_param_comms", at + 90, 8, **WORDS)
            t.kernel(NCCL, at + 800 + late, 150 - late, at=at + 92, op=op, stream=20, **WORDS)

        return extra

    (tmp_path / "ranks").mkdir()
    for rank in range(WORLD):
        here = tmp_path / "profile" / f"rank{rank}"
        here.mkdir(parents=True)
        windows = [
            window(kind, folder=here, step_us=step_us, extra=reduces(LATE_US * rank))[1]
            for kind, step_us in (("light", 1000), ("heavy", 1250))
        ]
        record = make_rank(
            rank=rank, world_size=WORLD, local_rank=rank, step_ns=1_000_000, device_type="cuda", device_index=0,
            device_name="NVIDIA H200", profile=Profile("done", windows, [1_000_000] * 30, "cuda events", "yes"),
            telemetry=Telemetry(reason=None, name="NVIDIA H200", sm_mhz=1980.0 - rank),
        )  # fmt: skip
        write(tmp_path, record)
    return tmp_path


def write(folder: Path, record: Any) -> None:
    (folder / "ranks" / f"{record.rank}.json").write_text(store.encode(record))


def change(folder: Path, rank: int, **fields: Any) -> None:
    from flopwise.records.rank import SCHEMA, RankRecord

    path = folder / "ranks" / f"{rank}.json"
    write(folder, dataclasses.replace(store.read(path, RankRecord, SCHEMA), **fields))


def test_a_rank_has_its_undisturbed_ledger_and_the_calls_of_its_heavy_window(folder: Path) -> None:
    found = summary_of_rank(folder, 1)
    assert (found.rank, found.world_size, found.device) == (1, WORLD, 0)
    assert (found.device_name, found.sm_mhz) == ("NVIDIA H200", 1979.0)
    assert found.ledger is not None
    assert not found.ledger.profiled
    assert found.ledger.step_s == pytest.approx(1e-3)
    assert len(found.bounds_ns) - 1 == 7  # of eight steps the first leads in
    assert (found.bounds_ns[-1] - found.bounds_ns[0]) / 7 == pytest.approx(1.25e6)
    inside = found.calls.step >= 0
    assert (found.calls.end_ns - found.calls.start_ns)[inside].tolist() == [110_000] * 7


def test_a_job_says_which_steps_are_undisturbed_and_which_were_profiled(folder: Path) -> None:
    job = analyse(find([folder]))
    assert job.health.withheld == {}
    assert job.step_s == pytest.approx(1e-3)
    assert job.recorded_step_s == pytest.approx(1.25e-3)
    assert (job.sources, [one.path for one in job.ranks]) == ([str(folder)], [str(folder)] * WORLD)
    assert title(job) == f"flopwise analyze {folder}"
    said = [str(piece if isinstance(piece, str) else piece[0]) for piece in step(job)]
    assert said[:2] == ["1 ms", "mean over ranks, undisturbed"]
    assert said[-1] == "calls, waiting and links are those of profiled steps of 1.25 ms"


def test_its_shares_of_waiting_are_of_the_steps_in_which_it_was_recorded(folder: Path) -> None:
    job = analyse(find([folder]))
    (late,) = job.stragglers
    assert (late.rank, late.delay_s) == (1, pytest.approx(LATE_US * 1e-6))
    (finding,) = [one for one in job.findings if one.cause == "straggler"]
    assert finding.share_frac == pytest.approx(
        LATE_US / WORLD / 1250
    )  # the mean over all ranks: one does not wait
    # In the ledger both parts are of the undisturbed step, in the proportion that the window has
    lines = {line.name: line.s for line in job.ranks[0].ledger.lines}  # type: ignore[union-attr]
    assert lines["comm_wait"] / (lines["comm_wait"] + lines["comm_transfer"]) == pytest.approx(
        LATE_US / 150
    )
    assert sum(lines.values()) == pytest.approx(1e-3)


def test_without_ledgers_the_calls_alone_are_read(folder: Path) -> None:
    ranks = read_ranks(find([folder]), ledgers=False)
    assert [(one.ledger, one.reason) for one in ranks] == [(None, "not asked for")] * WORLD
    job = job_of(ranks)
    assert job.step_s == job.recorded_step_s == pytest.approx(1.25e-3)
    assert [one.rank for one in job.stragglers] == [1]


def test_a_given_peak_is_held_against(folder: Path) -> None:
    peak = parse_peak("bf16=500T")
    found = summary_of_rank(folder, 0, peak)
    assert found.ledger is not None
    assert found.ledger.peak_flops_per_s == 500e12


def test_a_rank_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="rank 7 has written no record there"):
        summary_of_rank(folder, 7)
    with pytest.raises(RunFolderError, match="no rank has written a record there"):
        summary_of_rank(tmp_path / "profile", 0)


def test_a_rank_whose_window_is_gone_says_so(folder: Path) -> None:
    for path in (folder / "profile" / "rank1").glob("heavy*"):
        path.unlink()
    found = summary_of_rank(folder, 1)
    assert (found.ledger, len(found.calls)) == (None, 0)
    assert found.reason is not None
    assert found.reason.startswith(f"{folder}, rank 1: the trace of the heavy window is not in")


def test_a_rank_without_profile_says_how_to_get_one(folder: Path) -> None:
    change(folder, 1, profile=None)
    reason = summary_of_rank(folder, 1).reason
    assert reason == f"{folder}, rank 1: no windows were profiled (--no-profile)"


def test_a_ledger_of_the_profiled_steps_stands_in_where_there_are_no_undisturbed_ones(
    folder: Path,
) -> None:
    (folder / "profile" / "rank0" / "light.json").unlink()
    found = summary_of_rank(folder, 0)
    assert found.ledger is not None
    assert found.ledger.profiled
    assert found.ledger.step_s == pytest.approx(1.25e-3)
    (note,) = found.notes
    assert note.startswith("without undisturbed steps: the trace of the light window is not in")
    job = conclude(find([folder]), [found, summary_of_rank(folder, 1)])
    assert f"{folder}, rank 0: {note}" in job.notes
