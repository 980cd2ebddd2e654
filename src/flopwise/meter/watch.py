"""Watching the calls of one module without leaving anything in it that a copy or a file could take along.

A forward hook would be pickled with `torch.save(model)` and copied with `copy.deepcopy(model)`. The watch sits where
`Module.compile()` puts its compiled call instead: torch itself leaves that out of copies and files, and for modules
with a `__getstate__` of their own the watch turns into None, which is what stands there without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from flopwise.meter.found import is_optimized_module
from flopwise.meter.patches import never_compiled

SLOT = "_compiled_call_impl"
_ABSENT: Any = object()


class Watch:
    """Tells `on_call(module, args, kwargs)` of every call, then makes it."""

    __slots__ = ("__weakref__", "_module", "_name", "_on_call", "found")

    def __init__(
        self,
        module: nn.Module,
        on_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        # A compiled wrapper keeps its `forward` out of copies, and not the slot.
        self._name = "forward" if is_optimized_module(module) else SLOT
        self._module = weakref.ref(module)
        self._on_call = on_call
        self.found: Any = vars(module).get(self._name, _ABSENT)  # what stood there before
        vars(module)[self._name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        self._on_call(module, args, kwargs)
        if self.found is _ABSENT or self.found is None:
            return module._call_impl(*args, **kwargs)
        return self.found(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def compiled(self) -> Any:
        """The compiled call that is watched, or None."""
        return None if self.found is _ABSENT else self.found

    def remove(self) -> None:
        """Puts back what stood there, unless somebody else has set it since."""
        module = self._module()
        if module is None or vars(module).get(self._name) is not self:
            return
        if self.found is _ABSENT:
            del vars(module)[self._name]
        else:
            vars(module)[self._name] = self.found


def unwatched(copy: nn.Module) -> nn.Module:
    """Returns a module that has got its attributes from another one, without the other one's watch."""
    for name in (SLOT, "forward"):
        watch = vars(copy).get(name)
        if isinstance(watch, Watch):
            if watch.found is _ABSENT:
                del vars(copy)[name]
            else:
                vars(copy)[name] = watch.found
    return copy


never_compiled(Watch.__call__, nor_what_it_calls=False)
