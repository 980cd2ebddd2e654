"""What is known about an op while it runs: its module, the user's line, and in backward its forward op's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flopwise.flops.call import Call, Operand
from flopwise.kit.nested import tensors_in

#: Under this key a graph node carries the name of the module that made it.
_OWNER = "flopwise_module"
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass
class Where:
    """The modules that are running now, innermost last, and whether autocast was on as each was entered."""

    device: str
    stack: list[str] = field(default_factory=list)
    autocast: list[bool] = field(default_factory=list)

    def module(self) -> str | None:
        """Returns the name of the innermost module, that of the forward in backward; None outside of all."""
        node = current_node()
        if node is not None:
            return node.metadata.get(_OWNER) if hasattr(node, "metadata") else None
        return self.stack[-1] if self.stack else None

    def in_autocast(self) -> bool:
        """Returns whether autocast was on as the innermost module was entered."""
        return self.autocast[-1] if self.autocast else torch.is_autocast_enabled(self.device)


@contextmanager
def modules_of(root: nn.Module | None) -> Iterator[Where]:
    """Follows which module runs, by hooks that are gone afterwards."""
    where = Where(device_type(root))
    handles: list[Any] = []
    seen: set[Any] = set()

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            where.stack.append(name)
            where.autocast.append(torch.is_autocast_enabled(where.device))

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if where.stack:
                where.stack.pop()
                where.autocast.pop()
            _sign(output, name, seen)

        return hook

    for name, module in root.named_modules() if root is not None else ():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name), always_call=True))
    try:
        yield where
    finally:
        for handle in handles:
            handle.remove()


def device_type(root: nn.Module | None) -> str:
    """Returns the type of the device that the module is on."""
    for tensor in root.parameters() if root is not None else ():
        return tensor.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_node() -> Any:
    """Returns the graph node whose backward is running in this thread, None outside of backward."""
    return torch._C._current_autograd_node()


def nodes_behind(*nodes: Any, seen: set[Any] | None = None) -> Iterator[Any]:
    """Yields graph nodes and all that backward reaches from them, each once, none of `seen`, which grows."""
    seen = set() if seen is None else seen
    todo = [node for node in nodes if node is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo.extend(parent for parent, _ in node.next_functions if parent is not None)


def forward_line(node: Any) -> str | None:
    """Returns `file:line` of the forward op of a node, where anomaly mode has kept it."""
    lines = node.metadata.get("traceback_") if hasattr(node, "metadata") else None
    for line in reversed(list(lines or ())):
        match = _PLACE.search(line)
        if match and not _inside(match["file"]):
            return f"{match['file']}:{match['line']}"
    return None


def call_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Call:
    """Returns an op's call as the FLOP formulas read it."""
    schema = func._schema
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return Call(
        schema.name,
        {name: _convert(value) for name, value in named.items()},
        tuple(_operand(t) for t in outs if isinstance(t, torch.Tensor)),
    )


def _convert(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _operand(value)
    if isinstance(value, (list, tuple)):
        return tuple(_convert(v) for v in value)
    return value


def _operand(tensor: torch.Tensor) -> Operand:
    data = getattr(
        tensor, "_data", None
    )  # of torchao's float8 tensors, which name the dtype that they stand for
    stored = data if isinstance(data, torch.Tensor) and data.dtype.itemsize == 1 else tensor
    return Operand(tuple(tensor.shape), str(stored.dtype).removeprefix("torch."))


def _sign(output: Any, name: str, seen: set[Any]) -> None:
    """Writes the module's name on the graph nodes that it made: those that no module inside it has signed."""
    for node in nodes_behind(*(t.grad_fn for t in tensors_in(output)), seen=seen):
        metadata: Any = node.metadata
        metadata.setdefault(_OWNER, name)


def _inside(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    return ("site-packages" in parts and "torch" in parts) or "/flopwise/kit/" in path.replace(
        "\\", "/"
    )
