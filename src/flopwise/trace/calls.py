"""An operator of a trace as the formulas read it: its operands by the names of its schema, its result derived.

A trace lists operands by position and does not show results.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from dataclasses import dataclass

from flopwise.flops.call import Call, Cost, Operand, Shape
from flopwise.flops.dtypes import Precision, executed, real_operations
from flopwise.flops.table import Rule, rule_of
from flopwise.flops.zero import POINTWISE
from flopwise.trace.table import Operands

#: How libtorch spells dtypes, by torch's names. Source: c10/core/ScalarType.h and caffe2 TypeMeta names.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::complex<c10::Half>": "complex32",
}

#: No call has so many FLOPs, which the fastest device of today works on for a week, and none moves so many bytes, which no
#: device holds.
MOST_FLOPS, MOST_BYTES = 10**21, 2**50


@dataclass(frozen=True)
class Tensor:
    """One tensor operand of a trace: what the formulas read, and how it lies in memory."""

    operand: Operand
    strides: tuple[int, ...] | None  # None: not recorded

    @property
    def span_bytes(self) -> int:
        """Bytes that it touches: an expanded dimension (stride 0) is read from one place."""
        if self.strides is None or len(self.strides) != len(self.operand.shape):
            return self.operand.n_bytes
        real = [n for n, stride in zip(self.operand.shape, self.strides, strict=True) if stride]
        each = Operand((), self.operand.dtype).n_bytes
        return math.prod(real) * each if self.operand.numel else 0


@functools.cache
def schemas() -> dict[str, list[str]]:
    """Returns the argument names of every op with a formula, in the order of its schema."""
    text = importlib.resources.files("flopwise.flops").joinpath("schemas.json").read_text("utf-8")
    found: dict[str, list[str]] = json.loads(text)
    return found


@functools.lru_cache(maxsize=65536)
def arguments(operands: Operands) -> tuple[Tensor | object, ...]:
    """Returns an operator's arguments in order: tensors, plain values, None for what was not recorded.

    Raises:
        ValueError: the recorded text is no list.
    """
    dims = _list(operands.dims)
    types = _list(operands.types)
    strides = _list(operands.strides)
    concrete = _list(operands.concrete)
    found: list[Tensor | object] = []
    for i, shape in enumerate(dims):
        kind = types[i] if i < len(types) else ""
        dtype = DTYPES.get(kind) if isinstance(kind, str) else None
        sizes = _shape(shape)
        if dtype is not None and sizes is not None:
            step = _shape(strides[i]) if i < len(strides) else None
            found.append(Tensor(Operand(sizes, dtype), step))
        else:
            found.append(_value(concrete[i] if i < len(concrete) else ""))
    return tuple(found)


def tensors(operands: Operands) -> list[Tensor]:
    """Returns the tensor arguments in order."""
    return [a for a in arguments(operands) if isinstance(a, Tensor)]


def call_of(name: str, operands: Operands) -> Call:
    """Returns the call of an op that has a formula.

    Raises:
        LookupError: the op has none, or its operands were not recorded.
        ValueError: the recorded text is no list.
    """
    if rule_of(name) is None:
        raise LookupError(f"{name}: no formula")
    if not operands.dims:
        raise LookupError(f"{name}: shapes not recorded")
    names = schemas().get(name) or schemas().get(name.rstrip("_"))  # `addmm_` is `addmm` in place
    if names is None:
        raise LookupError(f"{name}: the names of its arguments are not known")
    found = arguments(operands)
    if not name.startswith("aten::") and len(found) != len(names):
        raise LookupError(
            f"{name}: recorded with {len(found)} arguments where {len(names)} are known: another version of it"
        )
    args: dict[str, object] = {}
    for label, value in zip(names, found, strict=False):
        args[label] = value.operand if isinstance(value, Tensor) else value
    call = Call(name, args)
    try:
        result = _given_result(names, found) or _result(call)
    except (ArithmeticError, TypeError, IndexError):
        raise ValueError(f"{name}: its operands make no sense") from None
    return Call(name, args, (result,) if result is not None else ())


def cost_of(call: Call) -> Cost:
    """Returns the FLOPs of a call that has a formula.

    Raises:
        LookupError: an operand that the formula reads was not recorded.
        ValueError: the operands make no sense.
    """
    rule = rule_of(call.name)
    if rule is None:
        raise LookupError(f"{call.name}: no formula")
    try:
        cost = rule.formula(call)
    except (ArithmeticError, TypeError, IndexError):
        raise ValueError(f"{call.name}: its operands make no sense") from None
    if not 0 <= cost.needed < MOST_FLOPS:
        raise ValueError(f"{call.name}: its operands make no sense")
    return cost


def execution_of(rule: Rule, call: Call, *, tf32: bool) -> tuple[str | None, int]:
    """Returns the dtype that a call's products run in, None where they are of integers, and how many real ones each is.

    Args:
        rule: of the operator.
        call: with the operand that the rule reads the dtype of.
        tf32: 32-bit floats are multiplied on TF32 units.

    Raises:
        LookupError: that operand was not recorded.
    """
    dtype = call.tensor(*rule.operand).dtype
    kind = executed(dtype, rule.family, Precision(tf32, tf32, tf32, tf32))
    return kind, real_operations(dtype, rule.family)


def operand_bytes(name: str, operands: Operands) -> int | None:
    """Returns the bytes that an op must move at least: each tensor once, its result too where that is clear.

    None where no tensor was recorded (lists of tensors are not), or none of a possible size.
    """
    moved = _moved(name, operands) if operands.dims else None
    return moved if moved is not None and moved < MOST_BYTES else None


def _moved(name: str, operands: Operands) -> int | None:
    try:
        found = tensors(operands)
    except ValueError:
        return None
    if not found:
        return None
    total = sum(tensor.span_bytes for tensor in found)
    space, _, op = name.partition("::")
    if space != "aten" or op.endswith(
        "_"
    ):  # in place, or generated: the result is among the operands
        return total
    try:
        result = call_of(name, operands).outs
        if result:
            return total + result[0].n_bytes
    except (LookupError, ValueError):
        pass
    if op in POINTWISE:
        return (
            total
            + Operand(_broadcast([t.operand.shape for t in found]), found[0].operand.dtype).n_bytes
        )
    return total


def _given_result(names: list[str], found: tuple[object, ...]) -> Operand | None:
    """The `out=` argument of an overload that has one comes after all others."""
    if len(found) > len(names) and isinstance(found[-1], Tensor):
        return found[-1].operand
    return None


def _result(call: Call) -> Operand | None:
    """Returns the result of the common products and convolutions; None where it is not derived."""
    op = call.name.partition("::")[2].rstrip("_")
    if op in ("mm", "bmm", "_scaled_mm", "_int_mm"):
        left, right = call.tensor("self"), call.tensor("mat2")
        return Operand((*left.shape[:-1], right.shape[-1]), left.dtype)
    if op == "addmm":
        left, right = call.tensor("mat1"), call.tensor("mat2")
        return Operand((left.shape[0], right.shape[-1]), left.dtype)
    if op in ("baddbmm",):
        left, right = call.tensor("batch1"), call.tensor("batch2")
        return Operand((*left.shape[:-1], right.shape[-1]), left.dtype)
    if "conv" in op and "backward" not in op:
        return _convolved(call)
    return None


def _convolved(call: Call) -> Operand | None:
    """Returns the result of a forward convolution. Source: torch.nn.Conv2d documentation, "Shape"."""
    given, weight = call.tensor("input", "self"), call.tensor("weight")
    if call.flag("transposed") or "transpose" in call.name:
        return None  # the formula reads the input there
    sizes = given.shape[2:]
    rank = len(sizes)
    stride = _each(call.args.get("stride"), rank)
    dilation = _each(call.args.get("dilation"), rank)
    padding = call.args.get("padding")
    kernel = weight.shape[2:]
    if isinstance(padding, str):
        pads = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
    else:
        pads = [2 * p for p in _each(padding, rank)]
    spatial = [
        (n + p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(sizes, pads, dilation, kernel, stride, strict=True)
    ]
    if min(spatial, default=1) < 1:
        raise ValueError(f"{call.name}: its filter is larger than what it reads")
    return Operand((given.shape[0], weight.shape[0], *spatial), given.dtype)


def _each(value: object, rank: int) -> list[int]:
    if isinstance(value, tuple) and value:
        numbers = [int(v) for v in value if isinstance(v, (int, float))]
        return numbers if len(numbers) == rank else numbers[:1] * rank
    if isinstance(value, int):
        return [value] * rank
    raise LookupError("stride, padding or dilation not recorded")


def _list(text: bytes) -> list[object]:
    if not text:
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("operands are no JSON") from None
    if not isinstance(found, list):
        raise ValueError("operands are no list")
    return found


def _shape(value: object) -> Shape | None:
    """Returns a list of sizes or strides, None for anything else."""
    if not isinstance(value, list):
        return None
    good = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**48 for n in value)
    return tuple(value) if good else None


def _value(text: object) -> object:
    """Returns a recorded plain value: a number, a truth value, a tuple of them, or the text itself."""
    if not isinstance(text, str) or not text:
        return None
    try:
        found = json.loads(text.replace("True", "true").replace("False", "false"))
    except (ValueError, RecursionError):
        return text
    return tuple(found) if isinstance(found, list) else found


def _broadcast(shapes: list[Shape]) -> Shape:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))
