"""Calls of modules that are compiled in place: under a time limit, and only for calls of a kind that has been rehearsed.

A call is of the kind that its tensors' shapes, strides and dtypes, the module's mode and the autocast state make it. Of each
kind there is compiled code of its own, so that an odd last batch neither compiles in a step nor makes the code of all
other steps one for any size. Odd calls run eagerly; where they turn out to be no exception they are compiled, too.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flopwise.fixes.attention.fusing import AttentionBackend
from flopwise.fixes.interface import Applied
from flopwise.fixes.slot import (
    COMPILED,
    COMPILES,
    INPUTS,
    Call,
    Layers,
    Slot,
    ends_recomputation,
    inner,
)
from flopwise.fixes.time_limit import Overdue, time_limit
from flopwise.kit.compiler import forget, frame, frames_compiled, stop_compile_workers, tally
from flopwise.kit.nested import tensors_in
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.parity import compare_forward, not_shown
from flopwise.meter.replay import Replay, Snapshot, error_words
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

#: With more graph breaks than this a model runs as many small graphs.
MOST_GRAPH_BREAKS = 8
#: With more compilations than this while it is on, it keeps compiling for new shapes or values.
MOST_RECOMPILES = 8
#: From so many odd calls on it is looked at whether they are exceptions.
ODD_CALLS = 8
#: Of all calls since: odd ones of one kind that get code of their own, and of several kinds that get code for any size.
OFTEN_FRAC, USUAL_FRAC = 0.5, 0.25
#: Blocks have what is left of the time limit, and this share of it at the least.
BLOCKS_FRAC = 0.5

#: What compiles graphs; None: Inductor.
BACKEND: Callable[..., Any] | None = None

_NOTHING: Any = object()
#: Those of this process, so that a fix that changes what they are called with can have them made ready.
_LIVE: weakref.WeakSet[Compiling] = weakref.WeakSet()


class Compiling(Applied):
    """Modules whose calls are compiled, as wholes or block by block."""

    unit_roundoff = FLOAT32
    rank = COMPILED
    #: Compiled calls after a switch until steps are steady ones.
    steady_calls = 1
    #: Forwards and backwards that a rehearsal makes.
    rehearsals = 1

    def __init__(
        self,
        modules: Sequence[nn.Module],
        deadline_s: float,
        *,
        mode: str = "default",
        blocks_first: bool = False,
        blocks_allowed: bool = True,
    ) -> None:
        self.compile_s = 0.0  # by torch's own account
        self.mode, self._roots = mode, list(modules)
        self._deadline_s, self._limit_s = deadline_s, deadline_s
        self._blocks_left = blocks_allowed  # blocks have not been tried yet
        self.rehearsing = False
        self._whole_reason = ""
        self.setting = {"mode": mode, "parts": "whole", "deadline_s": f"{deadline_s:.0f}"}
        _LIVE.add(self)
        blocks = _blocks_of(self._roots) if blocks_first and blocks_allowed else []
        self._take_up(blocks or self._roots, "blocks" if blocks else "whole")

    def _take_up(self, modules: Sequence[nn.Module], parts: str) -> None:
        self.setting["parts"] = parts
        if parts == "blocks":
            self._blocks_left = False
        self._reason: str | None = None
        self._frames = self._breaks = 0
        self._layers = Layers(modules, self.rank)
        self._backend = AttentionBackend(modules, BACKEND, self.mode)  # one for all: code is shared
        codes: dict[Hashable, types.CodeType] = {}
        self._parts = [Part(module, self, codes) for module in modules]

    # ------------------------------------------------------------------ on and off

    @property
    def is_on(self) -> bool:
        """Whether calls go to compiled code."""
        return self._layers.is_on

    def enable(self) -> None:
        if self.failure() is None:
            self._layers.on([part.layer for part in self._parts])

    def disable(self) -> None:
        self._layers.off()

    def undo(self) -> None:
        self.disable()
        self._forget()
        stop_compile_workers()

    def _forget(self) -> None:
        for part in self._parts:
            part.forget()

    def settled(self) -> bool:
        """Whether, while on, compiled code has run since the last switch of this or another fix."""
        return self._layers.settled() and (
            self.given_up()
            or not self._layers.is_on
            or any(part.steady >= self.steady_calls or part.is_covered for part in self._parts)
        )

    def failure(self) -> str | None:
        if self._reason is None:
            self._reason = self._layers.failure() or self._counted()
        return self._reason

    def fail(self, reason: str) -> None:
        """Gives compiled code up; calls are eager from here on."""
        if self._reason is None:
            self._reason = reason

    def given_up(self) -> bool:
        """Whether compiled code is not to be used any more."""
        return self._reason is not None

    def _counted(self) -> str | None:
        """Returns what the compiler's counters say against this fix, or None."""
        if self._breaks > MOST_GRAPH_BREAKS:
            return f"{self._breaks} graph breaks, more than {MOST_GRAPH_BREAKS}"
        recompiled = sum(part.recompiled for part in self._parts)
        if recompiled >= MOST_RECOMPILES + len(self._parts):
            return f"compiled {recompiled} times more while it was on (changing shapes or values)"
        return None

    # ------------------------------------------------------------------ before it is raced

    def verify(self, snapshot: Snapshot) -> Parity:
        """Compiles forward and backward under the time limit, compares, and compiles what training runs as well.

        Where the whole does not compile in time, or not well, its repeated blocks are tried.
        """
        snapshot = snapshot._replace(module=inner(snapshot.module))
        parity = self._verified(snapshot)
        if parity is None and self._fall_back():
            parity = self._verified(snapshot)
        self.disable()
        if parity is None:
            return not_shown("reordered", self._whole_reason + (self._reason or "not compared"))
        attention = self._backend.words()
        if attention is not None:
            self.setting["attention"] = attention
        return replace(parity, detail=self._whole_reason + parity.detail)

    def _verified(self, snapshot: Snapshot) -> Parity | None:
        """Returns the parity; None where nothing was compiled that could be compared."""
        slot = Slot.of(snapshot.module)
        parity = None
        with self._rehearsal():
            parity = compare_forward(
                snapshot,
                self._enable_for_comparison(snapshot),
                self.disable,
                unit_roundoff=max(FLOAT32, slot.unit_roundoff()),
                bare=slot.bypassed,
            )
        if self.failure() is None and self._frames == 0 and parity is not None and parity.passed:
            self.fail("nothing was compiled")
        if parity is not None and not parity.passed and not self.given_up():
            self.disable()
            return parity
        if not self.given_up() and parity is not None:
            self.enable()
            self.rehearse(snapshot)
            self.disable()
        return parity if self.failure() is None else None

    def _enable_for_comparison(self, snapshot: Snapshot) -> Callable[[], None]:
        """Returns what switches the fix on for the comparison."""
        return self.enable

    def rehearse(self, snapshot: Snapshot) -> str | None:
        """Compiles what training runs with the fixes that are on now; returns what went wrong.

        Call it while this fix is on. Forward and backward run as in training (dropout on) and leave nothing changed.
        """
        snapshot = snapshot._replace(module=inner(snapshot.module))
        before = tally().limits
        self._run_as_training(snapshot)
        if tally().limits > before and len(self._parts) > 1 and not self.given_up():
            # Blocks that are alike differ in a number that they read (their place in the stack, say).
            for part in self._parts:
                part.forget()
                part.codes = {}
            before = tally().limits
            self._run_as_training(snapshot)
        if tally().limits > before:
            self.fail("the limit of recompiles was met")
        return self.failure()

    def _run_as_training(self, snapshot: Snapshot) -> None:
        if self.given_up():
            return
        try:
            with kept_module(snapshot.module) as state, kept_rng() as rng:
                with self._rehearsal():
                    Replay(snapshot, state, rng).run()
                for _ in range(self.rehearsals - 1):
                    Replay(snapshot, state, rng).run()
        except Exception as error:
            self.fail(f"a step could not be rehearsed: {error_words(error)}")

    def _fall_back(self) -> bool:
        """Takes up the repeated blocks instead of the whole; returns whether there are any."""
        blocks = _blocks_of(self._roots) if self._blocks_left else []
        self._blocks_left = False
        if not blocks:
            return False
        self.disable()
        self._forget()
        stop_compile_workers()
        self._whole_reason = f"the whole model: {self._reason}; {len(blocks)} blocks: "
        self._limit_s = max(self._limit_s, self.compile_s + BLOCKS_FRAC * self._deadline_s)
        self._take_up(blocks, "blocks")
        return True

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        """Limits a block in which calls are rehearsed: each of them gets compiled code."""
        self.rehearsing = True
        try:
            with self.limited():
                yield
        finally:
            self.rehearsing = False

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Leaves the block when what is left of the time limit has passed, and gives compiled code up then."""
        before = tally()
        try:
            with time_limit(self._limit_s - self.compile_s), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script did not ask for a compiler's advice
                yield
        except Overdue as overdue:
            self.fail(f"compilation {overdue}, continuing eager")
        finally:
            spent = tally() - before
            self.compile_s += spent.compile_s
            self._frames += spent.frames
            self._breaks = max(self._breaks, spent.graph_breaks)  # of one form of the model

    # ------------------------------------------------------------------ for parts

    def look_at_masks(self, module: nn.Module) -> None:
        """Gives compiled code up where a mask that it takes for granted is not what it was."""
        changed = self._backend.known.changed(module)
        if changed is not None:
            self.fail(f"{changed}, a mask that attention was compiled with, was written")

    def compiled(self, module: nn.Module, function: types.FunctionType) -> Call:
        """Returns a frame's compiled call."""
        compiled: Call = torch.compile(function, backend=self._backend)
        return compiled

    def odd(self, module: nn.Module, call: Call) -> Call:
        """Returns what makes an odd call; `call` is what lies inside this layer."""
        return call


class Part:
    """The compiled calls of one module, by kind."""

    def __init__(
        self, module: nn.Module, owner: Compiling, codes: dict[Hashable, types.CodeType]
    ) -> None:
        self._module, self._owner, self.codes = module, owner, codes
        self._frames: list[types.FunctionType] = []
        self._functions: dict[Hashable, Call] = {}
        self._any_size: Call | None = None
        self._odd: Counter[Hashable] = Counter()
        self._calls = 0  # since odd ones were last counted anew
        self._marked: list[torch.Tensor] = []
        self._composition: tuple[int, ...] = ()
        self._unsure = True  # what lies around this layer has changed since the last compiled call
        self.steady = 0  # compiled calls since
        self.recompiled = 0  # frames compiled by calls of the training

    @property
    def is_covered(self) -> bool:
        """Whether compiled code of another fix stands in front of this layer, which is not called then."""
        own = self._owner.rank
        return any(rank in COMPILES and rank > own for rank in Slot.of(self._module).composition)

    @property
    def odd_frac(self) -> float:
        """The share of odd calls since they were last counted anew; 0 as long as there are few."""
        odd = self._odd.total()
        return odd / self._calls if odd >= ODD_CALLS else 0.0

    def layer(self, call: Call) -> Call:
        """Returns the compiled call; `call` is what lies inside, for when compiling is given up."""
        module, owner = self._module, self._owner
        odd = owner.odd(module, call)
        composition = tuple(rank for rank in Slot.of(module).composition if rank >= INPUTS)
        if composition != self._composition:
            self._composition, self._unsure, self.steady = composition, True, 0
        self._odd.clear()
        self._calls = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            owner.look_at_masks(module)
            if owner.given_up():
                return call(*args, **kwargs)
            if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
                return odd(*args, **kwargs)  # somebody counts or exports
            kind = kind_of(module, args, kwargs)
            function = self._functions.get(kind)
            if function is None:
                function = self._new(kind, args, kwargs)
                if function is None:
                    return odd(*args, **kwargs)
            else:
                self._calls += 1
            return self._run(function, call, args, kwargs)

        return run

    def _run(self, function: Call, call: Call, args: Any, kwargs: Any) -> Any:
        """Runs compiled code; what may compile is limited, and what fails is made again without."""
        owner = self._owner
        if self._unsure and not owner.rehearsing:
            result = reason = _NOTHING
            try:
                with owner.limited():
                    result = function(*args, **kwargs)
            except Exception as error:
                if ends_recomputation(error):
                    raise
                reason = f"compiled code raised {error_words(error)}"
            self._unmark()
        else:
            frames = frames_compiled()
            reason = _NOTHING
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                if ends_recomputation(error):
                    raise
                result, reason = _NOTHING, f"compiled code raised {error_words(error)}"
            self.recompiled += 0 if owner.rehearsing else frames_compiled() - frames
        if result is not _NOTHING:
            self._unsure = False
            self.steady += 1
            return result
        # Outside of the except clause, which keeps the memory of the frames that failed.
        result = call(*args, **kwargs)  # if it fails again the error is the script's own
        if reason is not _NOTHING:
            owner.fail(str(reason))
        return result

    def _unmark(self) -> None:
        for tensor in self._marked:
            vars(tensor).pop("_dynamo_weak_dynamic_indices", None)
        self._marked.clear()

    def _new(self, kind: Hashable, args: Any, kwargs: Any) -> Call | None:
        """Returns compiled code for a kind that has none, None where the call is an odd one to run eagerly."""
        if kind is None:
            return None
        first = not self._functions
        if self._owner.rehearsing or first:  # first: of a planned run, which rehearses nothing
            return self._add(kind)
        if not any(k[0] == kind[0] for k in self._functions):  # type: ignore[index]
            return None  # another mode: an evaluation that records gradients
        self._odd[kind] += 1
        self._calls += 1
        odd, many = self._odd.total(), self._odd.total() >= ODD_CALLS
        if many and self._odd[kind] >= OFTEN_FRAC * self._calls:
            self._counted_anew()
            return self._add(kind)
        usual = many and odd >= USUAL_FRAC * self._calls
        if usual and self._any_size is None and self._owner.mode == "default":
            self._mark_sizes(args, kwargs)
            self._counted_anew()
            self._any_size = self._made((likeness_of(self._module), "any size"))
        return self._any_size

    def _counted_anew(self) -> None:
        self.recompiled += 1
        self._odd.clear()
        self._calls = 0
        self._unsure, self.steady = True, 0

    def _add(self, kind: Hashable) -> Call:
        self._unsure = True
        function = self._functions[kind] = self._made((likeness_of(self._module), kind))
        return function

    def _made(self, key: Hashable) -> Call:
        """Returns a compiled call whose code modules that are alike share."""
        own = frame(self._module._call_impl)
        code = self.codes.setdefault(key, own.__code__)
        shared = types.FunctionType(code, own.__globals__, code.co_name, None, own.__closure__)
        self._frames.append(shared)
        return self._owner.compiled(self._module, shared)

    def _mark_sizes(self, args: Any, kwargs: Any) -> None:
        """Tells the compiler which sizes differ from call to call."""
        shapes = [kind[2] for kind in (*self._functions, *self._odd) if kind is not None]  # type: ignore[index]
        tensors = list(tensors_in((args, kwargs)))
        for i, tensor in enumerate(tensors):
            seen = [s[i][0] for s in shapes if len(s) == len(tensors)]
            for dim in range(tensor.dim()):
                if len({shape[dim] for shape in seen if len(shape) == tensor.dim()}) > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
                    self._marked.append(tensor)

    def forget(self) -> None:
        """Drops the compiled code."""
        for function in self._frames:
            forget(function)
        self._frames.clear()
        self._functions.clear()
        self._any_size = None


def rehearse_beside(snapshot: Snapshot, limit_s: float) -> str | None:
    """Has code that is compiled by other fixes made ready for the calls of this moment; returns what went wrong.

    What goes wrong here is not held against those fixes: without the calls of this moment they are as they were.

    Args:
        limit_s: that compiling may take.
    """
    for owner in list(_LIVE):
        if owner.given_up() or not owner.is_on:
            continue
        before = owner._limit_s
        owner._limit_s = max(before, owner.compile_s + limit_s)
        try:
            reason = owner.rehearse(snapshot)
        finally:
            owner._limit_s = before
        if reason is not None:
            owner._reason = None
            return reason
    return None


def kind_of(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    """Returns what decides which compiled code a call needs: (mode, precision, tensors); None where it cannot be told."""
    try:
        tensors = tuple(
            (tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
            for t in tensors_in((args, kwargs))
        )
    except Exception:  # a tensor without strides
        return None
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    under = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    precision = torch.backends.cuda.matmul.fp32_precision  # compiled code is of one
    return (module.training, (kind, under if under is not None else precision), tensors)


def likeness_of(module: nn.Module) -> Hashable:
    """Returns what modules have in common that can share compiled code."""
    from flopwise.kit.graph.regions import likeness

    return likeness(module)


def _blocks_of(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the repeated blocks of the roots whose calls can be compiled; none if any root has none."""
    from flopwise.kit.compiler import call_problem
    from flopwise.kit.graph.regions import regions_of

    found: list[nn.Module] = []
    for root in roots:
        blocks = [m for _, m in regions_of(root) if _is_slot(m) or call_problem(m) is None]
        if not blocks:
            return []
        found += blocks
    return found


def _is_slot(module: nn.Module) -> bool:
    """Whether what stands in the place of this module's call has been put there by a fix."""
    return isinstance(getattr(vars(module).get("_compiled_call_impl"), "__self__", None), Slot)
