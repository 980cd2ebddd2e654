"""Moves of host tensors to a device, seen, and answered with copies that are on the device already.

`Tensor.to` and `Tensor.cuda` are wrapped while this is installed. A tensor that nobody has spoken for goes straight to
torch; so does one that was written to since its copy was sent, one that is moved elsewhere or cast on the way, and
every move while a graph is captured. The script keeps its host tensor, and may do with it what it did before.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flopwise.meter.patches import never_compiled

#: What hands a tensor's memory to others, who might write to it without torch knowing.
GIVES_AWAY = ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage")
_ABSENT = object()


class Move(NamedTuple):
    """One move of a tensor as the script asked for it."""

    device: torch.device
    dtype: torch.dtype | None
    waits: bool  # it was to be there when the call returns
    memory_format: torch.memory_format | None


class Answer:
    """A copy that is on the device, or on its way."""

    def __init__(self, tensor: torch.Tensor, give: Callable[[Move], torch.Tensor]) -> None:
        self.key = id(tensor)
        self.version = tensor._version
        self.storage = tensor.untyped_storage()._cdata
        self.give = give  # returns the copy, in order before whatever the caller launches next


class _Known:
    __slots__ = ("answer", "reference", "seen")

    def __init__(
        self,
        reference: weakref.ref[torch.Tensor],
        answer: Answer | None,
        seen: Callable[[Move, float], None] | None,
    ) -> None:
        self.reference, self.answer, self.seen = reference, answer, seen


class Moves:
    """The tensors that somebody has spoken for, by the identity of their Python objects."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.answered = 0
        self._known: dict[int, _Known] = {}
        self._originals: dict[str, Any] = {}
        self._own: dict[str, Any] = {}  # what the class itself held before
        self._replacements: dict[str, Any] = {}
        self._asking = threading.local()

    # ------------------------------------------------------------------ in and out

    def install(self) -> None:
        """Wraps what moves tensors."""
        wraps = {"to": self._to, "cuda": self._cuda} | dict.fromkeys(GIVES_AWAY, self._giving)
        for name, wrap in wraps.items():
            original = getattr(torch.Tensor, name)
            self._own[name] = vars(torch.Tensor).get(name, _ABSENT)
            replacement = functools.wraps(original)(wrap(original))
            never_compiled(replacement, nor_what_it_calls=False)
            self._originals[name], self._replacements[name] = original, replacement
            setattr(torch.Tensor, name, replacement)

    def remove(self) -> None:
        """Takes the wrappers out, unless somebody has wrapped them; then every call passes through."""
        self._known.clear()
        for name, replacement in self._replacements.items():
            if vars(torch.Tensor).get(name) is not replacement:
                continue
            if self._own[name] is _ABSENT:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, self._own[name])
        self._replacements.clear()

    # ------------------------------------------------------------------ who is known

    def watch(self, tensor: torch.Tensor, seen: Callable[[Move, float], None]) -> None:
        """Has `seen` called with each move of the tensor and the seconds that it took on the host."""
        self._add(tensor, None, seen)

    def expect(self, tensor: torch.Tensor, answer: Answer) -> None:
        """Answers the next move of the tensor with a copy."""
        self._add(tensor, answer, None)

    def forget(self, answer: Answer) -> None:
        """Gives a copy up that nobody has asked for."""
        one = self._known.get(answer.key)
        if one is not None and one.answer is answer:  # else another object has that identity now
            del self._known[answer.key]

    def _add(
        self,
        tensor: torch.Tensor,
        answer: Answer | None,
        seen: Callable[[Move, float], None] | None,
    ) -> None:
        key, known = id(tensor), self._known

        def died(reference: weakref.ref[torch.Tensor]) -> None:
            now = known.get(key)
            if now is not None and now.reference is reference:
                del known[key]

        known[key] = _Known(weakref.ref(tensor, died), answer, seen)

    # ------------------------------------------------------------------ the wrappers

    def _to(self, original: Any) -> Any:
        known = self._known

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            one = known.get(id(tensor))
            if one is None or one.reference() is not tensor:
                return original(tensor, *args, **kwargs)
            return self._moved(one, tensor, _asked_of_to, original, args, kwargs)

        return to

    def _cuda(self, original: Any) -> Any:
        known = self._known

        def cuda(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            one = known.get(id(tensor))
            if one is None or one.reference() is not tensor:
                return original(tensor, *args, **kwargs)
            return self._moved(one, tensor, _asked_of_cuda, original, args, kwargs)

        return cuda

    def _giving(self, original: Any) -> Any:
        known, asking = self._known, self._asking

        def gives(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if known and not getattr(asking, "own", False):
                asking.own = True
                try:
                    self._given_away(tensor)
                finally:
                    asking.own = False
            return original(tensor, *args, **kwargs)

        return gives

    def _given_away(self, tensor: Any) -> None:
        """Gives up the copies of every tensor with the same memory: who has it now may write to it unseen."""
        try:
            storage = tensor.untyped_storage()._cdata
        except (RuntimeError, AttributeError, NotImplementedError, TypeError):
            return
        for key, one in list(self._known.items()):
            if one.answer is not None and one.answer.storage == storage:
                self._known.pop(key, None)

    def _moved(
        self, one: _Known, tensor: Any, asked: Any, original: Any, args: Any, kwargs: Any
    ) -> Any:
        move = asked(args, kwargs)
        if move is None:
            return original(tensor, *args, **kwargs)
        if one.seen is not None:
            started = time.perf_counter()
            moved = original(tensor, *args, **kwargs)
            one.seen(move, time.perf_counter() - started)
            return moved
        answer = one.answer
        if answer is None or not self._fits(answer, tensor, move):
            return original(tensor, *args, **kwargs)
        self._known.pop(id(tensor), None)  # a second move is a second copy
        copy = answer.give(move)
        self.answered += 1
        if move.memory_format not in (None, torch.preserve_format):
            return self._originals["to"](copy, memory_format=move.memory_format)
        return copy

    def _fits(self, answer: Answer, tensor: Any, move: Move) -> bool:
        same_place = move.device == self.device
        same_kind = move.dtype in (None, tensor.dtype) and not tensor.requires_grad
        return (
            same_place
            and same_kind
            and tensor._version == answer.version
            and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        )


def _asked_of_to(args: Any, kwargs: Any) -> Move | None:
    """Returns what `Tensor.to` is asked for; None where that is no device."""
    try:
        rest = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **rest)
    except (RuntimeError, TypeError, ValueError):
        return None  # torch says what is wrong
    if device is None:
        return None
    return Move(_with_index(device), dtype, not non_blocking, memory_format)


def _asked_of_cuda(args: Any, kwargs: Any) -> Move | None:
    """Returns what `Tensor.cuda(device=None, non_blocking=False, memory_format=...)` is asked for."""
    names = ("device", "non_blocking", "memory_format")
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or set(given) - set(names):
        return None
    device = given.get("device")
    try:
        chosen = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        return None
    waits = not given.get("non_blocking", False)
    return Move(_with_index(chosen), None, waits, given.get("memory_format"))


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
