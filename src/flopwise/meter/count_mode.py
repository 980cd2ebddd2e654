"""The dispatch mode that sees every op of a step, runs it once, unchanged, and books its cost.

It works below autograd and autocast: the ops it sees are those that a kernel serves, forward, backward and in the
optimizer. Whatever goes wrong in the booking is noted; the op's own result or error is always what the caller gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.flops.call import Call, Cost
from flopwise.meter.count_clock import Clock, Launches, Sample, capturing
from flopwise.meter.count_ops import (
    Op,
    call_of,
    first_tensor,
    flex_blocks,
    look_up,
    makes_differentiable,
    named,
    precision_of,
)
from flopwise.meter.count_roles import BACKWARD, Roles
from flopwise.meter.count_tally import Pending, Place, Tally, rule_dtype
from flopwise.meter.count_zeros import Zeros

_DIFFERENTIABLE_LSTM = (
    "a gradient of a oneDNN LSTM is itself differentiated: torch computes the layer again for that, and all of its "
    "gradients, so the count is too high"
)
_VALUES_KEPT = 1 << 20  # elements of a tensor whose contents a formula may ask for


class OpCounter(TorchDispatchMode):
    """Counts the ops of the thread it is pushed on, and of the backward passes that this thread starts.

    `in_place`: no tensor may be copied while it counts (a graph is being captured, or the tensors are fake).
    `fake`: fake tensors are what is counted. Otherwise they are somebody's planning (DTensor's, for its shapes).
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler (seconds) to wrap this class; compiled code runs eagerly anyway."""
        return False

    def __init__(
        self, roles: Roles, timed: bool, in_place: bool = False, fake: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = True
        self.observer: Callable[[str, Any, Any, Any], None] | None = None  # told of every op
        self.tally = Tally()
        self.launches = Launches()
        self._roles = roles
        self._clock = Clock(timed)
        self._in_place = in_place
        self._fake = fake
        self._ops: dict[Any, Op] = {}
        self._foreign: dict[type, bool] = {}
        self._zeros = Zeros()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if types and self._is_foreign(types):
            return NotImplemented  # the subclass unwraps itself; its inner ops come by here
        op = self._op(func) if self._fake or FakeTensor not in types else None
        if op is None:
            return func(*args, **kwargs)
        if op.decomposes:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        mark = self._begin(op, args, kwargs)
        self.launches.inside += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self.launches.inside -= 1
        try:
            self._book(op, mark, args, kwargs, out)
            if self.observer is not None:
                self.observer(op.name, args, kwargs, out)
        except Exception as error:
            self._trouble(op.name, error)
        return out

    def _op(self, func: Any) -> Op | None:
        try:
            op = self._ops.get(func)
            if op is None:
                op = self._ops[func] = look_up(func)
            return op
        except Exception as error:
            self._trouble(str(func), error)
            return None

    def _is_foreign(self, types: Any) -> bool:
        """Returns whether a tensor subclass with a dispatch of its own is among the operands (DTensor, ...)."""
        for kind in types:
            known = self._foreign.get(kind)
            if known is None:
                own = getattr(kind, "__torch_dispatch__", None)
                plain = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
                known = not issubclass(kind, FakeTensor) and own is not None and own not in plain
                self._foreign[kind] = known
            if known:
                return True
        return False

    def _begin(self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return self._clock.begin(op, args, kwargs)
        except Exception as error:
            self._trouble(op.name, error)
            return None

    def _book(
        self, op: Op, mark: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        sample = self._clock.end(op, mark, args, kwargs, out)
        self.tally.samples.append(sample)
        sample.covered = op.zero
        if op.zero:
            self._zeros.saw(op.name, out)
            return
        tensor = first_tensor(args, kwargs)
        device = tensor.device if tensor is not None else torch.device("cpu")
        place = Place(self._roles.now(), precision_of(device.type), str(device))
        if op.rule is None:
            self.tally.unknown(place)
            return
        waits = self._values_wanted(op, args, kwargs)
        if waits:
            self._wait(op, args, kwargs, out, waits, place, sample)
            return
        try:
            call = call_of(op, args, kwargs, out)
            cost, dtype = op.rule.formula(call), rule_dtype(op.rule, call.args)
            if self._zeros.in_product(op.name, args):
                cost = Cost(0, 0, cost.executed)
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            self.tally.notes[f"{op.name} was not counted: {error}"] += 1
            self.tally.unknown(place)
            return
        self.tally.add(op.name, op.rule.family, dtype, cost, place)
        if place.role == BACKWARD and makes_differentiable(op.rule.family):
            self.tally.notes[_DIFFERENTIABLE_LSTM] += 1
        sample.covered = True
        self._ask_torch(op, args, kwargs, out)

    def _values_wanted(
        self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors whose contents the formula reads, by name."""
        if op.rule is None or not op.rule.values:
            return {}
        found = named(op, args, kwargs)
        found.update(flex_blocks(found.get("block_mask")))
        tensors = {name: found.get(name) for name in op.rule.values}
        return {
            name: t
            for name, t in tensors.items()
            if isinstance(t, torch.Tensor) and t.numel() <= _VALUES_KEPT
        }

    def _wait(
        self,
        op: Op,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        waits: dict[str, torch.Tensor],
        place: Place,
        sample: Sample,
    ) -> None:
        """Puts an op aside until the contents of a tensor can be read without making the step wait.

        Contents that cannot be read at all are left out: the formula decides whether it can do without.
        """
        kept = {name: self._keep(t) for name, t in waits.items()}
        call = call_of(op, args, kwargs, out)
        rule = op.rule
        assert rule is not None
        if op.theirs is None:
            self.tally.unknown_to_torch.add(op.name)

        def resolve() -> tuple[Cost, str] | None:
            try:
                values = {
                    name: contents
                    for name, tensor in kept.items()
                    if (contents := self._contents(tensor)) is not None
                }
                full = Call(call.name, {**call.args, **_with_values(call, values)}, call.outs)
                return rule.formula(full), rule_dtype(rule, full.args)
            except Exception as error:
                self.tally.notes[f"{op.name} was not counted: {error}"] += 1
                return None

        self.tally.pending.append(Pending(op.name, resolve, rule.family, place, sample))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy, as the script may write into the tensor, or the tensor itself where none may be made."""
        if self._in_place or isinstance(tensor, FakeTensor) or (tensor.is_cuda and capturing()):
            return tensor
        return tensor.detach().clone()

    def _contents(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Returns what a small tensor holds, None where nothing is there to be read."""
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return None
        if tensor.is_cuda and capturing():
            return None
        return tuple(int(v) for v in tensor.flatten().tolist())

    def _ask_torch(
        self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Counts the same op with torch's formula, for the cross-check."""
        if op.theirs is None:
            self.tally.unknown_to_torch.add(op.name)
            return
        try:
            self.tally.theirs[op.name] += int(op.theirs(*args, **kwargs, out_val=out))
        except Exception as error:
            self.tally.notes[f"torch.utils.flop_counter failed on {op.name}: {error}"] += 1

    def _trouble(self, name: str, error: Exception) -> None:
        self.tally.notes[f"counting {name} failed: {type(error).__name__}: {error}"] += 1


class CaptureMode(OpCounter):
    """An op counter that compiled code runs past, compiled as ever."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells Dynamo that this mode is no reason to run eagerly."""
        return True

    def _contents(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Returns None: what is captured has not run, so its tensors hold nothing yet, and other lengths later."""
        return None


def _with_values(call: Call, values: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {
        name: dataclasses.replace(operand, values=values[name])
        for name in values
        if (operand := call.maybe(name)) is not None
    }
