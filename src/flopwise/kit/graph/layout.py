"""Channels last by measurement: convolutional models only, and only where it is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.graph.kept import device_of, kept
from flopwise.kit.graph.numerics import Call, scalar
from flopwise.kit.graph.timing import interleaved
from flopwise.kit.nested import map_tensors, tensors_in

#: A layout is changed if it is faster by more than this share.
FASTER_FRAC = 0.02


@dataclass(frozen=True)
class Layout:
    """The memory format that a model has now, and why."""

    channels_last: bool
    contiguous_s: float | None  # seconds of a forward and backward
    channels_last_s: float | None
    reason: str

    def __str__(self) -> str:
        name = "channels last" if self.channels_last else "contiguous"
        if self.contiguous_s is None or self.channels_last_s is None:
            return f"{name}: {self.reason}"
        return f"{name}: {self.reason} ({self.contiguous_s * 1e3:.3g} ms contiguous, {self.channels_last_s * 1e3:.3g} ms channels last)"


def fastest_layout(
    model: nn.Module, *args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any
) -> Layout:
    """Gives a model's 4-d weights the faster memory format and returns the measurement.

    Batches should have the same format (`to_channels_last`); torch converts others at every step. Values, state
    dict keys and shapes are unchanged; weights saved in channels last have other strides: `to_contiguous` before
    saving where somebody may call `.view` on them.

    Args:
        model: any module; one without 2-d convolutions is left alone.
        args, kwargs: one call of it.
        loss: as for `fusion_report`.
    """
    convolutions = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    if not convolutions:
        return Layout(False, None, None, "there is no 2-d convolution")
    was = _is_channels_last(model)
    call = Call(args, kwargs, loss)

    def arm(channels_last: bool) -> Callable[[], None]:
        change = to_channels_last if channels_last else to_contiguous

        def run() -> None:
            a, k = call.fresh()
            a, k = change(a), change(k)
            out = model(*a, **k)
            leaves = [p for p in model.parameters() if p.requires_grad]
            if leaves and torch.is_grad_enabled():
                torch.autograd.grad(scalar(out, loss), leaves, allow_unused=True)

        return run

    times = {}
    device = device_of(model)
    with kept(model, weights=False):
        # Weights cannot change format for every call of a turn: each arm is timed alone, twice, in mirrored order.
        seen: dict[bool, list[float]] = {False: [], True: []}
        for channels_last in (False, True, True, False):
            set_channels_last(model, channels_last)
            seen[channels_last].append(
                interleaved({"": arm(channels_last)}, device, rounds=5, budget_s=2.0)[""]
            )
        times = {k: min(v) for k, v in seen.items()}
    faster = times[True] < times[False] * (1 - FASTER_FRAC)
    slower = times[True] > times[False] * (1 + FASTER_FRAC)
    chosen = True if faster else False if slower else was
    set_channels_last(model, chosen)
    gain = 100 * (1 - times[chosen] / times[not chosen])
    reason = (
        f"{gain:.0f} % faster" if faster or slower else "no difference beyond 2 %, left as it was"
    )
    return Layout(chosen, times[False], times[True], reason)


def set_channels_last(model: nn.Module, channels_last: bool) -> None:
    """Gives all 4-d weights and buffers the memory format, in place."""
    chosen = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=chosen)  # type: ignore[call-overload]


def to_channels_last(batch: Any) -> Any:
    """Returns a batch whose 4-d tensors are in channels last."""
    return map_tensors(batch, lambda t: _like(t, torch.channels_last))


def to_contiguous(batch: Any) -> Any:
    """Returns a batch, or a state dict, whose 4-d tensors are contiguous."""
    return map_tensors(batch, lambda t: _like(t, torch.contiguous_format))


def _like(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return tensor.contiguous(memory_format=memory_format) if tensor.dim() == 4 else tensor


def _is_channels_last(model: nn.Module) -> bool:
    weights = [
        t for t in tensors_in(list(model.parameters())) if t.dim() == 4 and min(t.shape[1:]) > 1
    ]
    return bool(weights) and all(
        w.is_contiguous(memory_format=torch.channels_last) for w in weights
    )
