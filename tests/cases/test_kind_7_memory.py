"""Memory that grows, is cut up, is rounded up or thrown away: one test a case."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.memory import emptied_cache
from flopwise.kit.memory.allocator_settings import CANDIDATES, reasons_against
from flopwise.kit.memory.copied_pages import PackedStrings, copied_objects
from flopwise.kit.memory.emptied_cache import empty_cache_cost, held_back
from flopwise.kit.memory.history import HistoryWatch
from flopwise.kit.memory.interleaved import Ratio
from flopwise.kit.memory.pinned import pinned_plan
from flopwise.kit.memory.snapshot import fragmentation, read_snapshot

GIB = 2**30


def private_dirty_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty"):
            return int(line.split()[1]) << 10
    raise LookupError("Private_Dirty")


class Texts(Dataset[int]):
    """Reads texts, and gives the private memory of the worker that read them."""

    def __init__(self, texts: Any) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> int:
        assert self.texts[index]
        return private_dirty_bytes() if index in (0, len(self) - 1) else 0


def growth(texts: Any) -> int:
    """Returns by how much a worker grows that reads all of them."""
    loader = DataLoader(
        Texts(texts), batch_size=len(texts), num_workers=1, multiprocessing_context="fork"
    )
    (batch,) = list(loader)
    return int(batch[-1] - batch[0])


@pytest.mark.skipif(
    not os.access("/proc/self/smaps_rollup", os.R_OK),
    reason="needs Linux's account of private pages",
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_host_memory_that_grows_with_workers_though_data_are_only_read() -> None:
    texts = [f"{i:0100}" for i in range(100_000)]
    (found,) = copied_objects(Texts(texts), workers=2)
    assert found.kind == "list of str"
    copied, packed = growth(texts), growth(PackedStrings(texts))
    assert copied == pytest.approx(found.object_bytes, rel=0.4)
    assert packed < 0.25 * copied
    megabytes = f"{found.object_bytes / 1e6:.3g} MB"
    assert str(found) == (
        f"dataset.texts: list of str of 100000 objects, {megabytes}: reading them copies their pages, up to "
        f"{megabytes} in each worker, {3 * found.object_bytes / 1e6:.3g} MB with 2 workers. It is no leak of "
        "the loader. Keep them in PackedStrings"
    )
    assert copied_objects(Texts(PackedStrings(texts)), workers=2) == []


def test_a_running_loss_that_keeps_every_graph_alive() -> None:
    layer, watch = nn.Linear(512, 512), HistoryWatch()
    running: Any = 0.0
    for _ in range(20):
        running = running + layer(torch.randn(256, 512)).square().mean()
        watch.step()
    (found,) = watch.found
    assert found.name == "running"
    assert found.bytes_per_step == 2 * 256 * 512 * 4  # 1 MB a step; 215 MB were seen in 200
    text = str(found)
    assert "test_kind_7_memory.py:" in text
    assert "running += loss.detach()" in text
    assert "`.item()` in each step would wait for the device" in text
    plain: Any = 0.0
    watch = HistoryWatch()
    for _ in range(20):
        plain = plain + layer(torch.randn(256, 512)).square().mean().detach()
        watch.step()
    assert watch.found == []


class TestFragmentationWithChangingLengths:
    """That lengths from 64 to 4096 fragment, and what settings do about it, needs a GPU: the benchmark's section."""

    def test_a_snapshot_of_one_large_segment_that_holds_little(self, tmp_path: Path) -> None:
        segment = {
            "total_size": 11 * GIB,
            "blocks": [
                {"size": 5 * GIB, "state": "inactive"},
                {"size": GIB // 2, "state": "active_allocated"},
                {"size": 11 * GIB // 2, "state": "inactive"},
            ],
        }
        file = tmp_path / "snapshot.json"
        file.write_text(json.dumps({"segments": [segment]}))
        found = fragmentation(read_snapshot(file))
        assert found.trapped_frac == pytest.approx(10.5 / 11)
        assert str(found) == (
            "Fragmentation: 11.00 GiB reserved, 0.50 GiB in use, 10.50 GiB (95%) free but trapped beside "
            "what is in use, 0.00 GiB in free segments, largest free piece 5.50 GiB. The worst segment is "
            "11.00 GiB with 0.50 GiB in use. To try: expandable_segments:True (not with CUDA graphs or "
            "registered NCCL buffers), lengths in buckets, the largest batch first."
        )

    def test_the_word_is_kept_for_a_large_share(self) -> None:
        segment = {
            "total_size": 100,
            "blocks": [
                {"size": 90, "state": "active_allocated"},
                {"size": 10, "state": "inactive"},
            ],
        }
        assert "No fragmentation to speak of" in str(fragmentation([segment]))

    def test_the_setting_is_among_those_that_are_measured_but_not_with_graphs(self) -> None:
        setting = CANDIDATES["expandable segments"]
        assert reasons_against(setting, cuda=True) is None
        assert reasons_against(setting, cuda=True, cuda_graphs=True) is not None


def test_pinned_memory_that_is_rounded_up_is_told_before_it_is_taken() -> None:
    plan = pinned_plan([int(2.25 * GIB), int(1.125 * GIB), int(0.563 * GIB)])
    assert str(plan).startswith("pinned memory: 4 + 2 + 1 GiB for 3.938 GiB asked for, factor 1.78")
    assert "In pieces it is 3.94 GiB: 2 + 0.25; 1 + 0.125; 0.5 + 0.0625" in str(plan)


def test_a_cache_that_is_emptied_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs needs a GPU (test_memory_on_a_gpu.py); that calls are seen, and what is said of them, does not."""
    net, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.randn(8, 64)

    def step() -> None:
        net(x).mean().backward()
        torch.cuda.empty_cache()

    emptied: list[int] = []
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "empty_cache", lambda: emptied.append(1))
    ratio = Ratio(0.010, 0.007, 0.7, 0.65, 0.75, 7)
    states = {True: (60.0, GIB), False: (0.0, 2 * GIB)}

    def driver_calls(run: Any, device: Any) -> tuple[float, int]:
        emptied.clear()
        run()
        return states[bool(emptied)]

    monkeypatch.setattr(emptied_cache, "compare", lambda *args, **kwargs: ratio)
    monkeypatch.setattr(emptied_cache, "_driver_calls", driver_calls)
    text = str(empty_cache_cost(step))
    assert text.startswith("empty_cache 1 times a step at ")
    assert "without it 0.700 of the time" in text
    assert "driver allocations and frees a step 60 with it, 0 without" in text
    assert "peak reserved 1.00 GiB with it, 2.00 without" in text
    monkeypatch.setattr(emptied_cache, "_free_frac", lambda: 0.01)
    with held_back(0.05) as seen:  # under real pressure calls go on
        step()
    assert seen.let_through == 1
