"""Statistics of gradients that stay on the device: the largest magnitude, what float16 would lose, the scale they allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

#: The largest finite float16. Source: IEEE 754-2008, binary16: (2 - 2**-10) * 2**15.
FLOAT16_MAX = 65504.0
#: The smallest normal float16; what is smaller loses bits. Source: IEEE 754-2008, binary16.
FLOAT16_NORMAL = 2.0**-14
#: At most half the smallest subnormal float16 (2**-24) rounds to zero. Source: IEEE 754-2008, binary16.
FLOAT16_ZERO = 2.0**-25
#: Gradients that are looked at for the underflow share: every n-th of all, so that this many remain.
SAMPLE = 2**18


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the gradients of an optimizer as plain tensors: values of sparse ones, the local shard of sharded ones.

    They share memory with the gradients, so what is done to them in place is done to those. Sparse ones are not
    coalesced, for which a device would be waited for.
    """
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                found.append(grad._values())
            else:
                found.append(grad if type(grad) is torch.Tensor else local(grad))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shard of this rank for a sharded tensor, else the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def by_device(
    tensors: Iterable[torch.Tensor],
) -> dict[torch.device, dict[torch.dtype, list[torch.Tensor]]]:
    """Returns the tensors grouped as multi-tensor kernels need them."""
    flat: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        if key in flat:
            flat[key].append(tensor)
        else:
            flat[key] = [tensor]
    groups: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = {}
    for (device, dtype), same in flat.items():
        groups.setdefault(device, {})[dtype] = same
    return groups


@torch.no_grad()
def largest(groups: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor | None:
    """Returns the largest magnitude as a float32 scalar, inf or NaN if any entry is; one pass that only reads.

    Args:
        groups: lists of tensors of one dtype each, all on one device.
    """
    maxima: list[torch.Tensor] = []
    for tensors in groups:
        filled = [t for t in tensors if t.numel()]
        if filled:
            norms = torch._foreach_norm(filled, float("inf"))
            maxima.append(torch.stack(list(norms)).amax().float())
    if not maxima:
        return None
    return torch.stack(maxima).amax() if len(maxima) > 1 else maxima[0]


def power_of_two_below(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest power of two that is at most x, exactly, for positive normal float32: x without its mantissa."""
    return (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def scale_for(amax: torch.Tensor, headroom: float, least: float, most: float) -> torch.Tensor:
    """Returns the largest power of two with amax * scale * headroom <= 65504, between `least` and `most`.

    Args:
        amax: largest magnitude of unscaled gradients, float32 scalar, finite and positive.
        headroom: a power of two, so that the comparison is exact.
    """
    limit = FLOAT16_MAX / headroom
    scale = power_of_two_below((limit / amax).clamp(max=2.0**126, min=2.0**-126))
    scale = torch.where(amax * scale > limit, scale * 0.5, scale)
    return scale.clamp(least, most)


def underflow(grads: Sequence[torch.Tensor], scale: torch.Tensor, scaled: bool) -> torch.Tensor:
    """Returns three shares of gradient entries as a float32 tensor: subnormal in float16 at this scale, zero in it, 0 already.

    An entry that is 0 already may be a true zero or have been lost in backward: that cannot be told any more. A
    strided sample of about 262,144 entries is looked at. Non-finite entries count as none of the three.

    Args:
        scaled: whether the gradients are still multiplied by the scale.
    """
    total = sum(g.numel() for g in grads)
    stride = max(1, total // SAMPLE)
    sample = torch.cat([g.detach().reshape(-1)[::stride].float() for g in grads if g.numel()]).abs()
    if not scaled:
        sample = sample * scale
    gone, zero = sample <= FLOAT16_ZERO, sample == 0
    subnormal = (sample < FLOAT16_NORMAL) & ~gone
    return torch.stack(
        [subnormal.float().mean(), (gone & ~zero).float().mean(), zero.float().mean()]
    )
