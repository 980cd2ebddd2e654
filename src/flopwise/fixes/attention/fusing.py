"""Attention written out as products and a softmax, replaced by the fused operator in a traced graph.

softmax(q @ k^T * scale, masked) [dropped out] @ v becomes `scaled_dot_product_attention`: with `is_causal` where the mask
comes from buffers and constants and hides every later place and no other, without a mask where it hides nothing, else
with the mask as it is. It is done to the graph that Dynamo has traced, before Inductor sees it, so that Inductor's caches
keep the result under its own key and no setting of the process is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from flopwise.fixes.attention.dropping import drop_masks
from flopwise.fixes.attention.known_masks import MASKED, KnownTensors, Unknown, Values, kind_of
from flopwise.fixes.attention.reading import (
    Autocast,
    Product,
    autocasts,
    computes_in,
    dims_of,
    name_of,
    product_of,
    same_sizes,
    tensor_of,
)
from flopwise.fixes.attention.search import Found, Mask, Search

#: What stands for "hidden" in a mask of numbers: added to a score of float32 or bfloat16 it swallows the score, as the
#: numbers in use do (-1e9, the lowest of a dtype), so that a row of which everything is hidden stays uniform; and it
#: is small enough for a kernel to multiply.
_HIDDEN = -1e30


class AttentionBackend:
    """Compiles with Inductor what is left of a graph once its written-out attention is fused.

    Args:
        modules: those that are compiled; their buffers are what masks are read from.
        compile_graph: compiles a graph given its inputs; Inductor if not given.
        mode: of Inductor, as torch.compile names it.
    """

    compiler_name = "inductor"

    def __init__(
        self,
        modules: Sequence[nn.Module],
        compile_graph: Callable[[fx.GraphModule, Any], Any] | None = None,
        mode: str = "default",
    ) -> None:
        self.known = KnownTensors(modules)
        self.mode = mode
        self.replaced: list[int] = []  # attentions that were written out, in each graph
        self.unmasked: list[int] = []  # attentions that were fused already and lost a mask
        self._compile = compile_graph or _inductor(mode)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Returns the compiled graph."""
        done = _rewrite(graph, Values(graph, inputs, self.known))
        self.replaced.append(done[0])
        self.unmasked.append(done[1])
        return self._compile(graph, inputs, **options)

    def get_compiler_config(self) -> Any:
        """Returns Inductor's settings, as Dynamo asks for them."""
        return getattr(self._compile, "get_compiler_config", dict)()

    def reset(self) -> None:
        """Passes a reset of the compiler on."""
        reset = getattr(self._compile, "reset", None)
        if reset is not None:
            reset()

    def words(self) -> str | None:
        """Returns what was done to the graph with the most of it, None where nothing was."""
        fused, unmasked = max(self.replaced, default=0), max(self.unmasked, default=0)
        said = [f"replaced {fused}"] * (fused > 0) + [f"without masks {unmasked}"] * (unmasked > 0)
        return ", ".join(said) or None


def _rewrite(graph: fx.GraphModule, values: Values) -> tuple[int, int]:
    """Returns how many attentions of a graph, and of those that it calls, were replaced, and how many lost a mask."""
    replaced = unmasked = 0
    for inner, inner_values in values.inside():
        done = _rewrite(inner, inner_values)
        replaced, unmasked = replaced + done[0], unmasked + done[1]
    return replaced + fuse_attention(graph, values), unmasked + drop_masks(graph, values)


def _inductor(mode: str) -> Callable[..., Any]:
    wrapper: Callable[..., Any] = torch._TorchCompileInductorWrapper(mode, None, None)
    return wrapper


def fuse_attention(graph: fx.GraphModule, values: Values) -> int:
    """Returns how many attentions were replaced in the graph; what is not understood is left as it is."""
    around = autocasts(graph.graph)
    count = 0
    for node in list(graph.graph.nodes):
        found = Search(values, around).at(node) if product_of(node) is not None else None
        if found is not None and _replace(graph.graph, found, values, around[node]):
            count += 1
    if count:
        graph.graph.lint()
        graph.recompile()
    return count


def _replace(graph: fx.Graph, found: Found, values: Values, autocast: Autocast) -> bool:
    """Puts the fused operator in the place of the last product; returns False where that would not be the same."""
    scores, made = found.scores, tensor_of(found.output)
    if scores is None or made is None or not _fits(scores, found.value, autocast):
        return False
    computes = computes_in(scores.one, autocast)
    if _slower_fused(made.device, computes):
        return False
    kinds = [_kind(mask, values) for mask in found.masks]
    unknown = any(kind is None for kind in kinds)
    if unknown and not all(_may_be_passed(mask, computes) for mask in found.masks):
        return False
    with graph.inserting_before(found.output):
        mask = _combined(graph, found.masks, computes) if unknown else None
        causal = mask is None and "later" in kinds
        operands = (scores.one, _keys(graph, scores), found.value)
        result = _fused(graph, operands, mask, found, causal, flat=made.dim() == 3)
        if made.dtype != computes:
            result = graph.call_method("to", (result, made.dtype))
    result.meta.update(found.output.meta)
    found.output.replace_all_uses_with(result)
    for node in found.gone:
        if not node.users:
            graph.erase_node(node)
    return True


def _fused(
    graph: fx.Graph,
    operands: tuple[fx.Node, ...],
    mask: fx.Node | None,
    found: Found,
    causal: bool,
    flat: bool,
) -> fx.Node:
    """Returns the fused operator; where batch and heads are one dimension it gets four, as fused kernels want them."""
    if flat:
        operands = tuple(graph.call_method("unsqueeze", (node, 0)) for node in operands)
    settings: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": found.dropout,
        "is_causal": causal,
        "scale": found.scale,
    }
    fused = graph.call_function(F.scaled_dot_product_attention, operands, settings)
    return graph.call_method("squeeze", (fused, 0)) if flat else fused


def _keys(graph: fx.Graph, scores: Product) -> fx.Node:
    """Returns the keys as they were before they were transposed."""
    keys = scores.other
    if scores.transposes:
        return keys
    if name_of(keys) in ("transpose", "swapaxes") and len(keys.args) == 3:
        source, one, other = keys.args
        dims = dims_of(keys)
        swapped = isinstance(one, int) and isinstance(other, int)
        swapped = swapped and {one % dims, other % dims} == {dims - 1, dims - 2}  # type: ignore[operator]
        if swapped and isinstance(source, fx.Node):
            return source
    return graph.call_method("transpose", (keys, -2, -1))


def _fits(scores: Product, value: fx.Node, autocast: Autocast) -> bool:
    """Whether sizes and dtypes are those of an attention without broadcasting."""
    operands = (scores.one, scores.other, value)
    tensors = [t for node in operands if (t := tensor_of(node)) is not None]
    if len(tensors) != 3 or not all(t.is_floating_point() for t in tensors):
        return False
    if len({t.dtype for t in tensors}) != 1 and not autocast.on:
        return False
    q, k, v = (tuple(t.shape) for t in tensors)
    if not len(q) == len(k) == len(v) or len(q) not in (3, 4):
        return False
    batches = same_sizes(q[:-2], k[:-2]) and same_sizes(k[:-2], v[:-2])
    width, length = (k[-1], k[-2]) if scores.transposes else (k[-2], k[-1])
    return batches and same_sizes((q[-1], length), (width, v[-2]))


def _slower_fused(device: torch.device, computes: torch.dtype) -> bool:
    """Whether products of tensor cores would give way to a fused kernel without: float32 on a GPU with TF32 on.

    Source: an H200, torch 2.11: fused attention in float32 runs without tensor cores, products in TF32 with them.
    """
    on_gpu = device.type == "cuda" and computes == torch.float32
    return on_gpu and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _kind(mask: Mask, values: Values) -> str | None:
    """Returns what a mask hides, see `kind_of`; None also where that is not known before the step."""
    if mask.value is not None and mask.value > MASKED:
        return None
    try:
        value = values.of(mask.hidden)
    except Unknown:
        return None
    if mask.value is not None and isinstance(value, torch.Tensor):
        if value.dtype != torch.bool:
            return None
        value = ~value if mask.keeps else value
    return kind_of(value)


def _may_be_passed(mask: Mask, computes: torch.dtype) -> bool:
    """Whether a mask can be given to the operator; of learned ones fused kernels have no gradient."""
    tensor = tensor_of(mask.hidden)
    if tensor is None or tensor.requires_grad:
        return False
    if mask.value == -math.inf:
        return tensor.dtype == torch.bool
    if computes == torch.float16:
        return False
    if mask.value is not None:
        return mask.value <= MASKED and tensor.dtype == torch.bool
    return tensor.is_floating_point()


def _combined(graph: fx.Graph, masks: list[Mask], computes: torch.dtype) -> fx.Node:
    """Returns one mask for all: bool (True is kept) where all hide by minus infinity, else numbers."""
    kept: fx.Node | None = None
    added: fx.Node | None = None
    for mask in masks:
        if mask.value is None:
            one = graph.call_method("clamp", (mask.hidden,), {"min": _HIDDEN})
            one = graph.call_method("to", (one, computes))
        else:
            one = mask.hidden
            if not mask.keeps:
                one = graph.call_function(torch.logical_not, (one,))
            if mask.value == -math.inf:
                kept = one if kept is None else graph.call_function(torch.logical_and, (kept, one))
                continue
            zeros = graph.call_function(torch.zeros_like, (one,), {"dtype": computes})
            hidden = graph.call_function(torch.logical_not, (one,))
            one = graph.call_method("masked_fill", (zeros, hidden, _HIDDEN))
        added = one if added is None else graph.call_function(torch.add, (added, one))
    if added is None:
        assert kept is not None
        return kept
    if kept is not None:
        zeros = graph.call_function(torch.zeros_like, (kept,), {"dtype": computes})
        hidden = graph.call_function(torch.logical_not, (kept,))
        one = graph.call_method("masked_fill", (zeros, hidden, -math.inf))
        added = graph.call_function(torch.add, (added, one))
    return added
