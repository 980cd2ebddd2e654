"""Convolution weights and images with their channels innermost, kept only where that is measured to be faster."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.kit.memory.arguments import need_module, need_optimizers, need_step, need_whole
from flopwise.kit.memory.interleaved import Ratio, compare
from flopwise.kit.memory.same_results import why_unlike
from flopwise.kit.memory.undisturbed import device_of, undisturbed, without_gradients
from flopwise.kit.nested import map_tensors

#: By the number of dimensions of an image or a weight.
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class ChannelsLast:
    """The layout of one model's convolutions: `apply` and `undo` switch it."""

    module: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    declined: str | None = None  # why the model is as it was
    measured: Ratio | None = None  # time of the step with it over that without
    _strides: dict[nn.Parameter, tuple[int, ...]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    #: In a trial: every tensor with the memory that it had, which others may know too.
    _memory: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def adopted(self) -> bool:
        """Returns whether the model is in channels-last layout now, through this."""
        return bool(self._handles)

    def apply(self) -> None:
        """Lays out weights, their gradients and optimizer state, and from now on the images that the model is called with.

        Parameters stay the objects that they are. Outputs and what `state_dict` gives are contiguous, as before.
        """
        if self._handles:
            return
        for weight in image_weights(self.module):
            self._strides[weight] = weight.stride()
            self._lay_out(weight, None)
        self._handles = [
            self.module.register_forward_pre_hook(_images_in, with_kwargs=True),
            self.module.register_forward_hook(_results_out),
            self.module.register_state_dict_post_hook(_saved),
        ]

    def undo(self) -> None:
        """Gives every weight the strides that it had."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._memory is None:
            for weight, stride in self._strides.items():
                self._lay_out(weight, stride)
        else:
            for tensor, memory in self._memory:
                tensor.data = memory.copy_(tensor.data)
            self._memory.clear()
        self._strides.clear()

    def __str__(self) -> str:
        """Returns what came of it."""
        if self.declined is not None:
            return f"channels_last: left alone: {self.declined}"
        return f"channels_last: {self.measured or 'not measured'}"

    @torch.no_grad()
    def _lay_out(self, weight: nn.Parameter, stride: tuple[int, ...] | None) -> None:
        tensors = [weight.grad] if weight.grad is not None else []
        for optimizer in self.optimizers:
            if weight in optimizer.state:
                tensors += optimizer.state[weight].values()
        for tensor in (weight, *tensors):
            if isinstance(tensor, torch.Tensor) and tensor.shape == weight.shape:
                if self._memory is not None:
                    self._memory.append((tensor, tensor.data))
                tensor.data = laid_out(tensor.data, stride)


def choose_channels_last(
    module: nn.Module,
    step: Callable[[], object],
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    rounds: int = 7,
) -> ChannelsLast:
    """Measures the step in both layouts, in turns, and returns the layout, adopted only if it is shown to be faster.

    It is left as it was, with the reason, where it is not faster, where results differ by more than rounding explains, and
    where the step fails (a `view` after a convolution).

    Args:
        step: runs the model forward and backward; gradients, buffers and random numbers are put back after each run.
        optimizers: whose state is laid out like the weights.
    """
    where = "choose_channels_last"
    need_module(where, module)
    need_step(where, step)
    need_whole(where, "rounds", rounds)
    result = ChannelsLast(module, tuple(need_optimizers(where, optimizers)))
    result.declined = layout_problem(module)
    failed = None
    if result.declined is None:
        result._memory = []
        try:
            result.declined = _try(result, step, rounds)
        except (RuntimeError, ValueError, TypeError) as error:
            failed = str(error).partition("\n")[0]
        finally:
            result.undo()
            result._memory = None
    if failed is not None:
        gc.collect()  # out of the except clause, which keeps the tensors of the frames that failed
        with undisturbed(module):
            step()  # what fails without it too is the caller's to see
        result.declined = f"with it the step fails: {failed}"
    if result.declined is None:
        result.apply()  # anew: the gradients that were put aside go along
    return result


def _try(result: ChannelsLast, step: Callable[[], object], rounds: int) -> str | None:
    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        result.apply()
        try:
            yield
        finally:
            result.undo()

    why = why_unlike(result.module, step, applied)
    if why is not None:
        return why

    def switch(is_new: bool) -> None:
        if is_new:
            result.apply()
        else:
            result.undo()

    run = without_gradients(result.module, step)
    with undisturbed(result.module):
        result.measured = compare(run, run, device_of(result.module), rounds=rounds, before=switch)
    return None if result.measured.faster else f"not shown to be faster: {result.measured}"


def layout_problem(module: nn.Module) -> str | None:
    """Returns why another layout is not tried, None where it may be."""
    if not any(isinstance(m, _CONVOLUTIONS) for m in module.modules()):
        return "the model has no convolution over images"
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        return "DistributedDataParallel laid out its buckets for the old layout: choose before wrapping"
    weights = [m.weight for m in module.modules() if isinstance(m, _CONVOLUTIONS)]
    if not all(type(weight) is nn.Parameter for weight in weights):
        return "its weights are not plain parameters (sharded, or computed)"
    if _is_known_elsewhere(module, weights):
        return "its weights or gradients share their memory with others, who would not see another layout"
    # Of one channel a group, or of one pixel, both layouts are the same: such weights say nothing.
    telling = any(not weight.is_contiguous() for weight in weights)
    return (
        "the model is in channels-last layout already"
        if telling and not image_weights(module)
        else None
    )


def _is_known_elsewhere(module: nn.Module, weights: Sequence[torch.Tensor]) -> bool:
    """Returns whether memory of weights is part of a larger buffer, of another parameter, or of other processes."""
    owners = Counter(p.untyped_storage()._cdata for p in set(module.parameters()))
    for weight in weights:
        if owners[weight.untyped_storage()._cdata] > 1 or (
            not weight.is_cuda and weight.is_shared()
        ):
            return True
        for tensor in (weight, weight.grad):
            if tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
                return True
    return False


def image_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of convolutions for which channels-last is another layout; each once."""
    found: dict[nn.Parameter, None] = {}
    for layer in module.modules():
        if isinstance(layer, _CONVOLUTIONS) and type(layer.weight) is nn.Parameter:
            found[layer.weight] = None
    return [w for w in found if not w.is_contiguous(memory_format=FORMATS[w.dim()])]


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """Returns the tensor with these strides; None: channels-last."""
    if stride is None:
        return tensor.contiguous(memory_format=FORMATS[tensor.dim()])
    if tensor.stride() == stride:
        return tensor
    other = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return other.copy_(tensor)


def _images_in(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return map_tensors((args, kwargs), _image_last)


def _results_out(module: nn.Module, args: Any, out: Any) -> Any:
    return map_tensors(out, _as_before)


def _image_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() not in FORMATS or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=FORMATS[tensor.dim()])


def _as_before(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an image as callers know it: a `view` of what the model gives goes on to work."""
    return tensor.contiguous() if tensor.dim() in FORMATS else tensor


def _saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Makes what is saved contiguous: files with other strides break those who use `view` on them."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and not value.requires_grad:
            state[name] = _as_before(value)
