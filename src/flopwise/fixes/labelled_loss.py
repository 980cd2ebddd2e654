"""The loss of a language model from its head's input, with logits at labelled places only; learned from one of its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """How a model makes its loss of logits and labels."""

    shift: bool = False  # logits of a place are held against the label of the next
    ignore_index: int = -100
    label_smoothing: float = 0.0
    upcast: bool = False  # logits are cast to float32 first
    per_item: bool = False  # the sum over a number that the script gives, not the mean
    autocast: str = ""  # that the model enters by itself
    gives: str = ""  # the dtype that the model casts its logits to before it gives them

    def words(self) -> dict[str, str]:
        """Returns it as a plan holds it."""
        return {name: str(value) for name, value in asdict(self).items()}

    @staticmethod
    def of(words: Mapping[str, str]) -> Loss:
        """Returns what `words` gave.

        Raises:
            ValueError: something is missing, or no number.
        """
        read: dict[str, Callable[[str], Any]] = {
            "bool": lambda text: {"True": True, "False": False}[text], "int": int, "float": float, "str": str
        }  # fmt: skip
        try:
            return Loss(**{f.name: read[str(f.type)](words[f.name]) for f in fields(Loss)})
        except KeyError as error:
            raise ValueError(f"the loss of the trial is not told in full ({error})") from error

    def targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the target of every place, in one row."""
        if self.shift:
            labels = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        return labels.reshape(-1)

    def __call__(
        self, product: Product, hidden: torch.Tensor, targets: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Returns the loss; where it is `per_item`, the sum over all labels.

        Args:
            product: of the head.
            hidden: the head's input, (places, width).
            targets: (places,).
            rows: logits are computed for; at least as many as places with a label, or all.
        """
        if rows < targets.shape[0]:
            hidden, targets = labelled_rows(hidden, targets, rows, self.ignore_index)
        logits = product(hidden)
        return F.cross_entropy(
            logits.float() if self.upcast else logits,
            targets,
            ignore_index=self.ignore_index,
            reduction="sum" if self.per_item else "mean",
            label_smoothing=self.label_smoothing,
        )


class _Rows(torch.autograd.Function):
    """Takes rows; their gradient is put back by reading, not by adding."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        places: torch.Tensor,
        labelled: torch.Tensor,
        number: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(labelled, number)
        return hidden[places]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        labelled, number = ctx.saved_tensors
        back = grad[number.clamp(0, grad.shape[0] - 1)]
        return torch.where(labelled[:, None], back, torch.zeros_like(back)), None, None, None


def labelled_rows(
    hidden: torch.Tensor, targets: torch.Tensor, rows: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows with a label and their targets, in order, filled up to a fixed number with ignored ones.

    No size hangs on values, so nothing waits for the device. There must not be more rows with a label than `rows`.
    """
    labelled = targets != ignore_index
    number = labelled.cumsum(0) - 1
    into = torch.where(labelled, number.clamp(max=rows), rows)  # the last is for the others
    every = torch.arange(targets.shape[0], device=targets.device)
    places = every.new_zeros(rows + 1).scatter(0, into, every)[:rows]
    picked = targets.new_full((rows + 1,), ignore_index).scatter(0, into, targets)[:rows]
    taken: torch.Tensor = _Rows.apply(hidden, places, labelled, number)  # type: ignore[no-untyped-call]
    return taken, picked


class Count:
    """How many places have a label: asked for at once, read when the device has passed that point."""

    def __init__(self, targets: torch.Tensor, ignore_index: int) -> None:
        number = (targets != ignore_index).sum()
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(number.device))

    def read(self) -> int:
        """Returns the number."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


class _Losses(TorchFunctionMode):
    """Notes the calls of cross_entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, Any], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            bound = inspect.signature(F.cross_entropy).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.calls.append((bound.arguments, result))
        return result


@dataclass(frozen=True)
class Learned:
    """What one step of a model showed."""

    head: nn.Linear
    loss: Loss


def learn(
    run: Callable[[], Any], heads: list[nn.Linear], labels: torch.Tensor, items: Any
) -> Learned | str:
    """Runs a step and returns which head makes the logits and how the loss is made of them, or why that is not known.

    Args:
        run: gives the model's output, with `loss` and `logits`.
        heads: of which one may be the head.
        labels: what the model is given.
        items: the number that the script gives for the sum to be divided by, or None.
    """
    made: list[tuple[nn.Linear, torch.Tensor, str]] = []

    def note(layer: Any, _: Any, result: Any) -> None:
        kind = labels.device.type if not isinstance(result, torch.Tensor) else result.device.type
        on = torch.is_autocast_enabled(kind)
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else ""
        made.append((layer, result, dtype))

    hooks = [head.register_forward_hook(note) for head in heads]
    outside = torch.is_autocast_enabled(labels.device.type)
    try:
        with _Losses() as losses:
            output = run()
    finally:
        for hook in hooks:
            hook.remove()
    loss, logits = part(output, "loss"), part(output, "logits")
    if not isinstance(loss, torch.Tensor) or not isinstance(logits, torch.Tensor):
        return "the model gives no loss beside logits"
    mine = [one for one in made if one[1] is logits or _cast_to(one[1], logits)]
    if len(mine) != 1:
        return "the logits are not what a Linear layer gives as it is"
    if len(losses.calls) != 1:
        return f"the model calls cross_entropy {len(losses.calls)} times"
    head, given, dtype = mine[0]
    arguments, result = losses.calls[0]
    found = _loss(arguments, result, given, loss, labels, items, "" if outside else dtype)
    if isinstance(found, str):
        return found
    gives = "" if given is logits else str(logits.dtype).removeprefix("torch.")
    return Learned(head, replace(found, gives=gives))


def _cast_to(given: Any, logits: torch.Tensor) -> bool:
    """Whether logits are what a head gave, in float32: Accelerate casts what a model gives under its autocast."""
    return (
        isinstance(given, torch.Tensor)
        and given.shape == logits.shape
        and given.dtype in (torch.bfloat16, torch.float16)
        and logits.dtype == torch.float32
        and torch.equal(given.float(), logits)
    )


def _loss(
    call: dict[str, Any],
    result: Any,
    logits: torch.Tensor,
    loss: torch.Tensor,
    labels: torch.Tensor,
    items: Any,
    autocast: str,
) -> Loss | str:
    targets = call["target"]
    if call["weight"] is not None or targets.is_floating_point():
        return "the loss weights its classes, or is given their probabilities"
    if labels.shape != logits.shape[:-1]:
        return "labels and logits have different places"
    per_item = call["reduction"] == "sum"
    if not per_item and (call["reduction"] != "mean" or result is not loss):
        return "the loss is not the mean over the labels"
    if per_item and items is None:
        return "the loss is a sum, of which it is not known what it is divided by"
    flat, ignore = targets.reshape(-1), call["ignore_index"]
    labels = labels.to(flat.device)
    fits = [
        shift
        for shift in (False, True)
        if _same(Loss(shift, ignore).targets(labels), flat)
        or (shift and _same(labels[..., 1:].reshape(-1), flat))
    ]
    if len(fits) != 1:
        return "the targets of the loss are not the labels, nor the labels shifted by one"
    upcast = call["input"].dtype == torch.float32 != logits.dtype
    return Loss(fits[0], ignore, float(call["label_smoothing"]), upcast, per_item, autocast)


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool((one == two).all())


def part(output: Any, name: str) -> Any:
    """Returns one part of a model's output, None where it has none."""
    if isinstance(output, Mapping):
        return output.get(name)
    return getattr(output, name, None)
