"""Masks that are given to fused attention though they are not needed: left out of a traced graph.

A mask that hides nothing goes, and for one that hides every later place and no other the causal flag stands. The fastest
kernels know the flag and no masks. transformers builds such masks while its models are traced (5.17: `is_tracing` in
masking_utils.py), and leaves them out otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flopwise.fixes.attention.known_masks import Unknown, Values, kind_of
from flopwise.fixes.attention.reading import argument_of, as_node, name_of

#: Where `scaled_dot_product_attention` has its mask and its flag.
_MASK, _CAUSAL = 3, 5
#: Where `multi_head_attention_forward` has extra keys and values, which a mask does not speak of.
_BIAS_K, _BIAS_V, _ADD_ZERO = 7, 8, 9


def drop_masks(graph: fx.GraphModule, values: Values) -> int:
    """Returns how many attentions of the graph lost their mask."""
    count = 0
    for node in graph.graph.nodes:
        name = name_of(node)
        if name == "scaled_dot_product_attention":
            count += _from_fused(node, values)
        elif name == "multi_head_attention_forward":
            count += _from_layer(node, values)
    if count:
        graph.recompile()
    return count


def _from_fused(node: fx.Node, values: Values) -> bool:
    mask = as_node(argument_of(node, _MASK, "attn_mask"))
    if mask is None or argument_of(node, _CAUSAL, "is_causal", False) is not False:
        return False
    kind = _kind(mask, values, keeps=True)
    if kind is None:
        return False
    _set(node, _MASK, "attn_mask", None)
    _set(node, _CAUSAL, "is_causal", kind == "later")
    return True


def _from_layer(node: fx.Node, values: Values) -> bool:
    """Changes a node of torch's own layer: it leaves the mask out itself where it is told that it is causal."""
    mask, settings = as_node(node.kwargs.get("attn_mask")), node.kwargs
    if mask is None or settings.get("is_causal") or settings.get("need_weights", True):
        return False
    if len(node.args) <= _ADD_ZERO or node.args[_ADD_ZERO] is not False:
        return False
    if node.args[_BIAS_K] is not None or node.args[_BIAS_V] is not None:
        return False
    kind = _kind(mask, values, keeps=False)
    if kind == "nothing":
        node.kwargs = {**settings, "attn_mask": None}
    elif kind == "later" and settings.get("key_padding_mask") is None:
        node.kwargs = {**settings, "is_causal": True}
    else:
        return False
    return True


def _kind(mask: fx.Node, values: Values, keeps: bool) -> str | None:
    try:
        value = values.of(mask)
    except Unknown:
        return None
    if keeps and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        value = ~value
    return kind_of(value)


def _set(node: fx.Node, place: int, name: str, value: Any) -> None:
    if len(node.args) > place:
        node.args = (*node.args[:place], value, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
