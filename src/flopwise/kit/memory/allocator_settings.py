"""Allocator settings as measured choices: each in fresh processes, in turns, and none where it is known to do harm."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flopwise.kit.memory.arguments import ArgumentError, need_number, need_whole
from flopwise.kit.memory.fresh_process import FreshProcess
from flopwise.kit.memory.interleaved import FEWEST_ROUNDS, ratio_of
from flopwise.kit.memory.settings_comparison import (
    DEFAULT,
    Run,
    SettingsComparison,
    SettingsError,
)

#: The second is the newer name of the first. torch reads either; they are set alike, so that it does not matter which.
#: Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: What is tried, by what it is for. The last does something only in a process that limits its share of memory
#: (`torch.cuda.set_per_process_memory_fraction`). Source: documentation of CUDA semantics, "Memory management", for the
#: values; c10/cuda/CUDACachingAllocator.cpp (`set_fraction &&`) for the limit.
CANDIDATES: Mapping[str, str] = {
    "expandable segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
    "round up": "roundup_power2_divisions:8",
    "collect from 80 %": "garbage_collection_threshold:0.8",
}
_OWN = "own_allocator:"
#: Processes that wait with torch imported, at most: some hundred MB of host memory each. Our choice.
MOST_READY = 8
#: From this on, a loss differs by more than another order of sums explains. Our choice.
MOST_LOSS_FRAC = 0.01


def own_settings(pool_bytes: int) -> dict[str, str]:
    """Returns two more settings: the 256-byte allocator of `own_allocator`, without a pool and with one by pointer."""
    need_whole("own_settings", "pool_bytes", pool_bytes)
    return {"256-byte allocator": f"{_OWN}0", "pool by pointer": f"{_OWN}{pool_bytes}"}


def environment(setting: str | None, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns an environment in which torch's allocator has this setting and no other; None: torch's defaults."""
    env = dict(os.environ if base is None else base)
    for name in (*NAMES, "PYTORCH_HIP_ALLOC_CONF"):
        env.pop(name, None)
    if setting is not None and not setting.startswith(_OWN):
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
    if cuda_graphs and ("cudaMallocAsync" in setting or setting.startswith(_OWN)):
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
    """Measures each setting in fresh processes, in turns, and returns what came of it; `best` names the one to keep.

    Args:
        target: "module:function", "file.py:function" or such a function itself: it builds a training and returns the
            function that runs one step, which may return its loss. Or the words of a command that runs a script:
            `["train.py", "--epochs", "1"]`.
        settings: by name; default `CANDIDATES`. What the processes run with now is measured as "as it is".
        rounds: fresh processes a setting, at least 3.
        cuda_graphs, nccl_user_buffers: whether the training uses them: some settings are left out then.

    Raises:
        SettingsError: the training fails under every setting, or the function cannot be found again.
        ArgumentError: a number of runs below one, or settings that are no texts.
    """
    where = "compare_settings"
    need_whole(where, "rounds", rounds)
    need_whole(where, "steps", steps, least=1)
    need_whole(where, "warmup", warmup)
    need_number(where, "timeout_s", timeout_s)
    if settings is not None:
        _check_settings(settings)
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
        names = [name for name in tried if name not in result.failed]
        order = names if index % 2 == 0 else names[::-1]
        for name, run in _in_turns(spec, {name: tried[name] for name in order}, timeout_s):
            if isinstance(run, Run):
                result.runs.setdefault(name, []).append(run)
            else:
                result.failed[name] = run
                result.runs.pop(name, None)
    if not result.runs:
        raise SettingsError(
            f"the training fails under every setting; as it is: {result.failed[DEFAULT]}"
        )
    _judge(result)
    return result


def _check_settings(settings: Any) -> None:
    """Raises an ArgumentError for what is no mapping of names to texts, or has the name of what is compared with."""
    pairs = settings.items() if isinstance(settings, Mapping) else [(None, None)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ArgumentError(
            f"compare_settings: settings={settings!r}; names and values are meant: "
            '{"no splits": "max_split_size_mb:512"}'
        )
    if DEFAULT in settings:
        raise ArgumentError(
            f'compare_settings: "{DEFAULT}" names what the settings are compared with: take another name'
        )


def _judge(result: SettingsComparison) -> None:
    """Adds the ratios, and takes out what changes the loss."""
    base = result.runs.get(DEFAULT)
    if base is None:
        return
    for name, runs in list(result.runs.items()):
        if name == DEFAULT:
            continue
        old, new = base[-1].loss, runs[-1].loss
        if old is not None and not (new is not None and _close(old, new)):
            result.failed[name] = f"its loss is {new}, and {old} as it is"
            del result.runs[name]
            continue
        result.ratios[name] = ratio_of([run.step_s for run in base], [run.step_s for run in runs])


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=MOST_LOSS_FRAC) or (math.isnan(a) and math.isnan(b))


def _spec(target: Any, steps: int, warmup: int) -> dict[str, Any]:
    """Returns what a fresh process is told to run."""
    if callable(target):
        module, name = target.__module__, getattr(target, "__qualname__", "<object>")
        if "<" in name and "<locals>" not in name:
            raise SettingsError(
                f"{target!r} has no name of its own: a fresh process cannot find it. Give a function that is made by `def`"
            )
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
        words = [str(word) for word in target]
        if not words or not os.path.isfile(words[0]):
            raise SettingsError(f"{words}: a script and its arguments are meant")
        return {"command": words}
    file = target.rpartition(":")[0]
    if file.endswith(".py") and not os.path.isfile(file):
        raise SettingsError(f'"{target}": there is no file {file}')
    if ":" not in target:
        raise SettingsError(f'"{target}": "module:function" or "file.py:function" is wanted')
    return {"function": target, "steps": steps, "warmup": warmup, "path": sys.path}


def _started(spec: dict[str, Any], setting: str | None) -> FreshProcess:
    """Returns a fresh process under a setting, which waits for its turn."""
    # What is there now stays as it is: the two names may say different things.
    env = dict(os.environ) if setting == settings_now() else environment(setting)
    if setting is not None and setting.startswith(_OWN):
        spec = {**spec, "pool_bytes": int(setting.removeprefix(_OWN))}
    return FreshProcess(spec, env)


def _in_turns(
    spec: dict[str, Any], tried: Mapping[str, str | None], timeout_s: float
) -> Iterator[tuple[str, Run | str]]:
    """Yields what each setting came to: processes import side by side, and run one after another."""
    names, at_once = list(tried), max(1, min(MOST_READY, os.cpu_count() or 1))
    for first in range(0, len(names), at_once):
        with contextlib.ExitStack() as stack:
            ready = {
                name: stack.enter_context(_started(spec, tried[name]))
                for name in names[first : first + at_once]
            }
            for process in ready.values():
                process.wait_until_ready()
            for name, process in ready.items():
                yield name, process.run(timeout_s)
