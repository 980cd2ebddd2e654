"""Attention within the sequences of one packed row, under a name of its own among the attentions of transformers.

The sequences lie one behind the other in a row (1, T); their ends are known to the kernels, so nothing is computed between two of
them: flash attention for halves, the memory-efficient kernel for float32, both of torch. On a CPU each sequence is
attended alone. Compiled code on a CPU or in float32 attends to all together under a block-diagonal mask: the compiler
cannot trace the backward of the memory-efficient kernel (`meta__efficient_attention_backward` lacks an argument in
torch 2.11 to 2.13), and code for each set of lengths would be new code for each batch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

#: The name under which transformers finds it.
NAME = "flopwise_unpadded"
#: What attention functions are given beyond queries, keys and values, and this one has no use for.
#: Source: `attention_interface(...)` calls in transformers/models, 4.56 to 5.24.
UNSERVED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q")
#: Largest head of the flash attention kernels. Source: Dao-AILab/flash-attention, README.
LARGEST_HEAD = 256
#: Rows of more positions are not masked.
MOST_MASKED = 8192

_HALVES = (torch.float16, torch.bfloat16)


class Unfit(Exception):
    """A call that cannot be made without padding."""


@dataclass
class Segments:
    """The sequences of one packed row of T positions."""

    ends: torch.Tensor  # (N + 1,) int32: 0, and where each sequence ends
    longest: int  # no sequence is longer
    lengths: Sequence[int]  # of each


class _Current:
    """The row that is computed now. One attribute each: compiled code reads them anew in every call."""

    ends: torch.Tensor | None = None
    longest: int = 0
    lengths: Sequence[int] = ()


_NOW = _Current()


@contextmanager
def over(segments: Segments, config: Any) -> Iterator[None]:
    """Runs a model of this configuration with attention within these sequences."""
    before = config._attn_implementation
    _NOW.ends, _NOW.longest = segments.ends, segments.longest
    _NOW.lengths = segments.lengths
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _NOW.ends, _NOW.lengths = None, ()


def register() -> None:
    """Lets transformers find the attention. No mask is made for a name that its masks do not know."""
    importlib.import_module("torch.nn.attention.varlen")  # not only when it is first traced
    _interface().register(NAME, attend)


def unregister() -> None:
    """Takes the name out again."""
    _interface()._global_mapping.pop(NAME, None)


def interface_problem() -> str | None:
    """Returns why attention cannot be put in, or None."""
    try:
        interface = _interface()
    except (KeyError, AttributeError):
        return "this transformers has no interface for attentions"
    if not callable(getattr(interface, "register", None)) or not isinstance(
        getattr(interface, "_global_mapping", None), dict
    ):
        return "this transformers has another interface for attentions"
    return None


def _interface() -> Any:
    return sys.modules["transformers.modeling_utils"].AttentionInterface


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Returns attention within the sequences of the current row, (1, T, H, D), and no weights.

    Args:
        query: (1, H, T, D); keys and values may have fewer heads.

    Raises:
        Unfit: the model asks for what this cannot do.
    """
    _look(query, key, attention_mask, kwargs)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as for scaled_dot_product_attention
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    if torch.compiler.is_compiling() and (kind == "cpu" or query.dtype not in _HALVES):
        return _masked(query, key, value, dropout, scaling, causal), None
    attended = _on_cuda if kind == "cuda" else _one_by_one
    return attended(query, key, value, dropout, scaling, causal), None


def _look(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, more: dict[str, Any]
) -> None:
    if _NOW.ends is None:
        raise Unfit("attention is computed outside of the model's own call")
    if mask is not None:
        raise Unfit("the model makes a mask of its own for its attention")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise Unfit("attention is not within one row of tokens")
    for name in UNSERVED:
        if more.get(name) is not None:
            raise Unfit(f"the model gives its attention a {name}")
    if not torch.compiler.is_compiling() and _recomputed():
        raise Unfit("activations are computed again in the backward, outside of the model's call")


def _recomputed() -> bool:
    """Whether this part of the forward will run again in the backward (torch.utils.checkpoint)."""
    if not torch.is_grad_enabled():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """Returns (1, T, H, D), one sequence after the other."""
    parts = [t.split(list(_NOW.lengths), dim=2) for t in (query, key, value)]
    found = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=causal)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """Returns (1, T, H, D), all sequences together under a mask; the compiler makes it once for all layers."""
    ends = _NOW.ends
    assert ends is not None
    places = torch.arange(query.shape[2], device=query.device)
    member = (places[:, None] >= ends[None, 1:]).sum(1)
    allowed = member[:, None] == member[None]
    if causal:
        allowed = allowed & (places[:, None] >= places[None])
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, dropout_p=dropout, scale=scaling
    )
    return found.transpose(1, 2).contiguous()


def _on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """Returns (1, T, H, D) from torch's kernels for sequences of any length."""
    ends, longest = _NOW.ends, _NOW.longest
    assert ends is not None
    aten: Any = torch.ops.aten
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # (1, T, H, D)
    reason = kernel_problem(q.dtype, q.shape[-1], v.shape[-1])
    if reason is not None:
        raise Unfit(reason)
    if q.dtype == torch.float32:
        found = aten._efficient_attention_forward(
            q, k, v, None, ends, ends, longest, longest, dropout, int(causal), True, scale=scaling
        )
        row: Any = found[0][0]
        return row[None].contiguous()  # type: ignore[no-any-return]
    q, k, v = q[0], k[0], v[0]
    if torch.compiler.is_compiling() and not dropout:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if causal else (-1, -1)
        row = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window)
    else:  # the kernel under it, without the time that a Python operator takes
        row = aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, dropout, causal, False, scale=scaling
        )[0]
    return row[None].contiguous()  # type: ignore[no-any-return]


def kernel_problem(dtype: torch.dtype, head: int, value_head: int) -> str | None:
    """Returns why torch's kernels for sequences of any length do not serve heads of this size, or None.

    Source: `check_head_dim_size_flash` and `check_head_dim_size_mem_efficient` in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11.
    """
    if dtype not in (torch.float32, *_HALVES):
        return (
            f"no kernel for sequences of any length computes in {str(dtype).removeprefix('torch.')}"
        )
    if head != value_head or head > LARGEST_HEAD:
        return f"no kernel for sequences of any length serves heads of {head} and {value_head}"
    if head % (4 if dtype == torch.float32 else 8):
        return f"no kernel for sequences of any length serves heads of {head}"
    return None
