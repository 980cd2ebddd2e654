"""The loss of a language model from its head's input, with the logits of some places at a time.

The gradients of the head's input and weight are made beside the loss, chunk by chunk, so that no logits outlive their
chunk: the products are as many as in the plain form. Sums over chunks are in float32 where the products are in less.

Source: the idea of making the gradients in the forward, B. Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM
Training, 2024, https://arxiv.org/abs/2410.10989, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from flopwise.fixes.labelled_loss import Loss

#: What the float32 logits of a chunk take at most, by kind of device: on a GPU enough rows for products at full speed;
#: on a core of an AMD EPYC 256 rows of a vocabulary of 32000 took 0.65 of the plain form's time, 64 and 512 rows 0.73.
CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
#: Rows of a chunk at the least: with fewer, products wait for their weight.
LEAST_ROWS = {"cuda": 1024, "cpu": 128}
#: On a GPU the vocabulary is padded to a multiple of so many within a chunk: tensor cores load 128 bytes of bfloat16 at
#: once. Source: 50257 against 50304 outputs on an H200, docs/kit/memory.md.
MULTIPLE = 64


class Kind(NamedTuple):
    """What a chunk is computed by."""

    dtype: torch.dtype  # of the products
    wide: torch.dtype  # of everything else
    classes: int
    ignore_index: int
    label_smoothing: float


Piece = Callable[
    [torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, Kind],
    "tuple[torch.Tensor, torch.Tensor]",
]


def chunk_rows(places: int, classes: int, device: str) -> int:
    """Returns the rows of a chunk: chunks of one size where the number of places can be divided so, or all places."""
    most = max(LEAST_ROWS[device], CHUNK_BYTES[device] // (4 * classes))
    fewest = math.ceil(places / most)
    for chunks in range(fewest, 2 * fewest):
        if places % chunks == 0 and places // chunks >= LEAST_ROWS[device]:
            return places // chunks
    return min(places, most)


def piece(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    kind: Kind,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the losses of some rows, and the gradient of it that their logits have.

    Rows whose target is ignored have no part in the sum; their gradients are those of target 0, for the caller to leave
    out. Columns beyond the classes have gradient 0.
    """
    logits = F.linear(hidden, weight, bias)
    padded = logits.shape[-1] > kind.classes
    compiled = torch.compiler.is_compiling()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    if padded and compiled:
        logits = logits.masked_fill(columns >= kind.classes, -math.inf)
    elif padded:
        logits[:, kind.classes :] = -math.inf
    made = torch.log_softmax(logits, -1, dtype=kind.wide)
    valid = targets != kind.ignore_index
    at = torch.where(valid, targets, 0)[:, None]
    losses = -made.gather(-1, at)[:, 0]
    smooth = kind.label_smoothing
    if smooth:
        uniform = -made[:, : kind.classes].sum(-1) / kind.classes
        losses = (1 - smooth) * losses + smooth * uniform
    loss = torch.where(valid, losses, 0).sum()
    if compiled:  # into one kernel; a scatter would need memory for what it writes to
        grad = made.exp() - torch.where(columns == at, 1 - smooth, 0.0)
        if smooth:
            grad = grad - torch.where(columns < kind.classes, smooth / kind.classes, 0.0)
        return loss, grad.to(kind.dtype)
    made.exp_()
    made.scatter_add_(-1, at, torch.full_like(at, smooth - 1, dtype=kind.wide))
    if smooth:
        made[:, : kind.classes] -= smooth / kind.classes
    return loss, made.to(kind.dtype)


@dataclass(frozen=True)
class _How:
    """What a call is made by."""

    kind: Kind
    rows: int
    piece: Piece
    mean: bool
    pad: int


class _Chunked(torch.autograd.Function):
    """The loss; its gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, targets: torch.Tensor, how: _How
    ) -> torch.Tensor:
        kind = how.kind
        with torch.autocast(hidden.device.type, enabled=False):
            low = _padded(weight.to(kind.dtype), how.pad)
            low_bias = None if bias is None else _padded(bias.to(kind.dtype), how.pad)
            wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
            total = torch.zeros((), dtype=kind.wide, device=hidden.device)
            grad_hidden = torch.empty_like(hidden) if wants_hidden else None
            grad_weight = torch.zeros_like(low, dtype=kind.wide) if wants_weight else None
            grad_bias = low.new_zeros(low.shape[0], dtype=kind.wide) if wants_bias else None
            for start in range(0, hidden.shape[0], how.rows):
                rows = slice(start, start + how.rows)
                some, chosen = hidden[rows].to(kind.dtype), targets[rows]
                loss, grad = how.piece(some, low, low_bias, chosen, kind)
                total += loss
                counts = (chosen != kind.ignore_index).to(kind.dtype)[:, None]
                if grad_hidden is not None:
                    grad_hidden[rows].copy_((grad @ low).mul_(counts))
                if grad_weight is not None:
                    grad_weight += grad.t() @ (some * counts)
                if grad_bias is not None:
                    grad_bias += (grad * counts).sum(0, dtype=kind.wide)
                del grad
            number = (targets != kind.ignore_index).sum() if how.mean else None
        ctx.mean = how.mean
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        cut = slice(0, kind.classes)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight[cut],
            None if grad_bias is None else grad_bias[cut],
            number,
        )
        return total if number is None else total / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight, bias, number = ctx.saved_tensors
        # Of no label at all the loss is no number, and its gradients are 0, as torch has it.
        scale = grad if number is None else grad / number.clamp(min=1)
        made = [
            None if one is None else (one * scale).to(dtype)
            for one, dtype in (
                (hidden, None if hidden is None else hidden.dtype),
                (weight, ctx.dtypes[0]),
                (bias, ctx.dtypes[1]),
            )
        ]
        return (*made, None, None)


def chunked(
    loss: Loss,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    rows: int,
    by: Piece = piece,
) -> torch.Tensor:
    """Returns the loss of a head's input as `loss` makes it; where it is `per_item`, the sum over all labels.

    Args:
        hidden: (places, width).
        targets: (places,).
        rows: of a chunk.
        by: what computes a chunk; `piece`, or that compiled.
    """
    device = hidden.device.type
    cast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if cast else hidden.dtype
    wide = torch.promote_types(dtype, torch.float32)
    classes = weight.shape[0]
    kind = Kind(dtype, wide, classes, loss.ignore_index, loss.label_smoothing)
    how = _How(kind, rows, by, not loss.per_item, _pad_of(classes, device))
    made: torch.Tensor = _Chunked.apply(hidden, weight, bias, targets, how)  # type: ignore[no-untyped-call]
    return made if cast or loss.upcast else made.to(dtype)


def _pad_of(classes: int, device: str) -> int:
    """Returns how many columns of logits are added."""
    return -classes % MULTIPLE if device == "cuda" else 0


def _padded(tensor: torch.Tensor, more: int) -> torch.Tensor:
    """Returns the tensor with so many rows of zeros below."""
    if not more:
        return tensor
    return F.pad(tensor, (0,) * (2 * tensor.dim() - 1) + (more,))
