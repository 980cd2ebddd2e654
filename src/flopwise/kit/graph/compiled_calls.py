"""The compiled call of one module, in the module's own slot for it, and the code that modules share."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.compiler import forget, frame
from flopwise.kit.graph.arguments import check_above_zero, check_whole
from flopwise.kit.graph.graph_memory import copied_out
from flopwise.kit.graph.regions import likeness

#: A compilation that takes longer is abandoned.
DEADLINE_S = 120.0
#: With more graph breaks than this a model runs as many small graphs.
MOST_BREAKS = 8
#: With more compilations than this after the first, it keeps compiling for new shapes or values.
MOST_RECOMPILES = 8


@dataclass(frozen=True)
class Settings:
    """What torch.compile is called with, and when to give up."""

    mode: str | None = None
    backend: Any = "inductor"
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    deadline_s: float = DEADLINE_S
    evaluation: bool = True
    measure: bool = True
    steps_left: int | None = None
    most_breaks: int = MOST_BREAKS
    most_recompiles: int = MOST_RECOMPILES

    def __post_init__(self) -> None:
        check_above_zero(self.deadline_s, "deadline_s")
        check_whole(self.most_breaks, "most_breaks", 0)
        check_whole(self.most_recompiles, "most_recompiles", 0)
        if self.steps_left is not None:
            check_whole(self.steps_left, "steps_left", 0)

    def has_graphs(self) -> bool:
        """Whether torch captures CUDA graphs of compiled code, which it does for each thread anew."""
        options = self.options or {}
        return self.mode in ("reduce-overhead", "max-autotune") or bool(
            options.get("triton.cudagraphs")
        )


class CompiledCall:
    """One module whose call is compiled; modules that are alike share the code that Dynamo keeps its work by."""

    def __init__(
        self, module: nn.Module, settings: Settings, codes: dict[Hashable, types.CodeType]
    ) -> None:
        self.module = module
        self._settings, self._codes = settings, codes
        self._before = vars(module).get("_compiled_call_impl")
        self._frames: dict[str, types.FunctionType] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self.told: set[str] = set()  # what has been said about this module

    def function(self, kind: str) -> Callable[..., Any]:
        """Returns the compiled call for training or evaluation."""
        if kind not in self._functions:
            plain_frame = frame(self.module._call_impl)
            key = (likeness(self.module), kind)
            code = self._codes.setdefault(key, plain_frame.__code__)
            shared = types.FunctionType(
                code, plain_frame.__globals__, code.co_name, None, plain_frame.__closure__
            )
            s = self._settings
            self._frames[kind] = shared
            compiled = torch.compile(
                shared, mode=s.mode, backend=s.backend, dynamic=s.dynamic, options=s.options
            )
            self._functions[kind] = (
                copied_out(self.module, compiled, self.told) if s.has_graphs() else compiled
            )
        return self._functions[kind]

    def unshare(self) -> None:
        """Gives the module code of its own."""
        self._codes = {}

    def on(self) -> None:
        """Lets the module's call be compiled."""
        module = self.module

        def call(*args: Any, **kwargs: Any) -> Any:
            kind = "training" if module.training and torch.is_grad_enabled() else "evaluation"
            return self.function(kind)(*args, **kwargs)

        vars(module)["_compiled_call_impl"] = call

    def off(self) -> None:
        """Puts the module's call back."""
        vars(self.module)["_compiled_call_impl"] = self._before

    def forget(self) -> None:
        """Drops the compiled code."""
        for function in self._frames.values():
            forget(function)
        self._frames.clear()
        self._functions.clear()


class calls_on:
    """Lets the calls of parts be compiled for a block."""

    def __init__(self, parts: Sequence[CompiledCall]) -> None:
        self._parts = parts
        self._were = [vars(p.module).get("_compiled_call_impl") for p in parts]

    def __enter__(self) -> None:
        for part in self._parts:
            part.on()

    def __exit__(self, *error: Any) -> None:
        for part, was in zip(self._parts, self._were, strict=True):
            vars(part.module)["_compiled_call_impl"] = was


class calls_off(calls_on):
    """Lets the calls of parts be eager for a block."""

    def __enter__(self) -> None:
        for part in self._parts:
            vars(part.module)["_compiled_call_impl"] = None
