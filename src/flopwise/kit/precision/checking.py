"""The check of gradients: largest magnitude and found-inf in one pass over them, shared over ranks where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flopwise.kit.precision.one_pass import OnePass
from flopwise.kit.precision.statistics import by_device, largest

#: What a check gives: found_inf by device, and the largest magnitudes by device, all on the devices.
Checked = tuple[dict[torch.device, torch.Tensor], list[torch.Tensor]]


def check(
    grads: Sequence[torch.Tensor],
    home: torch.device,
    look: bool = True,
    one_pass: OnePass | None = None,
) -> Checked:
    """Returns found_inf by device and the largest magnitude of the gradients, in one pass that only reads them.

    The largest magnitude is not finite exactly if any entry is not.

    Args:
        home: the device that magnitudes are brought to.
        look: whether magnitudes are wanted; else they are inf where found_inf is 1, and 0 where not.
        one_pass: the kernel that does it all, where it can.
    """
    checked = None if one_pass is None else one_pass.check(grads, home, look)
    if checked is not None:
        return checked
    per_device: dict[torch.device, torch.Tensor] = {}
    amaxes: list[torch.Tensor] = []
    for device, by_dtype in by_device(grads).items():
        found, one = torch.arange(
            2, dtype=torch.float32, device=device
        )  # two scalars by one kernel
        amax = largest(by_dtype.values())
        if amax is None:
            amax = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([amax], found, one)
        per_device[device] = found
        amaxes.append((amax if look else _finite(found)).to(home, non_blocking=True))
    return per_device, amaxes


def check_and_unscale(
    grads: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    inverse_scale: torch.Tensor,
    look: bool = True,
    one_pass: OnePass | None = None,
) -> Checked:
    """Returns found_inf by device and the largest magnitude of the gradients before; multiplies them by a scalar.

    Args:
        found_inf: scalar that becomes 1, on the home device.
        look: whether magnitudes are taken, by one more pass; else they are inf where found_inf is 1, and 0 where not.
        one_pass: the kernel that takes them, where it can.
    """
    home = found_inf.device
    per_device: dict[torch.device, torch.Tensor] = {}
    amaxes: list[torch.Tensor] = []
    for device, by_dtype in by_device(grads).items():
        found = found_inf if device == home else torch.zeros((), device=device)
        amax = None
        if look and one_pass is not None:
            amax = one_pass.largest([t for tensors in by_dtype.values() for t in tensors], device)
        if look and amax is None:
            amax = largest(by_dtype.values())
        factor = inverse_scale.to(device, non_blocking=True)
        for tensors in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)
        finite = _finite(found)
        amax = finite if amax is None else torch.maximum(amax, finite)
        per_device[device] = found
        amaxes.append(amax.to(home, non_blocking=True))
    return per_device, amaxes


def _finite(found: torch.Tensor) -> torch.Tensor:
    """Returns 0 where found_inf is 0 and inf where it is 1, by one kernel."""
    return found.atanh()


def group_of(optimizer: torch.optim.Optimizer, asked: Any) -> Any:
    """Returns the group of ranks that must skip together, None for none.

    Each rank has only a part of sharded gradients (DTensor), so those are shared over the default group unasked.
    """
    if asked is not None:
        return asked
    sharded = any(
        hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"][:1]
    )
    return True if sharded and torch.distributed.is_initialized() else None


def share(group: Any, checked: Checked, home: torch.device) -> Checked:
    """Returns the check of all ranks: found if any found, the largest of all; True is the default group.

    A rank without gradients takes part with 0.
    """
    import torch.distributed as dist

    per_device, amaxes = checked
    if not per_device:
        per_device, amaxes = {home: torch.zeros((), device=home)}, [torch.zeros((), device=home)]
    founds = torch.stack([f.to(home, non_blocking=True) for f in per_device.values()]).amax()
    amax = torch.stack(amaxes).amax()
    # NaN is not ordered, so whether MAX keeps it is up to the backend; inf says the same here.
    pair = torch.stack([founds, torch.where(torch.isfinite(amax), amax, math.inf)])
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=None if group is True else group)
    for found in per_device.values():
        found.copy_(pair[0], non_blocking=True)
    return per_device, [pair[1]]
