"""A module's call, replaced in place; and tensors cast to float32 at its borders.

`nn.Module.__call__` runs `_compiled_call_impl` if that attribute is set, and torch drops it when a module is copied or
pickled: type, state dict and hooks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]

_NAME = "_compiled_call_impl"
_ABSENT = object()
_HALF = (torch.bfloat16, torch.float16)


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in float32 if it is bfloat16 or float16, else as it is."""
    return tensor.float() if tensor.dtype in _HALF else tensor


class Wrapped:
    """A module's call with something around it, until it is taken back."""

    def __init__(self, module: nn.Module, around: Callable[[Call], Call]) -> None:
        self.module = module
        self._found = vars(module).get(_NAME, _ABSENT)
        self._call = around(self.plain)
        vars(module)[_NAME] = self._call

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as it was found."""
        if self._found is _ABSENT or self._found is None:
            return self.module._call_impl(*args, **kwargs)
        return self._found(*args, **kwargs)

    def take_back(self) -> bool:
        """Leaves the module as it was found; returns False if somebody else has replaced the call since."""
        own = vars(self.module)
        if own.get(_NAME, _ABSENT) is not self._call:
            return False
        if self._found is _ABSENT:
            del own[_NAME]
        else:
            own[_NAME] = self._found
        return True
