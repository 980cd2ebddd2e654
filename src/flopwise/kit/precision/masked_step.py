"""Optimizer steps that the device skips by itself: what a skipped step must not change is put back without a read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: Up to this many entries tensors are copied together: beyond it a kernel takes longer than its launch (4 MB of float32
#: read and written at 4 TB/s: 2 us).
SMALL = 2**20
_TORCHS = ("torch.optim.",)


def supports_skipping(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's own kernels take `found_inf` and skip on the device (fused ones of torch)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def unmaskable(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why a step of this optimizer cannot be taken back on the device, None if it can.

    It can when all that a step changes are tensors on the device that exist before the step.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith(_TORCHS):
        return f"{kind.__name__} is not one of torch's: what its step changes besides tensors is not known"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(
        optimizer, "_optimizer_step_post_hooks", None
    ):
        return f"{kind.__name__} has step hooks: what they change is not known"
    for param in _stepped(optimizer):
        if hasattr(param, "to_local"):
            return f"{kind.__name__} has sharded parameters"
        if param.grad is not None and param.grad.is_sparse:
            return f"{kind.__name__} has sparse gradients"
        state = optimizer.state.get(param)
        for name, value in (state or {}).items():
            if isinstance(value, torch.Tensor):
                if value.device != param.device:
                    return (
                        f"{kind.__name__} keeps its '{name}' on the host; "
                        "fused=True (or capturable=True) keeps it on the device"
                    )
            elif value is not None:
                return f"{kind.__name__} keeps its '{name}' as a {type(value).__name__} on the host"
    return None


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether every parameter with a gradient has the state that its steps need: it is made at the first one."""
    momentum = any(g.get("momentum") for g in optimizer.param_groups)
    if type(optimizer) is torch.optim.SGD and not momentum:
        return True
    for param in _stepped(optimizer):
        state = optimizer.state.get(param)
        if not state or any(v is None for v in state.values()):
            return False
    return True


@dataclass(frozen=True)
class Copies:
    """Tensors of one device and dtype, and their values in one tensor, so that one kernel serves many."""

    tensors: list[torch.Tensor]
    values: torch.Tensor

    @staticmethod
    def of(tensors: list[torch.Tensor]) -> Copies:
        """Returns tensors with their values now."""
        if len(tensors) == 1:
            return Copies(tensors, tensors[0].clone())
        flat = [t.view(-1) for t in tensors]
        return Copies(flat, torch.cat(flat))

    def restore(self, skip: torch.Tensor) -> None:
        """Writes the values back where `skip`, a scalar of their device, is true; to the bit, NaN or not."""
        first = self.tensors[0]
        if len(self.tensors) == 1:
            torch.where(skip, self.values, first, out=first)
            return
        now = torch.cat(self.tensors)
        torch.where(skip, self.values, now, out=now)
        torch._foreach_copy_(self.tensors, now.split([t.numel() for t in self.tensors]))


def copied(optimizer: torch.optim.Optimizer) -> list[Copies]:
    """Returns what a step may change, with copies: the weights that have a gradient, and their state.

    Raises:
        torch.OutOfMemoryError: there is no memory for the copies.
    """
    single: list[list[torch.Tensor]] = []
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in _touched(optimizer):
        if tensor.numel() <= SMALL and tensor.is_contiguous():
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            single.append([tensor])
    return [Copies.of(tensors) for tensors in (*single, *small.values())]


def masked_step(
    optimizer: torch.optim.Optimizer,
    before: list[Copies],
    found_inf: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns what `optimizer.step` returns; where `found_inf` is not 0, weights and state are afterwards as before, to the bit.

    Args:
        before: by `copied`. Ask `unmaskable` and `has_state` before that.
    """
    devices = {copies.values.device for copies in before}
    skip = {device: found_inf.to(device, non_blocking=True) != 0 for device in devices}
    result = optimizer.step(*args, **kwargs)
    with torch.no_grad():
        for copies in before:
            copies.restore(skip[copies.values.device])
    return result


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param


def _touched(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for param in _stepped(optimizer):
        yield param.detach()
        for value in (optimizer.state.get(param) or {}).values():
            if isinstance(value, torch.Tensor):
                yield value.detach()
