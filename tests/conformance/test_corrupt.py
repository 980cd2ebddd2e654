"""Corrupt traces: each defect is found, what it makes wrong is withheld, and everything else stands.

On a small job made here, and on real traces where $FLOPWISE_TRACES says where they are. $FLOPWISE_MUTATIONS says how many random
changes are tried; 10,000 take some ten minutes.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flopwise.diagnosis.ledger.build import ledger
from flopwise.diagnosis.ranks.health import CALLS, TIMES, defects_of
from flopwise.errors import FlopwiseError
from flopwise.measurement.jobs import analyse
from flopwise.trace.chrome import read
from flopwise.trace.health import sift
from flopwise.trace.sources import SourceConflict, find

MUTATIONS = int(os.environ.get("FLOPWISE_MUTATIONS", "200"))
MOST_BYTES = 2 << 30
MOST_S = 20.0
BOMB_BYTES = 1 << 30  # in these tests
RANK = 3
REDUNDANCY = {"redundancy"}

#: By variant: the codes that must be said, and what is withheld for rank 3 and for the job.
EXPECTED: dict[str, tuple[set[str], set[str], set[str]]] = {
    "one_long_kernel": ({"H102"}, {"ledger", "mfu", "idle"}, {"ledger", "mfu", "idle"}),
    "one_long_collective": (
        {"H102"},
        {"ledger", "mfu", "idle", *CALLS},
        {"ledger", "mfu", "idle", *CALLS},
    ),
    "head_removed": ({"H104"}, set(), set()),  # of the first steps alone
    "cut": ({"H105"}, {*TIMES, *CALLS} | REDUNDANCY, {*TIMES, *CALLS}),
    "cut_text": ({"H105"}, {*TIMES, *CALLS} | REDUNDANCY, {*TIMES, *CALLS}),
    "clock_shifted": ({"H204"}, set(), set()),
    "nan_durations": ({"H101"}, {*TIMES, *CALLS}, {*TIMES, *CALLS}),
    "not_utf8": ({"H107"}, set(), set()),
    "starts_at_launch": (
        {"H108", "H109"},
        {*TIMES, "waits", "bandwidth", "stragglers"},
        {*TIMES, "waits", "bandwidth", "stragglers"},
    ),
    "empty_step": (
        {"H112"},
        {"ledger", "mfu", "steps", "idle", *CALLS},
        {"ledger", "mfu", "steps", "idle", *CALLS},
    ),
    "permuted": ({"H208"}, set(), set()),
    "renamed": (set(), set(), set()),
    "missing": (
        {"H201"},
        {"waits", "bandwidth", "stragglers"},
        {"waits", "bandwidth", "stragglers"},
    ),
    "twice": ({"H202"}, {*CALLS}, {*CALLS}),
    "bomb": (
        {"H117", "H201"},
        {*TIMES, "waits", "bandwidth", "stragglers"} | REDUNDANCY,
        {*TIMES, "waits", "bandwidth", "stragglers"},
    ),
}
#: What ends a conclusion about the others, too, does so because it is about calls that they share.
OTHERS = {"waits", "bandwidth", "stragglers"}


@pytest.fixture(scope="session")
def made(
    job: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[ModuleType, str], Path]:
    """Returns a function that makes a variant of the small job."""
    folder = job(tmp_path_factory.mktemp("job"))
    out = tmp_path_factory.mktemp("variants")

    def make(corrupt: ModuleType, name: str) -> Path:
        corrupt.BOMB_BYTES = BOMB_BYTES
        there: Path = out / name
        return there if there.exists() else corrupt.corrupt(folder, out, name, RANK)

    return make


@pytest.fixture
def corrupt(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("corrupt")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def check(name: str, found: Any) -> None:
    codes, rank, whole = EXPECTED[name]
    assert codes <= {*found.codes}, found.codes
    assert found.of(RANK) == rank
    assert found.job == whole
    if name not in ("missing", "bomb"):  # what is said of the other ranks' own time stands
        assert not found.of(1) & {*TIMES}
    for one in found.health.defects:
        assert one.evidence
        assert one.share_frac is None or 0 <= one.share_frac <= 1


@pytest.mark.parametrize("name", EXPECTED)
def test_a_corrupt_job(name: str, made: Any, corrupt: ModuleType, examine: Any) -> None:
    check(name, examine(made(corrupt, name)))


def report(name: str, folder: Path) -> None:
    """What the report of such a folder says: the same is withheld, and what is withheld is not in it."""
    codes, _, whole = EXPECTED[name]
    if name == "twice":
        with pytest.raises(SourceConflict, match="rank"):
            analyse(find([folder]))
        return
    job = analyse(find([folder]))
    assert codes <= {one.code for one in job.health.defects}
    assert {*job.health.withheld} == whole
    assert job.health.clean == (not any(one.withholds for one in job.health.defects))
    assert not (job.stragglers and "stragglers" in whole)
    assert not (job.lines and "ledger" in whole)
    assert job.redundant_bytes_frac is None or "redundancy" not in whole
    if "waits" in whole:
        assert all(one.wait_s is None for one in job.collectives)
    if name not in ("missing", "bomb"):
        assert all(one.ledger is not None for one in job.ranks if one.rank != RANK)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_of_a_corrupt_job(name: str, made: Any, corrupt: ModuleType) -> None:
    report(name, made(corrupt, name))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_of_a_corrupt_nano8(
    name: str, traces: Path, tmp_path: Path, corrupt: ModuleType
) -> None:
    corrupt.BOMB_BYTES = BOMB_BYTES
    report(name, corrupt.corrupt(traces / "nano8", tmp_path, name, RANK))
    assert peak_bytes() < MOST_BYTES


@pytest.mark.parametrize("name", EXPECTED)
def test_a_corrupt_nano8(
    name: str, traces: Path, tmp_path: Path, corrupt: ModuleType, examine: Any
) -> None:
    corrupt.BOMB_BYTES = BOMB_BYTES
    check(name, examine(corrupt.corrupt(traces / "nano8", tmp_path, name, RANK)))
    assert peak_bytes() < MOST_BYTES


def test_every_variant_is_expected(corrupt: ModuleType) -> None:
    assert {*corrupt.ONE_FILE, *corrupt.FOLDERS} == {*EXPECTED, "middle_removed"}


def test_work_missing_in_the_middle(made: Any, corrupt: ModuleType, examine: Any) -> None:
    found = examine(made(corrupt, "middle_removed"))
    assert found.of(RANK) == {"ledger", "mfu", "idle", "overlap", *CALLS}


def test_the_head_is_withheld_for_the_steps_it_is_missing_in(
    made: Any, corrupt: ModuleType, examine: Any
) -> None:
    (one,) = [d for d in examine(made(corrupt, "head_removed")).health.defects if d.steps]
    # 19 of 66 kernels: the 11 of the first step and 8 of the second
    assert (one.code, one.rank, one.count, one.steps) == ("H104", RANK, 19, [1, 2])
    assert one.withholds == ["ledger", "mfu", "idle", "waits"]


def test_a_shifted_clock_is_told(made: Any, corrupt: ModuleType, examine: Any) -> None:
    (one,) = examine(made(corrupt, "clock_shifted")).health.defects
    assert (one.code, one.rank) == ("H204", RANK)
    assert one.evidence.startswith("the clock of rank 3 is 5 ms ahead of the first rank's")


def test_the_files_own_rank_wins(made: Any, corrupt: ModuleType, examine: Any) -> None:
    found = examine(made(corrupt, "permuted"))
    assert found.codes == {"H208": [0, 1, 2, 3]}
    assert found.ranks != sorted(found.ranks)


def test_the_job_as_it_was_has_no_defect(
    job: Callable[..., Path], tmp_path: Path, examine: Any
) -> None:
    found = examine(job(tmp_path / "clean"))
    assert found.health.clean
    assert not found.health.defects


@pytest.mark.parametrize("folder", ["nano8", "h200_ddp2"])
def test_clean_jobs_raise_no_alarm(folder: str, traces: Path, examine: Any) -> None:
    found = examine(traces / folder)
    assert found.health.clean
    assert {*found.codes} <= {"H203"}  # their windows do begin at different calls


@pytest.mark.parametrize("folder", ["h200", "hta_pair", "workers_pair"])
def test_clean_files_raise_no_alarm(folder: str, traces: Path) -> None:
    for path in sorted((traces / folder).glob("*.gz")):
        trace = read(path)
        found = defects_of(trace, sift(trace.events))
        assert not [one for one in found if one.withholds], path


def test_a_bomb_is_not_opened(tmp_path: Path, corrupt: ModuleType) -> None:
    path = tmp_path / "bomb.json.gz"
    corrupt.write_bomb(path, 4 << 30)
    assert path.stat().st_size < 16 << 20
    began = time.monotonic()
    with pytest.raises(FlopwiseError, match="expand to more than 128 MiB"):
        read(path)
    assert time.monotonic() - began < MOST_S
    assert peak_bytes() < MOST_BYTES


def outcome(path: Path) -> str:
    """Looks at a file as a whole; returns what it was refused for."""
    try:
        trace = read(path)
        defects_of(trace, sift(trace.events))
        ledger(trace)
    except FlopwiseError as error:
        return str(error)
    return ""


@pytest.mark.timeout(7200)
def test_random_changes_end_in_a_result_or_one_error(
    job: Callable[..., Path], tmp_path: Path, corrupt: ModuleType
) -> None:
    text = (job(tmp_path / "job", ranks=2) / "rank1.json").read_bytes()
    packed = corrupt.packed_mutations(text, MUTATIONS // 10)
    path = tmp_path / "changed.json"
    refused = []
    for changed in (*packed, *corrupt.mutations(text, MUTATIONS)):
        path.write_bytes(changed)
        began = time.monotonic()
        refused.append(outcome(path))
        assert time.monotonic() - began < MOST_S
    assert len(refused) == MUTATIONS + MUTATIONS // 10
    assert all(why.startswith(str(path)) for why in refused if why)
    assert sum(not why for why in refused) > MUTATIONS // 2
    assert peak_bytes() < MOST_BYTES


def test_random_changes_of_a_real_trace(traces: Path, tmp_path: Path, corrupt: ModuleType) -> None:
    text = corrupt.unpacked(traces / "nano8" / "rank1.json.gz")
    path = tmp_path / "changed.json"
    for changed in corrupt.mutations(text, max(1, MUTATIONS // 20), seed=1):
        path.write_bytes(changed)
        why = outcome(path)
        assert not why or why.startswith(str(path))
    assert peak_bytes() < MOST_BYTES
