"""A fresh process under one allocator setting: it gets ready beside others, and runs once it is its turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flopwise.kit.memory.allocator_counters import AllocatorState
from flopwise.kit.memory.settings_comparison import Run

#: Seconds after which a process that has not imported torch is given up.
READY_S = 120.0
_POLL_S = 0.01
_TOLD_CHARACTERS = 300


class FreshProcess:
    """A process that has imported torch, has not touched the device, and waits. Used as a context, it ends with it."""

    def __init__(self, spec: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ready, self._out, self._errors = (
            Path(self._folder.name) / name for name in ("ready", "run.json", "errors")
        )
        source = str(Path(__file__).parents[3])
        words = ["-m", "flopwise.kit.memory.allocator_probe", str(self._out), json.dumps(spec)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *words, str(self._ready)],
                env={
                    **env,
                    "PYTHONPATH": os.pathsep.join(filter(None, (source, env.get("PYTHONPATH")))),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Waits until everything is imported, so that it takes no time from another's measurement; or it has ended."""
        end = time.monotonic() + READY_S
        while not self._ready.exists() and self._process.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S)

    def run(self, timeout_s: float) -> Run | str:
        """Lets it run and returns what it measured, or what it failed with."""
        try:
            self._process.communicate(b"\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"no end after {timeout_s:g} s"
        code = self._process.returncode
        if code or not self._out.exists():
            told = self._errors.read_text(encoding="utf-8", errors="replace").strip()
            return (told.splitlines() or [f"exit code {code}"])[-1][:_TOLD_CHARACTERS]
        found = json.loads(self._out.read_text(encoding="utf-8"))
        state = found.pop("state")
        return Run(**found, state=AllocatorState(**state) if state else None)
