"""What torch's fused optimizers do with a gradient's scale and with a skipped step, where it is not what one expects."""

from __future__ import annotations

import torch


def same_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a fused step gives the same bits from unscaled gradients as from scaled ones and `grad_scale`.

    For a scale that is a power of two the gradient is the same. But a kernel has two branches, and what a compiler makes
    of `a * b + c` (one rounding or two) may differ between them. In torch 2.11 it does for SGD: three of four weights
    are rounded once more if there is a `grad_scale`. Adam's kernel leaves nothing to the compiler but L2 decay, and
    AdamW's decay, which is one fused operation in both branches for compute capabilities 7.5 to 12.0.

    Source: torch 2.11, `FusedSgdKernel.cu` and `fused_adam_utils.cuh`, and the machine code of its CUDA 13 build.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return all(
        group.get("decoupled_weight_decay") or group.get("weight_decay") == 0
        for group in optimizer.param_groups
    )


def makes_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether this step of SGD makes momentum buffers.

    `fused=True` makes them of memory as it is found and has the kernel fill them. It fills nothing in a skipped step,
    and the next one takes them for momentum (torch 2.11, `torch/optim/sgd.py`, `_fused_sgd`).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"]:
            for param in group["params"]:
                if param.grad is not None:
                    if optimizer.state.get(param, {}).get("momentum_buffer") is None:
                        return True
                    break
    return False
