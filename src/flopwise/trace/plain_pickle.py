"""Reads pickles of plain data without unpickling them.

The few opcodes that build numbers, texts, lists, tuples and dictionaries are carried out here, one by one; anything else, every
name of a class or a function above all, is refused. So no code of a file can run. What it may build is bounded by the number
of its opcodes; positions of the memo are keys of a dictionary, so that none asks for room by being large; keys are texts or
numbers, so that none takes long to hash.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, TypeVar

#: Objects that a pickle may build: a list takes some 64 bytes, so 640 MB at most.
MOST_OPCODES = 10_000_000


class RefusedError(Exception):
    """A pickle is damaged, or holds anything but plain data."""


_MARK = object()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_VALUES = frozenset(
    ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1")
)  # fmt: skip


def plain(data: bytes) -> Any:
    """Returns what a pickle of plain data builds, without unpickling it.

    Raises:
        RefusedError: it is damaged, or asks for anything but numbers, texts, lists, tuples and dictionaries.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    opcodes = pickletools.genops(data)
    n = 0
    while True:
        try:
            opcode, argument, at = next(opcodes)
        except StopIteration:
            raise RefusedError("it has no end") from None
        except Exception as error:  # pickletools raises what it happens to meet
            raise RefusedError(f"it is damaged ({str(error)[:100]})") from None
        n += 1
        if n > MOST_OPCODES:
            raise RefusedError(f"more than {MOST_OPCODES} objects")
        name = opcode.name
        if name == "STOP":
            if len(stack) != 1 or stack[0] is _MARK:
                raise RefusedError("it is damaged (no single object)")
            return stack[0]
        try:
            _carry_out(name, argument, stack, memo)
        except RefusedError as error:
            raise RefusedError(f"byte {at}: {error}") from None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError):
            raise RefusedError(f"byte {at}: it is damaged ({name})") from None


def _carry_out(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _VALUES:
        if isinstance(argument, int) and not -(2**63) <= argument < 2**63:
            raise RefusedError("a number of more than 64 bits")
        stack.append(argument)
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = _top(stack)
    elif name == "MEMOIZE":
        memo[len(memo)] = _top(stack)
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("APPEND", "APPENDS"):
        items = [_pop(stack)] if name == "APPEND" else _since_mark(stack)
        _at_top(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [_pop(stack), _pop(stack)][::-1] if name == "SETITEM" else _since_mark(stack)
        if not all(isinstance(key, (str, int)) for key in items[::2]):
            raise RefusedError("a key that is neither text nor a number")
        _at_top(stack, dict).update(zip(items[::2], items[1::2], strict=True))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        items = [_pop(stack) for _ in range(int(name[-1]))]
        stack.append(tuple(reversed(items)))
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name not in ("PROTO", "FRAME"):
        raise RefusedError(
            f"{name}{f' {str(argument)[:80]!r}' if argument is not None else ''}: only plain data is read, "
            "never classes or functions"
        )


def _pop(stack: list[Any]) -> Any:
    value = stack.pop()
    if value is _MARK:
        raise ValueError
    return value


def _top(stack: list[Any]) -> Any:
    if stack[-1] is _MARK:
        raise ValueError
    return stack[-1]


_T = TypeVar("_T")


def _at_top(stack: list[Any], kind: type[_T]) -> _T:
    value = stack[-1]
    if not isinstance(value, kind):
        raise ValueError
    return value


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        items.append(value)
    items.reverse()
    return items
