"""Scaled dot-product attention in its fused forms: two products forward, four backward, one more recomputed.

Forward, for each query head and each pair of a query and a key that is counted: 2 d for the score and 2 d_v for the
weighted value. Backward needs dV, dP, dQ and dK, twice the forward, or as many of them as autograd asks for (keys of a
frozen encoder want none). A fused backward always computes them all, and the scores again, 2 d a pair: executed, not
needed. With grouped queries the scores still have one plane a query head.

"Full" counts all T_q T_k pairs (PaLM, arXiv:2204.02311, appendix B); "causal" only those that the mask or the
window leaves, exactly: T (T + 1) / 2 for a square causal mask.
Source: FlashAttention-2, arXiv:2307.08691, section 2 and algorithm 2 (the five products of the backward pass).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from flopwise.flops.call import WANTED, Call, Cost, Operand, Shape

TOP_LEFT = "top left"
BOTTOM_RIGHT = "bottom right"


@dataclass(frozen=True)
class Heads:
    """Query heads times sequences, and the depths of the two products."""

    planes: int
    d_qk: int
    d_v: int

    def cost(
        self,
        full: int,
        visible: int,
        wanted: tuple[bool, ...] | None = None,
        note: str | None = None,
    ) -> Cost:
        """Returns the cost of `full` pairs of query and key a plane, of which `visible` are not masked.

        Args:
            wanted: None for a forward pass; for a backward pass, whether the gradients of q, k and v are asked for.
                A fused kernel computes them all, and the scores again.
        """
        if wanted is None:
            needed = executed = 2 * (self.d_qk + self.d_v)
        else:
            to_q, to_k, to_v = wanted[:3]
            depths = self.d_v * (to_v + (to_q or to_k)) + self.d_qk * (to_q + to_k)
            needed, executed = 2 * depths, 2 * (3 * self.d_qk + 2 * self.d_v)
        return Cost(
            self.planes * full * needed,
            self.planes * visible * needed,
            self.planes * full * executed,
            note,
        )


def visible_pairs(t_q: int, t_k: int, corner: str | None, left: int = -1, right: int = -1) -> int:
    """Returns how many pairs of query i and key j a mask leaves of t_q by t_k.

    Args:
        corner: where the diagonal of a causal mask starts, `TOP_LEFT` (torch's `is_causal`) or `BOTTOM_RIGHT`
            (FlashAttention from 2.1 on); None: no causal mask. Windows are measured from the bottom right diagonal
            unless the corner says otherwise.
        left: keys before the diagonal that a window shows, -1: all. right: keys after it, -1: all.
    """
    shift = 0 if corner == TOP_LEFT else t_k - t_q
    if corner is not None:
        right = 0
    end = _clipped_sum(shift + right + 1, t_q, t_k) if right >= 0 else t_q * t_k
    begin = _clipped_sum(shift - left, t_q, t_k) if left >= 0 else 0
    return max(0, end - begin)


def sdpa(call: Call) -> Cost:
    """Returns the cost of `scaled_dot_product_attention` and its fused forms: tensors are (..., heads, T, d)."""
    return _dense(call, backward=False, time_axis=-2)


def sdpa_backward(call: Call) -> Cost:
    """Returns the cost of the gradients of a fused attention: tensors are (..., heads, T, d)."""
    return _dense(call, backward=True, time_axis=-2)


def flash(call: Call) -> Cost:
    """Returns the cost of a flash or efficient kernel: (batch, T, heads, d), or packed (tokens, heads, d)."""
    return _packed(call, False) if _cumulative(call, "q") else _dense(call, False, time_axis=-3)


def flash_backward(call: Call) -> Cost:
    """Returns the cost of the gradients of a flash or efficient kernel."""
    return _packed(call, True) if _cumulative(call, "q") else _dense(call, True, time_axis=-3)


def cudnn(call: Call) -> Cost:
    """Returns the cost of `_cudnn_attention_forward`: (batch, heads, T, d), or packed with cumulative lengths."""
    return _packed(call, False) if _is_packed(call) else _dense(call, False, time_axis=-2)


def cudnn_backward(call: Call) -> Cost:
    """Returns the cost of the gradients of `_cudnn_attention_forward`."""
    return _packed(call, True) if _is_packed(call) else _dense(call, True, time_axis=-2)


def flex(call: Call) -> Cost:
    """Returns the cost of `flex_attention`; causal counts the blocks that the block mask keeps, each in full."""
    return _flex(call, backward=False)


def flex_backward(call: Call) -> Cost:
    """Returns the cost of the gradients of `flex_attention`."""
    return _flex(call, backward=True)


def encoder_layer(call: Call) -> Cost:
    """Returns the FLOPs of `_transformer_encoder_layer_fwd`: attention block and two feed-forward products."""
    source, width = call.tensor("src"), call.tensor("qkv_weight").shape[1]
    batch, steps = math.prod(source.shape[:-2]), source.shape[-2]
    ffn = call.tensor("ffn_weight_1").numel + call.tensor("ffn_weight_2").numel
    flops = _block(batch, steps, steps, width) + 2 * batch * steps * ffn
    return Cost(flops, flops, flops, _mask_note(call.maybe("mask")))


def multi_head(call: Call) -> Cost:
    """Returns the FLOPs of `_native_multi_head_attention`: projections, scores, values, output projection."""
    query, key = call.tensor("query").shape, call.tensor("key").shape
    flops = _block(math.prod(query[:-2]), query[-2], key[-2], query[-1])
    return Cost(flops, flops, flops, _mask_note(call.maybe("mask")))


def _dense(call: Call, backward: bool, time_axis: int) -> Cost:
    _refuse_partly_used_keys(call)
    query, key, value = (call.tensor(*names) for names in _QKV)
    t_q, t_k = query.shape[time_axis], key.shape[time_axis]
    heads = Heads(_planes(query.shape, time_axis), query.shape[-1], value.shape[-1])
    bias = call.maybe("attn_mask", "attn_bias", "bias")
    hidden = bias is not None and bias.numel > 0
    visible = visible_pairs(t_q, t_k, _corner(call), *_window(call))
    wanted = _wanted(call) if backward else None
    return heads.cost(t_q * t_k, visible, wanted, MASK_NOTE if hidden else None)


def _packed(call: Call, backward: bool) -> Cost:
    """Returns the cost of sequences laid end to end: sum of L_q L_k over them, not the square of their sum."""
    _refuse_partly_used_keys(call)
    query, value = call.tensor(*_QKV[0]), call.tensor(*_QKV[2])
    q_ends = _cumulative(call, "q")
    k_ends = _cumulative(call, "k") or q_ends
    if q_ends is None or q_ends.values is None or k_ends is None or k_ends.values is None:
        raise LookupError(f"{call.name}: the lengths of the packed sequences are not visible")
    pairs = list(zip(_lengths(q_ends.values), _lengths(k_ends.values), strict=True))
    corner, window = _corner(call), _window(call)
    heads = Heads(query.shape[-2], query.shape[-1], value.shape[-1])
    full = sum(t_q * t_k for t_q, t_k in pairs)
    visible = sum(visible_pairs(t_q, t_k, corner, *window) for t_q, t_k in pairs)
    return heads.cost(full, visible, _wanted(call) if backward else None)


def _flex(call: Call, backward: bool) -> Cost:
    query, key, value = (call.tensor(*names) for names in _QKV)
    planes, t_q, t_k = _planes(query.shape, -2), query.shape[-2], key.shape[-2]
    full = t_q * t_k
    kept = [call.maybe("kv_num_blocks"), call.maybe("full_kv_num_blocks")]
    blocks = [b for b in kept if b is not None]
    heads = Heads(planes, query.shape[-1], value.shape[-1])
    wanted = _wanted(call) if backward else None
    block_q = call.integer("block_q", default=128)
    block_kv = call.integer("block_kv", default=128)
    if not blocks or (block_q >= t_q and block_kv >= t_k):  # no mask is one block of them all
        return heads.cost(full, full, wanted)
    if any(b.values is None for b in blocks):
        return heads.cost(
            full, full, wanted, "the blocks of a flex_attention mask were not visible"
        )
    area = block_q * block_kv
    # The block mask may be shared by sequences and heads: its own planes stand for an equal share of ours.
    shared = math.prod(blocks[0].shape[:-1])
    visible = sum(sum(b.values or ()) for b in blocks) * area // shared
    cost = heads.cost(full, min(full, visible), wanted)
    note = "flex_attention: block sparse" if visible < full else None
    return Cost(cost.needed, cost.needed_causal, cost.executed, note)


def _block(batch: int, t_q: int, t_k: int, width: int) -> int:
    """Returns the FLOPs of the q, k, v and output projections and of both attention products."""
    projections = 2 * width * width * (2 * t_q + 2 * t_k)
    return batch * (projections + 4 * t_q * t_k * width)


#: Arguments that say how many of the keys are used, or in which pages of a cache they lie.
_PARTLY_USED = (
    "seqused_q",
    "seqused_k",
    "sequed_q",  # as flash_attn_3 spells it in places
    "sequed_k",
    "seqlen_k",
    "leftpad_k",
    "block_table",
    "block_tables",
    "page_table",
    "k_new",
)


def _refuse_partly_used_keys(call: Call) -> None:
    """Raises LookupError where the shapes of the keys do not say how many of them are used."""
    for name in _PARTLY_USED:
        if call.maybe(name) is not None:
            raise LookupError(f"{call.name}: only a part of the keys is used ({name})")


def _wanted(call: Call) -> tuple[bool, ...]:
    """Returns whether the gradients of q, k and v are asked for; all of them where nothing tells."""
    return call.mask("grad_input_mask" if "grad_input_mask" in call.args else WANTED, 3)


_QKV = (("query", "q"), ("key", "k"), ("value", "v"))
MASK_NOTE = (
    "attention with a mask tensor is counted full in both conventions: its values were not read"
)


def _mask_note(mask: Operand | None) -> str | None:
    return MASK_NOTE if mask is not None else None


def _planes(shape: Shape, time_axis: int) -> int:
    """Returns sequences times heads: every dimension but time and depth."""
    return math.prod(shape) // (shape[time_axis] * shape[-1]) if math.prod(shape) else 0


def _corner(call: Call) -> str | None:
    """Returns where a causal mask starts, None without one."""
    kind = call.integer(
        "custom_mask_type", default=0
    )  # 0 none, 1 from the top left, 2 from the bottom right
    if kind:
        return TOP_LEFT if kind == 1 else BOTTOM_RIGHT
    if not call.flag("is_causal", "causal"):
        return None
    return TOP_LEFT if "scaled_dot_product" in call.name else BOTTOM_RIGHT


def _window(call: Call) -> tuple[int, int]:
    sizes = call.args.get("window_size")
    if isinstance(sizes, tuple) and len(sizes) == 2:
        return int(sizes[0]), int(sizes[1])
    if (
        isinstance(sizes, int) and sizes > 0
    ):  # efficient attention: keys up to `window_size - 1` before the query
        return sizes - 1, -1
    return (
        call.integer("window_size_left", "window_left", default=-1),
        call.integer("window_size_right", "window_right", default=-1),
    )


def _cumulative(call: Call, side: str) -> Operand | None:
    names = ("cum_seq", "cu_seqlens", "cu_seq", "seqstart")
    ends = call.maybe(*(f"{name}_{side}" for name in names))
    return ends if ends is not None and ends.numel else None


def _is_packed(call: Call) -> bool:
    return _cumulative(call, "q") is not None and len(call.tensor(*_QKV[0]).shape) == 3


def _lengths(ends: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in pairwise(ends)]


def _clipped_sum(start: int, n: int, top: int) -> int:
    """Returns the sum over i < n of start + i, each clipped to 0..top."""
    low = min(max(-start, 0), n)  # terms below 0
    high = min(max(top - start, low), n)  # the first term at the top
    count = high - low
    return count * (start + low) + count * (count - 1) // 2 + (n - high) * top
