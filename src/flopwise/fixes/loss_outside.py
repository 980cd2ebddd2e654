"""A model's loss made outside of the model, from its head's input; its logits only if somebody reads them.

The part that fixes of a language model's loss share. The model runs without its labels, and its head passes its input
on; how the loss is made was learned from one step (`labelled_loss`). For some calls it is watched whether the script
reads the logits.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Scene
from flopwise.fixes.labelled_loss import Learned, Loss, learn, part
from flopwise.fixes.lazy_logits import LazyLogits, later, watched
from flopwise.fixes.replaced_linear import PASSES, linear_problem, switch
from flopwise.fixes.slot import LOGITS, Call, Layers, Slot, forward_problem, inner
from flopwise.kit.compiler import forget, frame, tally
from flopwise.kit.nested import map_tensors
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, error_words, is_replaying
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

#: Around what is compiled, inside of what casts.
RANK = LOGITS
#: A head with fewer outputs is no vocabulary, and one with a smaller share of the products nothing to save.
LEAST_OUTPUTS, LEAST_HEAD_FRAC = 1024, 0.03
#: How tokens are masked and numbered does not change how a loss is made of logits and labels: other fixes leave a mask
#: out, or number the tokens of one row.
NOT_OF_THE_LOSS = frozenset(("attention_mask", "position_ids", "use_cache"))
WATCHED_CALLS = 4  # in which the script is seen to read logits, or not


def eligible(scene: Scene) -> Eligible | Declined:
    """Returns whether the model has a head whose product could be made outside of it."""
    reason = forward_problem(scene, "another head")
    if reason:
        return Declined(reason)
    if scene.device.type not in ("cpu", "cuda"):
        return Declined(f"not tested on devices of type {scene.device.type}")
    if len(scene.roots) != 1:
        return Declined(f"{len(scene.roots)} models are trained, not one")
    root = inner(scene.roots[0])
    reason = _model_problem(root)
    if reason:
        return Declined(reason)
    shares = {head: share for head, share in _heads(root).items() if share >= LEAST_HEAD_FRAC}
    if not shares:
        return Declined(
            f"no Linear layer with {LEAST_OUTPUTS} outputs or more has {LEAST_HEAD_FRAC:.0%} of the products"
        )
    return Eligible(f"the head is {max(shares.values()):.1%} of the products")


def _model_problem(root: nn.Module) -> str | None:
    """Returns why the model's loss cannot be made outside of it, or None."""
    try:
        names = inspect.signature(root.forward).parameters
    except (TypeError, ValueError):
        names = {}  # type: ignore[assignment]
    if "labels" not in names:
        return "the model takes no labels: how its loss is made is not seen"
    if _hooked(root):
        return "a forward hook would see the output without its logits"
    return None


def _heads(root: nn.Module) -> dict[nn.Linear, float]:
    """Returns layers that could be the head, each with its share of the weights that products are made with."""
    weights = {
        id(weight): weight.numel()
        for m in root.modules()
        if isinstance(weight := getattr(m, "weight", None), nn.Parameter)
        and weight.dim() == 2
        and not isinstance(m, nn.Embedding)
    }
    total = sum(weights.values())
    hooked = {name for name, m in root.named_modules() if m._forward_hooks or m._forward_pre_hooks}
    return {
        layer: layer.weight.numel() / total
        for name, layer in root.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.out_features >= LEAST_OUTPUTS
        and layer.out_features != layer.in_features
        and linear_problem(layer) is None
        and not any(name == one or name.startswith(f"{one}.") for one in hooked if one)
    }


class LossOutside(Applied):
    """A model whose loss is made outside of it; how, a subclass says."""

    unit_roundoff = FLOAT32

    def __init__(self, module: nn.Module, setting: Mapping[str, str] | None) -> None:
        self.setting = dict(setting or {})
        self._module = module
        self._slot = Slot.of(module)
        self._layers = Layers([module], RANK, revert=self._take_back)
        self._reason: str | None = None
        self._head: nn.Linear | None = None
        self._loss: Loss | None = None
        self._given: str | None = None  # the arguments of the step that was learned from
        self._watch = _Watch()
        if setting:
            self._take(setting)
        else:
            self._layers.on([self._watching])

    def _take(self, setting: Mapping[str, str]) -> None:
        """Goes by what an earlier trial has learned."""
        try:
            self._loss = Loss.of(setting)
        except ValueError as error:
            self._reason = str(error)
            return
        found = dict(self._module.named_modules()).get(setting.get("head", ""))
        if not isinstance(found, nn.Linear) or found not in _heads(self._module):
            self._reason = "the head of the trial is not there"
            return
        self._head = found
        self._given = setting.get("given")

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def label_problem(self, labelled_frac: float, places: int) -> str | None:
        """Returns why it is not for a model that is called with so many places, this share with a label; or None."""

    @abstractmethod
    def asked(self, loss: Loss, targets: torch.Tensor) -> Any:
        """Returns what is to be on its way before the forward is launched; `made` gets it."""

    @abstractmethod
    def made(
        self, head: nn.Linear, loss: Loss, hidden: torch.Tensor, targets: torch.Tensor, asked: Any
    ) -> torch.Tensor:
        """Returns the loss; where it is `per_item`, the sum over all labels.

        Args:
            hidden: the head's input, (places, width).
            targets: (places,).
        """

    @abstractmethod
    def forget(self) -> None:
        """Drops what was compiled for `made`."""

    # ------------------------------------------------------------------ switching

    def enable(self) -> None:
        if self.failure() is not None or self._head is None:
            return
        if not switch(self._head, PASSES, False):
            self._reason = "the head's class was changed"
            return
        self._layers.on([self._labelled])

    def disable(self) -> None:
        self._layers.off()
        self._take_back()

    def undo(self) -> None:
        self.disable()
        self.forget()

    def ready(self) -> bool:
        return self._loss is not None or self.failure() is not None or self._watch.done

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._reason or self._layers.failure()

    def _take_back(self) -> None:
        if self._head is not None:
            switch(self._head, PASSES, None)

    # ------------------------------------------------------------------ the comparison

    def verify(self, snapshot: Snapshot) -> Parity:
        """Learns how the loss is made, and compares the step without the other logits."""
        module = self._module
        self.disable()
        snapshot = snapshot._replace(module=module)
        labelled = self._watch.labelled()
        reason = self.failure() or self._watch.read()
        if reason is None and labelled is not None:
            reason = self.label_problem(*labelled)
        if reason is None and self._loss is None:
            reason = self._learn(snapshot)
        if reason is not None:
            self._reason = reason
            return not_shown("reordered", reason)
        return parity_alone(self, snapshot)

    def _learn(self, snapshot: Snapshot) -> str | None:
        """Returns why it is not known how the loss is made, or None."""
        module, args, kwargs, autocast = snapshot
        labels = _labels(module, args, kwargs)
        if labels is None:
            return "the model is called without labels"
        device, on = labels.device.type, autocast is not None

        def run() -> Any:
            given = map_tensors((args, kwargs), torch.Tensor.clone)
            with torch.autocast(device, autocast or torch.bfloat16, enabled=on):
                return module(*given[0], **given[1])

        items = kwargs.get("num_items_in_batch")
        try:
            with kept_module(module), kept_rng(), self._slot.bypassed(), torch.no_grad():
                found = learn(run, list(_heads(module)), labels, items)
        except Exception as error:  # the fix is not kept; the run goes on
            return f"it could not be seen how the loss is made: {error_words(error)}"
        if not isinstance(found, Learned):
            return found
        self._head, self._loss = found.head, found.loss
        self._given = _given(args, kwargs)
        name = next(n for n, m in module.named_modules() if m is found.head)
        self.setting = {"head": name, "given": self._given, **found.loss.words()}
        return None

    # ------------------------------------------------------------------ the layers

    def _watching(self, call: Call) -> Call:
        """Hands logits out so that it is seen whether they are read."""

        def run(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            loss, logits = part(output, "loss"), part(output, "logits")
            if not isinstance(loss, torch.Tensor) or type(logits) is not torch.Tensor:
                return output
            lazy = watched(logits)
            self._watch.saw(lazy, _labels(self._module, args, kwargs))
            made = _with(output, loss, lazy)
            if made is None:
                self._reason = f"a {type(output).__name__} cannot be made with other logits"
            return output if made is None else made

        return run

    def _labelled(self, call: Call) -> Call:
        """Makes the loss outside of the model, of logits at labelled places."""

        def run(*args: Any, **kwargs: Any) -> Any:
            module, head, loss = self._module, self._head, self._loss
            labels = _labels(module, args, kwargs)
            self._reason = self._reason or self._watch.read()
            if (
                head is None
                or loss is None
                or labels is None
                or self._reason is not None
                or self._given != _given(args, kwargs)
                or _hooked(module)
                or (labels.is_cuda and torch.cuda.is_current_stream_capturing())
            ):
                return call(*args, **kwargs)
            targets = loss.targets(labels)
            asked = self.asked(loss, targets)
            bare_args, bare_kwargs = _without_labels(module, args, kwargs)
            with _passing(head):
                output = call(*bare_args, **bare_kwargs)
            hidden = part(output, "logits")
            if (
                not isinstance(hidden, torch.Tensor)
                or hidden.shape != (*labels.shape, head.in_features)
                or part(output, "loss") is not None
            ):
                self._reason = "without labels the model gives another output"
                return call(*args, **kwargs)
            with _entered(hidden.device.type, loss.autocast):
                flat = hidden.flatten(0, -2)
                made = self.made(head, loss, flat, targets.to(hidden.device), asked)
                lazy: Any = later(hidden, head.weight, head.bias)
            if loss.gives:
                lazy = lazy.to(getattr(torch, loss.gives))
            if loss.per_item:
                items = kwargs["num_items_in_batch"]
                made = made / (items.to(made.device) if isinstance(items, torch.Tensor) else items)
            self._watch.saw(lazy, None)
            return _with(output, made, lazy)

        return run


def _hooked(root: nn.Module) -> bool:
    """Whether a forward hook would see what the model gives without its labels."""
    return bool(torch_module._global_forward_hooks or root._forward_hooks)


def _labels(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Returns the labels of a call, None where it has none or they are no whole numbers."""
    labels = kwargs.get("labels")
    if labels is None and len(args) > 1:
        labels = args[place] if 0 <= (place := _place(module)) < len(args) else None
    if not isinstance(labels, torch.Tensor) or labels.dtype != torch.int64 or labels.dim() < 2:
        return None
    return labels


def _place(module: nn.Module) -> int:
    """Returns at which place the labels are given, -1 if at none."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index("labels") if "labels" in names else -1


def _without_labels(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments with None for the labels."""
    if kwargs.get("labels") is not None:
        return args, {**kwargs, "labels": None}
    place = _place(module)
    return (*args[:place], None, *args[place + 1 :]), kwargs


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns which arguments a call is given: with others a model may make its loss in another way."""
    names = {n for n, v in kwargs.items() if v is not None} - NOT_OF_THE_LOSS
    return " ".join([str(len(args)), *sorted(names)])


def _with(output: Any, loss: torch.Tensor, logits: torch.Tensor) -> Any:
    """Returns a model's output with another loss and other logits, None where it cannot be made."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return dataclasses.replace(output, loss=loss, logits=logits)
    if type(output) is dict:
        return {"loss": loss, **output} | {"loss": loss, "logits": logits}
    return None


class Beside:
    """A function that is compiled where the model is, for each kind of call on its own; eager once that has failed."""

    def __init__(self, slot: Slot, function: Call) -> None:
        self._slot, self._function = slot, function
        self._frame: Any = None
        self._compiled: Any = None
        self._known: set[Hashable] = set()  # what it was compiled for
        self._fails = False
        self.compile_s = 0.0

    def __call__(self, kind: Hashable, *args: Any) -> Any:
        """Returns what the function returns; calls of one `kind` run the same code."""
        if self._fails or not self._slot.compiles:
            return self._function(*args)
        if self._compiled is None:
            self._frame = frame(self._function)
            self._compiled = torch.compile(self._frame, dynamic=False)
        if kind in self._known:
            return self._compiled(*args)
        before = tally()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script did not ask for a compiler's advice
                made = self._compiled(*args)
        except Exception:
            self._fails = True
            return self._function(*args)
        self._known.add(kind)
        self.compile_s += (tally() - before).compile_s
        return made

    def forget(self) -> None:
        """Drops the compiled code."""
        if self._frame is not None:
            forget(self._frame)
        self._frame = self._compiled = None
        self._known.clear()


@contextmanager
def _passing(head: nn.Linear) -> Iterator[None]:
    """The head passes its input on."""
    own = vars(head)
    if PASSES not in own:  # someone has taken it away since
        yield
        return
    own[PASSES] = True
    try:
        yield
    finally:
        if PASSES in own:
            own[PASSES] = False


@contextmanager
def _entered(device: str, autocast: str) -> Iterator[None]:
    """Enters the autocast that the model enters by itself, where none is on around it."""
    if not autocast or torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, getattr(torch, autocast)):
        yield


class _Watch:
    """Whether the script reads logits, and how many places have a label."""

    def __init__(self) -> None:
        self._calls = 0
        self._reads: list[str] = []  # of the last call's logits; nothing else of them is kept
        self._read: str | None = None
        self._labelled: list[tuple[torch.Tensor, int]] = []

    @property
    def done(self) -> bool:
        """Whether enough was seen."""
        return self._calls > WATCHED_CALLS or self.read() is not None

    def saw(self, lazy: LazyLogits, labels: torch.Tensor | None) -> None:
        """Takes the logits of a call."""
        if is_replaying():  # what reads them is a comparison, not the script
            lazy.source.watched = False
            return
        self.read()
        self._calls += 1
        self._reads = lazy.source.reads
        if labels is not None and len(self._labelled) <= WATCHED_CALLS:
            self._labelled.append(((labels >= 0).sum(), labels.numel()))

    def read(self) -> str | None:
        """Returns which operator has read logits, in words, or None."""
        if self._reads and self._read is None:
            self._read = f"the script reads the logits ({self._reads[0]})"
        return self._read

    def labelled(self) -> tuple[float, int] | None:
        """Returns the share of places with a label and the most places of a call, None where no labels were seen."""
        if not self._labelled:
            return None
        places = [n for _, n in self._labelled]
        return sum(int(n) for n, _ in self._labelled) / sum(places), max(places)
