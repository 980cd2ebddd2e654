"""Shared by all tests: one thread, a private cache, nothing of a surrounding run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
for _name in ("FLOPWISE_RUN", "FLOPWISE_DISABLE", "FLOPWISE_PLAN", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
