"""Parity: how far a fix moves the numbers, on one snapshot of weights and inputs, and whether that is rounding.

The yardstick is not the old result but a more precise one. The same step is computed three ways: as it was, with the
fix, and in float64. The fix passes if its error against float64 is at most c times the larger of

- the error that the script already had, and
- what the step's own sensitivity makes of one rounding: every weight and input multiplied by 1 + u * xi with
  xi uniform in [-1, 1] and u the unit roundoff of the arithmetic that the fix computes in.

So a reordered sum passes, also where the problem is badly conditioned, and a wrong number does not.
Source: the backward-error view of rounding, N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
SIAM 2002, sections 1.5 and 1.6; unit roundoffs from IEEE 754-2019 and the bfloat16 format (8 significant bits).

Everything here runs between two steps of the user's training and leaves nothing changed: weights, buffers, gradients,
flags, attributes and random generators are as before, bit for bit, also when something raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from flopwise.meter.kept import Rng, kept_module, kept_optimizer, kept_rng
from flopwise.meter.replay import (
    Outcome,
    Replay,
    Snapshot,
    distance,
    error_words,
    quieten,
    quieten_wholly,
)
from flopwise.meter.sameness import difference, same
from flopwise.meter.yardstick import (
    FLOAT32,
    UNIT_ROUNDOFF,
    C,
    allowed_roundoff,
    finite,
    loss_rel,
    output_error,
    yardstick,
)
from flopwise.records.verdict import Parity

#: Weights are moved by this relative amount to look at a nearby point.
NEARBY = 2.0**-10


def compare_forward(
    snapshot: Snapshot,
    enable: Callable[[], None],
    disable: Callable[[], None],
    *,
    numerics: str = "reordered",
    unit_roundoff: float = FLOAT32,
    bare: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reject: Callable[[list[torch.Tensor]], str | None] | None = None,
    seed: int = 0,
) -> Parity:
    """Returns how outputs, loss and gradients of one forward and backward differ with the fix on.

    Args:
        snapshot: the root module and its inputs; call with the fix off, it is off again afterwards.
        numerics: the fix's class; "identical" asks for equality to the bit.
        unit_roundoff: of the least precise arithmetic that the fix computes in.
        bare: a context in which no fix at all is on, for the reference.
        reject: looks at the old outputs, with their graphs; a reason ends the comparison.
    """
    devices = {p.device.index for p in snapshot.module.parameters() if p.device.type == "cuda"}
    u = allowed_roundoff(snapshot, unit_roundoff)
    compare = _Comparison(snapshot, enable, disable, numerics, u, bare)
    with kept_rng({d for d in devices if d is not None}) as rng:
        try:
            parity = compare.at(rng, seed, reject=reject)
            if parity.passed or not compare.only_gradients_differ:
                return parity
            nearby = [compare.at(rng, seed + k, nearby=k) for k in (1, 2)]
        except Exception as error:  # the fix is not kept; the run goes on
            return not_shown(numerics, f"could not be compared: {error_words(error)}")
        finally:
            disable()
    if all(p.passed for p in nearby):
        kink = (
            f"at the snapshot itself a kink (ReLU, max) lies within rounding: gradients {parity.grad_rel:.2g} "
            "apart there, within bounds at two points nearby"
        )
        return replace(nearby[0], detail=f"{nearby[0].detail}; {kink}")
    return parity


class _Comparison:
    """One fix on one snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        enable: Callable[[], None],
        disable: Callable[[], None],
        numerics: str,
        unit_roundoff: float,
        bare: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.snapshot, self.numerics, self.unit_roundoff = snapshot, numerics, unit_roundoff
        self.enable, self.disable, self.bare = enable, disable, bare
        self.only_gradients_differ = False

    def at(
        self,
        rng: Rng,
        seed: int,
        *,
        nearby: int = 0,
        reject: Callable[[list[torch.Tensor]], str | None] | None = None,
    ) -> Parity:
        """Returns the comparison at the snapshot's weights, or at a point nearby."""
        with kept_module(self.snapshot.module) as state:
            replay = Replay(self.snapshot, state, rng, seed)
            if nearby:
                replay.prepare.append(partial(_move, seed=nearby))
            replay.rewind()
            replay.look = reject
            old = replay.run()
            replay.look = None
            if replay.reason is not None:
                return not_shown(self.numerics, replay.reason)
            quiet = []
            for quieter, words in ((quieten, "dropout off"), (quieten_wholly, "random layers off")):
                if old.drew:
                    replay.prepare.append(quieter)
                    quiet = [f"compared with {words}"]
                    replay.rewind()
                    old = replay.run()
            return self._judge(replay, old, quiet)

    def _judge(self, replay: Replay, old: Outcome, notes: list[str]) -> Parity:
        replay.rewind()
        self.enable()
        try:
            new = replay.run()
        finally:
            self.disable()
        if not finite(old):
            return not_shown(self.numerics, "the step is not finite without the fix either")
        grad_rel, cosine = distance(new.grads, old.grads)
        output_rel, _ = distance(list(new.outputs), list(old.outputs))
        if self.numerics == "identical":
            equal = _equal(old, new)
            grad_bound = output_bound = 0.0
            passed, source = equal, "equality to the bit"
        else:
            with self.bare():
                yard = yardstick(replay, old, self.unit_roundoff)
            grad_new, _ = distance(new.grads, yard.reference.grads)
            output_new = output_error(new, yard.reference)
            grads_hold, outputs_hold = grad_new <= yard.grad_bound, output_new <= yard.output_bound
            self.only_gradients_differ = outputs_hold and not grads_hold
            passed = grads_hold and outputs_hold
            grad_bound, output_bound = (
                yard.grad_bound + yard.grad_old,
                yard.output_bound + yard.output_old,
            )
            source = yard.source
            notes.append(
                f"error of the gradients {grad_new:.2g} (without the fix {yard.grad_old:.2g}, "
                f"allowed {yard.grad_bound:.2g}), of the {'loss' if old.loss is not None else 'outputs'} "
                f"{output_new:.2g} (without {yard.output_old:.2g}, allowed {yard.output_bound:.2g})"
            )
        return Parity(
            numerics=self.numerics,
            passed=passed and finite(new),
            loss_old=old.loss,
            loss_new=new.loss,
            loss_rel=loss_rel(new.loss, old.loss),
            grad_rel=grad_rel,
            grad_cosine=cosine,
            bound=grad_bound,
            bound_source=source,
            detail="; ".join(notes),
            output_rel=output_rel,
            loss_bound=output_bound,
        )


def compare_update(
    optimizer: torch.optim.Optimizer,
    enable: Callable[[], None],
    disable: Callable[[], None],
    *,
    numerics: str = "reordered",
    seed: int = 0,
) -> Parity:
    """Returns how one update differs with the fix on: from the same weights, gradients and state, both ways.

    `grad_rel` and its bound are those of the update (new weights minus old ones). The gradients are those at hand, or
    seeded noise where the script has cleared them. Hooks and schedulers do not see these updates.
    """
    with kept_optimizer(optimizer) as kept, kept_rng():
        try:
            old = _update(optimizer, seed)
            kept.restore()
            enable()
            try:
                new = _update(optimizer, seed)
            finally:
                disable()
            kept.restore()
            reference = _update(_twin_in_float64(optimizer), seed)
        except Exception as failure:  # the fix is not kept; the run goes on
            return not_shown(numerics, f"could not be compared: {error_words(failure)}")
    rel, cosine = distance(new.changes, old.changes)
    if numerics == "identical":
        pairs = zip(new.changes + new.state, old.changes + old.state, strict=True)
        equal = all(same(a, b) for a, b in pairs)
        source = "equality to the bit"
        return Parity(numerics, equal, None, None, None, rel, cosine, 0.0, source, "one update")
    u = max(UNIT_ROUNDOFF.get(p.dtype, FLOAT32) for p in _parameters(optimizer))
    errors = []
    for part in ("changes", "state"):
        ours, theirs, exact = (getattr(update, part) for update in (new, old, reference))
        before = distance(theirs, exact)[0]
        errors.append((distance(ours, exact)[0], before, C * max(before, u)))
    (error, before, allowed), (state_error, state_before, state_allowed) = errors
    return Parity(
        numerics=numerics,
        passed=error <= allowed and state_error <= state_allowed,
        loss_old=None,
        loss_new=None,
        loss_rel=None,
        grad_rel=rel,
        grad_cosine=cosine,
        bound=allowed + before,
        bound_source=f"error against float64, at most {C:g} times the old error or one rounding (u = {u:.3g})",
        detail=f"error of the update {error:.2g} (without the fix {before:.2g}, allowed {allowed:.2g}), of the "
        f"optimizer's state {state_error:.2g} (without {state_before:.2g}, allowed {state_allowed:.2g})",
    )


class _Update(NamedTuple):
    """What one update did: changes of the trained parameters in float64, and the state after it."""

    changes: list[torch.Tensor | None]
    state: list[torch.Tensor | None]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _update(optimizer: torch.optim.Optimizer, seed: int) -> _Update:
    """Makes one update, past all hooks. The caller takes it back."""
    parameters = _parameters(optimizer)
    if all(p.grad is None for p in parameters):
        for i, p in enumerate(parameters):
            generator = torch.Generator(p.device).manual_seed(seed + i)
            noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32)
            p.grad = (0.01 * noise).to(p.dtype)
    before = [p.detach().clone() for p in parameters]
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # the class's step, wrapped by torch for its hooks
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
    changes = [p.detach().double() - b.double() for p, b in zip(parameters, before, strict=True)]
    entries = [optimizer.state.get(p, {}) for p in parameters]
    tensors = [v for e in entries for _, v in sorted(e.items()) if isinstance(v, torch.Tensor)]
    return _Update([*changes], [t.detach().to("cpu", torch.float64, copy=True) for t in tensors])


def _twin_in_float64(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class, with the same settings, on float64 copies of everything."""
    twins: dict[torch.Tensor, torch.Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            twins[p] = p.detach().double().requires_grad_(p.requires_grad)
            twins[p].grad = p.grad.double() if p.grad is not None else None
        plain: dict[str, Any] = {
            "params": [twins[p] for p in group["params"]],
            "fused": False,
            "foreach": False,
        }
        if group.get("capturable"):
            plain["capturable"] = False  # asks for counters on the device
        groups.append({**group, **plain})
    twin: torch.optim.Optimizer = type(optimizer)(groups, lr=groups[0]["lr"])  # type: ignore[call-arg]
    for p, entry in optimizer.state.items():
        twin.state[twins[p]] = {
            name: value.double() if name != "step" and torch.is_tensor(value) else _copied(value)
            for name, value in entry.items()
        }
    return twin


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def compare_batches(
    old: Sequence[Any], new: Sequence[Any], *, draws_random_numbers: bool = False
) -> Parity:
    """Returns whether batches of the same indices, fetched both ways, are equal to the bit.

    Where the data set draws random numbers (augmentation), workers draw from streams of their own and the values
    cannot agree: then structure, shapes and dtypes are compared, and the class becomes "reordered".
    """
    numerics = "reordered" if draws_random_numbers else "identical"
    if not old or len(old) != len(new):
        return not_shown(
            numerics, f"{len(old)} batches one way, {len(new)} the other: nothing to compare"
        )
    for number, (a, b) in enumerate(zip(old, new, strict=True)):
        where = difference(a, b, values=not draws_random_numbers)
        if where:
            return not_shown(numerics, f"batch {number} of {len(old)} differs: {where}")
    if draws_random_numbers:
        detail = (
            f"{len(old)} batches: same indices, structure, shapes and dtypes. The data set draws random numbers; "
            "workers draw them from their own seeded streams, so values agree in distribution only"
        )
        return Parity(
            numerics, True, None, None, None, None, None, 0.0, "shapes and dtypes", detail
        )
    detail = f"{len(old)} batches of the same indices, every tensor equal to the bit"
    return Parity(numerics, True, None, None, None, 0.0, 1.0, 0.0, "equality to the bit", detail)


@torch.no_grad()
def _move(module: torch.nn.Module, seed: int) -> None:
    """Moves every parameter by a seeded relative 2**-10."""
    for i, parameter in enumerate(module.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(1000 * seed + i)
        xi = torch.rand(parameter.shape, generator=generator, device=parameter.device)
        parameter.mul_((1 + NEARBY * (2 * xi - 1)).to(parameter.dtype))


def _equal(old: Outcome, new: Outcome) -> bool:
    """Whether loss, outputs and gradients are equal to the bit."""
    if old.loss != new.loss or len(old.outputs) != len(new.outputs):
        return False
    pairs = [*zip(old.outputs, new.outputs, strict=True), *zip(old.grads, new.grads, strict=True)]
    return all(same(a, b) for a, b in pairs)


def not_shown(numerics: str, reason: str) -> Parity:
    """Returns a parity that was not shown."""
    return Parity(numerics, False, None, None, None, None, None, 0.0, "none", reason)
