"""FW105 compile-model: the root module compiled in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flopwise.fixes.attention.fusing import AttentionBackend
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import COMPILED, Call, Layers, Slot, forward_problem, inner
from flopwise.fixes.time_limit import Overdue, alarm_problem, limit_is_set, time_limit
from flopwise.kit.compiler import (
    compiler_problem,
    forget,
    frame,
    frames_compiled,
    stop_compile_workers,
    tally,
)
from flopwise.meter.found import compiled_parts
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.parity import compare_forward
from flopwise.meter.replay import Replay, Snapshot
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

#: A compilation that takes longer is abandoned.
DEADLINE_S = 120.0
#: What compiles the graphs; None: Inductor with its default options.
BACKEND: Callable[..., Any] | None = None
#: With more graph breaks than this a model runs as many small graphs, and is left alone.
MOST_GRAPH_BREAKS = 8
#: With more compilations than this while it is on, it keeps compiling for new shapes and is taken back.
MOST_RECOMPILES = 8


class CompileModel(Fix):
    """The root module compiled by torch.compile, in place.

    What it does:
    Compiles the call of the root module (inside DistributedDataParallel: of the module in it) with the default mode
    and puts it in the module's own slot for that, so that type, state dict, copies and pickles stay as they are.
    Containers of library layers, which `Module.compile` silently leaves uncompiled, are compiled too; that frames
    were really compiled is checked. Attention that is written out (products and a softmax) becomes the fused operator
    in the compiled code. Masks that come from buffers and constants are looked at before anything is compiled: for one
    that hides every later place and no other the causal flag stands, and one that hides nothing is left out; also of
    attention that is fused already. Only while gradients are recorded.

    Why it helps:
    Chains of small operations become one kernel: less memory traffic, fewer launches, less Python. Fused attention
    keeps the scores of all pairs of places out of memory. Models that consist of large matrix products gain little.

    When it declines:
    The script compiles by itself; there is no C++ compiler (CPU) or no Triton with a C compiler (GPU); the model's
    call cannot be wrapped; no time limit can be set (not in the main thread, or the script uses the alarm signal);
    forward and backward are too small a share of the step. It is taken back when compiling takes longer than 120 s,
    when nothing was compiled, after more than 8 graph breaks or more than 8 further compilations, and when a mask that
    attention was compiled with is written. The trial also states after how many steps the compilation is paid back.

    What can change:
    Fused kernels round less often and sum in another order: results differ by rounding, held against a float64
    reference. Random numbers (dropout) come from another stream, so numbers are compared with dropout off. Hooks
    that the script adds to inner modules later are not called. The compiler's cache files stay on disk.
    """

    code = "FW105"
    name = "compile-model"
    causes = ("launch-bound", "memory-bound", "unfused-attention")
    findings = ("L107", "L103", "L112", "L108", "L109")
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether compiling may be tried."""
        if scene.facts.compiles or any(compiled_parts(root) for root in scene.roots):
            return Declined("the script compiles its model itself")
        reason = forward_problem(scene, "ours") or compiler_problem(scene.device) or alarm_problem()
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module, switched off; nothing is compiled before `verify` or the first call."""
        return _Applied([inner(root) for root in scene.roots])


class _Applied(Applied):
    def __init__(self, modules: list[nn.Module], deadline_s: float = DEADLINE_S) -> None:
        self.setting = {"mode": "default"}
        self.compile_s = 0.0  # by torch's own account
        self._deadline_s = deadline_s
        self._layers = Layers(modules, COMPILED)
        self._compiled = [_Compiled(module, self) for module in modules]
        self._reason: str | None = None
        self._frames = 0
        self._breaks = 0

    def enable(self) -> None:
        if self.failure() is not None:
            return
        self._layers.on([compiled.layer for compiled in self._compiled])

    def disable(self) -> None:
        self._layers.off()

    def undo(self) -> None:
        self.disable()
        for compiled in self._compiled:
            compiled.forget()
        stop_compile_workers()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        if self._reason is None:
            self._reason = self._layers.failure() or self._counted()
        return self._reason

    def verify(self, snapshot: Snapshot) -> Parity:
        """Compiles forward and backward under the time limit, compares, and compiles what training runs as well."""
        module = inner(snapshot.module)
        snapshot = snapshot._replace(module=module)
        slot = Slot.of(module)
        parity = None
        with self.limited():
            parity = compare_forward(
                snapshot,
                self.enable,
                self.disable,
                unit_roundoff=max(FLOAT32, slot.unit_roundoff()),
                bare=slot.bypassed,
            )
            if parity.passed and "compared with" in parity.detail:
                self._rehearse(snapshot)
        self.disable()
        if self.failure() is None and self._frames == 0 and parity is not None and parity.passed:
            self._reason = "nothing was compiled"
        if self._reason is not None or parity is None:
            return _failed(self._reason or "not compared")
        attention = [words for c in self._compiled if (words := c.backend.words()) is not None]
        if attention:
            self.setting["attention"] = "; ".join(attention)
        return parity

    def _rehearse(self, snapshot: Snapshot) -> None:
        """Runs one compiled forward and backward as in training (dropout on), so that no real step compiles."""
        with kept_module(snapshot.module) as state, kept_rng() as rng:
            self.enable()
            try:
                Replay(snapshot, state, rng).run()
            finally:
                self.disable()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Leaves the block when what is left of the time limit has passed, and gives the fix up then."""
        before = tally()
        try:
            with time_limit(self._deadline_s - self.compile_s), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script did not ask for a compiler's advice
                yield
        except Overdue as overdue:
            self._reason = f"compilation {overdue}, continuing eager"
        finally:
            spent = tally() - before
            self.compile_s += spent.compile_s
            self._frames += spent.frames
            self._breaks += spent.graph_breaks

    def given_up(self) -> bool:
        """Whether compiled code is not to be used any more."""
        return self._reason is not None

    def give_up(self, reason: str) -> None:
        """Has compiled code not be used any more."""
        self._reason = self._reason or reason

    def _counted(self) -> str | None:
        """Returns what the compiler's counters say against this fix, or None."""
        if self._breaks > MOST_GRAPH_BREAKS:
            return f"{self._breaks} graph breaks, more than {MOST_GRAPH_BREAKS}"
        recompiled = sum(compiled.recompiled for compiled in self._compiled)
        if recompiled > MOST_RECOMPILES:
            return f"compiled {recompiled} times more while it was on (changing shapes or values)"
        return None


class _Compiled:
    """The compiled call of one module."""

    def __init__(self, module: nn.Module, owner: _Applied) -> None:
        self._owner = owner
        self._frame = frame(module._call_impl)
        self.backend = AttentionBackend(module, BACKEND)
        self._function: Call = torch.compile(self._frame, backend=self.backend)
        self._warm = False
        self.recompiled = 0  # frames compiled by calls of the training after the first

    def layer(self, call: Call) -> Call:
        """Returns the compiled call; `call` is the plain one, for when compiling is given up."""
        function, owner = self._function, self._owner

        def run(*args: Any, **kwargs: Any) -> Any:
            changed = self.backend.known.changed()
            if changed is not None:
                owner.give_up(f"{changed}, a mask that attention was compiled with, was written")
            if owner.given_up():
                return call(*args, **kwargs)
            if limit_is_set():
                self._warm = True
                return function(*args, **kwargs)
            if not self._warm:
                return self._first(call, args, kwargs)
            frames = frames_compiled()
            result = function(*args, **kwargs)
            self.recompiled += frames_compiled() - frames
            return result

        return run

    def _first(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of the training, if nothing was rehearsed; limits the forward's compilation only."""
        with self._owner.limited():
            result = self._function(*args, **kwargs)
            self._warm = True
            return result
        return call(*args, **kwargs)

    def forget(self) -> None:
        """Drops the compiled code."""
        forget(self._frame)


def _failed(reason: str) -> Parity:
    return Parity("reordered", False, None, None, None, None, None, 0.0, "none", reason)
