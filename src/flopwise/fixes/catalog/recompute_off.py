"""FW113 recompute-off: activation checkpointing switched off where measured memory allows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import RECOMPUTE, Call, Layers, Slot, forward_problem, inner
from flopwise.hardware import limits
from flopwise.kit.nested import map_tensors
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, error_words
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity
from flopwise.units import size

#: Around what is compiled, inside of what changes arguments: it adds one of its own.
RANK = RECOMPUTE
#: The predicted peak must stay below this share of the memory that there is.
MOST_MEMORY_FRAC = 0.85
#: What torch.utils.checkpoint.checkpoint looks up when it is called, however a script has imported it.
GENERATOR, FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
#: Flag of transformers: of a model's layers, which ask it in each forward.
FLAG = "gradient_checkpointing"


class RecomputeOff(Fix):
    """Activation checkpointing switched off where measured memory allows.

    What it does:
    Lets `torch.utils.checkpoint` keep the activations instead of computing them again in the backward: its inner
    functions are replaced between two steps, whoever has imported it, and the `gradient_checkpointing` flags of
    transformers' layers are cleared, so that a compiler sees it too. A model that caches keys and values once
    checkpointing is off is told not to. Before that one forward is run without checkpointing that keeps nothing, only
    adds up what would be kept.

    Why it helps:
    A checkpointed forward is computed twice: a third of all FLOPs of the step with full checkpointing. Where the
    activations fit into memory, that is for nothing.

    When it declines:
    The ledger found no forward that runs again; the peak that is predicted (the peak so far, and what would be kept)
    is above 85 % of the memory that is free or held by this process; no checkpoint is called in the step; it is
    another implementation than torch's (DeepSpeed, Megatron); the script compiles its model; the model's call cannot
    be wrapped. A forward that runs out of memory all the same is run again as before.

    What can change:
    Nothing in the mathematics: the same forward is differentiated, without its repetition. Memory grows by what is
    kept; a larger batch later in training grows it further. In compiled code only flags are seen: calls of
    `checkpoint` that a compiled forward makes by itself stay.
    """

    code = "FW113"
    name = "recompute-off"
    causes = ("recompute",)
    findings = ("L106",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether checkpointing may be tried off."""
        if not set(self.findings) & set(scene.findings):
            return Declined("no forward was found to run again in the backward")
        if scene.device.type not in ("cpu", "cuda"):
            return Declined(f"not tested on devices of type {scene.device.type}")
        reason = forward_problem(scene, "a step without checkpoints")
        if reason is None and not all(hasattr(torch_checkpoint, n) for n in (GENERATOR, FUNCTION)):
            reason = "torch.utils.checkpoint is made otherwise in this torch"
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off. With a setting memory is predicted at the first call, before it acts."""
        return _Applied([inner(root) for root in scene.roots], scene.device, bool(setting))


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, roots: list[nn.Module], device: torch.device, planned: bool) -> None:
        self.setting = {"checkpointing": "off"}
        self._roots, self._device = roots, device
        self._layers = Layers(roots, RANK, revert=self._as_before)
        self._unknown = planned  # whether memory has to be predicted at the next call
        self._reason: str | None = None
        self._off = False
        self._flags: list[nn.Module] = []

    def enable(self) -> None:
        if self.failure() is not None:
            return
        if not self._unknown:
            self._switch_off()
        self._layers.on([self._layer(root) for root in self._roots])

    def disable(self) -> None:
        self._layers.off()
        self._as_before()

    def undo(self) -> None:
        self.disable()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._reason or self._layers.failure()

    def verify(self, snapshot: Snapshot) -> Parity:
        """Predicts the peak, and compares the step only where that fits."""
        snapshot = snapshot._replace(module=inner(snapshot.module))
        self.disable()
        self._predict(snapshot)
        if self._reason is not None:
            return not_shown("reordered", self._reason)
        _REPLACED.enter(torch_checkpoint._checkpoint_without_reentrant_generator, _WithoutReentry)
        try:
            return parity_alone(self, snapshot)
        finally:
            _REPLACED.leave()

    def _predict(self, snapshot: Snapshot) -> None:
        """Sets the reason where the activations would not fit, or none are computed again."""
        self._unknown = False
        try:
            with kept_module(snapshot.module), kept_rng(), Slot.of(snapshot.module).bypassed():
                kept, calls = kept_bytes(snapshot.module, lambda: _forward(snapshot))
        except Exception as error:  # the fix is not kept; the run goes on
            self._reason = f"what would be kept could not be seen: {error_words(error)}"
            return
        if not calls:
            self._reason = "the step calls no torch.utils.checkpoint"
            return
        peak, room = memory(self._device)
        if peak + kept > MOST_MEMORY_FRAC * room:
            self._reason = (
                f"a peak of {size(peak + kept)} is predicted ({size(kept)} more, of {calls} checkpoints), above "
                f"{MOST_MEMORY_FRAC:.0%} of the {size(room)} that there are"
            )

    def _layer(self, root: nn.Module) -> Callable[[Call], Call]:
        caches = _may_cache(root)

        def around(call: Call) -> Call:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._unknown:
                    self._predict(Snapshot(root, args, kwargs, _autocast(self._device)))
                    if self._reason is None:
                        self._switch_off()
                if caches and self._flags and kwargs.get("use_cache") is None:
                    kwargs = {**kwargs, "use_cache": False}
                return call(*args, **kwargs)

            return run

        return around

    def _switch_off(self) -> None:
        if self._off:
            return
        self._off = True
        _REPLACED.enter(_kept, _KeptFunction)
        for root in self._roots:
            for module in root.modules():
                if vars(module).get(FLAG) is True:
                    vars(module)[FLAG] = False
                    self._flags.append(module)

    def _as_before(self) -> None:
        if not self._off:
            return
        self._off = False
        _REPLACED.leave()
        while self._flags:
            module = self._flags.pop()
            if vars(module).get(FLAG) is False:
                vars(module)[FLAG] = True


def _may_cache(root: nn.Module) -> bool:
    """Whether the model takes `use_cache`: with checkpoints it caches nothing in training, without it might."""
    try:
        names = inspect.signature(root.forward).parameters
    except (TypeError, ValueError):
        return False
    return "use_cache" in names


class _Replaced:
    """The inner functions of torch.utils.checkpoint, replaced while anyone wants it."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Any]] = []

    def enter(self, generator: Any, function: Any) -> None:
        self._found.append(
            (getattr(torch_checkpoint, GENERATOR), getattr(torch_checkpoint, FUNCTION))
        )
        setattr(torch_checkpoint, GENERATOR, generator)
        setattr(torch_checkpoint, FUNCTION, function)

    def leave(self) -> None:
        generator, function = self._found.pop()
        setattr(torch_checkpoint, GENERATOR, generator)
        setattr(torch_checkpoint, FUNCTION, function)


_REPLACED = _Replaced()


def _kept(*_: Any, **__: Any) -> Iterator[None]:
    """Stands for the generator around a checkpointed function: does nothing before it and after it."""
    yield


class _KeptFunction:
    """Stands for the reentrant checkpoint: calls the function."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        """Returns what the function returns, with its graph."""
        with _graph_of(args):
            return function(*args)


def _graph_of(args: tuple[Any, ...]) -> torch.set_grad_enabled:
    """A reentrant checkpoint none of whose inputs has a gradient gives none to its parameters either."""
    some = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return torch.set_grad_enabled(some and torch.is_grad_enabled())


class _WithoutReentry:
    """Stands for the reentrant checkpoint in a comparison, which asks for gradients in a way that it does not allow."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Returns what the other kind of checkpoint gives."""
        with _graph_of(args):
            return torch_checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )


def kept_bytes(module: nn.Module, forward: Callable[[], object]) -> tuple[int, int]:
    """Runs a forward without checkpoints that keeps nothing; returns the bytes that it would keep, and the checkpoints.

    Of each function that is checkpointed, every storage that autograd saves counts once. Not more than one function's are
    held at once, which is what the backward of a checkpoint holds as well.
    """
    total, calls = [0], [0]
    strided = [p for p in module.parameters() if p.layout == torch.strided]
    there = {p.untyped_storage().data_ptr() for p in strided}  # with their views, transposed ones

    @contextmanager
    def counted() -> Iterator[None]:
        held: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> None:
            if tensor.layout != torch.strided:
                return
            address = tensor.untyped_storage().data_ptr()
            if address not in there:
                held.setdefault(address, tensor.detach())

        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        with hooks(pack, lambda _: None):
            yield
        calls[0] += 1
        total[0] += sum(t.untyped_storage().nbytes() for t in held.values())

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        with counted():
            yield

    class Counted:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            with counted():
                return function(*args)

    replaced = _Replaced()
    replaced.enter(generator, Counted)
    try:
        forward()
    finally:
        replaced.leave()
    return total[0], calls[0]


def memory(device: torch.device) -> tuple[int, int]:
    """Returns the peak of this process so far and the memory that it could have, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (
            torch.cuda.max_memory_allocated(device),
            free + torch.cuda.memory_reserved(device),
        )
    now, available = limits.resident_bytes() or 0, limits.available_memory_bytes()
    return now, now + (available or 0)


def _forward(snapshot: Snapshot) -> Any:
    """Returns what the model returns for copies of its inputs, as in training."""
    module, args, kwargs, autocast = snapshot
    args, kwargs = map_tensors((args, kwargs), lambda t: t.detach().clone())
    device, on = next(module.parameters()).device.type, autocast is not None
    with torch.enable_grad(), torch.autocast(device, autocast or torch.bfloat16, enabled=on):
        return module(*args, **kwargs)


def _autocast(device: torch.device) -> torch.dtype | None:
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None
