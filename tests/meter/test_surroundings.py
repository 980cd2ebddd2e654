"""What surrounds a training is seen, costs timed steps nothing, and is left as it was."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flopwise.meter import switches, threads
from flopwise.meter.surroundings import parameters_of
from flopwise.meter.where import caller, place
from flopwise.meter.worker_loads import Page


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.ones(4)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        for _ in range(32):
            time.sleep(0.002)
            yield torch.ones(4)


def train_on(loader: Any, epochs: int = 1) -> Any:
    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(epochs):
            for x in loader:
                net(x).sum().backward()
                optimizer.step()

    return train


class TestLoaders:
    def test_workers_time_their_own_loads(self, measure: Any) -> None:
        loader = DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)
        (facts,) = measure(train_on(loader, epochs=2)).record.surroundings.loaders
        assert (facts.num_workers, facts.prefetch_factor, facts.batch_size) == (2, 2, 4)
        assert (facts.persistent_workers, facts.pin_memory, facts.batches) == (True, False, 16)
        assert facts.starts == 2
        assert facts.loads == 32
        assert 8e6 <= facts.load_ns < 30e6  # four items of 2 ms
        assert facts.load_cpu_ns < facts.load_ns / 2  # it sleeps
        assert facts.where is not None
        assert "test_surroundings.py:" in facts.where
        if hasattr(os, "sched_getaffinity"):
            assert facts.worker_cores == [sorted(os.sched_getaffinity(0))] * 2

    def test_while_training_runs_they_are_known_by_loader(self, measure: Any) -> None:
        loader = DataLoader(Slow(), batch_size=4, num_workers=1)
        surroundings = measure(train_on(loader)).session.surroundings
        load_s, cpu_s = surroundings.loads()[loader]
        assert 8e-3 <= load_s < 30e-3
        assert 0 < cpu_s < load_s / 2

    def test_streams_are_timed_too(self, measure: Any) -> None:
        loader = DataLoader(Stream(), batch_size=4, num_workers=1)
        (facts,) = measure(train_on(loader)).record.surroundings.loaders
        assert facts.batches is None
        assert facts.loads == 8
        assert facts.load_ns >= 8e6

    def test_without_workers_there_is_nothing_to_time(self, measure: Any) -> None:
        (facts,) = measure(train_on(DataLoader(Slow(), batch_size=4))).record.surroundings.loaders
        assert (facts.num_workers, facts.prefetch_factor, facts.loads, facts.load_ns) == (
            0,
            None,
            0,
            None,
        )

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_loaders_of_an_evaluation_are_left_alone(self, measure: Any) -> None:
        training, held_out = DataLoader(Slow(), batch_size=8), DataLoader(Slow(), batch_size=64)

        def train() -> None:
            train_on(training)()
            with torch.no_grad():
                list(held_out)

        (facts,) = measure(train).record.surroundings.loaders
        assert facts.batch_size == 8

    def test_a_loader_made_anew_for_each_epoch_is_one(self, measure: Any) -> None:
        def train() -> None:
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(3):
                for x in DataLoader(Slow(), batch_size=16):
                    net(x).sum().backward()
                    optimizer.step()

        (facts,) = measure(train).record.surroundings.loaders
        assert facts.starts == 3

    def test_a_page_keeps_workers_apart(self) -> None:
        page = Page()
        page.worker(0)[0:3] = memoryview(bytearray(24)).cast("Q")
        for index, (loads, wall) in enumerate([(2, 10), (3, 20)]):
            words = page.worker(index)
            words[0], words[1], words[8] = loads, wall, 0b101
        assert page.loads() == (5, 30, 0)
        assert page.cores() == [[0, 2], [0, 2]]
        assert page.threads() == (0.0, 0.0, 0, [])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
class TestCores:
    def test_who_changes_the_mask_is_named(self, measure: Any) -> None:
        everything = os.sched_getaffinity(0)
        if len(everything) < 2:
            pytest.skip("one core cannot be cut to fewer")

        def train() -> None:
            train_on([torch.ones(2, 4)] * 4)()
            os.sched_setaffinity(0, {min(everything)})
            train_on([torch.ones(2, 4)] * 4)()

        try:
            masks = measure(train, warmup=2).record.surroundings.masks
        finally:
            os.sched_setaffinity(0, everything)
        assert [(m.when, m.cores) for m in masks] == [
            ("at attach", sorted(everything)),
            ("after step 4", [min(everything)]),
        ]
        assert "test_surroundings.py:" in str(masks[1].where)

    def test_the_call_is_given_back(self, measure: Any) -> None:
        before = (os.sched_setaffinity, torch.set_anomaly_enabled)
        measure(train_on([torch.ones(2, 4)] * 4))
        assert (os.sched_setaffinity, torch.set_anomaly_enabled) == before


class TestThreads:
    def write(self, folder: Path, threads_: dict[int, tuple[int, int]]) -> str:
        for thread, (ran, waited) in threads_.items():
            task = folder / "task" / str(thread)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"{ran} {waited} 7\n")
        return str(folder)

    def test_between_two_samples(self, tmp_path: Path) -> None:
        first = threads.sample(self.write(tmp_path, {1: (1000, 0), 2: (500, 100)}))
        assert first is not None
        assert first.threads == {1: (1000, 0), 2: (500, 100)}
        last = first._replace(
            at_ns=first.at_ns + 1000, threads={1: (1500, 400), 2: (500, 150), 3: (900, 0)}
        )
        use = threads.between(first, last)
        assert use == threads.Use(window_ns=1000, run_ns=1400, wait_ns=450, busy=2)

    def test_a_system_that_does_not_tell(self, tmp_path: Path) -> None:
        assert threads.sample(str(tmp_path)) is None
        assert threads.libraries(str(tmp_path)) == []

    def test_libraries_by_their_files(self, tmp_path: Path) -> None:
        (tmp_path / "maps").write_text(
            "7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/numpy.libs/libscipy_openblas64_-fdde.so\n"
            "7f01-7f02 r-xp 00000000 08:01 2  /venv/lib/python3.12/site-packages/cv2/cv2.abi3.so\n"
            "7f02-7f03 rw-p 00000000 00:00 0\n"
            "7f03-7f04 r-xp 00000000 08:01 3  /opt/torch/lib/libgomp-a34b.so.1\n"
        )
        assert threads.libraries(str(tmp_path)) == ["OpenBLAS", "GNU OpenMP", "OpenCV"]

    def test_variables_that_cap_pools(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in threads.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MKL_NUM_THREADS", "2")
        assert threads.variables() == {"MKL_NUM_THREADS": "2"}


class TestSwitches:
    @pytest.mark.parametrize(
        ("variable", "value", "on"),
        [
            ("CUDA_LAUNCH_BLOCKING", "1", True),
            ("CUDA_LAUNCH_BLOCKING", "0", False),
            ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
            ("TORCH_DISTRIBUTED_DEBUG", "INFO", False),
            ("TORCH_LOGS", "+dynamo", True),
            ("TORCH_LOGS", "", False),
            ("ONEDNN_VERBOSE", "none", True),
            ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", True),  # its presence alone counts
        ],
    )
    def test_variables(
        self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, on: bool
    ) -> None:
        for name in switches.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, value)
        found = switches.Switches().found(first_step=3)
        assert [s.setting for s in found] == ([f"{variable}={value}"] if on else [])
        if found and sys.platform == "linux":
            assert found[0].where == "os.environ, set by the process itself"

    def test_a_profiler_that_runs(self) -> None:
        watch = switches.Switches()
        watch.look()
        assert switches.PROFILER not in [s.name for s in watch.found(3)]
        with torch.autograd.profiler.profile():
            watch.look()
        assert switches.PROFILER in [s.name for s in watch.found(3)]


class TestParameters:
    def test_tied_embeddings_are_multiplied_too(self) -> None:
        tied = nn.ModuleDict({"in": nn.Embedding(100, 8), "out": nn.Linear(8, 100, bias=False)})
        tied["out"].weight = tied["in"].weight
        found = parameters_of([tied])
        assert found is not None
        assert (found.total, found.trained, found.looked_up) == (800, 800, 0)

    def test_frozen_and_looked_up(self) -> None:
        net = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2))
        net[1].weight.requires_grad_(False)
        found = parameters_of([net, net])
        assert found is not None
        assert (found.total, found.trained, found.looked_up) == (818, 802, 800)

    def test_no_roots(self) -> None:
        assert parameters_of([]) is None


def test_places_are_relative_below_the_working_directory(in_folder: Path) -> None:
    frame = sys._getframe()
    assert place(frame).startswith(str(Path(__file__)))
    namespace: dict[str, Any] = {"sys": sys}
    exec(compile("frame = sys._getframe()", str(in_folder / "a.py"), "exec"), namespace)
    assert place(namespace["frame"]) == "a.py:1"


def test_the_caller_is_in_the_script() -> None:
    assert str(caller()).rpartition(":")[0].endswith("test_surroundings.py")
