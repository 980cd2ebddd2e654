"""One layer tried with padding and without, on an input like the one that it gets."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from flopwise.kit.memory.interleaved import Ratio, compare
from flopwise.kit.memory.observed import LayerCall
from flopwise.kit.memory.padded_layers import switch_off, switch_on

#: Roundings by which two kernels may differ, as a share of the largest value. Our choice: products in 16 bits are summed in
#: FP32 and rounded once; sums in FP32 and FP64 differ by their order, over as many terms as there are.
ROUNDINGS_16_BIT, ROUNDINGS = 8, 64
#: Unit in the last place of TF32, which has 10 bits behind the point. Source: NVIDIA A100 architecture white paper.
TF32_EPS = 2.0**-10


def trial(
    layer: nn.Module, target: tuple[int, int], call: LayerCall, contiguous: bool, rounds: int
) -> Ratio | str:
    """Returns what padding is measured to do, or why not to pad; the layer is plain afterwards."""
    try:
        with torch.random.fork_rng([call.device] if call.device.type == "cuda" else []):
            x = call.input()
        run = _forward_backward(layer, x, call)

        def switch(is_new: bool) -> None:
            switch_off(layer)
            if is_new:
                switch_on(layer, *target, contiguous)

        switch(False)
        before = run()
        switch(True)
        after = run()
        apart = max(_distance(a, b) for a, b in zip(before, after, strict=True))
        if not apart <= _tolerance(layer, call):
            return f"its results differ by {apart:.2g} of their largest value"
        del before, after
        ratio = compare(run, run, call.device, rounds=rounds, before=switch)
        return ratio if ratio.faster else f"not shown to be faster: {ratio}"
    except (RuntimeError, ValueError) as error:
        message = str(error).partition("\n")[0]
        return f"padded, it fails: {message}"
    finally:
        switch_off(layer)


def _forward_backward(
    layer: nn.Module, x: torch.Tensor, call: LayerCall
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a function that runs the layer alone, without hooks and without writing gradients anywhere."""
    wanted = [t for t in (x, *layer.parameters(recurse=False)) if t.requires_grad]
    on = call.autocast is not None

    def run() -> tuple[torch.Tensor, ...]:
        with (
            torch.enable_grad(),
            torch.autocast(call.device.type, call.autocast or torch.bfloat16, enabled=on),
        ):
            y = layer.forward(x)
        if not wanted:
            return (y,)
        # Not all ones: that would hide a wrong row behind a right sum.
        weights = torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype).expand_as(y)
        return (y, *torch.autograd.grad(y, wanted, weights))

    return run


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference as a share of the largest value; infinite for other shapes or dtypes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = a.detach(), b.detach()
    largest = float(a.abs().max())
    difference = float((a - b).abs().max())
    return difference / largest if largest else difference


def _tolerance(layer: nn.Module, call: LayerCall) -> float:
    weight = next(layer.parameters(recurse=False))
    dtype = call.autocast or weight.dtype
    if dtype == torch.float32 and weight.is_cuda:
        return ROUNDINGS_16_BIT * TF32_EPS  # whether TF32 is used may differ by size
    return torch.finfo(dtype).eps * (ROUNDINGS_16_BIT if dtype.itemsize == 2 else ROUNDINGS)
