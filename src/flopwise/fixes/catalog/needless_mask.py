"""FW107 needless-mask: an attention mask that hides nothing is left out of the model's call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import MASKS, Call, Layers, forward_problem, inner
from flopwise.kit.full_masks import hides_nothing, is_full, watch_moves
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, is_replaying
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

NAME = "attention_mask"
#: After so many calls in which no mask could be left out the fix is given up.
MOST_IN_VAIN = 16


class NeedlessMask(Fix):
    """An attention mask that hides nothing, left out of the model's call.

    What it does:
    Where the root module is called with an `attention_mask` of tokens (batch by length) that is known to be all ones,
    leaves the argument out, so that its default None stands. Masks are looked at on the host, as `Tensor.to` or
    `Tensor.cuda` copies them to the device, batch by batch: a batch with padding keeps its mask. Nothing waits for the
    device. (Masks that transformers builds by itself while it is compiled are left out by compile-model.)

    Why it helps:
    Fused attention has its fastest kernels (flash, cuDNN) without a mask, or with the causal flag. Models of
    transformers read the mask in every step to find that it hides nothing, and wait for the device; when they are
    compiled they cannot look, and keep it.

    When it declines:
    No root module takes an `attention_mask` whose default is None; the ledger was looked at and shows neither fused
    attention with a mask nor a model of transformers; the script compiles its model; its call cannot be wrapped; forward
    and backward are too small a share of the step. It is given up when the model is called without a mask, and when of 16
    calls none could do without: their batches have padding, or the masks were made or changed on the device.

    What can change:
    Other attention kernels sum in another order: results differ by rounding, held against a float64 reference, on a
    batch whose mask is all ones. Calls with and without a mask are compiled apart.
    """

    code = "FW107"
    name = "needless-mask"
    causes = ("needless-mask",)
    findings = ("L109",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether masks may be left out."""
        reason = forward_problem(scene, "a call without its mask")
        if reason:
            return Declined(reason)
        takers = [root for root in map(inner, scene.roots) if place_of(root) is not None]
        if not takers:
            return Declined(f"no model takes an {NAME} whose default is None")
        if not scene.findings or set(self.findings) & set(scene.findings):
            return Eligible()
        if any(_of_transformers(root) for root in takers):
            return Eligible(
                "models of transformers read the mask, or keep it when they are compiled"
            )
        return Declined("no fused attention is given a mask")

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module that takes a mask, switched off."""
        return _Applied([root for root in map(inner, scene.roots) if place_of(root) is not None])


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, modules: list[nn.Module]) -> None:
        self.setting = {"argument": NAME}
        self._layers = Layers(modules, MASKS)
        self._modules = modules
        self._end_watch: Callable[[], None] | None = None
        self._kept = self._left_out = self._absent = 0  # calls

    def enable(self) -> None:
        if self.failure() is not None:
            return
        if self._end_watch is None:
            self._end_watch = watch_moves()
        self._layers.on([self._layer_of(module) for module in self._modules])

    def disable(self) -> None:
        self._layers.off()

    def undo(self) -> None:
        self.disable()
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        reason = self._layers.failure()
        if reason is None and not self._left_out:
            if self._absent >= MOST_IN_VAIN:
                return f"the model is called without an {NAME}"
            if self._kept >= MOST_IN_VAIN:
                return (
                    f"none of {self._kept} masks could be left out: batches have padding, or masks are made or changed "
                    "on the device"
                )
        return reason

    def verify(self, snapshot: Snapshot) -> Parity:
        """Compares on the snapshot's batch with a mask of ones: the one case in which anything changes."""
        module = inner(snapshot.module)
        place = place_of(module)
        given = _given(place, snapshot.args, snapshot.kwargs) if place is not None else None
        if place is None or given is None:
            return not_shown("reordered", f"the model is called without an {NAME} of tokens")
        args, kwargs = _with(place, snapshot.args, snapshot.kwargs, torch.ones_like(given))
        return parity_alone(self, snapshot._replace(args=args, kwargs=kwargs))

    def _layer_of(self, module: nn.Module) -> Callable[[Call], Call]:
        place = place_of(module)
        assert place is not None

        def layer(call: Call) -> Call:
            def without_mask(*args: Any, **kwargs: Any) -> Any:
                mask = _given(place, args, kwargs)
                if is_replaying():  # copies of a batch, between steps: nobody minds waiting
                    full = mask is not None and is_full(mask)
                else:
                    full = mask is not None and hides_nothing(mask)
                    self._left_out += full
                    self._kept += mask is not None and not full
                    self._absent += mask is None
                if full:
                    args, kwargs = _with(place, args, kwargs, None)
                return call(*args, **kwargs)

            return without_mask

        return layer


def place_of(module: nn.Module) -> int | None:
    """Returns the place of the mask among the arguments of a module's call, None where it takes none or needs one."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return None
    found = parameters.get(NAME)
    if found is None or found.default is not None:
        return None
    if found.kind is inspect.Parameter.KEYWORD_ONLY:
        return len(parameters)
    return list(parameters).index(NAME)


def _given(place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the mask of tokens that a call is given, None where there is none or it is a mask of another kind."""
    mask = kwargs.get(NAME, args[place] if place < len(args) else None)
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _with(
    place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], mask: torch.Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with another mask, or with none."""
    if NAME not in kwargs:
        return (*args[:place], mask, *args[place + 1 :]), dict(kwargs)
    rest = {name: value for name, value in kwargs.items() if name != NAME}
    return args, rest if mask is None else {**rest, NAME: mask}


def _of_transformers(module: nn.Module) -> bool:
    return any(type(part).__module__.startswith("transformers.") for part in module.modules())
