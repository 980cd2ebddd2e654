"""The ranks of a job read by a Ray cluster."""

from __future__ import annotations

import dataclasses
import sys
import time
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.errors import UsageError
from flopwise.measurement.cluster import Ray
from flopwise.measurement.jobs import Stage, conclude, read_rank, read_ranks
from flopwise.trace.sources import Sources, find

RANKS = 6


@pytest.fixture
def sources(training: Any, tmp_path: Path) -> Sources:
    for rank in range(RANKS):
        t = training(4 + rank)
        t.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": RANKS}
        t.write(f"rank{rank}.json")
        t.events.clear()
    return find([tmp_path])


def test_ray_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'flopwise\[ray\]'"):
        Ray("auto")


class Lost(Exception):
    """Stands in for what Ray raises of a task whose machines are all lost."""


class Raised(Lost):
    """Stands in for what Ray raises of a task that itself raised."""


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(Lost("node died\nmore"), BrokenExecutor), (Raised("a bug"), Raised), (None, type(None))],
)
def test_a_task_that_the_cluster_loses_is_no_bug_of_ours(
    error: Exception | None, becomes: type
) -> None:
    task: Future[int] = Future()
    ray = SimpleNamespace(
        remote=lambda **how: (
            lambda fn: SimpleNamespace(remote=lambda *args: SimpleNamespace(future=lambda: task))
        )
    )
    executor = Ray.__new__(Ray)
    executor._ray, executor._lost, executor._raised = ray, Lost, Raised
    future = executor.submit(abs, -3)
    if error is None:
        task.set_result(3)
        assert future.result() == 3
    else:
        task.set_exception(error)
    found = future.exception()
    assert isinstance(found, becomes)
    if becomes is BrokenExecutor:
        assert str(found) == "Lost: node died"


def slowly(stage: Stage, marks: str) -> RankSummary:
    """Reads a rank after two seconds, and leaves a mark on which machine it began."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    Path(marks, f"{stage.source.rank}-{node}-{time.time_ns()}").touch()
    time.sleep(2)
    return read_rank(stage)


@pytest.mark.timeout(180)
def test_a_machine_that_is_lost_midway_changes_nothing(sources: Sources, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'flopwise[ray]')")
    from ray.cluster_utils import Cluster

    local = conclude(sources, read_ranks(sources))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    marks = tmp_path / "marks"
    marks.mkdir()
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        with Ray(cluster.address) as executor:
            stages = [Stage(one) for one in sources]
            futures = [executor.submit(slowly, stage, str(marks)) for stage in stages]
            end = time.monotonic() + 60
            while len({path.name.split("-")[1] for path in marks.iterdir()}) < 2:
                assert time.monotonic() < end, "the two machines have not begun"
                time.sleep(0.1)
            cluster.remove_node(nodes[0], allow_graceful=False)
            found = [future.result() for future in futures]
        began = [path.name.split("-")[0] for path in marks.iterdir()]
        assert len(began) > len(set(began)) == RANKS  # what ran there ran again on the other one
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert dataclasses.asdict(conclude(sources, found)) == dataclasses.asdict(local)


@pytest.mark.timeout(120)
def test_no_cluster_there() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'flopwise[ray]')")
    with pytest.raises(UsageError, match="no cluster answers there"):
        Ray("127.0.0.1:1")
