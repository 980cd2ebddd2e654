"""Convolutions: each element of the larger side times the filter that reaches it.

A weight is (C_out, C_in / groups, *kernel), or (C_in, C_out / groups, *kernel) when transposed, so groups need no
term of their own. Dilation changes no count, padding is counted like data.
Source: torch.nn.Conv2d documentation (shapes); Dumoulin & Visin, arXiv:1603.07285 (arithmetic, transposed form).
"""

from __future__ import annotations

import math

from flopwise.flops.call import WANTED, Call, Cost, Operand


def convolution(call: Call) -> Cost:
    """Returns the FLOPs of a forward convolution: 2 out (C_in / groups) kernel, or 2 in (C_out / groups) kernel."""
    given, weight = call.tensor("input", "self", "X"), call.tensor("weight", "W")
    transposed = call.flag("transposed") or "transpose" in call.name
    return Cost.exactly(_one(given if transposed else call.out(), weight))


def convolution_backward(call: Call) -> Cost:
    """Returns the FLOPs of the gradients that `output_mask` asks for: the forward's for input and for weight.

    Each gradient pairs the same input, weight and output elements as the forward does, whatever the groups.
    torch.utils.flop_counter (2.11) counts the weight gradient of a grouped convolution `groups` times.
    """
    weight, wanted = call.tensor("weight"), call.mask("output_mask", 3)
    transposed = call.flag("transposed")
    larger = call.tensor("input", "self") if transposed else call.tensor("grad_output")
    return Cost.exactly(_one(larger, weight) * (wanted[0] + wanted[1]))


def input_gradient(call: Call) -> Cost:
    """Returns the FLOPs of the gradient of a convolution's input, an op of its own until torch 1.10: those of the forward."""
    return Cost.exactly(_one(call.tensor("grad_output"), call.tensor("weight")))


def weight_gradient(call: Call) -> Cost:
    """Returns the FLOPs of the gradient of a convolution's weight, an op of its own until torch 1.10: those of the forward.

    It is given the sizes of the weight, not the weight.
    """
    sizes = call.args.get("weight_size")
    if not isinstance(sizes, tuple) or not all(isinstance(n, int) for n in sizes):
        raise LookupError(f"{call.name}: the sizes of the weight are not visible")
    return Cost.exactly(_one(call.tensor("grad_output"), Operand(sizes)))


def conv_tbc(call: Call) -> Cost:
    """Returns the FLOPs of `conv_tbc` with a weight of (kernel, C_in, C_out): 2 out kernel C_in."""
    width, c_in, _ = call.tensor("weight").shape
    return Cost.exactly(2 * call.out().numel * width * c_in)


def conv_tbc_backward(call: Call) -> Cost:
    """Returns the FLOPs of both gradients of `conv_tbc`, those asked for alone being needed.

    `self` is the gradient of the result.
    """
    width, c_in, _ = call.tensor("weight").shape
    one, wanted = 2 * call.tensor("self").numel * width * c_in, call.mask(WANTED, 3)
    needed = one * (wanted[0] + wanted[1])
    return Cost(needed, needed, 2 * one)


def _one(larger: Operand, weight: Operand) -> int:
    return 2 * larger.numel * math.prod(weight.shape[1:])
