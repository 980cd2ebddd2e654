from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flopwise.fixes.catalog import host_settings
from flopwise.fixes.catalog.host_settings import (
    WHOLE_STEPS,
    Collector,
    HostSettings,
    Pauses,
    confine,
    cores_of,
    node_cores,
    release,
    words_of,
)
from flopwise.fixes.interface import Declined, Eligible, Scene
from flopwise.meter.replay import Snapshot

CUDA = torch.device("cuda", 0)


class Node:
    """Is in a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


def scene(workers: int = 0, **more: Any) -> Scene:
    model = nn.Linear(4, 4)
    loader = DataLoader([0] * 4, num_workers=workers)
    given: dict[str, Any] = {
        "roots": [model],
        "optimizers": [torch.optim.SGD(model.parameters(), lr=0.1)],
        "loaders": [loader],
        "cores": 2,
    }
    return Scene(**(given | more))


def step(here: Scene, n: int = 1, garbage: int = 0) -> None:
    for _ in range(n):
        for _ in range(garbage):
            Node()
        here.optimizers[0].step()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    gc.collect()
    before = (gc.isenabled(), gc.get_freeze_count(), list(gc.callbacks), torch.get_num_threads())
    yield
    after = (gc.isenabled(), gc.get_freeze_count(), list(gc.callbacks), torch.get_num_threads())
    gc.unfreeze()
    gc.enable()
    assert after == before


@pytest.fixture
def apply() -> Iterator[Any]:
    done = []

    def apply(here: Scene, setting: Any = None) -> Any:
        done.append((HostSettings().apply(here, setting), here))
        return done[-1][0]

    yield apply
    for applied, here in done:
        applied.undo()
        assert not here.optimizers[0]._optimizer_step_post_hooks


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores in two nodes, the GPU at the second."""
    for node, cores in (("node0", "0-3"), ("node1", "4-7")):
        (tmp_path / "node" / node).mkdir(parents=True)
        (tmp_path / "node" / node / "cpulist").write_text(cores + "\n")
    device = tmp_path / "pci" / "0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(host_settings, "_NODES", tmp_path / "node")
    monkeypatch.setattr(host_settings, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0),
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)))


class TestDeclines:
    def test_without_steps(self) -> None:
        answer = HostSettings().check(Scene())
        assert isinstance(answer, Declined)

    def test_where_nothing_can_be_set(self) -> None:
        gc.disable()
        answer = HostSettings().check(scene())
        gc.enable()
        assert isinstance(answer, Declined)
        assert answer.reason.startswith("nothing measured")
        assert "switched garbage collection off" in answer.reason

    def test_where_the_script_froze_objects(self) -> None:
        gc.freeze()
        answer = HostSettings().check(scene())
        gc.unfreeze()
        assert isinstance(answer, Declined)
        assert "frozen objects itself" in answer.reason

    def test_where_pauses_are_short(self, apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_settings, "LEAST_GC_FRAC", 2.0)
        here = scene()
        applied = apply(here)
        step(here, 3, 500)
        assert not applied.verify(Snapshot(here.roots[0])).passed
        assert "nothing measured: pauses for garbage collection take" in applied.failure()
        applied.enable()
        assert gc.isenabled()

    @pytest.mark.parametrize(
        ("threads", "findings", "reason"),
        [(8, {}, "not found to exceed"), (1, {"D104": None}, "with 1 threads")],
    )
    def test_threads(
        self, threads: int, findings: Any, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert reason in str(host_settings._threads_problem(scene(findings=findings)))

    @pytest.mark.usefixtures("two_nodes")
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no GPU"),
            (lambda: scene(4, device=CUDA), "too few for the loader's workers"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:This DataLoader will create")
    def test_cores(self, made: Any, reason: str) -> None:
        assert reason in str(host_settings._cores_problem(made()))

    @pytest.mark.usefixtures("two_nodes")
    def test_cores_that_somebody_chose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 4})
        assert host_settings._cores_problem(scene(device=CUDA)) == "the cores were chosen already"

    def test_one_node(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(host_settings, "_NODES", tmp_path)
        assert host_settings._cores_problem(scene(device=CUDA)) == "there is one NUMA node"


class TestGarbage:
    def test_pauses_are_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_settings, "WATCHED_STEPS", 3)
        here = scene()
        pauses = Pauses(here.optimizers[0])
        assert pauses.share is None
        for _ in range(3):
            gc.collect()
            step(here)
        pauses.stop()
        assert pauses.enough
        assert 0.3 < pauses.share <= 1.0

    def test_no_pauses_are_none(self) -> None:
        here = scene()
        pauses = Pauses(here.optimizers[0])
        step(here, 3)
        pauses.stop()
        assert pauses.share < 0.3

    def test_nothing_is_collected_but_between_steps(self, apply: Any) -> None:
        here = scene()
        applied = apply(here, {"gc": "planned"})
        applied.enable()
        phases = []
        watch = lambda phase, info: phases.append(phase)  # noqa: E731
        gc.callbacks.append(watch)
        cycle = Node()
        alive = weakref.ref(cycle)
        del cycle
        for _ in range(5000):
            Node()
        assert phases == []
        assert alive() is not None
        step(here)
        assert alive() is None
        gc.callbacks.remove(watch)
        applied.disable()
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0

    def test_all_that_is_new_is_collected_after_so_many_steps(self) -> None:
        here = scene()
        collector = Collector(here.optimizers[0])
        collector.begin()
        old = Node()
        step(here, 3)  # by now it is old
        alive = weakref.ref(old)
        del old
        step(here, WHOLE_STEPS)
        assert alive() is None
        collector.end()

    def test_what_was_frozen_is_collected_in_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_settings, "THAW_STEPS", 5)
        here, old = scene(), Node()
        collector = Collector(here.optimizers[0])
        collector.begin()
        alive = weakref.ref(old)
        del old
        step(here, 4)
        assert alive() is not None
        step(here)
        assert alive() is None
        assert gc.get_freeze_count() > 0
        collector.end()

    def test_is_set_where_pauses_are_long(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_settings, "WATCHED_STEPS", 3)
        here = scene()
        applied = apply(here)
        for _ in range(3):
            assert not applied.ready()
            gc.collect()
            step(here)
        assert applied.ready()
        parity = applied.verify(Snapshot(here.roots[0]))
        assert parity.passed
        assert parity.numerics == "identical"
        assert gc.isenabled()
        assert "gc" in applied.setting
        for _ in range(3):
            applied.enable()
            applied.enable()
            assert not gc.isenabled()
            applied.disable()
            applied.disable()
            assert gc.isenabled()

    def test_the_optimizer_can_be_copied_and_stored(self, apply: Any) -> None:
        here = scene()
        optimizer = here.optimizers[0]
        before = pickle.dumps(optimizer.state_dict())
        apply(here, {"gc": "planned"}).enable()
        assert pickle.dumps(optimizer.state_dict()) == before
        assert not copy.deepcopy(optimizer)._optimizer_step_post_hooks


class TestThreads:
    def test_are_those_that_workers_leave(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = [2]
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
        monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.__setitem__(0, n))
        here = scene(1, findings={"D104": None})
        assert isinstance(HostSettings().check(here), Eligible)
        applied = apply(here)
        assert applied.setting == {"threads": "1"}
        applied.enable()
        assert threads == [1]
        applied.disable()
        assert threads == [2]
        monkeypatch.undo()

    def test_the_numbers_are_compared_on_a_cpu(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = scene()
        applied = apply(here, {"threads": str(torch.get_num_threads())})
        parity = applied.verify(Snapshot(here.roots[0], (torch.randn(3, 4),)))
        assert parity.passed, parity.detail
        assert parity.numerics == "reordered"

    @pytest.mark.parametrize("wrong", ["0", "many"])
    def test_what_cannot_be_read_is_said(self, wrong: str) -> None:
        with pytest.raises(ValueError, match=wrong):
            HostSettings().apply(scene(), {"threads": wrong})


class TestCores:
    @pytest.mark.parametrize(
        ("words", "cores"),
        [("", set()), ("0", {0}), ("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11}), ("4-4", {4})],
    )
    def test_lists(self, words: str, cores: set[int]) -> None:
        assert cores_of(words) == cores
        assert cores_of(words_of(cores)) == cores

    @pytest.mark.usefixtures("two_nodes")
    def test_are_those_of_the_gpus_node(self, apply: Any) -> None:
        assert node_cores(CUDA) == {4, 5, 6, 7}
        assert host_settings._cores_problem(scene(device=CUDA)) is None
        assert apply(scene(device=CUDA)).setting == {"cores": "4-7"}

    @pytest.mark.usefixtures("two_nodes")
    def test_of_a_gpu_whose_node_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_settings, "_PCI", Path("/nowhere"))
        assert host_settings._cores_problem(scene(device=CUDA)) == (
            "the node of the GPU is not known"
        )

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
    def test_threads_are_confined_and_released(self) -> None:
        all_cores = os.sched_getaffinity(0)
        some = {min(all_cores)}
        stop, seen = threading.Event(), []

        def run() -> None:
            stop.wait()
            seen.append(os.sched_getaffinity(0))

        old = threading.Thread(target=run)
        old.start()
        before = confine(some)
        try:
            assert os.sched_getaffinity(0) == some
            new = threading.Thread(target=run)
            new.start()
            assert os.sched_getaffinity(old.native_id) == some
        finally:
            release(before, some)
        stop.set()
        old.join()
        new.join()
        assert seen == [all_cores, all_cores]
        assert os.sched_getaffinity(0) == all_cores
