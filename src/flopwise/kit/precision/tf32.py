"""TF32 for one module: products of float32 operands rounded to 10 bits of mantissa, in its forward and its backward.

torch has two sets of switches that disagree when mixed: reading the old ones then raises
(`torch.backends.cuda.matmul.allow_tf32` against `.fp32_precision`). The old setters write both, so they are used where
both agree; where a script has set the new ones alone, only the new ones are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


def _new() -> dict[str, Any]:
    cudnn: Any = torch.backends.cudnn
    return {"matmul": torch.backends.cuda.matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}


@dataclass(frozen=True)
class Flags:
    """The switches as they were found."""

    new: dict[str, str]  # fp32_precision of matmul, conv and rnn
    matmul: (
        bool | None
    )  # torch.backends.cuda.matmul.allow_tf32; None if it conflicts with the new ones
    cudnn: bool | None  # torch.backends.cudnn.allow_tf32; None if it conflicts

    @staticmethod
    def read() -> Flags:
        """Returns the switches of this process."""
        _say_once()
        return Flags({n: b.fp32_precision for n, b in _new().items()}, _matmul(), _cudnn())

    def conflict(self) -> str | None:
        """Returns what is mixed up, None if old and new switches agree."""
        if self.matmul is None:
            return "torch.backends.cuda.matmul.fp32_precision and the older allow_tf32/set_float32_matmul_precision disagree"
        if self.cudnn is None:
            return "torch.backends.cudnn.conv/rnn.fp32_precision and the older cudnn.allow_tf32 disagree"
        return None

    def restore(self) -> None:
        """Sets the switches as they were."""
        if self.matmul is False:
            torch.backends.cuda.matmul.allow_tf32 = False
        if self.cudnn is False:
            torch.backends.cudnn.allow_tf32 = False
        for name, backend in _new().items():
            if backend.fp32_precision != self.new[name]:
                backend.fp32_precision = self.new[name]


def switch_on() -> Flags:
    """Allows TF32 for matrix products and cuDNN; returns the switches as they were found."""
    found = Flags.read()
    if found.matmul is False:
        torch.backends.cuda.matmul.allow_tf32 = True
    elif found.matmul is None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if found.cudnn is False:
        torch.backends.cudnn.allow_tf32 = True
    elif found.cudnn is None:
        for name in ("conv", "rnn"):
            _new()[name].fp32_precision = "tf32"
    return found


@contextmanager
def tf32() -> Iterator[None]:
    """Allows TF32 inside, in this process; the switches are as they were afterwards."""
    _after_failures()
    found = switch_on()
    try:
        yield
    finally:
        found.restore()


#: Switches as they were found by backward passes that have not ended, by their number.
_BACKWARDS: dict[int, Flags] = {}


def in_backward_of(outputs: list[torch.Tensor]) -> None:
    """Allows TF32 from where backward reaches these outputs until that backward pass ends."""

    def begun(grad: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number not in _BACKWARDS:
            _BACKWARDS[number] = switch_on()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _ended(number))

    for tensor in outputs:
        if tensor.requires_grad:
            tensor.register_hook(begun)


def _ended(number: int) -> None:
    found = _BACKWARDS.pop(number, None)
    if found is not None:
        found.restore()


def _after_failures() -> None:
    """Gives back what backward passes have left that ended in an error: their callbacks were not called."""
    if _BACKWARDS and torch._C._current_graph_task_id() == -1:
        first = next(iter(_BACKWARDS.values()))
        _BACKWARDS.clear()
        first.restore()


@cache
def _say_once() -> None:
    """Has torch say once, unheard, that the old switches are deprecated (torch 2.9 to 2.11, at their first use)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _matmul()
        _cudnn()


def _matmul() -> bool | None:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return None


def _cudnn() -> bool | None:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None
