"""FW114 cudnn-benchmark: cuDNN's search for the fastest algorithm, where shapes repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import (
    Applied,
    Declined,
    Eligible,
    Fix,
    Scene,
    StartUp,
)
from flopwise.fixes.slot import Call, Layers, forward_problem, inner
from flopwise.kit.nested import map_tensors, tensors_in
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, error_words, find_loss
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

#: The layer around the root watches the shapes of its inputs, and else counts calls.
RANK = 114
WATCHED_CALLS = 6  # whose inputs must all have the same shapes
ROUNDS = 7


class CudnnBenchmark(Fix):
    """cuDNN's search for the fastest algorithm, where shapes repeat.

    What it does:
    Sets `torch.backends.cudnn.benchmark`, with which cuDNN times its algorithms at the first call of each
    convolution's shape. What a thread has chosen for a shape, with or without the search, it keeps for good; so the
    two are compared on copies of a step in threads of their own, and it is declined there where the step is not
    faster. In a running process it acts on shapes that are new; a plan sets it before the script builds anything, and
    so do the fresh processes in which it is compared.

    Why it helps:
    cuDNN's own guess is good for common shapes, less so for depthwise and unusual ones. On an H200 it gained 0.7 % of
    ResNet-50's step and moved single depthwise convolutions by -6 to +7 %.

    When it declines:
    The model has no convolution layer, or is not on a CUDA device; the search is on already, or cuDNN off; the script
    asks for deterministic algorithms; the shapes of the model's inputs change; a step is not shown to be faster with
    it; the model's call cannot be wrapped; forward and backward are too small a share of the step.

    What can change:
    Other algorithms sum in another order, and which one wins may differ from run to run: results differ by rounding.
    The first step of each shape takes seconds longer (up to 16 s for ResNet-50) and needs memory for what is tried.
    """

    code = "FW114"
    name = "cudnn-benchmark"
    causes = ("convolution-algorithm",)
    in_processes = True
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether the search may be tried."""
        reason = forward_problem(scene, "the search") or _problem(scene)
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off: it watches the shapes of some calls first."""
        return _Applied([inner(root) for root in scene.roots], watch=not setting)

    @classmethod
    def at_start(cls, setting: Mapping[str, str]) -> StartUp | None:
        """Returns the search, on from the start."""
        if setting.get("benchmark", "True") != "True":
            raise ValueError(f"benchmark is {setting['benchmark']!r}, not True")
        return _FromTheStart()


class _FromTheStart(StartUp):
    name = "torch.backends.cudnn.benchmark"

    def install(self) -> None:
        """Switches the search on."""
        torch.backends.cudnn.benchmark = True

    def trouble(self) -> str | None:
        """Returns that the script has switched it off since, if so."""
        on = torch.backends.cudnn.benchmark
        return None if on else "left out: the script has switched cudnn.benchmark off"


def _problem(scene: Scene) -> str | None:
    """Returns why the search is nothing for this scene, or None."""
    if not any(isinstance(m, _ConvNd) for root in scene.roots for m in root.modules()):
        return "the model has no convolution layer"
    if scene.device.type != "cuda":
        return f"there is no cuDNN on a {scene.device.type}"
    if torch.backends.cudnn.benchmark:
        return "cudnn.benchmark is on already"
    if not torch.backends.cudnn.enabled or not torch.backends.cudnn.is_available():
        return "cuDNN is off"
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return (
            "the script asks for deterministic algorithms, of which there is little to choose from"
        )
    return None


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, roots: list[nn.Module], *, watch: bool) -> None:
        self.setting = {"benchmark": "True"}
        self._layers = Layers(roots, RANK)
        self._count = len(roots)
        self._reason: str | None = None
        self._shapes: dict[tuple[Any, ...], int] = {}  # of inputs, and how often they were seen
        self._on = False
        if watch:
            self._layers.on([self._watching] * self._count)

    def enable(self) -> None:
        if self.failure() is not None:
            return
        self._layers.on([_unchanged] * self._count)
        if not self._on and not torch.backends.cudnn.benchmark:
            torch.backends.cudnn.benchmark = self._on = True

    def disable(self) -> None:
        self._layers.off()
        if self._on:
            torch.backends.cudnn.benchmark = self._on = False

    def undo(self) -> None:
        self.disable()

    def ready(self) -> bool:
        return sum(self._shapes.values()) >= WATCHED_CALLS * self._count or self._varies()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._reason or self._layers.failure()

    def verify(self, snapshot: Snapshot) -> Parity:
        """Times the step with the search and without, and compares it where it is faster."""
        snapshot = snapshot._replace(module=inner(snapshot.module))
        self.disable()
        if self._varies():
            self._reason = (
                f"{len(self._shapes)} shapes of inputs in {sum(self._shapes.values())} calls: "
                "each would be searched for"
            )
        if self._reason is None:
            self._reason = _not_faster(snapshot)
        if self._reason is not None:
            return not_shown("reordered", self._reason)
        return parity_alone(self, snapshot)

    def _varies(self) -> bool:
        return len(self._shapes) > self._count

    def _watching(self, call: Call) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            shapes = tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))
            self._shapes[shapes] = self._shapes.get(shapes, 0) + 1
            return call(*args, **kwargs)

        return run


def _not_faster(snapshot: Snapshot) -> str | None:
    """Returns why a step is not faster with the search, or None; the switch is as before."""
    from flopwise.kit.memory.conv_search import choose_cudnn_benchmark

    module, args, kwargs, autocast = snapshot
    device, on = next(module.parameters()).device.type, autocast is not None

    def step() -> None:
        given = map_tensors((args, kwargs), torch.Tensor.clone)
        with torch.enable_grad():
            with torch.autocast(device, autocast or torch.bfloat16, enabled=on):
                output = module(*given[0], **given[1])
            loss = find_loss(output)
            if loss is None:
                floats = [
                    t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad
                ]
                loss = torch.stack([t.float().square().mean() for t in floats]).sum()
            loss.backward()

    before = torch.backends.cudnn.benchmark
    try:
        with kept_module(module), kept_rng():
            choice = choose_cudnn_benchmark(module, step, steps=3, rounds=ROUNDS)
    except Exception as error:  # the fix is not kept; the run goes on
        return f"the search could not be tried: {error_words(error)}"
    finally:
        torch.backends.cudnn.benchmark = before
    return None if choice.on else str(choice)


def _unchanged(call: Call) -> Call:
    return call
