"""A model is run to be measured, and is afterwards what it was: gradients, buffers and random numbers are put back."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from flopwise.errors import MemoryWarning


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Puts back the module's gradients, its buffers and their values, and the state of random numbers: torch's and Python's.

    Inside, there are no gradients at first. Parameters are not copied; if they change inside, a MemoryWarning says so:
    what is run is meant to be forward and backward, without a step of the optimizer.
    """
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters]
    # Others may write where they lie: DistributedDataParallel keeps its buckets there.
    values_of = {g: g.detach().clone() for g in gradients if g is not None and _is_part(g)}
    versions = [_version(parameter) for parameter in parameters]
    buffers = [
        (
            owner,
            name,
            buffer,
            None if buffer is None or _is_shared(buffer) else buffer.detach().clone(),
        )
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    drawn = random.getstate()
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(sorted(d for d in devices if d is not None)):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for part, before in values_of.items():
                part.copy_(before)
            for owner, name, buffer, values in buffers:
                owner._buffers[name] = buffer  # a forward may have put another one there
                if buffer is not None and values is not None:
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(values)
        random.setstate(drawn)
    if any(_version(p) != v for p, v in zip(parameters, versions, strict=True)):
        warnings.warn(
            "the function that was given to measure the model changed its parameters: it is meant to run forward and "
            "backward, without a step of the optimizer. They keep the values that they have now",
            MemoryWarning,
            stacklevel=4,
        )


def without_gradients(module: nn.Module, step: Callable[[], object]) -> Callable[[], None]:
    """Returns the step with the gradients dropped before it, as `zero_grad` does: what is timed makes them anew."""
    parameters = list(module.parameters())

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        step()

    return run


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the module's first parameter; the CPU where it has none."""
    first = next(module.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether elements share memory, as in an expanded tensor: nothing can be written there in place."""
    if tensor.layout != torch.strided:
        return False
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _is_part(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is part of a larger buffer."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _version(parameter: torch.Tensor) -> int:
    return -1 if parameter.is_inference() else parameter._version
