"""Variables that keep every step's graph alive, because a loss was added up with its history."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch

from flopwise.kit.memory.where import place
from flopwise.units import size

#: Steps in a row by which a graph has to grow before it is called so: fewer could be an accumulation over micro-batches,
#: whose losses are added up and run backward together. Our choice.
GROWING_STEPS = 16
#: Nodes that are looked at in one graph. A graph that grows beyond has been reported long before.
MOST_NODES = 200_000
#: Values of a collection that are looked at, the newest: losses are not gathered by the thousand before it is told.
MOST_VALUES = 1_000


@dataclass(frozen=True)
class KeptHistory:
    """A variable whose graph grows from step to step."""

    name: str  # as the script has it: "running", "self.total", "losses[...]"
    where: str | None  # file:line of the loop
    steps: int  # over how many steps it grew
    bytes_per_step: (
        int  # tensors that its graph saved for backward; what hooks packed away is left out
    )
    nodes_per_step: int

    def __str__(self) -> str:
        """Returns what holds what, and the cure, which makes nothing wait for the device."""
        return (
            f"{self.name} ({self.where or 'unknown place'}) keeps the graph of every step: {size(self.bytes_per_step)} "
            f"and {self.nodes_per_step} nodes more each step over {self.steps} steps. Detach what is added to it "
            f"(`{self.name.partition('[')[0]} += loss.detach()`) and read it at the end: `.item()` in each step would wait for "
            "the device"
        )


class HistoryWatch:
    """Looks at the variables of a training loop, once a step of the optimizer, for graphs that grow.

    ```
    watch = HistoryWatch()
    for batch in loader:
        ...
        watch.step()
    ```
    """

    def __init__(self) -> None:
        self.found: list[KeptHistory] = []
        self._grown: dict[str, list[tuple[int, int]]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}

    def step(self) -> KeptHistory | None:
        """Looks at the variables of the function that calls it, and returns one that is found to grow, once."""
        frame = sys._getframe(1)
        news = None
        for name, tensors in _with_history(frame):
            nodes, n_bytes = graph_size(tensors)
            old = self._sizes.get(name)
            self._sizes[name] = (nodes, n_bytes)
            if old is None or nodes <= old[0]:
                self._grown.pop(name, None)
                continue
            grown = self._grown.setdefault(name, [])
            grown.append((nodes - old[0], n_bytes - old[1]))
            if len(grown) == GROWING_STEPS:
                nodes_each, bytes_each = (sum(g[i] for g in grown) // len(grown) for i in (0, 1))
                news = KeptHistory(name, place(frame), len(grown), bytes_each, nodes_each)
                self.found.append(news)
        return news


def graph_size(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Returns the nodes of the graph behind tensors, and the bytes of the storages that they have saved."""
    seen: set[Any] = set()
    storages: dict[int, int] = {}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        for saved in _saved(node):
            storage = saved.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return len(seen), sum(storages.values())


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that a node keeps as they are; a node that was run backward has none left.

    What hooks have packed is looked at as they left it: to unpack it would compute a checkpoint again, or copy to a device.
    """
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, name)
            many = raw if isinstance(raw, (list, tuple)) else (raw,)
            if not all(hasattr(one, "data") for one in many):  # a torch that cannot tell
                many = (getattr(node, name.removeprefix("_raw")),)
                values = many[0] if isinstance(many[0], (list, tuple)) else many
            else:
                values = tuple(one.data for one in many)
        except RuntimeError:
            return
        for value in values:
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                yield value


def _with_history(frame: FrameType) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields the tensors with a history that variables hold, and the attributes of what they hold."""
    for name, value in list(frame.f_locals.items()):
        found: list[tuple[str, list[torch.Tensor]]] = []
        with suppress(
            Exception
        ):  # a weak proxy whose object is gone, say: it is not ours to fail on
            found.extend(_of_variable(name, value))
        yield from found


def _of_variable(name: str, value: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    if isinstance(value, HistoryWatch):
        return
    yield from _inside(name, value)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, (ModuleType, type)):
        for attribute, inner in list(attributes.items()):
            yield from _inside(f"{name}.{attribute}", inner)


def _inside(name: str, value: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields a tensor, or those of a list, tuple or dictionary together: a list of losses keeps as much as their sum."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield name, [value]
        return
    if isinstance(value, dict):
        values = list(value.values()) if len(value) <= MOST_VALUES else []
    else:
        values = list(value[-MOST_VALUES:]) if isinstance(value, (list, tuple)) else []
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.grad_fn is not None]
    if tensors:
        yield f"{name}[...]", tensors
