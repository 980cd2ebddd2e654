"""Replacements made in the user's process: each one named, each one undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """A stack of attribute replacements that undoes itself in reverse order.

    An attribute that somebody else has replaced since is left alone: our replacement under theirs must then pass
    every call straight through (each of ours checks that the meter is live).
    """

    def __init__(self) -> None:
        self.names: list[str] = []  # every patch ever made, for the report
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: Any, label: str) -> None:
        """Replaces `owner.name` by `new`."""
        own = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        setattr(owner, name, new)

        def undo() -> None:
            if vars(owner).get(name, _ABSENT) is not new:
                return
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self.names.append(label)
        self._undo.append(undo)

    def hold(self, remove: Callable[[], None], label: str) -> None:
        """Takes over a hook that was registered elsewhere; `remove` takes it out again."""
        self.names.append(label)
        self._undo.append(remove)

    def undo(self) -> list[str]:
        """Takes everything back; returns what could not be taken back, in words."""
        failures = []
        while self._undo:
            try:
                self._undo.pop()()
            except StaysError as error:
                failures.append(str(error))
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        return failures


def take_out(hooks: dict[int, Any], key: int) -> None:
    """Takes a hook out of an ordered dictionary of torch's, also while torch runs the hooks in it.

    The last one can go at any time. Another must not: who runs the hooks would then raise. An empty one takes its
    place, for good.

    Raises:
        StaysError: an empty one stays.
    """
    if key not in hooks:
        return
    if next(reversed(hooks)) == key:
        del hooks[key]
    else:
        hooks[key] = _nothing
        raise StaysError(
            "the script has put a hook behind ours, so an empty one stays in our place"
        )


class StaysError(Exception):
    """Something of ours stays behind, and does nothing."""


def _nothing(*_: Any) -> None:
    return None


def never_compiled(function: Callable[..., Any], *, nor_what_it_calls: bool) -> Callable[..., Any]:
    """Keeps Dynamo away from `function`, also where compiled code calls it.

    What torch.compiler.disable does, without importing Dynamo into processes that never compile: the attribute stops
    it from being inlined, the strategy on the code object from being compiled as a frame of its own.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if nor_what_it_calls else default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError, TypeError):
        pass  # then a compiled optimizer step has more graph breaks, and is still right
    return function


never_compiled(_nothing, nor_what_it_calls=True)
