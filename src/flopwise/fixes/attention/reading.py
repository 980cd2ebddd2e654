"""Reading a graph that Dynamo has traced: what a node calls, the sizes and dtypes of its value, and autocast around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

PRODUCTS = frozenset(("matmul", "bmm"))
#: Methods of operators whose name is not that of the function in `operator`.
_OPERATORS = {"and": "and_", "or": "or_", "radd": "add", "rmul": "mul"}
SCALES = frozenset(("mul", "imul", "mul_", "div", "truediv", "itruediv", "div_"))
#: What leaves numbers as they are, but for rounding.
KEEPS = frozenset(("to", "type", "float", "half", "bfloat16", "type_as", "contiguous"))


def name_of(node: fx.Node) -> str:
    """Returns the bare name of what a node calls: "matmul" of operator.matmul, torch.matmul and Tensor.__matmul__."""
    if node.op == "call_method":
        name = str(node.target)
    else:
        name = str(getattr(node.target, "__name__", ""))
    if name.startswith("__") and name.endswith("__"):  # torch 2.11 has comparisons so
        name = name[2:-2]
        return _OPERATORS.get(name, name)
    return name


class Autocast(NamedTuple):
    """Whether a node runs under autocast, and in which dtype."""

    on: bool
    dtype: torch.dtype


def autocasts(graph: fx.Graph) -> dict[fx.Node, Autocast]:
    """Returns the state of autocast at every node: the caller's, and what the graph enters and leaves."""
    tensors = (t for node in graph.nodes if (t := tensor_of(node)) is not None)
    kind = next((t.device.type for t in tensors if t.device.type != "meta"), "cpu")
    states = [Autocast(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))]
    found = {}
    for node in graph.nodes:
        name = name_of(node)
        if name == "_enter_autocast":
            device, dtype, enabled = (*node.args, None, None, True)[:3]
            now = Autocast(bool(enabled), dtype or torch.get_autocast_dtype(kind))
            states.append(now if device == kind else states[-1])
        elif name == "_exit_autocast" and len(states) > 1:
            states.pop()
        found[node] = states[-1]
    return found


def computes_in(query: fx.Node, autocast: Autocast) -> torch.dtype:
    """Returns the dtype that a product of this tensor is computed in."""
    tensor = tensor_of(query)
    dtype = tensor.dtype if tensor is not None else torch.float32
    return autocast.dtype if autocast.on and dtype != torch.float64 else dtype


class Product(NamedTuple):
    """A product of two stacks of matrices; of the second its rows are multiplied where it is transposed in the product."""

    one: fx.Node
    other: fx.Node
    transposes: bool = False


def product_of(node: fx.Node) -> Product | None:
    """Returns what a node multiplies, None where it is no product of two stacks of matrices."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = name_of(node)
    if name == "einsum":
        return _einsum(node)
    if name not in PRODUCTS or len(node.args) != 2:
        return None
    one, other = as_node(node.args[0]), as_node(node.args[1])
    return Product(one, other) if one is not None and other is not None else None


def _einsum(node: fx.Node) -> Product | None:
    equation: Any = node.args[0]
    operands: list[Any] = list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    nodes = [n for operand in operands if (n := as_node(operand)) is not None]
    if not isinstance(equation, str) or len(nodes) != 2 or len(operands) != 2:
        return None
    inputs, _, made = equation.replace(" ", "").partition("->")
    one, _, other = inputs.partition(",")
    if not len(one) == len(other) == len(made) > 2 or "." in inputs:
        return None
    if not one[:-2] == other[:-2] == made[:-2] or len(set(one[-2:] + other[-2:])) != 3:
        return None
    row, column = made[-2], made[-1]
    if one[-2] != row or other[-2:].count(column) != 1:
        return None
    if other == made[:-2] + one[-1] + column:
        return Product(nodes[0], nodes[1])
    if other == made[:-2] + column + one[-1]:
        return Product(nodes[0], nodes[1], transposes=True)
    return None


def comes_of_product(node: fx.Node, steps: int = 8) -> bool:
    """Whether a node is made of a product by scaling, masking and casting alone."""
    for _ in range(steps):
        if product_of(node) is not None:
            return True
        before = first_of(node)
        if before is None or name_of(node) not in (*KEEPS, *SCALES, "add", "iadd", "masked_fill"):
            return False
        node = before
    return False


def tensor_of(node: Any) -> torch.Tensor | None:
    """Returns the fake tensor that stands for a node's value in the trace, None where it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns the sizes of a node's value."""
    tensor = tensor_of(node)
    return tuple(tensor.shape) if tensor is not None else (None,)


def dims_of(node: fx.Node) -> int:
    """Returns the number of dimensions of a node's value, -1 where it is no tensor."""
    tensor = tensor_of(node)
    return tensor.dim() if tensor is not None else -1


def same_sizes(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether sizes are equal, asked in a way that adds no condition to the compiled code."""
    return len(one) == len(other) and all(
        _written(a) == _written(b) for a, b in zip(one, other, strict=True)
    )


def _written(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def first_of(node: fx.Node) -> fx.Node | None:
    """Returns the node that is the first argument, None where that is none."""
    return as_node(node.args[0]) if node.args else None


def as_node(thing: Any) -> fx.Node | None:
    """Returns what was given where it is a node."""
    return thing if isinstance(thing, fx.Node) else None


def argument_of(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns an argument by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
