"""A module's call, replaced in place; and tensors cast to float32 at its borders.

`nn.Module.__call__` runs `_compiled_call_impl` if that attribute is set, and torch drops it when a module is copied or
pickled: type, state dict and hooks stay as they are. What torch.compile traces calls `forward` past that attribute
(torch/_dynamo/variables/nn_module.py), so what must be in compiled code, too, goes around `forward`.
"""

from __future__ import annotations

import functools
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

    @property
    def active(self) -> bool:
        """Whether it is around the module's call now."""
        return vars(self.module).get(_NAME, _ABSENT) is self._call

    def take_back(self) -> bool:
        """Leaves the module as it was found; returns False if somebody else has replaced the call since."""
        own = vars(self.module)
        if not self.active:
            return False
        if self._found is _ABSENT:
            del own[_NAME]
        else:
            own[_NAME] = self._found
        return True


class WrappedForward:
    """A module's `forward` with something around it, until it is taken back; compiled code has it, too.

    A copy of the module, or what is unpickled, has the forward that was found.
    """

    def __init__(self, module: nn.Module, around: Callable[[Call], Call]) -> None:
        self.module = module
        self._found = vars(module).get("forward", _ABSENT)
        self.plain: Call = module.forward
        self._forward = _Forward(module, self._found, around(self.plain))
        vars(module)["forward"] = self._forward

    @property
    def active(self) -> bool:
        """Whether it is around the module's forward now."""
        return vars(self.module).get("forward", _ABSENT) is self._forward

    def take_back(self) -> bool:
        """Leaves the module as it was found; returns False if somebody else has replaced its forward since."""
        if not self.active:
            return False
        if self._found is _ABSENT:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self._found
        return True


class _Forward:
    """What is called in place of a module's forward."""

    def __init__(self, module: nn.Module, found: Any, call: Call) -> None:
        self._module, self._found, self._call = module, found, call
        # Frameworks read the signature of a forward (which columns a batch needs), and export its code.
        functools.update_wrapper(self, module.forward)
        if (code := getattr(module.forward, "__code__", None)) is not None:
            self.__code__ = code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        if self._found is _ABSENT:
            return getattr, (self._module, "forward")
        return _same, (self._found,)


def _same(value: Any) -> Any:
    return value
