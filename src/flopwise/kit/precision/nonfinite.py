"""Where a step first stops being finite: the op, its module and line, what went in, and what would cure it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.errors import PrecisionError
from flopwise.flops.zero import VIEWS
from flopwise.kit.nested import tensors_in
from flopwise.kit.precision.causes import Event, Range, explain, fills, overwrites, uninitialised
from flopwise.kit.precision.replaying import kept, loss_of
from flopwise.kit.precision.saying import users_line
from flopwise.kit.precision.watching import (
    Where,
    current_node,
    forward_line,
    modules_of,
    nodes_behind,
)


@dataclass(frozen=True)
class NonFinite:
    """The first values of a step that are not finite where they should be."""

    phase: str  # "input" | "forward" | "backward"
    value: str  # "NaN" | "inf" | "-inf"
    op: str  # "softmax", "sum"; for an input its name
    module: str | None  # None outside of all modules; "" is the model itself
    line: str | None  # file:line of the forward op in the user's code
    dtype: str
    inputs: str  # shapes, dtypes and ranges of what went into the op
    loss_finite: bool | None  # None if no loss was seen
    cause: str
    cure: str

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        whose = f" of {self.module or 'the model'}" if self.module is not None else ""
        if self.phase == "input":
            return f"{self.value} is in {self.op} before the step computes anything. {self.cause} {self.cure}"
        head = f"First {self.value} in {self.phase}: {self.op}{whose}{at}, in {self.dtype}; went in: {self.inputs}."
        if self.phase == "backward" and self.loss_finite:
            head += " The loss was finite: watching the loss would have missed it."
        return f"{head} {self.cause} {self.cure}"


def find_nonfinite(
    step: Callable[..., Any] | nn.Module,
    *batch: Any,
    module: nn.Module | None = None,
    **named: Any,
) -> NonFinite | None:
    """Replays one step and returns where it first is not finite; None if its loss and its gradients are finite.

    What is not finite on the way and does not reach them (masks, clamped quotients) is no finding. Without a loss or
    backward in the step, all that is not finite is.

    Args:
        step: a function that makes forward and backward (no optimizer step); or a module, which is called with the batch.
            A module's loss is its scalar output, `.loss` or `["loss"]`, else the sum of its outputs.
        batch, named: arguments of the step.
        module: the model, for names; by default the step if that is one.

    Gradients, buffers and the state of the random numbers are afterwards as before. Every op is read: this is slow,
    and made for one step. Compiled modules run eagerly.
    """
    if not callable(step):
        raise PrecisionError(
            f"find_nonfinite: a function that makes one step, or a module, is needed, not {type(step).__name__}"
        )
    root = module if module is not None else (step if isinstance(step, nn.Module) else None)
    names = {} if root is None else _names(root)
    with kept(root), torch.compiler.set_stance("force_eager"), modules_of(root) as where:
        watch = _Watch(where, names)
        watch.came_in = _in_batch((*batch, *named.values()))
        with torch.autograd.set_detect_anomaly(True, check_nan=False), watch:
            _run(lambda: step(*batch, **named), isinstance(step, nn.Module), watch)
        watch.ended()
    return watch.result()


def _names(root: nn.Module) -> dict[int, str]:
    """Returns the names of a module's tensors by where their memory begins."""
    named: list[tuple[str, torch.Tensor]] = [
        (f"parameter {n}", t) for n, t in root.named_parameters()
    ]
    named += [(f"buffer {n}", t) for n, t in root.named_buffers()]
    return {t.data_ptr(): name for name, t in named if not is_lazy(t) and t.numel()}


def _run(step: Callable[[], Any], backward: bool, watch: _Watch) -> None:
    try:
        out = step()
        if backward:
            loss = loss_of(out)
            if loss is not None:
                watch.loss_finite = _finite(loss)
                loss.backward()
    except RuntimeError:
        if (
            not watch.events and watch.came_in is None
        ):  # a later op may refuse what the first one made
            raise


def _in_batch(batch: tuple[Any, ...]) -> NonFinite | None:
    for i, tensor in enumerate(tensors_in(batch)):
        if _has_nan_or_inf(tensor):
            value = "NaN" if bool(torch.isnan(tensor).any()) else "inf"
            return NonFinite(
                "input", value, f"tensor {i} of the batch ({Range.of(tensor)})", None, None, _name(tensor.dtype), "", None,
                "The data are at fault, not the precision.", "Look at the sample and its decoding.",
            )  # fmt: skip
    return None


class _Watch(TorchDispatchMode):
    """Looks at every op's inputs and results until enough is known."""

    def __init__(self, where: Where, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where, self._names = where, names
        self.events: list[Event] = []
        self.loss_finite: bool | None = None
        self._tainted: set[int] = set()  # storages that hold what an op here made non-finite
        self.came_in: NonFinite | None = None  # what was not finite before any op of this step
        self._backward_seen = False
        self._suspects: list[tuple[Any, Event]] = []  # of backward, with their graph nodes
        self._last_scalar: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if name in VIEWS or name.rstrip("_") in VIEWS:
            return func(*args, **kwargs)
        node = current_node()
        self._phase(node)
        # In backward the first gradient that is not finite is enough.
        if any(e.phase == "backward" for e in self.events):
            return func(*args, **kwargs)
        read = args[1:] if overwrites(name) else args
        ins = _floats((read, {k: v for k, v in kwargs.items() if k != "out"}))
        self._arrivals(ins)
        if name.endswith("_"):
            ins = [t.detach().clone() for t in ins]
        out = func(*args, **kwargs)
        self._look(name, ins, args, _floats(out), node)
        return out

    def _phase(self, node: Any) -> None:
        if node is not None and not self._backward_seen:
            self._backward_seen = True
            if self.loss_finite is None and self._last_scalar is not None:
                self.loss_finite = _finite(self._last_scalar)

    def _look(
        self, name: str, ins: list[torch.Tensor], args: Any, outs: list[torch.Tensor], node: Any
    ) -> None:
        if node is None and outs and outs[0].dim() == 0:
            # Backward begins with ones like the loss.
            self._last_scalar = (ins[0] if name == "ones_like" and ins else outs[0]).detach()
        if node is not None and any(_has_nan_or_inf(t) for t in ins):
            self._passed_on(node)
        bad = next((t for t in outs if not _finite(t)), None)
        if bad is None:
            self._tainted.difference_update(_storage(t) for t in outs)
            return
        if uninitialised(name):
            return
        self._tainted.update(_storage(t) for t in outs)
        if fills(name):
            return
        if node is None:
            worse = _has_nan_or_inf(bad) and not any(_has_nan_or_inf(t) for t in ins)
            if worse or _adds_nan(bad, ins) or all(_finite(t) for t in ins):
                self.events.append(self._event(name, ins, args, bad, None))
        # After a loss that is not finite no gradient is.
        elif self.loss_finite is not False and all(node is not n for n, _ in self._suspects):
            self._suspects.append((node, self._event(name, ins, args, bad, node)))

    def _event(
        self, name: str, ins: list[torch.Tensor], args: Any, bad: torch.Tensor, node: Any
    ) -> Event:
        has_nan = bool(torch.isnan(bad).any())
        value = "NaN" if has_nan else ("-inf" if not bool((bad == float("inf")).any()) else "inf")
        return Event(
            "forward" if node is None else "backward", value, name.strip("_"), self._where.module(),
            users_line() if node is None else forward_line(node), _name(bad.dtype), tuple(Range.of(t) for t in ins),
            None if node is None else type(node).__name__, ins, args,
        )  # fmt: skip

    def _passed_on(self, node: Any) -> None:
        """Takes the first suspect for one whose values have reached this node: formulas mask what is not finite inside."""
        for suspect, event in self._suspects:
            if suspect is not node and any(n is node for n in nodes_behind(suspect)):
                self.events.append(event)
                return

    def ended(self) -> None:
        """Looks, before gradients are put back, which suspects have reached a gradient."""
        if any(event.phase == "backward" for event in self.events):
            return
        for suspect, event in self._suspects:
            leaves = (getattr(n, "variable", None) for n in nodes_behind(suspect))
            grads = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
            if any(not _finite(g) for g in grads):
                self.events.append(event)
                return

    def _arrivals(self, ins: list[torch.Tensor]) -> None:
        for tensor in ins:
            if (
                self.came_in is None
                and not self.events
                and _storage(tensor) not in self._tainted
                and _has_nan_or_inf(tensor)
            ):
                known = self._names.get(
                    tensor.data_ptr(),
                    f"a tensor that this step has not written ({Range.of(tensor)})",
                )
                value = "NaN" if bool(torch.isnan(tensor).any()) else "inf"
                self.came_in = NonFinite(
                    "input", value, known, self._where.module(), users_line(), _name(tensor.dtype), "", None,
                    "It is the result of an earlier step." if known.startswith("parameter") else "This step did not make it.",
                    "Go back to a checkpoint before it, and look at the optimizer (half-precision weights without a float32 "
                    "master copy?)." if known.startswith("parameter") else "Look at where it is made.",
                )  # fmt: skip

    def result(self) -> NonFinite | None:
        if self.loss_finite is True and all(e.phase == "forward" for e in self.events):
            return None
        if self.came_in is not None:
            return self.came_in
        event, cause, cure = explain(self.events, self.loss_finite)
        if event is None and self.loss_finite is False:
            return NonFinite(
                "forward", "a non-finite value", "the loss", None, None, "", "", False, "No op was seen that made it.",
                "Look at what the step takes from outside of it.",
            )  # fmt: skip
        if event is None:
            return None
        return NonFinite(
            event.phase, event.value, event.op, event.module, event.line, event.dtype,
            ", ".join(map(str, event.ranges)) or "nothing", self.loss_finite, cause, cure,
        )  # fmt: skip


def _floats(tree: Any) -> list[torch.Tensor]:
    dense = (_values(t) for t in tensors_in(tree) if t.is_floating_point())
    return [t for t in dense if t.numel()]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or the entries that a sparse one has: what is not there is 0."""
    if tensor.layout == torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout == torch.strided else tensor.values()


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_values(tensor.detach())).all())


def _has_nan_or_inf(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has NaN or +inf: -inf alone is what masks are made of."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    tensor = _values(tensor)
    return bool((torch.isnan(tensor) | (tensor == float("inf"))).any())


def _adds_nan(bad: torch.Tensor, ins: list[torch.Tensor]) -> bool:
    return bool(torch.isnan(bad).any()) and not any(bool(torch.isnan(t).any()) for t in ins)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
