from __future__ import annotations

import inspect
from typing import Any

import torch

from flopwise.kit.input.cuda_surface import CudaSurface


def test_the_device_that_tests_use_has_the_same_surface(surface: Any) -> None:
    def public(kind: type) -> dict[str, list[str]]:
        methods = {n: f for n, f in vars(kind).items() if not n.startswith("_")}
        return {n: list(inspect.signature(f).parameters) for n, f in methods.items()}

    assert public(type(surface)) == public(CudaSurface)


def test_whoever_else_refers_to_memory_is_counted() -> None:
    there = CudaSurface(torch.device("cpu"))
    x = torch.ones(4)
    alone = there.share_count(x)
    view = x[1:]
    assert there.share_count(x) == alone + 1
    detached = x.detach()
    assert there.share_count(x) == alone + 2
    del view, detached
    assert there.share_count(x) == alone


def test_tensors_on_the_host_need_no_record() -> None:
    CudaSurface(torch.device("cpu")).record(torch.ones(1), None)
