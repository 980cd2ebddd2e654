"""The slot: layers around one module's call, switched in place.

`nn.Module.__call__` runs `_compiled_call_impl` if that attribute is set; torch drops it when a module is copied or
pickled. Layers put there leave the type, the state dict and the hooks of the module alone, and an EMA copy stays plain.
Layers have ranks, so any order of switching gives the same composition: a layer of higher rank lies outside.
They act only while gradients are recorded, so an evaluation under `no_grad` is untouched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flopwise.fixes.interface import Scene, share_reason
from flopwise.meter.found import compiled_parts
from flopwise.meter.replay import error_words

Call = Callable[..., Any]

#: Ranks, inner to outer. Of layers with compiled code the outermost runs: tuned code stands in front of compiled code alone, and
#: captured graphs in front of both.
COMPILED, AUTOTUNED, GRAPHED, RECOMPUTE, INPUTS, LOGITS, AUTOCAST, TF32, MASKS = (
    10,
    12,
    15,
    17,
    20,
    25,
    30,
    40,
    50,
)
#: Those with compiled code.
COMPILES = (COMPILED, AUTOTUNED, GRAPHED)
#: Outside of all: it makes another call, and restores the outputs that the others have made of it.
UNPADDED = 90
#: Outside of that: it gives it the sequences of several batches.
REGROUPED = 95
#: Below this share of forward and backward in a step no trial could show a gain of theirs.
LEAST_COMPUTE_FRAC = 0.05

_ABSENT = object()
#: Weak on both sides: a slot lives in its module while it has layers, and with the fixes that use it.
_SLOTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Slot]] = weakref.WeakKeyDictionary()


class Slot:
    """The layers around one module's call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._found: Any = _ABSENT
        self._installed: Call | None = None
        self._layers: dict[int, Callable[[Call], Call]] = {}
        self._roundoffs: dict[int, float] = {}
        self._reverts: dict[int, Callable[[], None] | None] = {}
        self._stack: Call | None = None
        self.calls = 0  # calls that went through layers
        self.failures: dict[int, str] = {}

    @staticmethod
    def of(module: nn.Module) -> Slot:
        """Returns the slot of a module: one and the same for every fix."""
        known = _SLOTS.get(module)
        slot = known() if known is not None else None
        if slot is None:
            slot = Slot(module)
            _SLOTS[module] = weakref.ref(slot)
        return slot

    def put(
        self,
        rank: int,
        layer: Callable[[Call], Call],
        unit_roundoff: float = 0.0,
        revert: Callable[[], None] | None = None,
    ) -> None:
        """Puts a layer in at its rank.

        Args:
            unit_roundoff: of the arithmetic that the layer brings.
            revert: takes back what belongs to the layer beside it, before a failed call is made again without.
        """
        self._look()
        self._layers[rank] = layer
        self._reverts[rank] = revert
        self._roundoffs[rank] = unit_roundoff
        self._rebuild()

    def take(self, rank: int) -> None:
        """Takes the layer of a rank out; the last one leaves the module as it was found."""
        self._look()
        self._layers.pop(rank, None)
        self._roundoffs.pop(rank, None)
        self._reverts.pop(rank, None)
        self._rebuild()

    def unit_roundoff(self) -> float:
        """Returns the coarsest unit roundoff that the layers bring, 0 without any."""
        return max(self._roundoffs.values(), default=0.0)

    @property
    def composition(self) -> tuple[int, ...]:
        """The ranks of the layers that are in, inner to outer."""
        return tuple(sorted(self._layers))

    @property
    def found_compiled(self) -> bool:
        """Whether the script has compiled the module in place itself."""
        return self._found is not _ABSENT and self._found is not None

    @property
    def compiles(self) -> bool:
        """Whether a call would run compiled code: the script's own, or that of a layer."""
        own = any(rank in self._layers for rank in COMPILES)
        return self.found_compiled or (own and self._stack is not None)

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Runs the module without any layer."""
        stack, self._stack = self._stack, None
        try:
            yield
        finally:
            self._stack = stack

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as it was found."""
        module = self._module()
        assert module is not None
        if self._installed is not None and self._found is not _ABSENT and self._found is not None:
            return self._found(*args, **kwargs)
        return module._call_impl(*args, **kwargs)

    def _look(self) -> None:
        """Gives the slot up if the script has set the module's call since: what is there now is the script's."""
        module = self._module()
        if module is None or self._installed is None:
            return
        if vars(module).get(_NAME, _ABSENT) is not self._installed:
            self._give_up("the script set the module's call itself (model.compile())")
            self._installed = None

    def _rebuild(self) -> None:
        module = self._module()
        if module is None:
            return
        own = vars(module)
        now = own.get(_NAME, _ABSENT)
        if self._layers and self._installed is None:
            self._found = now
            self._installed = self._call
            own[_NAME] = self._installed
        elif not self._layers and self._installed is not None:
            if self._found is _ABSENT:
                del own[_NAME]
            else:
                own[_NAME] = self._found
            self._installed = None
        call: Call = self.plain
        for rank in sorted(self._layers):
            call = self._layers[rank](call)
        self._stack = call if self._layers else None

    def _give_up(self, reason: str) -> None:
        self.failures.update(dict.fromkeys(self._layers, reason))
        self._layers.clear()
        self._roundoffs.clear()
        self._reverts.clear()
        self._stack = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._stack is None or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        self.calls += 1
        try:
            return self._stack(*args, **kwargs)
        except Exception as error:
            if ends_recomputation(error):
                raise
            words = error_words(error)
        # Outside of the except clause, which keeps the memory of the frames that failed.
        return self._without(words, args, kwargs)

    def _without(self, words: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call failed with layers on: it is made once more without any, and they are out for good.

        If it fails again the error is the script's own, and the layers stay.
        """
        for revert in self._reverts.values():
            if revert is not None:
                revert()
        result = self.plain(*args, **kwargs)
        self._give_up(f"the forward raised {words}")
        self._rebuild()
        return result


_NAME = "_compiled_call_impl"


def ends_recomputation(error: Exception) -> bool:
    """Whether this is how activation checkpointing leaves a block that it has seen enough of.

    Source: `_StopRecomputationError` in torch/utils/checkpoint.py, torch 2.11 to 2.13.
    """
    return type(error).__name__ == "_StopRecomputationError"


class Layers:
    """One fix's layers around several modules, switched together."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        rank: int,
        unit_roundoff: float = 0.0,
        revert: Callable[[], None] | None = None,
    ) -> None:
        self._revert = revert
        self._slots = [Slot.of(module) for module in modules]
        self._rank, self._roundoff = rank, unit_roundoff
        self._calls: int | None = None  # at the moment of switching on; None while off
        for slot in self._slots:
            slot.failures.pop(rank, None)

    def on(self, layers: Iterable[Callable[[Call], Call]]) -> None:
        """Puts one layer around each module, unless one has failed before."""
        if self.failure() is not None:
            return
        for slot, layer in zip(self._slots, layers, strict=True):
            slot.put(self._rank, layer, self._roundoff, self._revert)
        if self._calls is None:
            self._calls = self._total()

    def off(self) -> None:
        """Takes the layers out."""
        for slot in self._slots:
            slot.take(self._rank)
        self._calls = None

    @property
    def is_on(self) -> bool:
        """Whether the layers are in."""
        return self._calls is not None

    def settled(self) -> bool:
        """Whether, while on, any of the modules has been called: if not, the fix does nothing."""
        return self._calls is None or self._total() > self._calls

    def failure(self) -> str | None:
        """Returns why a layer was taken out by itself, or None."""
        return next((s.failures[self._rank] for s in self._slots if self._rank in s.failures), None)

    def _total(self) -> int:
        return sum(slot.calls for slot in self._slots)


def inner(module: nn.Module) -> nn.Module:
    """Returns the module inside DistributedDataParallel wrappers: its call is what a fix must wrap."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def script_compiles(root: nn.Module) -> bool:
    """Returns whether any part of a module is compiled by the script itself, and not by a fix."""
    return compiled_parts(root, by_script=True) > 0


def slot_problem(module: nn.Module) -> str | None:
    """Returns why layers cannot be put around this module's call, or None."""
    kind = type(module)
    if isinstance(module, DataParallel):
        return "DataParallel copies the module's call to its replicas"
    if isinstance(module, torch.jit.ScriptModule):
        return "the model is TorchScript"
    if kind.__call__ is not nn.Module.__call__ or "__call__" in vars(module):
        return f"{kind.__name__} defines its own __call__"
    if any(type(p).__name__ in ("DTensor", "FlatParameter") for p in module.parameters()):
        return "the model's parameters are sharded"
    return None


def forward_problem(scene: Scene, change: str) -> str | None:
    """Returns why a fix of the forward is not for this scene, or None; `change` is what the fix brings, in words."""
    if scene.facts.compiles:
        return f"the script compiles its model; {change} would compile it again"
    if not scene.roots:
        return "no root module was found"
    for root in scene.roots:
        reason = slot_problem(inner(root))
        if reason:
            return reason
    return share_reason(scene.compute_frac, LEAST_COMPUTE_FRAC, "in forward and backward")
