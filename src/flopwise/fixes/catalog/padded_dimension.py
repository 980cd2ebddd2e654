"""FW111 padded-dimension: odd sizes of Linear layers computed on round ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.replaced_linear import PRODUCT, Product, linear_problem, switch
from flopwise.fixes.slot import Call, Layers, Slot, forward_problem, inner
from flopwise.kit.nested import map_tensors, tensors_in
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, error_words
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

if TYPE_CHECKING:
    from flopwise.kit.memory.observed import LayerCall

#: The layer around the root only counts calls and takes the padding back where a call fails: where it lies is all the same.
RANK = 111
#: Sizes are judged for 16 bit, in which they matter most, and padded to multiples of this where that adds little.
DTYPE, MULTIPLE = "bfloat16", 64
#: Rows of the input with which a layer is tried alone: enough to fill a device, and no second copy of all logits.
MOST_ROWS = 4096
MOST_GROUPS = 12  # of layers alike that are tried, the largest first
ROUNDS = 5
GAP = "gap"  # in a setting: the result is not copied to rows without a gap


class PaddedDimension(Fix):
    """Odd sizes of Linear layers computed on round ones.

    What it does:
    Computes Linear layers whose input or output size tensor cores cannot load in full (a vocabulary of 50257) with
    zeros added up to a round size (50304), and cuts the result. The zeros are added in each call: parameters, state
    dicts, checkpoints, outputs and tied embeddings stay as they are, and what was added is never trained. Each layer is
    tried alone on an input like its own, in the arithmetic of the script and in bfloat16, and is padded only where
    that is faster. Only while gradients are recorded.

    Why it helps:
    Rows of 16-bit numbers that are no multiple of 16 bytes are read by slow kernels: on an H200 the head of GPT-2 runs
    at 93-151 TFLOP/s with 50257 columns and at 644-707 with 50304. torch.compile pads by itself, but to the next
    multiple of 8 only; with it, the zeros are written by kernels that run anyway and the logits are never copied.

    When it declines:
    No product of odd size was found in the ledger, or none of a Linear layer; the sizes would grow by more than an
    eighth; no layer is faster so; the script compiles its model; the layer's forward or weight is not a plain one;
    the model's call cannot be wrapped.

    What can change:
    Another kernel sums in another order: results differ by rounding, held against a float64 reference. While it is
    on, the class of these layers is a subclass of nn.Linear (copies and pickles are plain). A few more FLOPs are computed
    than the model needs (0.1 % of GPT-2's head), which count as no useful work.
    """

    code = "FW111"
    name = "padded-dimension"
    causes = ("odd-shape",)
    findings = ("L110",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether any layer may be tried padded."""
        if not set(self.findings) & set(scene.findings):
            return Declined("no products of sizes that tensor cores cannot load were found")
        reason = forward_problem(scene, "another size of layers")
        if reason:
            return Declined(reason)
        if scene.device.type not in ("cpu", "cuda"):
            return Declined(f"not tested on devices of type {scene.device.type}")
        found, declined = candidates(scene.roots)
        if not found:
            return Declined(declined or "no Linear layer has an odd size: the products are others")
        sizes = sorted({arrow(one.layer, one.target) for one in found.values()})
        return Eligible(f"{len(found)} layers: {', '.join(sizes[:3])}")

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off; with a setting, for the layers that it names, else for those that prove faster."""
        found, _ = candidates(scene.roots)
        return _Applied([inner(root) for root in scene.roots], found, setting)


@dataclass(frozen=True)
class Candidate:
    """A layer that could be padded."""

    root: nn.Module
    layer: nn.Linear
    target: tuple[int, int]  # rows and columns of the weight to compute with

    @property
    def sizes(self) -> str:
        """Returns the target in words, as a plan holds it."""
        return f"{self.target[0]}x{self.target[1]}"


def candidates(roots: Any) -> tuple[dict[str, Candidate], str | None]:
    """Returns the layers that could be padded by name, and why the first of the others cannot."""
    from flopwise.kit.memory.alignment import LITTLE_FRAC, cure, is_odd

    found: dict[str, Candidate] = {}
    declined: str | None = None
    seen: set[nn.Module] = set()
    for index, root in enumerate(inner(r) for r in roots):
        for name, layer in root.named_modules():
            if layer in seen or not isinstance(layer, nn.Linear):
                continue
            seen.add(layer)
            sizes = (layer.out_features, layer.in_features)
            if not any(is_odd(size, DTYPE) for size in sizes):
                continue
            reason = linear_problem(layer)
            if reason is None and tuple(layer.weight.shape) == sizes:
                target = tuple(cure(n, MULTIPLE, DTYPE, LITTLE_FRAC) or n for n in sizes)
                if target != sizes:
                    full = f"{index}:{name}" if index else name or "(root)"
                    found[full] = Candidate(root, layer, (target[0], target[1]))
                    continue
                reason = f"a round size would add more than {LITTLE_FRAC:.1%}"
            declined = (
                declined or f"{name} ({sizes[0]}x{sizes[1]}): {reason or 'weight of another size'}"
            )
    return found, declined


def arrow(layer: nn.Linear, target: tuple[int, int]) -> str:
    """Returns the change of sizes in words."""
    sizes = (layer.out_features, layer.in_features)
    return ", ".join(f"{a} -> {b}" for a, b in zip(sizes, target, strict=True) if a != b)


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(
        self,
        roots: list[nn.Module],
        found: dict[str, Candidate],
        setting: Mapping[str, str] | None,
    ) -> None:
        self.setting = {}
        self._layers = Layers(roots, RANK, revert=self._plain)
        self._count = len(roots)
        self._reason: str | None = None
        self._found = self._chosen = found
        self._gaps: set[str] = set()  # layers whose result keeps a gap behind each row
        self._switched: list[nn.Module] = []
        self._products: dict[tuple[str, bool], Product] = {}
        self._known = bool(setting)
        if setting:
            self._take(setting)

    def _take(self, setting: Mapping[str, str]) -> None:
        """Chooses the layers of an earlier trial; one that has changed since is left out."""
        words = {name: text.partition(" ") for name, text in setting.items()}
        self._choose(
            {n: one for n, one in self._found.items() if n in words and words[n][0] == one.sizes},
            {name for name, (_, _, rest) in words.items() if rest == GAP},
        )
        if not self._chosen:
            self._reason = "the layers that were padded in the trial are not there"

    def _choose(self, chosen: dict[str, Candidate], gaps: set[str]) -> None:
        self._chosen, self._gaps = chosen, gaps & chosen.keys()
        self.setting = {
            name: f"{one.sizes} {GAP}" if name in self._gaps else one.sizes
            for name, one in chosen.items()
        }

    def enable(self) -> None:
        if self.failure() is not None:
            return
        self._plain()
        self._pad()
        self._layers.on([_unchanged] * self._count)

    def _product(self, name: str, one: Candidate) -> Product:
        """Returns one and the same function each time: a compiler guards on it."""
        kind = (name, name in self._gaps)
        if kind not in self._products:
            self._products[kind] = _product(one, contiguous=name not in self._gaps)
        return self._products[kind]

    def disable(self) -> None:
        self._layers.off()
        self._plain()

    def undo(self) -> None:
        self.disable()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._reason or self._layers.failure()

    def verify(self, snapshot: Snapshot) -> Parity:
        """Tries the layers alone, takes those that are faster, and compares the step with them."""
        module = inner(snapshot.module)
        snapshot = snapshot._replace(module=module)
        slot = Slot.of(module)
        self.disable()
        if not self._known and self._reason is None:
            self._try_alone(snapshot, slot)
        if self._reason is not None:
            return not_shown("reordered", self._reason)
        return parity_alone(self, snapshot)

    def _try_alone(self, snapshot: Snapshot, slot: Slot) -> None:
        """Takes the layers that are faster padded; if none is, that is the reason not to go on."""
        try:
            calls, leaving = _calls(snapshot, slot, [one.layer for one in self._found.values()])
            faster, slower = _faster(self._found, calls)
        except Exception as error:  # the fix is not kept; the run goes on
            self._reason = f"the layers could not be tried: {error_words(error)}"
            return
        self._choose(faster, {name for name, one in faster.items() if one.layer not in leaving})
        if self._gaps and not self._runs(snapshot, slot):
            self._choose(faster, set())  # something asks for rows without a gap
        if not faster:
            self._reason = f"no layer is faster padded: {slower or 'none was called'}"

    def _runs(self, snapshot: Snapshot, slot: Slot) -> bool:
        """Whether the model's forward runs with the padding that is chosen, apart from what else is on."""
        try:
            self._pad()
            with kept_module(snapshot.module), kept_rng(), slot.bypassed():
                _forward(snapshot)
        except Exception:
            return False
        finally:
            self._plain()
        return True

    def _pad(self) -> None:
        for name, one in self._chosen.items():
            if switch(one.layer, PRODUCT, self._product(name, one)):
                self._switched.append(one.layer)

    def _plain(self) -> None:
        """Makes every layer what it was."""
        while self._switched:
            switch(self._switched.pop(), PRODUCT, None)


def _calls(
    snapshot: Snapshot, slot: Slot, layers: list[nn.Linear]
) -> tuple[dict[nn.Module, LayerCall], set[nn.Module]]:
    """Runs the model once; returns what the layers got, and those whose results leave the model as they are."""
    from flopwise.kit.memory.observed import calls_of

    module = snapshot.module
    made: dict[nn.Module, set[int]] = {layer: set() for layer in layers}
    left: set[int] = set()

    def note(layer: nn.Module, _: Any, result: Any) -> None:
        made[layer].update(_storages(result))

    def run() -> None:
        left.update(_storages(_forward(snapshot)))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(note).remove)
        stack.enter_context(kept_module(module))
        stack.enter_context(kept_rng())
        stack.enter_context(slot.bypassed())
        calls = calls_of(module, layers, run)
    return calls, {layer for layer, addresses in made.items() if addresses & left}


def _forward(snapshot: Snapshot) -> Any:
    """Returns what the model returns for copies of its inputs, as in training."""
    module, args, kwargs, autocast = snapshot
    args, kwargs = map_tensors((args, kwargs), torch.Tensor.clone)
    device, on = next(module.parameters()).device.type, autocast is not None
    with torch.enable_grad(), torch.autocast(device, autocast or torch.bfloat16, enabled=on):
        return module(*args, **kwargs)


def _storages(tree: Any) -> Iterator[int]:
    for tensor in tensors_in(tree):
        if tensor.layout == torch.strided:
            yield tensor.untyped_storage().data_ptr()


def _faster(
    found: dict[str, Candidate], calls: dict[nn.Module, LayerCall]
) -> tuple[dict[str, Candidate], str | None]:
    """Returns the candidates that are faster padded, each kind tried once; and what the largest of the others showed."""
    groups: dict[Any, dict[str, Candidate]] = {}
    for name, one in found.items():
        call = calls.get(one.layer)
        if call is not None:
            kind = (
                tuple(one.layer.weight.shape),
                one.layer.bias is None,
                call.shape,
                call.autocast,
            )
            groups.setdefault(kind, {})[name] = one

    def flops(alike: dict[str, Candidate]) -> int:
        one = next(iter(alike.values()))
        return len(alike) * one.layer.weight.numel() * _rows(calls[one.layer].shape)

    faster: dict[str, Candidate] = {}
    slower = None
    for alike in sorted(groups.values(), key=flops, reverse=True)[:MOST_GROUPS]:
        one = next(iter(alike.values()))
        words = _slower_alone(one, calls[one.layer])
        if words is None:
            faster.update(alike)
        else:
            slower = slower or f"{arrow(one.layer, one.target)}: {words}"
    return faster, slower


def _slower_alone(one: Candidate, call: LayerCall) -> str | None:
    """Returns why a layer is not faster padded, or None: neither as it computes nor in bfloat16."""
    from flopwise.kit.memory.padding_trial import trial

    rows = min(_rows(call.shape), MOST_ROWS)
    width = call.shape[-1]
    call = replace(call, shape=(rows, width), stride=(width, 1))
    low = replace(call, autocast=torch.bfloat16)
    both = call.device.type == "cuda" and call.autocast is None and call.dtype == torch.float32
    words = None
    for as_in in (call, low) if both else (call,):
        found = trial(_twin(one.layer), one.target, as_in, True, ROUNDS)
        if not isinstance(found, str):
            return None
        words = words or found
    return words


def _twin(layer: nn.Linear) -> nn.Linear:
    """Returns a plain layer with the same parameters: what else is on the layer or hooked to it is left out."""
    twin = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    twin.weight, twin.bias = layer.weight, layer.bias
    return twin


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def _product(one: Candidate, *, contiguous: bool) -> Product:
    """Returns what a layer computes by: padded, unless its weight is of another size by now."""
    from flopwise.kit.memory.padded_layers import padded_linear

    sizes = (one.layer.out_features, one.layer.in_features)
    more = (one.target[0] - sizes[0], one.target[1] - sizes[1])

    def padded(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if weight.shape != sizes:
            return F.linear(input, weight, bias)
        return padded_linear(input, weight, bias, *more, contiguous)

    return padded


def _unchanged(call: Call) -> Call:
    return call
