"""Shared by the tests of the precision room: one rank of a process group, and a process without foreign Functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flopwise.kit.precision import mixed


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_foreign_functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out autograd Functions that other tests have defined, but where they are what is tested."""
    if request.module.__name__.rpartition(".")[2] != "test_custom_functions":
        monkeypatch.setattr(mixed, "any_defined", lambda: False)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
