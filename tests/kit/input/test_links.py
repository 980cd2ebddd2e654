from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.errors import FlopwiseWarning, InputError
from flopwise.kit.input import JpegBatch, PinnedPool, collate_into, links


def test_the_device_is_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert links.device_of(None) == torch.device("cpu")
    with pytest.raises(InputError, match="torch sees no CUDA device here"):
        links.device_of("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert links.device_of(None) == torch.device("cuda:1")
    assert links.device_of("cuda:0") == torch.device("cuda:0")
    assert links.device_of("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="device=cuda:2: torch sees 2 CUDA devices"):
        links.device_of("cuda:2")


def test_other_devices_are_served_the_plain_way_and_that_is_said() -> None:
    with pytest.warns(FlopwiseWarning, match="to meta they go the plain way, read ahead"):
        assert links.device_of("meta") == torch.device("meta")
    moved = links.mover(torch.device("meta"))([torch.ones(2), "a"])
    assert moved[0].device.type == "meta"


def test_on_the_cpu_nothing_is_touched_but_encoded_images(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [torch.ones(1), {"x": 1}]
    assert links.mover(torch.device("cpu"))(batch) is batch
    monkeypatch.setattr(JpegBatch, "to", lambda self, device: f"decoded on {device}")
    files = JpegBatch([torch.ones(3, dtype=torch.uint8)])
    assert links.mover(torch.device("cpu"))([files, 1]) == ["decoded on cpu", 1]


def test_the_pool_is_found_by_the_loaders_collate_function() -> None:
    pool = PinnedPool(64, 2)
    loader: Any = SimpleNamespace(collate_fn=collate_into(pool))
    assert links.pool_of(loader) is pool
    assert links.pool_of([1]) is None
    assert links.pool_of(SimpleNamespace(collate_fn=len)) is None


def test_normalising_comes_before_the_transform() -> None:
    first: Any = "normalize"
    assert links.changes_of(first, None) == ["normalize"]
    assert links.changes_of(first, len) == ["normalize", len]
    assert links.changes_of(None, None) == []
