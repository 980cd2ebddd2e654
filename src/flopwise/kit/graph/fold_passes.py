"""Passes over an exported evaluation graph: what is constant is computed once, what does nothing goes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: Convolutions whose weight has the output channels first.
CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
#: Constants may be larger than what they are computed from by this many bytes.
_ROOM_BYTES = 1 << 20
#: In evaluation these return their first argument.
_NOTHING = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)


def _nodes(module: fx.GraphModule) -> list[Any]:
    return list(module.graph.nodes)


class Constants:
    """The tensors of a graph module, looked up and added by name."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._added = 0

    def value(self, node: fx.Node) -> Any:
        """Returns what a `get_attr` node stands for."""
        found: Any = self.module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found

    def add(self, tensor: torch.Tensor, before: fx.Node) -> fx.Node:
        """Registers a tensor as a buffer; returns a node that stands for it."""
        while hasattr(self.module, f"folded_{self._added}"):
            self._added += 1
        name = f"folded_{self._added}"
        self.module.register_buffer(name, tensor.detach())
        with self.module.graph.inserting_before(before):
            return self.module.graph.get_attr(name)


def fold_batch_norms(module: fx.GraphModule) -> dict[str, int]:
    """Folds batch norms into the convolution or linear layer before them; returns how many of each."""
    constants = Constants(module)
    written = _names(constants, written_nodes(module))
    found = {"conv+bn": 0, "linear+bn": 0}
    for norm in _nodes(module):
        if norm.target is not aten.batch_norm.default or norm.args[5]:
            continue
        before = norm.args[0]
        if not isinstance(before, fx.Node) or len(before.users) != 1:
            continue
        kind = _foldable(before)
        tensors = [before.args[1], *before.args[2:3], *norm.args[1:5]]
        if kind is None or not all(_is_constant(t, written) for t in tensors):
            continue
        if kind == "linear+bn" and norm.meta["val"].dim() != 2:
            continue  # its features are not the dimension that is normalised
        weight, bias = _folded(constants, before, norm)
        args = list(before.args) + [None] * (3 - len(before.args))
        args[1], args[2] = constants.add(weight, before), constants.add(bias, before)
        before.args = tuple(args)
        norm.replace_all_uses_with(before)
        module.graph.erase_node(norm)
        found[kind] += 1
    return found


def _foldable(node: Any) -> str | None:
    if node.target in CONVOLUTIONS:
        return "conv+bn"
    return "linear+bn" if node.target is aten.linear.default else None


def _is_constant(value: Any, written: set[str]) -> bool:
    if value is None:
        return True
    return isinstance(value, fx.Node) and value.op == "get_attr" and value.target not in written


def _folded(constants: Constants, before: Any, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weight and bias with the norm in them, computed in float64."""

    def wide(value: Any) -> torch.Tensor | None:
        return constants.value(value).detach().double() if value is not None else None

    old = constants.value(before.args[1]).detach()
    weight = old.double()
    bias = wide(before.args[2] if len(before.args) > 2 else None)
    gamma, beta, mean, variance = (wide(a) for a in norm.args[1:5])
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance + norm.args[7])
    if gamma is not None:
        scale = scale * gamma
    shift = (bias - mean if bias is not None else -mean) * scale
    if beta is not None:
        shift = shift + beta
    new = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    return new.to(old.dtype), shift.to(old.dtype)


def drop_identities(module: fx.GraphModule) -> int:
    """Takes out operations that return their argument: dropout in evaluation, detach, casts to the same dtype."""
    dropped = 0
    for node in _nodes(module):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        nothing = node.target in _NOTHING and len(node.args) > 2 and node.args[2] is False
        nothing |= node.target in (aten.detach.default, aten.alias.default)
        if node.target in (
            aten.to.dtype,
            aten.contiguous.default,
            aten.view.default,
            aten.reshape.default,
        ):
            nothing |= _same(node, source) and not _is_copy(node)
        if nothing:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
            dropped += 1
    return dropped


def _is_copy(node: Any) -> bool:
    """Whether a cast was asked for a tensor of its own, which something may write to."""
    return bool(dict(enumerate(node.args)).get(3, node.kwargs.get("copy", False)))


def _same(node: Any, source: Any) -> bool:
    """Whether two nodes give tensors of the same shape, strides, dtype and device."""
    a, b = node.meta.get("val"), source.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.dtype, a.device, tuple(map(str, a.shape)), tuple(map(str, a.stride()))) == (
        b.dtype, b.device, tuple(map(str, b.shape)), tuple(map(str, b.stride())),
    )  # fmt: skip


def fold_constants(module: fx.GraphModule) -> int:
    """Computes what depends on nothing but weights and literals; returns how many operations were replaced.

    What the graph writes to later, or hands out, is made anew in every call.
    """
    constants = Constants(module)
    written = written_nodes(module)
    names, fresh = _names(constants, written), written | _handed_out(module)
    values: dict[fx.Node, Any] = {}
    for node in _nodes(module):
        if node.op == "get_attr" and node.target not in names:
            value = constants.value(node)
            if isinstance(value, torch.Tensor):
                values[node] = value.detach()
        elif (
            node.op == "call_function"
            and node not in fresh
            and _is_pure(node)
            and all(i in values for i in node.all_input_nodes)
        ):
            result = _computed(node, values)
            if result is not None:
                values[node] = result
    replaced = 0
    for node in list(values):
        used = any(user not in values for user in node.users)
        if node.op != "call_function" or not used or _only_views(node, values):
            continue
        node.replace_all_uses_with(constants.add(values[node].clone(), node))
        replaced += 1
    return replaced


def written_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes to whose memory the graph writes, itself or through views."""
    return _sources([i for n in _nodes(module) for i in _sharing(n, writes=True)])


def _handed_out(module: fx.GraphModule) -> set[fx.Node]:
    """Returns the operations whose memory the caller gets."""
    ends = [i for n in _nodes(module) if n.op == "output" for i in n.all_input_nodes]
    return {n for n in _sources(ends) if n.op == "call_function"}


def _sources(nodes: list[fx.Node]) -> set[fx.Node]:
    """Returns the nodes, and those whose memory they share."""
    found: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes += _sharing(node)
    return found


def _sharing(node: Any, writes: bool = False) -> Iterator[fx.Node]:
    """Yields the inputs whose memory the result may share; with `writes` those that are written to."""
    if node.target is operator.getitem or node.target in _NOTHING:
        if not writes:
            yield node.args[0]
        return
    schema = getattr(node.target, "_schema", None)
    for k, argument in enumerate(schema.arguments if schema is not None else ()):
        info = argument.alias_info
        if info is None or (writes and not info.is_write):
            continue
        value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, fx.Node):
                yield each


def _names(constants: Constants, nodes: set[fx.Node]) -> set[str]:
    """Returns the names of the tensors that these nodes stand for, and of those that share their memory."""

    def place(node: fx.Node) -> int | None:
        value = constants.value(node)
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

    places = {place(n) for n in nodes if n.op == "get_attr"} - {None}
    if not places:
        return set()
    every = [n for n in _nodes(constants.module) if n.op == "get_attr"]
    return {str(n.target) for n in every if place(n) in places}


def _is_pure(node: Any) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _computed(node: Any, values: dict[fx.Node, Any]) -> Any:
    """Returns the value of a node, or None where it would be much larger than what it is made of."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    target: Callable[..., Any] = node.target
    with torch.no_grad():
        result = target(*args, **kwargs)
    if not isinstance(result, torch.Tensor):
        return result if node.target is not operator.getitem else None
    inputs = [values[i] for i in node.all_input_nodes]
    room = sum(t.numel() * t.element_size() for t in inputs if isinstance(t, torch.Tensor))
    own = (
        result.untyped_storage().nbytes()
        if result._is_view()
        else result.numel() * result.element_size()
    )
    return result if own <= room + _ROOM_BYTES else None


def _only_views(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a constant is a view of a weight, which costs nothing and needs no copy."""
    result = values[node]
    if not isinstance(result, torch.Tensor):
        return True
    roots = [values[n] for n in values if n.op == "get_attr"]
    place = result.untyped_storage().data_ptr()
    return any(
        isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() == place for r in roots
    )


def choose_branches(module: fx.GraphModule) -> int:
    """Replaces `torch.cond` and `where` on a constant condition by the branch that is taken; returns how many."""
    constants = Constants(module)
    written = written_nodes(module)
    names = _names(constants, written)
    chosen = 0
    for node in _nodes(module):
        if node.op != "call_function" or node in written:
            continue
        condition = _condition(constants, node, names)
        if condition is None:
            continue
        if node.target is aten.where.self:
            branch = node.args[1] if condition else node.args[2]
            if isinstance(branch, fx.Node) and _same(node, branch):
                node.replace_all_uses_with(branch)
                module.graph.erase_node(node)
                chosen += 1
        elif _inline(constants, node, node.args[1] if condition else node.args[2]):
            chosen += 1
    return chosen


def _condition(constants: Constants, node: Any, written: set[str]) -> bool | None:
    """Returns the value of a constant condition, None where it is not known or not the same everywhere."""
    if node.target is not aten.where.self and node.target is not torch.ops.higher_order.cond:
        return None
    condition = node.args[0]
    if isinstance(condition, bool):
        return condition
    if not isinstance(condition, fx.Node) or not _is_constant(condition, written):
        return None
    value = constants.value(condition)
    if bool(value.all()):
        return True
    return None if bool(value.any()) else False


def _inline(constants: Constants, node: Any, branch: Any) -> bool:
    """Puts the operations of a branch in the place of its `cond`."""
    graph, inner = node.graph, constants.value(branch)
    operands = list(node.args[3]) if len(node.args) > 3 else []
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    if len(places) != len(operands):
        return False
    known: dict[fx.Node, Any] = dict(zip(places, operands, strict=True))
    for n in inner.graph.nodes:
        if n.op == "get_attr":
            known[n] = constants.add(getattr(inner, str(n.target)), node)
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(inner.graph, known)
    listed: list[Any] = list(results) if isinstance(results, (list, tuple)) else [results]
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(listed[user.args[1]])
            graph.erase_node(user)
    if node.users:
        return False
    graph.erase_node(node)
    return True


def relu_in_place(module: fx.GraphModule) -> int:
    """Lets a ReLU after a convolution or linear layer write over its input, which nothing else reads."""
    changed = 0
    for node in _nodes(module):
        if node.target is aten.relu.default and _after_layer(node):
            node.target = aten.relu_.default
            changed += 1
    return changed


def fuse_relu(module: fx.GraphModule) -> int:
    """Makes one cuDNN call of a 2-d convolution with bias and the ReLU after it (CUDA only)."""
    fused = 0
    for node in _nodes(module):
        if node.target not in (aten.relu.default, aten.relu_.default) or not _after_layer(node):
            continue
        conv = node.args[0]
        args = [*conv.args, *[None] * 7]
        if conv.target is not aten.conv2d.default or args[2] is None:
            continue
        stride, padding, dilation = args[3] or [1, 1], args[4] or [0, 0], args[5] or [1, 1]
        with module.graph.inserting_before(node):
            new = module.graph.call_function(
                aten.cudnn_convolution_relu.default,
                (*args[:3], _pair(stride), _pair(padding), _pair(dilation), args[6] or 1),
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        module.graph.erase_node(conv)
        fused += 1
    return fused


def _pair(value: Any) -> list[int]:
    pair = list(value) if isinstance(value, (list, tuple)) else [value]
    return pair * 2 if len(pair) == 1 else pair


def _after_layer(node: Any) -> bool:
    before = node.args[0]
    return (
        isinstance(before, fx.Node)
        and len(before.users) == 1
        and (before.target in CONVOLUTIONS or before.target is aten.linear.default)
    )


def written_tensors(module: fx.GraphModule) -> list[torch.Tensor]:
    """Returns the graph's own tensors that a call of it changes (a counter, a cache)."""
    constants = Constants(module)
    names = _names(constants, written_nodes(module))
    nodes = {str(n.target): n for n in _nodes(module) if n.op == "get_attr"}
    return [constants.value(nodes[name]) for name in sorted(names)]


def count_nodes(module: fx.GraphModule) -> int:
    """Returns how many operations a graph has."""
    return sum(n.op == "call_function" or n.op == "call_method" for n in module.graph.nodes)


def has_branches(module: fx.GraphModule) -> bool:
    """Whether a graph has operations with graphs of their own, which cannot be counted from outside."""
    return any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in module.graph.nodes)
