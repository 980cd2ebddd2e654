"""Tells the ops of the model from those that only repeat it (activation checkpointing) or update it (optimizers).

Inside a backward pass autograd switches gradients off, unless the pass is itself to be differentiated. An op with
gradients on inside an ordinary backward pass is therefore a forward op run again. A reentrant checkpoint inside
another one repeats its forward with gradients off, so the Python stack is read as well: up to the call that started
the backward pass, a frame of torch.utils.checkpoint means repetition.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.autograd
import torch.autograd.graph
import torch.utils.checkpoint

from flopwise.errors import AttachError

FORWARD, BACKWARD, REPEATED, OPTIMIZER = "forward", "backward", "repeated", "optimizer"

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_MODULE_CALLS = {
    getattr(torch.nn.Module, name).__code__
    for name in ("_call_impl", "_wrapped_call_impl")
    if hasattr(torch.nn.Module, name)
}
_DEPTH = 400  # frames looked at before giving up


class Roles:
    """Watches backward passes while it is installed, and tells the role of the op that runs right now."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._engine_codes: set[Any] = set()
        self._watch: Any = None
        self._running: list[bool] = []  # create_graph of the passes that have not returned
        self._creates: dict[int, bool] = {}  # by graph task

    def install(self) -> None:
        """Wraps the call that starts a backward pass, to learn whether it will be differentiated.

        Raises:
            AttachError: this torch starts its backward passes elsewhere.
        """
        engine = getattr(torch.autograd, "_engine_run_backward", None)
        if engine is None or not hasattr(torch._C, "_current_graph_task_id"):
            raise AttachError(
                f"torch {torch.__version__} starts backward passes in a way that this flopwise does not know: "
                "recomputation cannot be told from model FLOPs, so FLOPs are not counted"
            )

        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            create = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
            self._running.append(bool(create))
            try:
                return engine(t_outputs, *args, **kwargs)
            finally:
                self._running.pop()

        self._engine, self._watch = engine, run_backward
        known = (engine, getattr(torch.autograd.graph, "_engine_run_backward", None))
        self._engine_codes = {f.__code__ for f in known if f is not None and hasattr(f, "__code__")}
        torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Takes the wrapper off again; one that others have wrapped since stays, and only passes calls on."""
        if self._watch is not None and torch.autograd._engine_run_backward is self._watch:  # type: ignore[attr-defined]
            torch.autograd._engine_run_backward = self._engine  # type: ignore[attr-defined]
        self._watch = None

    def now(self) -> str:
        """Returns the role of the op that is being dispatched in this thread."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            if torch.is_grad_enabled():
                return FORWARD
            return OPTIMIZER if self._updates(sys._getframe(1)) else FORWARD
        if torch.is_grad_enabled() and not self._creates_graph(task):
            return REPEATED
        return self._inside_backward(sys._getframe(1))

    def _creates_graph(self, task: int) -> bool:
        if task not in self._creates:
            self._creates[task] = self._running[-1] if self._running else False
        return self._creates[task]

    def _updates(self, frame: FrameType | None) -> bool:
        """Returns whether an optimizer's step called this, and no module in between (a teacher's forward, say)."""
        for _ in range(_DEPTH):
            if frame is None or frame.f_code in _MODULE_CALLS:
                return False
            if _is_step(frame):
                return True
            frame = frame.f_back
        return False

    def _inside_backward(self, frame: FrameType | None) -> str:
        for _ in range(_DEPTH):
            if frame is None or frame.f_code in self._engine_codes:
                return BACKWARD
            if frame.f_code.co_filename == _CHECKPOINT_FILE:
                return REPEATED
            if _is_step(frame):
                return OPTIMIZER
            frame = frame.f_back
        return BACKWARD


def _is_step(frame: FrameType) -> bool:
    """Returns whether the frame is the step of an optimizer, torch's or one that only looks like it."""
    if frame.f_code.co_name != "step":
        return False
    owner = frame.f_locals.get("self")
    return isinstance(owner, torch.optim.Optimizer) or hasattr(owner, "param_groups")
