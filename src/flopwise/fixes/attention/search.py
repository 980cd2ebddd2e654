"""Finds attention that is written out in a traced graph: softmax(q @ k^T * scale, masked) [dropped out] @ v."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from flopwise.fixes.attention.known_masks import Unknown, Values
from flopwise.fixes.attention.reading import (
    KEEPS,
    SCALES,
    Autocast,
    Product,
    argument_of,
    as_node,
    comes_of_product,
    dims_of,
    first_of,
    name_of,
    product_of,
    same_sizes,
    shape_of,
)


@dataclass
class Mask:
    """One masking of scores: `hidden` is bool and filled with `value`, or (no value) numbers that are added."""

    hidden: fx.Node
    value: float | None = None
    keeps: bool = False  # True of the node means "kept"


@dataclass
class Found:
    """One written-out attention: its parts, and the nodes that go, the last first."""

    output: fx.Node
    value: fx.Node
    scores: Product | None = None  # of query and keys
    scale: float = 1.0
    dropout: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    gone: list[fx.Node] = field(default_factory=list)


class Search:
    """Goes from the last product back to the first."""

    def __init__(self, values: Values, autocasts: dict[fx.Node, Autocast]) -> None:
        self._values, self._autocasts = values, autocasts

    def at(self, output: fx.Node) -> Found | None:
        """Returns the attention whose last product this node is."""
        last = product_of(output)
        if last is None or last.transposes:
            return None
        weights = last.one
        found = Found(output, last.other, gone=[output])
        node = self._to_softmax(weights, found)
        while node is not None and product_of(node) is None:
            node = self._through_score(node, found)
        if node is None or len(node.users) != 1:
            return None
        found.gone.append(node)
        found.scores = product_of(node)
        if not same_sizes(
            shape_of(node), shape_of(weights)
        ):  # a mask that makes more of the scores
            return None
        if any(self._autocasts[gone] != self._autocasts[output] for gone in found.gone):
            return None
        return found

    def _to_softmax(self, node: fx.Node | None, found: Found) -> fx.Node | None:
        """Returns what the softmax is taken of, having passed casts and dropouts of the weights."""
        while node is not None and len(node.users) == 1:
            name = name_of(node)
            found.gone.append(node)
            if name == "softmax":
                last = argument_of(node, 1, "dim") in (-1, dims_of(node) - 1)
                return first_of(node) if last else None
            if name == "dropout":
                p, training = argument_of(node, 1, "p", 0.5), argument_of(node, 2, "training", True)
                if not isinstance(p, (int, float)) or not isinstance(training, bool):
                    return None
                if training and p:
                    if found.dropout:
                        return None
                    found.dropout = float(p)
            elif name not in KEEPS:
                return None
            node = first_of(node)
        return None

    def _through_score(self, node: fx.Node, found: Found) -> fx.Node | None:
        """Returns the scores before this node, which scales, masks or casts them; None if it does something else."""
        if len(node.users) != 1:
            return None
        name = name_of(node)
        found.gone.append(node)
        if name in KEEPS:
            return first_of(node)
        if name in SCALES:
            return self._scale(node, found, divides="div" in name)
        if found.scale != 1.0:  # what comes before a scaling is scaled by it, masks too
            return None
        if name in ("add", "iadd", "add_") and not node.kwargs and len(node.args) == 2:
            return self._added(node, found)
        scores, hidden, value, keeps = self._filled(node, name)
        if scores is None or hidden is None or value is None:
            return None
        found.masks.append(Mask(hidden, value, keeps))
        return scores

    def _scale(self, node: fx.Node, found: Found, divides: bool) -> fx.Node | None:
        if node.kwargs or len(node.args) != 2:
            return None
        scores, factor = node.args
        if not divides and self._number(factor) is None:
            scores, factor = factor, scores
        number = self._number(factor)
        if not number or number <= 0 or not isinstance(scores, fx.Node):
            return None
        found.scale = found.scale / number if divides else found.scale * number
        return scores

    def _added(self, node: fx.Node, found: Found) -> fx.Node | None:
        scores, mask = node.args
        if not isinstance(scores, fx.Node) or not isinstance(mask, fx.Node):
            return None
        if not comes_of_product(scores):
            scores, mask = mask, scores
        found.masks.append(Mask(mask))
        return scores

    def _filled(
        self, node: fx.Node, name: str
    ) -> tuple[fx.Node | None, fx.Node | None, float | None, bool]:
        """Returns scores, mask, the number that is filled in, and whether the mask says what is kept."""
        if name in ("masked_fill", "masked_fill_"):
            hidden, value = argument_of(node, 1, "mask"), argument_of(node, 2, "value")
            return first_of(node), as_node(hidden), self._number(value), False
        if name == "where" and node.op == "call_function" and len(node.args) == 3:
            condition, one, other = node.args
            if self._number(other) is not None:
                return as_node(one), as_node(condition), self._number(other), True
            return as_node(other), as_node(condition), self._number(one), False
        return None, None, None, False

    def _number(self, thing: Any) -> float | None:
        """Returns a number that is written in the graph, also as a tensor without dimensions."""
        if isinstance(thing, (int, float)) and not isinstance(thing, bool):
            return float(thing)
        if not isinstance(thing, fx.Node) or dims_of(thing) != 0:
            return None
        try:
            value = self._values.of(thing)
        except Unknown:
            return None
        return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None
