"""One call of an op as the formulas see it: its name, its arguments by schema name, the shapes of its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]

#: The argument that tells, for each operand of the op that a backward op without a mask belongs to, whether autograd
#: asks for its gradient.
WANTED = "wanted"

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Operand:
    """A tensor argument or result: its shape and torch's name of its dtype (`bfloat16`).

    `values` are the contents of a small integer tensor that a formula needs (the cumulative lengths of packed
    sequences); None when nobody has read them.
    """

    shape: Shape
    dtype: str = "float32"
    values: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Returns the size in bytes, each element once; 8-bit and smaller formats count one byte an element."""
        return self.numel * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Call:
    """An op with its arguments by the names of its schema. Tensors are `Operand`, lists of tensors are tuples."""

    name: str  # namespace and op without the overload: "aten::mm"
    args: Mapping[str, object] = field(default_factory=dict)
    outs: tuple[Operand, ...] = ()

    def tensor(self, *names: str) -> Operand:
        """Returns the tensor argument that goes by one of these names.

        Raises:
            LookupError: there is none; the formula does not apply.
        """
        found = self.maybe(*names)
        if found is None:
            raise LookupError(f"{self.name}: no tensor {' or '.join(names)}")
        return found

    def maybe(self, *names: str) -> Operand | None:
        """Returns the tensor argument that goes by one of these names, or None."""
        for name in names:
            value = self.args.get(name)
            if isinstance(value, Operand):
                return value
        return None

    def tensors(self, name: str) -> tuple[Operand, ...]:
        """Returns the tensors of a list argument."""
        value = self.args.get(name)
        return tuple(v for v in value if isinstance(v, Operand)) if isinstance(value, tuple) else ()

    def flag(self, *names: str) -> bool:
        """Returns a boolean argument, False where it is missing."""
        return any(bool(self.args[name]) for name in names if self.args.get(name) is not None)

    def integer(self, *names: str, default: int) -> int:
        """Returns an integer argument, or the default where it is missing or None."""
        for name in names:
            value = self.args.get(name)
            if isinstance(value, int):
                return int(value)
        return default

    def mask(self, name: str, length: int) -> tuple[bool, ...]:
        """Returns a list of booleans such as `output_mask`; all True where it is missing."""
        value = self.args.get(name)
        return tuple(bool(v) for v in value) if isinstance(value, tuple) else (True,) * length

    def out(self) -> Operand:
        """Returns the first result.

        Raises:
            LookupError: the shapes of the results are not known.
        """
        if not self.outs:
            raise LookupError(f"{self.name}: result not known")
        return self.outs[0]


@dataclass(frozen=True)
class Cost:
    """FLOPs of one call, three ways. A multiply-add is two."""

    needed: int  # what the model asks for, attention counted full
    needed_causal: (
        int  # the same, without the scores that a mask or window rules out, where that is visible
    )
    executed: (
        int  # what the kernel does, what it recomputes inside included; attention counted full
    )
    note: str | None = None  # what the formula could not see

    @staticmethod
    def exactly(flops: int) -> Cost:
        """Returns the cost of an op without attention: all three counts are the same."""
        return Cost(flops, flops, flops)


def bytes_moved(call: Call) -> int:
    """Returns the bytes of all operands and results, each read or written once.

    Ignores: caches, broadcasting, operands that are read again.
    """
    total = 0
    for value in (*call.args.values(), *call.outs):
        if isinstance(value, Operand):
            total += value.n_bytes
        elif isinstance(value, tuple):
            total += sum(v.n_bytes for v in value if isinstance(v, Operand))
    return total
