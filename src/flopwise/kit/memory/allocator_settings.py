"""Allocator settings as measured choices: each in fresh processes, in turns, and none where it is known to do harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flopwise.errors import FlopwiseError
from flopwise.kit.memory.allocator_state import AllocatorState
from flopwise.kit.memory.interleaved import FEWEST_ROUNDS, Ratio, ratio_of

#: torch reads the first that is set, and never both. Source: c10/cuda/CUDAAllocatorConfig.h of torch 2.13, and what
#: `torch._C._accelerator_getAllocatorSettings()` says there. Both are set alike, so that it does not matter.
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: What is tried, by what it is for. The values are those of torch's documentation (CUDA semantics, memory management).
CANDIDATES: Mapping[str, str] = {
    "expandable segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
    "round up": "roundup_power2_divisions:8",
    "collect from 80 %": "garbage_collection_threshold:0.8",
}
DEFAULT = "as it is"


class SettingsError(FlopwiseError):
    """Allocator settings could not be measured."""


@dataclass(frozen=True)
class Run:
    """One fresh process under one setting."""

    step_s: float  # median of the timed steps; of a command: all of it
    state: AllocatorState | None  # at its end; None without CUDA
    loss: float | None = None


@dataclass
class SettingsComparison:
    """What each setting came to."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def best(self) -> str:
        """Returns the setting to keep: the fastest that is shown to be faster, else the default.

        A setting that ran out of memory more often, or retried more often, is not taken.
        """
        before = self.trouble(DEFAULT)
        faster = {
            name: ratio.ratio
            for name, ratio in self.ratios.items()
            if ratio.faster and self.trouble(name) <= before
        }
        return min(faster, key=lambda name: faster[name], default=DEFAULT)

    def trouble(self, name: str) -> int:
        """Returns retries and failures of a setting's runs."""
        states = [run.state for run in self.runs[name] if run.state is not None]
        return sum(state.retries + state.out_of_memory for state in states)

    def __str__(self) -> str:
        """Returns one line a setting."""
        lines = []
        for name, runs in self.runs.items():
            text = f"{name}: {median(run.step_s for run in runs) * 1e3:.3g} ms"
            states = [run.state for run in runs if run.state is not None]
            if states:
                text += (
                    f", peak {max(s.peak_allocated_bytes for s in states) / 2**30:.2f} GiB allocated and "
                    f"{max(s.peak_reserved_bytes for s in states) / 2**30:.2f} reserved, "
                    f"{max(s.fragmentation_frac for s in states):.1%} fragmented, "
                    f"{sum(s.retries for s in states)} retries"
                )
            lines.append(text + (f"; {self.ratios[name]}" if name in self.ratios else ""))
        return "\n".join(
            lines + [f"{name}: not tried: {why}" for name, why in self.declined.items()]
        )


def environment(setting: str | None, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns an environment in which torch's allocator has this setting and no other; None: torch's defaults."""
    env = dict(os.environ if base is None else base)
    for name in (*NAMES, "PYTORCH_HIP_ALLOC_CONF"):
        env.pop(name, None)
    if setting is not None:
        env.update(dict.fromkeys(NAMES, setting))
    return env


def settings_now(env: Mapping[str, str] | None = None) -> str | None:
    """Returns the setting that this process' environment asks for."""
    env = os.environ if env is None else env
    return next((env[name] for name in NAMES if name in env), None)


def reasons_against(
    setting: str,
    *,
    cuda_graphs: bool = False,
    nccl_user_buffers: bool = False,
    cuda: bool | None = None,
) -> str | None:
    """Returns why a setting is not tried, or None.

    Source: pytorch/pytorch#158029 (hangs with graphs and peer-to-peer), uccl-project/uccl#839 (registration of
    expandable memory); the private pools of graphs are the native backend's (CUDA semantics, memory management).
    """
    if not (torch.cuda.is_available() if cuda is None else cuda):
        return "there is no CUDA device, whose memory it is about"
    if "expandable_segments:true" in setting.lower().replace(" ", ""):
        if cuda_graphs:
            return (
                "expandable segments are not combined with CUDA graphs: jobs of several GPUs hung"
            )
        if nccl_user_buffers:
            return "expandable segments cannot be registered as NCCL's user buffers everywhere"
        if sys.platform == "win32":
            return "expandable segments need Linux"
    if "cudaMallocAsync" in setting and cuda_graphs:
        return "the pools of CUDA graphs are kept by the native backend"
    return None


def compare_settings(
    target: str | Sequence[str] | Callable[[], Callable[[], object]],
    settings: Mapping[str, str] | None = None,
    *,
    rounds: int = FEWEST_ROUNDS,
    steps: int = 20,
    warmup: int = 5,
    cuda_graphs: bool = False,
    nccl_user_buffers: bool = False,
    timeout_s: float = 600,
    cuda: bool | None = None,
) -> SettingsComparison:
    """Measures each setting in fresh processes, in turns, and returns what came of it.

    Args:
        target: "module:function", "file.py:function" or such a function itself: it builds a training and returns the
            function that runs one step. Or the words of a command that runs a script: `["train.py", "--epochs", "1"]`.
        settings: by name; default `CANDIDATES`. What the processes run with now is measured as "as it is".
        rounds: fresh processes a setting, at least 3.
        cuda_graphs, nccl_user_buffers: whether the training uses them: some settings are left out then.

    Raises:
        SettingsError: the training fails under the setting that it has now, or the function cannot be found again.
    """
    spec = _spec(target, steps, warmup)
    result = SettingsComparison()
    tried: dict[str, str | None] = {DEFAULT: settings_now()}
    for name, setting in (CANDIDATES if settings is None else settings).items():
        why = reasons_against(
            setting, cuda_graphs=cuda_graphs, nccl_user_buffers=nccl_user_buffers, cuda=cuda
        )
        if why:
            result.declined[name] = why
        else:
            tried[name] = result.settings[name] = setting
    for index in range(max(rounds, FEWEST_ROUNDS)):
        for name in sorted(tried, reverse=index % 2 == 1):
            if name in result.declined:
                continue
            run = _run(spec, environment(tried[name]), timeout_s)
            if isinstance(run, Run):
                result.runs.setdefault(name, []).append(run)
            elif name == DEFAULT:
                raise SettingsError(f"the training fails as it is: {run}")
            else:
                result.declined[name] = f"its process failed: {run}"
                result.runs.pop(name, None)
    base = [run.step_s for run in result.runs[DEFAULT]]
    for name, runs in result.runs.items():
        if name != DEFAULT:
            result.ratios[name] = ratio_of(base, [run.step_s for run in runs])
    return result


def _spec(target: Any, steps: int, warmup: int) -> dict[str, Any]:
    """Returns what a fresh process is told to run."""
    if callable(target):
        module, name = target.__module__, target.__qualname__
        if "<locals>" in name or "." in name:
            raise SettingsError(
                f"{name} is made inside something else: a fresh process cannot find it"
            )
        if module == "__main__":
            module = os.path.abspath(str(getattr(sys.modules["__main__"], "__file__", "")))
            if not os.path.isfile(module):
                raise SettingsError(f"{name} is in no file: a fresh process cannot find it")
        target = f"{module}:{name}"
    if not isinstance(target, str):
        return {"command": [str(word) for word in target]}
    if ":" not in target:
        raise SettingsError(f'"{target}": "module:function" or "file.py:function" is wanted')
    return {"function": target, "steps": steps, "warmup": warmup, "path": sys.path}


def _run(spec: dict[str, Any], env: dict[str, str], timeout_s: float) -> Run | str:
    """Returns what one fresh process measured, or what it failed with."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        words = [
            sys.executable,
            "-m",
            "flopwise.kit.memory.allocator_probe",
            str(out),
            json.dumps(spec),
        ]
        source = str(Path(__file__).parents[3])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (source, env.get("PYTHONPATH"))))
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"no end after {timeout_s:g} s"
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return lines[-1][:300]
        found = json.loads(out.read_text())
    state = found.pop("state")
    return Run(**found, state=AllocatorState(**state) if state else None)


def as_json(comparison: SettingsComparison) -> dict[str, Any]:
    """Returns everything that was measured, as plain data."""
    return asdict(comparison)
