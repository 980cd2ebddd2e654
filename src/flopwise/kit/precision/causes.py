"""From what an op was given and what it made to why: rows that are masked everywhere, ranges that a dtype lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: Ops whose result is what they were told to write: -inf in it is meant.
_FILLS = {
    "fill", "full", "full_like", "new_full", "masked_fill", "where", "scalar_tensor", "index_fill", "constant_pad_nd",
    "masked_fill_", "fill_", "copy_", "clone", "cat", "stack", "index_put_", "scatter", "_efficientzerotensor",
}  # fmt: skip
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "set_",
}  # fmt: skip
#: Sums and powers, whose result can be beyond float16 though no entry is.
_ACCUMULATE = {"sum", "mean", "pow", "linalg_vector_norm", "norm", "cumsum", "prod", "var", "var_mean", "std", "exp", "mul",
               "addmm", "mm", "bmm", "baddbmm", "convolution", "add", "square", "logsumexp"}  # fmt: skip
#: Arithmetic by which masks are made.
_MASKING = {"add", "sub", "rsub", "mul", "neg", "_to_copy", "to_copy", "to", "copy"}
_HALF = ("float16",)


@dataclass(frozen=True)
class Range:
    """A tensor's shape, dtype and extreme values."""

    shape: tuple[int, ...]
    dtype: str
    least: float
    most: float
    nan: int
    inf: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Range:
        """Returns the range of a tensor's finite values, and how many are NaN or infinite."""
        t = tensor.detach()
        finite = t[torch.isfinite(t)].float() if t.numel() else t.float()
        return Range(
            tuple(t.shape),
            str(t.dtype).removeprefix("torch."),
            float(finite.min()) if finite.numel() else 0.0,
            float(finite.max()) if finite.numel() else 0.0,
            int(torch.isnan(t).sum()),
            int(torch.isinf(t).sum()),
        )

    def __str__(self) -> str:
        bad = "".join(f", {n} {word}" for n, word in ((self.nan, "NaN"), (self.inf, "inf")) if n)
        return f"{self.dtype}{list(self.shape)} {self.least:.4g} to {self.most:.4g}{bad}"


@dataclass(frozen=True)
class Event:
    """An op whose result is not finite although what went in was; in backward the first gradient that is not."""

    phase: str
    value: str
    op: str
    module: str | None
    line: str | None
    dtype: str
    ranges: tuple[Range, ...]
    node: str | None  # the graph node's class, in backward
    ins: list[torch.Tensor]
    args: Any

    @property
    def of_masks(self) -> bool:
        """Whether -inf went in."""
        return any(r.inf for r in self.ranges)

    def __str__(self) -> str:
        return f"{self.op}{f' at {self.line}' if self.line else ''}"


def fills(op: str) -> bool:
    """Returns whether an op only writes what it was told to."""
    return op in _FILLS


def overwrites(op: str) -> bool:
    """Returns whether an op in place does not read what it writes to."""
    return op in _OVERWRITES


def uninitialised(op: str) -> bool:
    """Returns whether an op gives memory as it is, whose values mean nothing."""
    return "empty" in op or op == "resize_"


def explain(events: list[Event], loss_finite: bool | None) -> tuple[Event | None, str, str]:
    """Returns the event that matters, its cause and its cure; the event is None if nothing went wrong."""
    forward = [e for e in events if e.phase == "forward"]
    backward = [e for e in events if e.phase == "backward"]
    if loss_finite and backward:
        return _in_backward(backward[0], forward)
    if loss_finite is not False and not backward and all(_is_mask(e) for e in forward):
        return None, "", ""
    masked = next((e for e in forward if _softmax(e) and e.value == "NaN"), None)
    first = _origin(forward)
    if masked is not None and (first is masked or first is None or first.value == "-inf"):
        return masked, *_empty_rows(masked, forward)
    if first is None:
        return (
            (backward[0], *_in_backward(backward[0], forward)[1:]) if backward else (None, "", "")
        )
    return first, *_in_forward(first)


def _is_mask(event: Event) -> bool:
    """Returns whether this is -inf that arithmetic of masks has made."""
    return event.value == "-inf" and event.op in _MASKING


def _origin(forward: list[Event]) -> Event | None:
    """Returns where forward goes wrong: the first op that makes it from finite values and is no mask, else the first."""
    own = (e for e in forward if not _is_mask(e) and not e.of_masks)
    of_masks = (e for e in forward if e.of_masks and e.value != "-inf")
    return next(own, None) or next(of_masks, None) or (forward[0] if forward else None)


def _softmax(event: Event) -> bool:
    return "softmax" in event.op and event.node is None


def _empty_rows(event: Event, forward: list[Event]) -> tuple[str, str]:
    scores = event.ins[0]
    dim = event.args[1] if len(event.args) > 1 and isinstance(event.args[1], int) else -1
    empty = (scores == float("-inf")).all(dim)
    total = int(empty.sum())
    if not total:
        return (
            f"The scores reach +inf before the softmax ({event.ranges[0]}).",
            "Scale the scores before the product, or compute them in float32.",
        )
    first = tuple(torch.nonzero(empty)[0].tolist())
    where = f"{total} fully masked row{'s' if total > 1 else ''}, the first at index {list(first)}"
    cause = f"Row fully masked, mask = -inf: {where}; softmax of nothing but -inf is 0/0."
    planes = next(
        (e for e in forward if e.op in ("add", "sub") and e.value == "-inf" and _at_minimum(e)),
        None,
    )
    if planes is not None:
        return (
            f"{cause} The -inf comes from two saturated mask planes added at {planes.line}: the smallest {planes.dtype} plus "
            "itself is -inf.",
            "Combine masks as booleans, then fill once.",
        )
    return cause, (
        "Never let a row be empty, or set its result to 0 by torch.where on the scores before the softmax. Leaving the row out of "
        "the loss does not help: its gradient is NaN x 0 = NaN."
    )


def _at_minimum(event: Event) -> bool:
    try:
        least = torch.finfo(getattr(torch, event.dtype)).min
    except (AttributeError, TypeError):
        return False
    return any(r.least <= 0.5 * least for r in event.ranges)


def _in_forward(event: Event) -> tuple[str, str]:
    sizes = ", ".join(map(str, event.ranges))
    if event.of_masks:
        return (
            f"-inf went in, as masks have it, and was used: selected, summed or multiplied by 0 ({sizes}).",
            "Leave masked entries out of what is summed (a target that is masked, label smoothing over masked classes).",
        )
    if event.op in ("_to_copy", "to") or "copy" in event.op:
        return (
            f"A value of up to {_largest(event):.4g} does not fit {event.dtype}.",
            "Keep this tensor in float32, or use the dtype's own extreme (torch.finfo(x.dtype).min) for a mask.",
        )
    if event.op in ("sqrt", "log", "log2", "log10", "rsqrt", "acos", "asin", "atanh", "log1p"):
        wrong = "a negative number" if event.value == "NaN" else "0"
        return (
            f"{event.op} of {wrong} ({sizes}).",
            f"Clamp the input of {event.op} away from it, or add an epsilon inside.",
        )
    if (
        event.op in ("div", "true_divide", "reciprocal", "softmax", "log_softmax")
        and event.value == "NaN"
    ):
        return (
            f"0/0 or inf/inf ({sizes}).",
            "Make the divisor safe (clamp, epsilon) before dividing.",
        )
    if event.op in ("div", "true_divide", "reciprocal"):
        return (
            f"Division by 0, or beyond the range of {event.dtype} ({sizes}).",
            "Make the divisor safe (clamp, epsilon).",
        )
    if event.dtype in _HALF and (event.op in _ACCUMULATE or event.value != "NaN"):
        return (
            f"Overflow: the result is beyond 65504, the largest float16, though no input is ({sizes}).",
            f"Compute this {event.op} in float32 (x.float()); only it, the rest can stay. bfloat16 has the range, too.",
        )
    return (
        f"The result is beyond the range of {event.dtype} ({sizes}).",
        "Look at how large its inputs have become.",
    )


def _in_backward(event: Event, forward: list[Event]) -> tuple[Event, str, str]:
    op = (event.node or event.op).removesuffix("Backward0").removesuffix("Backward1")
    named = Event(event.phase, event.value, f"backward of {op.lower()}", event.module, event.line, event.dtype,
                  event.ranges, event.node, event.ins, event.args)  # fmt: skip
    softmax = next((e for e in forward if _softmax(e) and e.value == "NaN"), None)
    if softmax is not None:
        cause, cure = _empty_rows(softmax, forward)
        return (
            softmax,
            f"{cause} The loss leaves it out, and its gradient is NaN all the same (first in {named}).",
            cure,
        )
    hidden = next(
        (e for e in forward if e.value == "NaN" or e.op in ("sqrt", "log", "div", "pow", "exp")),
        None,
    )
    if hidden is not None:
        return (
            named,
            f"Forward made {hidden.value} at {hidden} in entries that were not selected afterwards (torch.where, indexing); "
            "backward multiplies 0 by it, which is NaN.",
            "Make the unused branch's input safe before the select: sqrt(where(x > 0, x, 1)).",
        )
    if op.lower() in ("sqrt", "pow", "rsqrt", "log", "norm", "acos", "asin"):
        return (
            named,
            f"The derivative of {op.lower()} is infinite at 0 ({', '.join(map(str, event.ranges))}).",
            "Add an epsilon inside, or use torch.linalg.vector_norm, whose gradient at 0 is 0.",
        )
    if event.dtype in _HALF:
        return (
            named,
            f"The gradient is beyond 65504, the largest float16 ({', '.join(map(str, event.ranges))}).",
            "A smaller loss scale cures it if it is rare (DynamicScaler does that); else keep this op in float32 or use bfloat16.",
        )
    return (
        named,
        f"What went in: {', '.join(map(str, event.ranges))}.",
        "Look at this op's derivative at these values.",
    )


def _largest(event: Event) -> float:
    return max((max(abs(r.least), abs(r.most)) for r in event.ranges), default=0.0)
