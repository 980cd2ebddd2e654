"""What a mask in a traced graph holds, computed from tensors that are there before anything is compiled.

A mask that comes from buffers and constants alone is the same in every step, as long as nobody writes those buffers:
`KnownTensors` remembers which were read and says when one has changed.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from flopwise.fixes.attention.reading import name_of

#: Functions and methods that compute a value from their arguments and do nothing else.
_PURE = frozenset(
    name
    for line in (
        "arange full full_like new_full new_ones new_zeros ones ones_like scalar_tensor tensor zeros zeros_like",
        "add cumsum diff div mul neg rsub sub truediv tril triu where masked_fill",
        "eq ge gt le lt ne and_ bitwise_and bitwise_not bitwise_or inv invert logical_and logical_not logical_or not_ or_",
        "bool contiguous detach float int long to type type_as",
        "expand expand_as getitem reshape squeeze transpose unsqueeze view",
    )
    for name in line.split()
)
#: Of these, the ones whose result may share the memory of what they are given.
_VIEWS = frozenset(
    [
        "bool",
        "contiguous",
        "detach",
        "expand",
        "expand_as",
        "float",
        "getitem",
        "int",
        "long",
        "reshape",
        "squeeze",
        "to",
        "transpose",
        "type",
        "type_as",
        "unsqueeze",
        "view",
        "chunk",
        "split",
        "narrow",
        "select",
        "permute",
        "flatten",
    ]
)
#: Below this an added number counts as "masked": exp of it is 0 in float32 beside any score that training produces.
#: Source: transformers before 4.20 added -10000 for padding (modeling_bert.py), the smallest in use.
MASKED = -1e4
#: DistributedDataParallel writes every buffer in every step, with the values of rank 0. In a job of several ranks a tensor
#: that was found unchanged so many times is looked at only every so many times, since each look waits for the device.
MOST_REWRITTEN, SELDOM = 3, 100
#: Masks of more elements are not computed.
MOST_ELEMENTS = 1 << 28


@dataclass
class _Known:
    owner: weakref.ref[nn.Module]
    name: str
    tensor: weakref.ref[torch.Tensor]
    version: int
    copy: torch.Tensor  # on the host
    rewritten: int = 0  # times that it was written with the values it had

    def holds(self) -> bool:
        """Whether the module still has this tensor, with the values it had."""
        owner, tensor = self.owner(), self.tensor()
        if owner is None or tensor is None:
            return False
        now = owner._buffers.get(self.name)
        if now is None:
            now = vars(owner).get(self.name)
        if now is not tensor:
            return False
        if tensor._version == self.version:
            return True
        self.version = tensor._version
        self.rewritten += 1
        if self.rewritten > MOST_REWRITTEN and self.rewritten % SELDOM and _has_ranks():
            return True
        return torch.equal(tensor.detach().cpu(), self.copy)


class KnownTensors:
    """Buffers, and plain tensors that are attributes of parts, of modules that are compiled; and which of them were read.

    Modules of one class may share compiled code: a tensor may be read where all of them have an equal one in its place.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._read: dict[int, list[_Known]] = {}  # by module

    def read(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values may be used; they are looked at from here on."""
        place = self._place(tensor)
        if place is None:
            return False
        module, part, name = place
        if any(k.tensor() is tensor for k in self._read.get(id(module), ())):
            return True
        copy = tensor.detach().to("cpu", copy=True)
        found = {}
        for reference in self._modules:
            other = reference()
            if type(other) is not type(module) or other is None:
                continue
            owner, twin = _tensor_at(other, part, name)
            if owner is None or not _is_plain(twin) or not _equal(twin, copy):
                return False
            known = _Known(weakref.ref(owner), name, weakref.ref(twin), twin._version, copy)
            found[id(other)] = known
        for key, known in found.items():
            self._read.setdefault(key, []).append(known)
        return True

    def changed(self, module: nn.Module) -> str | None:
        """Returns which tensor of a module that was read is not what it was, None where all are."""
        for known in self._read.get(id(module), ()):
            if not known.holds():
                return known.name
        return None

    def _place(self, tensor: Any) -> tuple[nn.Module, str, str] | None:
        """Returns module, part and attribute that are this very tensor; None where it is none, or would change."""
        if not _is_plain(tensor):
            return None
        for module in filter(None, (reference() for reference in self._modules)):
            for part, owner in module.named_modules():
                for name, value in (*owner._buffers.items(), *vars(owner).items()):
                    if value is tensor:
                        return module, part, name
        return None


def _is_plain(tensor: Any) -> bool:
    """Whether this is a tensor whose values only somebody's writing would change."""
    if type(tensor) not in (torch.Tensor, nn.Buffer) or tensor.requires_grad:
        return False
    return not tensor.is_inference()


def _tensor_at(module: nn.Module, part: str, name: str) -> tuple[nn.Module | None, Any]:
    try:
        owner = module.get_submodule(part)
    except AttributeError:
        return None, None
    return owner, owner._buffers.get(name, vars(owner).get(name))


def _equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    here = tensor.detach().cpu()
    return here.dtype == copy.dtype and torch.equal(here, copy)


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Unknown(Exception):
    """The value depends on more than buffers and constants."""


class Values:
    """Values of nodes of one traced graph, computed where they depend on buffers and constants alone."""

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        known: KnownTensors,
        outer: Values | None = None,
    ) -> None:
        """Takes a graph and its inputs: tensors, or nodes of an outer graph that calls it."""
        self._module = graph
        self._known = known
        self._outer = outer
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._inputs = dict(zip(nodes, inputs, strict=False))
        self._done: dict[fx.Node, Any] = {}
        self._written = _written(graph)

    def inside(self) -> Iterator[tuple[fx.GraphModule, Values]]:
        """Yields the graphs that this one calls to compute them again in backward, and their values."""
        for call, graph in _inner_graphs(self._module):
            yield graph, Values(graph, call.args[1:], self._known, self)

    def of(self, node: fx.Node) -> Any:
        """Returns the value of a node.

        Raises:
            Unknown: it depends on something else than buffers and constants, or is too large.
        """
        if node not in self._done:
            if _root(node) in self._written:
                raise Unknown
            with torch.no_grad():
                self._done[node] = self._compute(node)
        return self._done[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            value = self._inputs.get(node)
            if isinstance(value, fx.Node) and self._outer is not None:
                return self._outer.of(value)
            if not isinstance(value, torch.Tensor) or not self._known.read(value):
                raise Unknown
            return value.detach()
        if node.op == "get_attr":
            return getattr(self._module, str(node.target)).detach()
        name = name_of(node)
        if node.op not in ("call_function", "call_method") or name not in _PURE:
            raise Unknown
        if _count(getattr(node.meta.get("example_value"), "shape", ())) > MOST_ELEMENTS:
            raise Unknown
        if name == "getitem":
            return self._item(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.of)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _item(self, node: fx.Node) -> Any:
        """Returns what an index takes; of one that takes the first T rows and columns, T not fixed, all of them.

        A mask of all rows and columns that hides every later place, or nothing, does so for the first T of each, too.
        """
        source: Any = node.args[0]
        index: Any = node.args[1]
        if isinstance(index, tuple) and len(index) > 1 and all(isinstance(i, slice) for i in index):
            *others, rows, columns = index
            if (
                isinstance(rows.stop, fx.Node)
                and (rows.start in (None, 0) and rows.step is None)
                and (rows.start, rows.stop, rows.step)
                == (columns.start, columns.stop, columns.step)
                and all(slice(None) == other for other in others)
                and isinstance(source, fx.Node)
            ):
                whole = self.of(source)
                if isinstance(whole, torch.Tensor) and whole.dim() == len(index):
                    return whole
                raise Unknown
        values: Any = fx.node.map_arg(node.args, self.of)
        return operator.getitem(*values)


def _inner_graphs(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """Yields the calls of inner graphs, as activation checkpointing makes them, and the graphs."""
    for node in graph.graph.nodes:
        if name_of(node) in ("tag_activation_checkpoint", "wrap") and node.args:
            called = node.args[0]
            inner = (
                getattr(graph, str(called.target), None) if isinstance(called, fx.Node) else None
            )
            if isinstance(inner, fx.GraphModule):
                yield node, inner


def _written(graph: fx.GraphModule) -> set[Any]:
    """Returns the nodes whose memory the graph writes into."""
    every = graph.graph.nodes
    found = {_root(node.args[0]) for node in every if node.args and _writes(node)}
    found |= {_root(node.kwargs["out"]) for node in every if "out" in node.kwargs}
    for call, inner in _inner_graphs(graph):
        written = _written(inner)
        places = [node for node in inner.graph.nodes if node.op == "placeholder"]
        pairs = zip(places, call.args[1:], strict=False)
        found |= {_root(given) for place, given in pairs if place in written}
    return found


def _writes(node: fx.Node) -> bool:
    """Whether a node writes into its first argument."""
    name = name_of(node)
    if name in ("setitem", "iand", "ior", "iadd", "isub", "imul", "itruediv"):
        return True
    return name.endswith("_") and not name.startswith("_") and name not in ("and_", "or_", "not_")


def _root(node: Any) -> Any:
    """Returns the node whose memory a node may share."""
    while isinstance(node, fx.Node) and name_of(node) in _VIEWS and node.args:
        node = node.args[0]
    return node


def _count(shape: Any) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


def kind_of(hidden: Any) -> str | None:
    """Returns what a mask hides, "nothing" or "later" (every later place and no other), None where it is another.

    Args:
        hidden: a mask as it is used on scores: bool (True is hidden), or numbers that are added to them.
    """
    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2:
        return None
    if hidden.dtype != torch.bool:
        masked = hidden <= MASKED
        if not bool((masked | (hidden == 0)).all()):
            return None
        hidden = masked
    if not bool(hidden.any()):
        return "nothing"
    rows, columns = hidden.shape[-2:]
    if rows != columns or rows < 2:
        return None
    later = torch.ones(rows, columns, dtype=torch.bool, device=hidden.device).triu(1)
    return "later" if bool((hidden == later).all()) else None
