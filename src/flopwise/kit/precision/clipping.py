"""Clipping and the loss scale: clipping that is right in any order, and calls of torch's that come too early."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from flopwise.kit.precision.saying import users_line

#: Windows in which clips are listened for: a loop that does it wrong does it from the first step on.
WATCHED_WINDOWS = 3
#: Calls and returns that are listened to in all.
MOST_EVENTS = 500_000


def clip_scaled(
    params: Sequence[torch.Tensor], max_norm: float, norm_type: float, scale: torch.Tensor
) -> torch.Tensor:
    """Returns the norm of the true gradients and clips the scaled ones as if they had been unscaled before.

    For a scale that is a power of two the result is the same to the bit.
    """
    grads = [p.grad for p in params if p.grad is not None]
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        norm = norm / scale.to(norm.device, non_blocking=True)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


@dataclass(frozen=True)
class Heard:
    """A clip of torch's that ran on gradients which were still multiplied by the scale."""

    function: str
    bound: float  # max_norm or clip_value
    norm: Any  # what clip_grad_norm_ returned: the norm of the scaled gradients; None for clip_grad_value_
    line: str | None


class ClipWatch:
    """Listens for torch's clip functions between backward and unscaling, in the first windows only.

    It is a profile function of this thread (`sys.setprofile`), so it also hears names that were imported before; it
    is not set where another is.
    """

    def __init__(self, windows: int = WATCHED_WINDOWS) -> None:
        self._left = windows
        self._events = 0
        self._heard: Heard | None = None
        self._mine = self._on_event  # one object, to be compared

    def start(self) -> None:
        """Begins to listen."""
        if self._left > 0 and sys.getprofile() is None:
            sys.setprofile(self._mine)

    def stop(self) -> Heard | None:
        """Ends listening; returns the first clip that was heard."""
        if sys.getprofile() is self._mine:
            sys.setprofile(None)
        heard, self._heard = self._heard, None
        return heard

    def end_of_window(self) -> None:
        """Counts a window."""
        self.stop()
        self._left -= 1

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        self._events += 1
        if self._events > MOST_EVENTS:  # a loop that goes on without a step is not slowed down
            self._left = 0
            self.stop()
        if event != "return" or self._heard is not None:
            return
        name = _CODES.get(frame.f_code)
        if name is None:
            return
        bound = frame.f_locals.get("max_norm", frame.f_locals.get("clip_value", math.nan))
        norm = value if isinstance(value, torch.Tensor) else None
        self._heard = Heard(name, float(bound), norm, users_line(frame))


_CODES = {
    inspect.unwrap(function).__code__: function.__name__
    for function in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
}


def words(heard: Heard, scale: float) -> str | None:
    """Returns what a clip on scaled gradients did to the step, None if it did nothing. Reads the norm."""
    right = (
        "The right order: scaler.unscale_(optimizer), clip, scaler.step(optimizer), scaler.update(); or "
        "scaler.clip_grad_norm_(parameters, max_norm), which is right in any order."
    )
    at = f"at {heard.line}" if heard.line else "between backward and unscale_"
    if heard.norm is None:
        return (
            f"{heard.function} {at} runs on gradients that are still multiplied by the scale of {scale:g}: it cuts them at "
            f"{heard.bound / scale:.3g} instead of {heard.bound:g}. {right}"
        )
    norm = float(heard.norm)
    if not math.isfinite(norm) or norm <= 0 or scale <= 1:
        return None
    factor = min(1.0, heard.bound / (norm / scale)) / min(1.0, heard.bound / norm)
    if factor < 1.01:
        return None
    return (
        f"Clip runs on scaled gradients: {heard.function} {at} compares max_norm {heard.bound:g} with a norm of {norm:.4g}, "
        f"which is {scale:g} times the true one; effective lr cut by about {factor:.0f}x. {right}"
    )
