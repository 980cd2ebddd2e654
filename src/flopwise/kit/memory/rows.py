"""A parameter that keeps its shape while its storage is longer: rows of zeros lie behind its last row.

The parameter is a view of the first rows of a longer buffer. Its shape, its strides and the object stay, so optimizers,
gradient clipping, state dicts and tied weights see what they saw before; nothing writes behind its end. A product that is
faster on a round number of rows reads the whole buffer, and no weight is copied in any step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

#: The buffers, by parameter: tied modules share one, a copied module gets its own.
_BUFFERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _WholeBuffer(torch.autograd.Function):
    """The parameter with the rows behind it; the gradient of those rows is left out."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.rows = parameter.shape[0]
        ctx.save_for_backward(parameter)  # so that a write between forward and backward is noticed
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.saved_tensors  # noqa: B018  raises if the parameter was written to
        return gradients[0][: ctx.rows], None


def padded(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the parameter with zeros up to `rows` rows, without copying it after the first call.

    While torch compiles, the padding is an op of the graph instead. A parameter whose memory belongs to something
    larger (a shard, a flat buffer) is padded by a copy, every time.

    Raises:
        ValueError: fewer rows than the parameter has.
    """
    more = rows - parameter.shape[0]
    if more < 0:
        raise ValueError(f"{rows} rows are fewer than the parameter's {parameter.shape[0]}")
    if more == 0:
        return parameter
    if torch.compiler.is_compiling() or not _ours_to_move(parameter, rows):
        return torch.nn.functional.pad(parameter, (0, 0) * (parameter.dim() - 1) + (0, more))
    buffer = _BUFFERS.get(parameter)
    if buffer is None or not _behind(parameter, buffer, rows):
        buffer = _move(parameter, rows)
    result: torch.Tensor = _WholeBuffer.apply(parameter, buffer)  # type: ignore[no-untyped-call]
    return result


def shrink(parameter: torch.Tensor) -> None:
    """Gives a parameter memory of its own size again."""
    if _BUFFERS.pop(parameter, None) is not None:
        parameter.data = parameter.data.clone()


def zero_behind(parameter: torch.Tensor) -> bool:
    """Returns whether all that lies behind the parameter is zero still, as it must be."""
    buffer = _BUFFERS.get(parameter)
    return buffer is None or not bool(buffer[parameter.shape[0] :].any())


def _behind(parameter: torch.Tensor, buffer: torch.Tensor, rows: int) -> bool:
    """Whether the parameter is still the beginning of this buffer."""
    return (
        buffer.shape[0] == rows
        and buffer.data_ptr() == parameter.data_ptr()
        and buffer.dtype == parameter.dtype
        and buffer.stride() == parameter.stride()
    )


def _ours_to_move(parameter: torch.Tensor, rows: int) -> bool:
    """Whether the parameter is a plain leaf, whose rows lie one after the other in memory of its own."""
    if type(parameter) is not torch.nn.Parameter or not parameter.is_leaf:
        return False
    if parameter.layout != torch.strided or parameter.device.type == "meta":
        return False
    if not parameter.shape[0] or parameter.stride(0) * parameter.shape[0] != parameter.numel():
        return False
    buffer = _BUFFERS.get(parameter)
    if buffer is not None and _behind(parameter, buffer, rows):
        return True
    if torch.is_inference_mode_enabled() or (
        parameter.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return False
    held = parameter.untyped_storage().nbytes() // parameter.element_size()
    known = buffer is not None and buffer.data_ptr() == parameter.data_ptr()
    return parameter.storage_offset() == 0 and (known or held == parameter.numel())


@torch.no_grad()
def _move(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """Moves the parameter to the beginning of a longer buffer."""
    shape = (rows, *parameter.shape[1:])
    buffer = torch.empty_strided(
        shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
    )
    n = parameter.shape[0]
    buffer[:n].copy_(parameter)
    buffer[n:].zero_()
    if parameter.is_cuda:  # its old memory may be reused only after this copy
        parameter.data.record_stream(torch.cuda.current_stream(parameter.device))
    parameter.data = buffer[:n]
    _BUFFERS[parameter] = buffer
    return buffer
