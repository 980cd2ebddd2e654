from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a module of benchmarks, its gpu, gpu/jobs or gpu/lines by its bare name, as its script does."""
    gpu = BENCHMARKS / "gpu"
    for folder in (BENCHMARKS, gpu, gpu / "jobs", gpu / "lines"):
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if path.startswith(str(BENCHMARKS)):
            del sys.modules[name]
