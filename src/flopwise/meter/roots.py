"""The root modules of the training: found once, watched through one hook each, let go after the measurement."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from flopwise.kit.nested import copies
from flopwise.meter.found import (
    compiled_parts,
    compiles_own_code,
    describe_batch,
    find_roots,
)
from flopwise.meter.replay import Snapshot
from flopwise.meter.rows import EVALUATION
from flopwise.meter.watch import Watch
from flopwise.meter.yardstick import ENTERED

if TYPE_CHECKING:
    from flopwise.meter.session import Session

now = time.perf_counter_ns

#: Calls up to this one are looked at closely.
FIRST_CALLS = 3


class Roots:
    """Watches the calls of the outermost modules that own trained parameters.

    A module that is never called as such (a LightningModule, a container whose parts are called one by one) is
    replaced by its children, at most three levels down. A module that a compiled function of the user's calls is
    left alone: a hook on it would make the compiler start over.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._found: list[weakref.ref[nn.Module]] = []  # the script frees its models when it likes
        self.settled = False
        self._watched: list[weakref.ref[nn.Module]] = []
        self._aside: list[weakref.ref[nn.Module]] = []  # watched before, and to be watched again
        self._release: list[Callable[[], None]] = []
        self._calls = 0
        self._called: set[int] = set()  # of the watched modules, by id, those that were called
        self._depth = 0
        self._lead: int | None = None  # the first root called in this interval
        self.keep_inputs = False  # copy the inputs of the next call, for a parity check
        self.autocast: torch.dtype | None = None  # the script's own, around the last call
        self.autocast_within: torch.dtype | None = None  # the same, entered by the model itself
        self._within: Any = None  # the hook that looks for it
        self._inputs: Snapshot | None = None

    @property
    def found(self) -> list[nn.Module]:
        """The root modules that still live."""
        return _alive(self._found)

    @property
    def forwards(self) -> list[nn.Module]:
        """The modules whose calls are the forward: the roots, or the parts that are called of a root that is not."""
        if not self._depth:
            return self.found
        watched = _alive(self._watched or self._aside)
        return [module for module in watched if id(module) in self._called]

    def look(self, steps: int) -> None:
        """Called at the first step ends: finds the roots, and goes one level down while none is called."""
        if self.settled:
            return
        if not self.found:
            found = find_roots(self._parameters())
            if not found:
                self.settled = True
                return
            self._found = [weakref.ref(module) for module in found]
            self._watch(found)
        elif self._calls:
            self.settled = True
        elif self._depth < 3 and steps <= 6:
            self._depth += 1
            children = [c for module in _alive(self._watched) for c in module.children()]
            trained = {id(p) for p in self._parameters()}
            below = [c for c in children if any(id(p) in trained for p in c.parameters())]
            self._unhook()
            self._watch(below)
        else:
            self.settled = True
            self._session.note(
                "the model is not called as a module: inputs and forward are not seen"
            )

    def restart(self) -> None:
        """Looks for the roots anew: other modules are trained from here on."""
        self.release()
        self.settled = False
        self._calls = self._depth = 0
        self._called.clear()

    def release(self) -> None:
        """Takes every hook out and forgets the modules: the script may want their memory back."""
        self._unhook()
        self._found = []
        self._inputs = None

    def _unhook(self) -> None:
        while self._release:
            self._release.pop()()
        self._watched = []
        self._end_looking_within()

    def look_away(self) -> None:
        """Takes the watches off for a while: a fix is about to change how the modules are called."""
        self._aside = self._watched
        self._unhook()

    def watch_again(self) -> None:
        """Puts the watches back, around what a fix may have put there meanwhile."""
        modules, self._aside = self._aside, []
        self._watch(_alive(modules))

    def take_inputs(self) -> Snapshot | None:
        """Returns copies of what a root was last called with since `keep_inputs` was set, once."""
        inputs, self._inputs = self._inputs, None
        self.keep_inputs = False
        return inputs

    @property
    def called(self) -> bool:
        """Whether a call of a watched module has been seen."""
        return self._calls > 0

    def new_interval(self) -> None:
        """Forgets which root was called first."""
        self._lead = None
        self._end_looking_within()

    def _parameters(self) -> list[nn.Parameter]:
        session = self._session
        parameters: list[Any] = []
        for reference in session.optimizers.values():
            optimizer = reference()
            if optimizer is not None:
                parameters += [p for g in optimizer.param_groups for p in g["params"]]
        if not parameters and session.watched_leaf is not None:
            parameters = [session.watched_leaf]
        return parameters

    def _watch(self, modules: list[nn.Module]) -> None:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self._session.note(
                    f"{type(module).__name__} is TorchScript: its inputs are not seen"
                )
            elif compiles_own_code() and not compiled_parts(module):
                self._session.note(
                    f"{type(module).__name__} is called inside a function that the script compiles: "
                    "it is not watched, so as not to make the compiler start over"
                )
            else:
                self._release.append(Watch(module, self._on_call).remove)
                self._watched.append(weakref.ref(module))
                self._session.patches.names.append(f"the call of {type(module).__name__} (root)")

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        session = self._session
        if not session.live:
            return
        if not torch.is_grad_enabled():
            if not session.trainers.is_other():
                session.interval.flags |= EVALUATION
            return
        if session.brief:
            return
        if session.in_backward:  # a checkpoint's replay
            return
        started = now()
        interval = session.interval
        try:
            self._calls += 1
            self._called.add(id(module))
            if session.trainers.is_other():
                session.counting.called_elsewhere()
                return
            interval.calls += 1
            first = interval.forward_from_ns == 0
            if first:
                interval.forward_from_ns = started
            if self._lead is None:
                self._lead = id(module)
            if self._lead == id(module):
                interval.root_calls += 1
                signature = self._read(args, kwargs)
                if self.keep_inputs or self._calls < FIRST_CALLS:
                    self._look_closely(module, args, kwargs)
                if first and not interval.backwards:
                    session.counting.root_called(module, args, kwargs, signature)
            interval.own_ns += now() - started
        except Exception as error:
            session.fail(error)

    def _look_closely(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Takes what only a few calls have to tell: the script's own autocast, and copies of the inputs on request."""
        device = self._session.device.type
        under = torch.is_autocast_enabled(device)
        self.autocast = torch.get_autocast_dtype(device) if under else None
        if self.keep_inputs:
            args, kwargs = copies((args, kwargs))
            self._inputs = Snapshot(module, args, kwargs, self.autocast)
        if self._calls >= FIRST_CALLS or under or self._within is not None:
            return  # later on it may be a fix's
        if not compiles_own_code() and not compiled_parts(module):
            self._within = register_module_forward_pre_hook(partial(self._on_part, module))

    def _on_part(self, root: nn.Module, module: nn.Module, _: Any) -> None:
        """Takes the autocast around the first product of a forward: Accelerate enters it in the model's own forward."""
        weight = module._parameters.get("weight")
        if (
            weight is None
            or weight.dim() < 2
            or isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        ):
            return
        self._end_looking_within()
        device = weight.device.type
        under = torch.is_autocast_enabled(device)
        self.autocast_within = torch.get_autocast_dtype(device) if under else None
        if self.autocast_within is not None:
            ENTERED[root] = self.autocast_within
            if isinstance(root, DistributedDataParallel):
                ENTERED[root.module] = self.autocast_within

    def _end_looking_within(self) -> None:
        hook, self._within = self._within, None
        if hook is not None:
            hook.remove()

    def _read(self, args: Any, kwargs: Any) -> str:
        session = self._session
        interval, reading = session.interval, session.reading
        found = describe_batch(args) if args else describe_batch(kwargs)
        if found.signature and found.signature not in interval.shapes:
            interval.shapes.append(found.signature)
        if found.ids is not None and reading.has_embedding:
            interval.root_tokens += found.ids.numel()
            interval.root_samples += found.ids.shape[0 if reading.batch_first else 1]
        elif found.samples is not None:
            interval.root_samples += found.samples
        return found.signature


def _alive(references: list[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for reference in references if (module := reference()) is not None]
