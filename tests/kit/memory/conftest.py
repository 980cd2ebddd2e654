"""Tests marked `alone` run in a process of their own: what ends it ends no other test, and its last words are shown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ALONE = "FLOPWISE_TEST_ALONE"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: runs in a process of its own")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("alone") is None or os.environ.get(ALONE):
        return None
    words = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, f"{pyfuncitem.path}::{pyfuncitem.nodeid.partition('::')[2]}"],
        env={**os.environ, ALONE: "1"},
        cwd=pyfuncitem.config.rootpath,
        capture_output=True,
        text=True,
    )
    told = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, f"exit code {done.returncode}\n{told}"
    assert "1 passed" in done.stdout, told  # skipped there is not passed here
    return True
