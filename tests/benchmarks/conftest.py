from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a module of benchmarks/gpu or benchmarks/gpu/jobs by its bare name, as its script does."""
    monkeypatch.syspath_prepend(GPU)
    monkeypatch.syspath_prepend(GPU / "jobs")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if path.startswith(str(GPU)):
            del sys.modules[name]
