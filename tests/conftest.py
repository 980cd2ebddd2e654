"""Shared by all tests: one thread, a private cache, nothing of a surrounding run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
for _name in (
    "FLOPWISE_RUN",
    "FLOPWISE_DISABLE",
    "FLOPWISE_PLAN",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Returns a function that loads a script of tools/, which is no package, by name."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / "tools" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"tools_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load
