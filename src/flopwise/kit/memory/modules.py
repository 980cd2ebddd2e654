"""Which module's forward runs now, told by hooks; and whether a backward pass does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: What is called so in records: a module's hooks are not called in backward by the names that users know.
BACKWARD = "backward"


class Modules:
    """Follows the forward passes of a module's children while it is entered."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def now(self) -> str:
        """Returns the name of the innermost module whose forward runs; "" outside of all, and in the root itself."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> Modules:
        for name, child in self._module.named_modules():
            self._handles += [
                child.register_forward_pre_hook(self._entering(name), prepend=True),
                child.register_forward_hook(self._left, always_call=True),
            ]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self._stack.append(name)

        return enter

    def _left(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()


def in_backward() -> bool:
    """Returns whether the call comes from a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
