"""Constants in a model's source that float16 cannot hold: -1e9 in a mask raises, or silently becomes -inf."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.precision.statistics import FLOAT16_MAX

#: Calls whose numbers become elements of a tensor.
_FILLS = {
    "masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full", "where", "clamp", "clamp_", "add", "sub",
    "mul", "index_fill", "index_fill_",
}  # fmt: skip
_INTEGERS = ("int64", "int32", "int16", "int8", "long", "int")
_OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Pow: lambda a, b: a**b,
    ast.Mult: lambda a, b: a * b,
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Div: lambda a, b: a / b,
}


@dataclass(frozen=True)
class Constant:
    """One number that does not fit float16."""

    value: float
    module: str  # name in the model; "" is the model itself
    kind: str  # the module's class
    line: str | None  # file:line; None for a buffer

    def __str__(self) -> str:
        where = self.line or "a buffer"
        return (
            f"{self.value:g} in {self.module or 'the model'} ({self.kind}, {where}) does not fit float16 (largest "
            "65504): filling with it raises, adding it gives -inf, and two of them in one row NaN. Use "
            "torch.finfo(x.dtype).min or a boolean mask."
        )


def constants_beyond_float16(model: nn.Module) -> tuple[Constant, ...]:
    """Returns the numbers in the source and the buffers of the model's own modules that float16 cannot hold.

    Looked at: literals, attributes, globals and local names that go into fills, selections and sums with tensors.
    Classes of torch itself are left out, and those whose source is not there. Infinities fit.
    """
    found: dict[tuple[str | None, float], Constant] = {}
    for name, module in model.named_modules():
        for value, line in _in_source(module):
            found.setdefault((line, value), Constant(value, name, type(module).__name__, line))
        for buffer_name, buffer in module.named_buffers(recurse=False):
            for value in _in_buffer(buffer):
                full = f"{name}.{buffer_name}".lstrip(".")
                found.setdefault((full, value), Constant(value, full, type(module).__name__, None))
    return tuple(found.values())


def _in_buffer(buffer: torch.Tensor) -> Iterator[float]:
    if not buffer.is_floating_point() or buffer.is_meta or not buffer.numel():
        return
    values = torch.where(torch.isfinite(buffer), buffer, 0.0).detach()
    for extreme in (float(values.min()), float(values.max())):
        if abs(extreme) > FLOAT16_MAX:
            yield extreme


def _in_source(module: nn.Module) -> Iterator[tuple[float, str | None]]:
    kind = type(module)
    if kind.__module__.split(".")[0] == "torch":
        return
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        path = inspect.getsourcefile(kind)
    except (OSError, TypeError, SyntaxError):
        return
    outside = vars(sys.modules.get(kind.__module__, None) or object)
    for function in ast.walk(tree):
        if (
            isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            and function.name != "__init__"
        ):
            for value, line in _Numbers(module, dict(outside), function).found():
                yield value, f"{path}:{first + line - 1}"


class _Numbers:
    """The numbers that one method puts into tensors."""

    def __init__(self, module: nn.Module, names: dict[str, Any], function: ast.AST) -> None:
        self._module, self._names, self._function = module, names, function
        arguments = getattr(function, "args", None)
        self._self = arguments.args[0].arg if arguments is not None and arguments.args else "self"
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    self._names[target.id] = self._value(node.value)

    def found(self) -> Iterator[tuple[float, int]]:
        for node in ast.walk(self._function):
            for candidate, sign in _candidates(node):
                value = self._value(candidate)
                if value is None or not math.isfinite(value) or abs(value) <= FLOAT16_MAX:
                    continue
                if sign is None or value * sign < 0:
                    yield value, candidate.lineno

    def _value(self, node: ast.AST) -> float | None:
        """Returns the number that an expression is, None if it is something else."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            inner = self._value(node.operand)
            return None if inner is None else (-inner if isinstance(node.op, ast.USub) else inner)
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left), self._value(node.right)
            if left is None or right is None or type(node.op) not in _OPERATIONS:
                return None
            try:
                return float(_OPERATIONS[type(node.op)](left, right))
            except (OverflowError, ZeroDivisionError):
                return None
        if isinstance(node, ast.Constant):
            return _number(node.value)
        if isinstance(node, ast.Name):
            return _number(self._names.get(node.id))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self._self:
                return _number(getattr(self._module, node.attr, None))
            if node.attr in ("min", "max") and "finfo(torch.float32)" in ast.unparse(node.value):
                return float(getattr(torch.finfo(torch.float32), node.attr))
        return None


def _candidates(node: ast.AST) -> Iterator[tuple[ast.expr, int | None]]:
    """Yields expressions that may be a mask's constant, and by which sign they then become negative: None for either.

    What is filled in counts with any sign. What is added or multiplied must be negative: large positive factors are not
    masks (rotary bases, units of time).
    """
    if isinstance(node, ast.Call) and _called(node) in _FILLS:
        if not any(
            k.arg == "dtype" and ast.unparse(k.value).endswith(_INTEGERS) for k in node.keywords
        ):
            for value in (*node.args, *(k.value for k in node.keywords)):
                yield value, None
    elif isinstance(node, (ast.BinOp, ast.AugAssign)):
        sign = {ast.Add: 1, ast.Mult: 1, ast.Sub: -1}.get(type(node.op))
        if sign is not None and isinstance(node, ast.AugAssign):
            yield node.value, sign
        elif sign is not None and isinstance(node, ast.BinOp):
            yield node.right, sign
            if sign > 0:
                yield node.left, sign


def _called(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
