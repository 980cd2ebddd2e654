"""Reading a graph that Dynamo has traced: what a node calls, the sizes and dtypes of its value, and autocast around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

PRODUCTS = frozenset(("matmul", "bmm", "__matmul__"))
SCALES = frozenset(("mul", "imul", "mul_", "div", "truediv", "itruediv", "div_"))
#: What leaves numbers as they are, but for rounding.
KEEPS = frozenset(("to", "type", "float", "half", "bfloat16", "type_as", "contiguous"))


def name_of(node: fx.Node) -> str:
    """Returns the bare name of what a node calls: "matmul" of operator.matmul, torch.matmul and Tensor.matmul."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", ""))


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


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product."""
    return node.op in ("call_function", "call_method") and name_of(node) in PRODUCTS


def comes_of_product(node: fx.Node, steps: int = 8) -> bool:
    """Whether a node is made of a product by scaling, masking and casting alone."""
    for _ in range(steps):
        if is_product(node):
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


def operands_of(product: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Returns the two nodes that are multiplied."""
    if len(product.args) != 2:
        return None, None
    return as_node(product.args[0]), as_node(product.args[1])


def argument_of(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns an argument by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
