"""FW104 bf16-autocast: the forward of the root module under bfloat16 autocast, outputs and loss in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import AUTOCAST, Call, Layers, forward_problem, inner
from flopwise.kit.nested import map_tensors
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import BFLOAT16
from flopwise.records.verdict import Parity


class Bf16Autocast(Fix):
    """Matrix products and convolutions in bfloat16, weights and loss in float32.

    What it does:
    Runs the forward of the root module under `torch.autocast(bfloat16)` and casts its outputs back to float32, so
    that a loss computed outside sees float32. Weights, their gradients and the optimizer stay in float32. Only
    while gradients are recorded: an evaluation under `no_grad` is left as it was.

    Why it helps:
    Tensor cores multiply bfloat16 many times faster than float32, and activations take half the memory traffic. On a
    CPU without bfloat16 instructions it is slower; the trial shows that and the fix is not kept.

    When it declines:
    The script uses autocast, a GradScaler or torch.compile itself; weights are not all float32; the model uses
    autograd Functions of its own that declare no autocast policy (their backward would meet mixed dtypes); the device
    has no bfloat16; the model's call cannot be wrapped (DataParallel, TorchScript, sharded parameters); forward and
    backward are too small a share of the step.

    What can change:
    Operands are rounded to 8 significant bits, results are accumulated in float32. It is classed "reordered" and
    not "lossy" because what it loses is rounding and nothing else, and that is checked: errors of outputs, loss and
    gradients against a float64 reference must stay within four times what one bfloat16 rounding of weights and
    inputs does to this very step. bfloat16 has the exponent range of float32, so no loss scaling is needed. A check
    on one snapshot does not replace a look at the loss curve.
    """

    code = "FW104"
    name = "bf16-autocast"
    causes = ("fp32-compute",)
    findings = ("L104",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether bfloat16 autocast may be tried."""
        facts = scene.facts
        if facts.autocast or facts.grad_scaler:
            return Declined("the script uses mixed precision itself")
        if facts.custom_functions:
            return Declined(_functions_reason(facts.custom_functions))
        reason = (
            forward_problem(scene, "autocast around it")
            or next(filter(None, map(_dtype_problem, scene.roots)), None)
            or _device_problem(scene.device)
        )
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module, switched off."""
        return _Applied([inner(root) for root in scene.roots], scene.device)


class _Applied(Applied):
    unit_roundoff = BFLOAT16

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self.setting = {"dtype": "bfloat16"}
        self._layers = Layers(modules, AUTOCAST, BFLOAT16)
        self._count = len(modules)
        self._device = device.type

    def enable(self) -> None:
        self._layers.on([self._layer] * self._count)

    def disable(self) -> None:
        self._layers.off()

    def undo(self) -> None:
        self.disable()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._layers.failure()

    def verify(self, snapshot: Snapshot) -> Parity:
        return parity_alone(self, snapshot, _reject)

    def _layer(self, call: Call) -> Call:
        device = self._device

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=torch.bfloat16):
                outputs = call(*args, **kwargs)
            return map_tensors(outputs, _in_float32)

        return under_autocast


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _dtype_problem(module: nn.Module) -> str | None:
    """Returns why the weights' dtypes do not fit, or None."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    if dtypes - {torch.float32}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return f"the weights are {names}, not all float32"
    return None


def _device_problem(device: torch.device) -> str | None:
    """Returns why the device cannot compute in bfloat16, or None."""
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{torch.cuda.get_device_name(device)} has no bfloat16"
        return None
    return None if device.type == "cpu" else f"not tested on devices of type {device.type}"


def custom_functions(tensors: Iterable[torch.Tensor], limit: int = 100_000) -> tuple[str, ...]:
    """Returns the script's autograd Functions in the graphs of `tensors` that declare no autocast policy.

    Functions of torch itself are left out, and those decorated with `torch.amp.custom_fwd`. At most `limit` nodes are
    looked at.
    """
    found: set[str] = set()
    seen: set[Any] = set()
    todo: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while todo and len(seen) < limit:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            function = node._forward_cls  # type: ignore[attr-defined]
            declared = getattr(function.forward, "__code__", None)
            known = function.__module__.split(".")[0] == "torch"
            if not known and (declared is None or declared.co_name != "decorate_fwd"):
                found.add(function.__qualname__)
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return tuple(sorted(found))


def _functions_reason(names: Iterable[str]) -> str:
    return (
        f"the model uses autograd Functions of its own ({', '.join(names)}) that declare no autocast policy: "
        "their backward would meet mixed dtypes (torch.amp.custom_fwd declares one)"
    )


def _reject(outputs: list[torch.Tensor]) -> str | None:
    names = custom_functions(outputs)
    return _functions_reason(names) if names else None
