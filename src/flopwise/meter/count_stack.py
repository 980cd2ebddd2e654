"""Puts a dispatch mode under those of the user, and takes it out again wherever it stands by then."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.errors import AttachError


def insert(mode: TorchDispatchMode) -> None:
    """Pushes the mode below the user's own modes of this thread.

    A `with` block of the user that was entered before and is left later pops whatever stands on top: that must be
    its own mode, never ours.

    Raises:
        AttachError: this torch keeps its modes in another way.
    """
    try:
        above = _take_off(_user_modes())
        try:
            mode.__enter__()
        finally:
            for other in reversed(above):
                dispatch._push_mode(other)
    except AttributeError as error:
        raise AttachError(
            f"torch {torch.__version__} keeps its dispatch modes in a way that this flopwise does not know "
            f"({error}): FLOPs are not counted"
        ) from error


def remove(mode: TorchDispatchMode) -> None:
    """Takes the mode out of this thread's stack and leaves the others as they were.

    Raises:
        AttachError: the mode is not there: another thread, or someone popped it.
    """
    modes = _user_modes()
    if not any(m is mode for m in modes):
        raise AttachError(
            "the counting mode is no longer on this thread's stack: it was stopped on another thread than it was "
            "started on, or other code removed it. The count of this step is dropped"
        )
    index = next(i for i, m in enumerate(modes) if m is mode)
    above = _take_off(modes[index + 1 :])
    mode.__exit__(None, None, None)
    for other in reversed(above):
        dispatch._push_mode(other)
    _tell_truth()


def force_eager() -> Any:
    """Returns an undo for having torch.compile'd code run eagerly from here on, None where nothing is compiled.

    Under a dispatch mode Dynamo gives up on a frame; with fullgraph=True it raises and throws its cache away. Asked
    to stay out of the way, it does neither.

    Raises:
        AttachError: called from inside compiled code.
    """
    # flex_attention compiles itself when it is called; so it counts as compiled code as soon as it is imported.
    if not {"torch._dynamo", "torch.nn.attention.flex_attention"} & set(sys.modules):
        return None
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise AttachError(f"FLOPs cannot be counted from inside compiled code ({error})") from error


def restore(stance: Any) -> None:
    """Undoes `force_eager`."""
    if stance is not None:
        stance.__exit__(None, None, None)


def compiled_frames() -> int:
    """Returns how many functions this process has compiled."""
    compiler = sys.modules.get("torch._dynamo.utils")
    counters = getattr(compiler, "counters", None)
    return int(counters["frames"]["ok"]) if counters is not None else 0


def _user_modes() -> list[TorchDispatchMode]:
    return [m for m in dispatch._get_current_dispatch_mode_stack() if not m.is_infra_mode()]


def _take_off(modes: list[TorchDispatchMode]) -> list[TorchDispatchMode]:
    """Pops as many modes as given, top first, and returns them in that order."""
    return [dispatch._pop_mode() for _ in modes]


def _tell_truth() -> None:
    """Sets torch's flags about active modes to what the stack says; they were saved when it was another."""
    stack = dispatch._get_current_dispatch_mode_stack()
    user = [m for m in stack if not m.is_infra_mode()]
    dispatch._is_in_torch_dispatch_mode = bool(stack)
    dispatch._is_in_non_infra_torch_dispatch_mode = bool(user)
    watched = any(not m.ignore_compile_internals() for m in stack)
    dispatch._is_in_any_mode_without_ignore_compile_internals = watched
    dispatch.set_is_in_mode_without_ignore_compile_internals(watched)  # type: ignore[attr-defined]
