"""The compiler as it is seen from outside: whether it can work here, and what it has done so far."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]

_NUMBERS = itertools.count()
#: Classes whose own `__call__` ends in `nn.Module.__call__`, whose call can be compiled as any other.
#: Source: transformers/modeling_layers.py; every decoder layer of transformers is one.
_PASSES_ON = ("transformers.modeling_layers.GradientCheckpointingLayer",)


@dataclass(frozen=True)
class Tally:
    """What Dynamo and Inductor have done in this process until now."""

    frames: int  # frames that were compiled
    attempts: int  # frames that were looked at, compiled or not
    graph_breaks: int
    compile_s: float  # forward and backward, by torch's own account
    limits: int  # times that the limit of recompiles was met

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            self.frames - other.frames,
            self.attempts - other.attempts,
            self.graph_breaks - other.graph_breaks,
            self.compile_s - other.compile_s,
            self.limits - other.limits,
        )


def tally() -> Tally:
    """Returns what the compiler has done in this process so far; zeros where it was never used."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Tally(0, 0, 0, 0.0, 0)
    frames = utils.counters["frames"]
    return Tally(
        int(frames["ok"]),
        int(frames["total"]),
        sum(utils.counters["graph_break"].values()),
        float(utils.calculate_time_spent().get("total_wall_time", 0.0)),
        sum(n for words, n in utils.counters["unimplemented"].items() if _is_limit(str(words))),
    )


def frames_compiled() -> int:
    """Returns how many frames Dynamo has compiled in this process: one look-up, for every step."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["ok"]) if utils is not None else 0


def frames_tried() -> int:
    """Returns how many frames Dynamo has looked at in this process: one look-up, for every step."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0


def _is_limit(words: str) -> bool:
    """Whether a reason for not compiling is the limit of recompiles.

    Source: `gb_type` in torch/_dynamo/convert_frame.py, torch 2.11 to 2.13.
    """
    return words.startswith("Dynamo recompile limit exceeded")


def frame(call: Call) -> types.FunctionType:
    """Returns a plain function around a call, with code of its own.

    torch skips the forwards of its own containers (`Module.compile` on an `nn.Sequential` of library layers compiles
    nothing and says nothing), but not this frame; and it keeps compiled code by code object, so two modules, or the
    training and the evaluation of one, must not share one.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    code = run.__code__.replace(co_name=f"compiled_call_{next(_NUMBERS)}")
    return types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)


def forget(function: types.FunctionType) -> None:
    """Drops what was compiled for a frame."""
    reset_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "reset_code", None)
    if reset_code is not None:
        reset_code(function.__code__)


def compiler_problem(device: torch.device) -> str | None:
    """Returns why torch.compile cannot generate code for this device here, or None."""
    if sys.platform == "win32":
        return "not tested on Windows"
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            compiler = get_cpp_compiler()
        except Exception:
            compiler = ""
        if not compiler or shutil.which(compiler) is None:
            return "there is no C++ compiler"
        return None
    if device.type != "cuda":
        return f"not tested on devices of type {device.type}"
    from torch.utils._triton import has_triton

    if not has_triton():
        return "there is no Triton for this GPU"
    if not any(shutil.which(c) for c in (os.environ.get("CC", ""), "gcc", "cc", "clang") if c):
        return "there is no C compiler, which Triton needs"
    return None


def call_problem(module: nn.Module) -> str | None:
    """Returns why this module's call cannot be replaced in place, or None."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "the module is TorchScript: it is compiled already, by another compiler, and is left as it is"
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        return "a part of the module is TorchScript, which Dynamo does not trace into: it is left as it is"
    if kind.__name__ == "DistributedDataParallel":
        return "DistributedDataParallel splits the graph at its buckets: compile the module in it"
    if isinstance(module, nn.DataParallel):
        return "DataParallel copies the module's call to its replicas"
    if isinstance(module, torch._dynamo.OptimizedModule):
        return "the module was compiled by torch.compile()"
    owner = next(c for c in kind.__mro__ if "__call__" in vars(c))
    own = owner is not nn.Module and f"{owner.__module__}.{owner.__qualname__}" not in _PASSES_ON
    if own or "__call__" in vars(module):
        return f"{kind.__name__} defines its own __call__"
    if vars(module).get("_compiled_call_impl") is not None:
        return "the module's call is compiled already (module.compile(), or this kit)"
    if any(type(p).__name__ in ("DTensor", "FlatParameter") for p in module.parameters()):
        return "the module's parameters are sharded"
    return None


def break_even_steps(compile_s: float, old_s: float, new_s: float) -> int | None:
    """Returns after how many steps a compilation is paid back, None if never.

    Args:
        compile_s: seconds that compiling took.
        old_s: seconds a step without it.
        new_s: seconds a step with it.

    Raises:
        ValueError: a time is negative, or not finite.
    """
    times = {"compile_s": compile_s, "old_s": old_s, "new_s": new_s}
    for name, value in times.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(
                f"break_even_steps: {name}={value!r}: finite seconds from 0 on are meant"
            )
    return math.ceil(compile_s / (old_s - new_s)) if new_s < old_s else None


def stop_compile_workers() -> None:
    """Ends the compiler's worker processes, which wait for more to compile."""
    module = sys.modules.get("torch._inductor.async_compile")
    stop: Callable[[], None] | None = getattr(module, "shutdown_compile_workers", None)
    if stop is not None:
        stop()
