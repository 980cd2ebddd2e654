"""Models compiled in place: the same object, the same keys, and back to eager whenever compiling does not pay."""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from flopwise.errors import GraphError
from flopwise.kit.compiler import (
    break_even_steps,
    call_problem,
    compiler_problem,
    frames_compiled,
    frames_tried,
    tally,
)
from flopwise.kit.graph.arguments import check_module
from flopwise.kit.graph.compile_report import CompileReport, varying
from flopwise.kit.graph.compiled_calls import CompiledCall, Settings, calls_off, calls_on
from flopwise.kit.graph.deadline import Overdue, Within, modes_problem
from flopwise.kit.graph.events import Mark
from flopwise.kit.graph.kept import device_of, kept, without_dropout
from flopwise.kit.graph.numerics import Call, Numerics, compare
from flopwise.kit.graph.regions import Choice, is_silent, likeness, regions_of, scripted
from flopwise.kit.graph.rehearsal import Rehearsal
from flopwise.kit.graph.saying import warn
from flopwise.kit.nested import tensors_in

#: Compiled code that is slower than eager by more than this share is taken back.
SLOWER_FRAC = 0.02
#: Different input shapes that are remembered.
_MOST_SHAPES = 256


def compile_in_place(model: nn.Module, **settings: Any) -> Compiled:
    """Compiles a model without wrapping it; returns the handle that reports on it and takes it back.

    The object, its type, its state dict, its copies and pickles stay as they are. Nothing happens before the first
    call in training: then forward and backward are compiled on that call's own arguments, in a thread that is
    abandoned after `deadline_s`, and timed against eager; buffers, random numbers and gradients are put back. The
    model goes on eagerly, with one GraphWarning, if compiling takes longer, fails, compiles nothing, breaks into more
    than `most_breaks` graphs, is slower than eager, or would be paid back after `steps_left` only; and later if it has
    been compiled anew more than `most_recompiles` times. A container of torch's own layers, of which
    `module.compile()` silently compiles nothing, is compiled all the same. Inside DistributedDataParallel compile
    `ddp.module`. There is no deadline with `mode="reduce-overhead"` or "max-autotune", whose CUDA graphs belong to one
    thread, nor under a mode of torch (`torch.device` as a context, say), which other threads do not see.

    Args:
        model: the module.
        settings: `mode`, `backend`, `dynamic`, `options`: as for `torch.compile`; `deadline_s`: seconds, 120 by
            default; `evaluation`: compile calls without gradients or in evaluation mode as well, apart from training
            (True by default); `measure`: time compiled against eager (True); `steps_left`: steps that the run still
            has, if known; `most_breaks`, `most_recompiles`: 8 by default.
    """
    check_module(model, "compile_in_place")
    return Compiled(model, [("", model)], _settings(settings))


def compile_regions(model: nn.Module, regions: Choice | None = None, **settings: Any) -> Compiled:
    """Compiles a model's repeated blocks instead of the whole, once for all that are alike; returns the handle.

    Cheaper to compile than the whole by the number of repetitions; what lies between the blocks stays eager.

    Args:
        model: the module.
        regions: a class, several classes, or a function of name and module that chooses the blocks; None for the
            outermost classes of which the model has two or more.
        settings: as for `compile_in_place`.
    """
    check_module(model, "compile_regions")
    checked = _settings(settings)
    chosen = [(n, m) for n, m in regions_of(model, regions) if not scripted(m.modules())]
    return Compiled(model, chosen, checked)


def _settings(given: dict[str, Any]) -> Settings:
    known = [field.name for field in dataclasses.fields(Settings)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise GraphError(f"there is no setting {unknown[0]!r}; there are {', '.join(known)}")
    return Settings(**given)


class Compiled:
    """The compiled parts of one model."""

    def __init__(
        self, model: nn.Module, modules: Sequence[tuple[str, nn.Module]], settings: Settings
    ) -> None:
        self._model, self._settings = model, settings
        self._within = Within(settings.deadline_s)
        self._mark, self._start = Mark(), tally()
        self._counts = {"training": 0, "evaluation": 0}
        self._recompiles = {"training": 0, "evaluation": 0}
        self._limits = 0
        self.evaluation_reason: str | None = None
        self._compile_s, self._skips = 0.0, _cudagraph_skips()
        self._times: dict[str, float] = {}
        self._shapes: Counter[tuple[tuple[int, ...], ...]] = Counter()
        self._warm: set[str] = set()
        self._busy = False
        self.reason = self._problem(modules)
        self._parts: list[CompiledCall] = []
        self._cured: tuple[str, ...] = ()
        if self.reason is not None:
            self._warn()
            return
        self._cured = tuple(name for name, module in modules if is_silent(module))
        self._codes: dict[Hashable, types.CodeType] = {}
        self._parts = [CompiledCall(module, self._settings, self._codes) for _, module in modules]
        self._root = vars(model).get("_compiled_call_impl")
        whole = self._parts[0] if modules[0][1] is model else None
        self._watch(whole)

    def _problem(self, modules: Sequence[tuple[str, nn.Module]]) -> str | None:
        if not modules:
            return "no block of the model is repeated, and none was chosen"
        for _, module in modules:
            problem = call_problem(module)
            if problem is not None and not is_silent(module):
                return problem
        if vars(self._model).get("_compiled_call_impl") is not None and not is_silent(self._model):
            return "the model's call is compiled already"
        uses_inductor = self._settings.backend == "inductor"
        return compiler_problem(device_of(self._model)) if uses_inductor else None

    # What the model's calls go through.

    def _watch(self, whole: CompiledCall | None) -> None:
        """Puts the dispatch between eager, compiled training and compiled evaluation into the model's own slot."""
        model = self._model
        eager: Callable[..., Any] = model._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.reason is not None or self._busy:
                return eager(*args, **kwargs)
            kind = "training" if model.training and torch.is_grad_enabled() else "evaluation"
            plain = kind == "evaluation" and not self._settings.evaluation
            if not plain and kind not in self._warm:
                self._first(kind, args, kwargs)
            if (
                plain
                or self.reason is not None
                or (kind == "evaluation" and self.evaluation_reason)
            ):
                with calls_off(self._parts):
                    return eager(*args, **kwargs)
            run = whole.function(kind) if whole is not None else eager
            tried, compiled = frames_tried(), frames_compiled()
            result = run(*args, **kwargs)
            if frames_tried() != tried:
                self._again(kind, frames_compiled() - compiled)
            if kind == "training" and len(self._shapes) < _MOST_SHAPES:
                self._shapes[tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))] += 1
            return result

        for part in self._parts:
            if part is not whole:
                part.on()
        vars(model)["_compiled_call_impl"] = call

    def _first(self, kind: str, args: Any, kwargs: Any) -> None:
        """Compiles for the first call of a kind, on its own arguments, and decides whether that is kept."""
        self._warm.add(kind)
        before, problem = tally(), self._rehearse(kind, (args, kwargs))
        if problem is None and (tally() - before).limits and len(self._parts) > 1:
            # Blocks that are alike differ in a number that they read (their place in the stack, say): no code in common.
            for part in self._parts:
                part.forget()
                part.unshare()
            before, problem = tally(), self._rehearse(kind, (args, kwargs))
        spent = tally() - before
        self._counts[kind] += spent.frames
        self._limits = (tally() - self._start).limits
        self._compile_s = max(self._compile_s, (tally() - self._start).compile_s)
        problem = problem or self._verdict(kind, spent.frames, spent.limits)
        for part in self._parts:
            part.told.clear()  # nobody has heard it
        if problem is not None:
            self._stop(kind, problem)

    def _rehearse(self, kind: str, given: tuple[Any, Any]) -> str | None:
        """Compiles, and times training against eager; returns why that failed, or None."""
        alone = modes_problem() is not None or self._settings.has_graphs()
        self._busy = True
        try:
            with warnings.catch_warnings(), kept(self._model, weights=False) as state:
                warnings.simplefilter("ignore")  # nobody asked for a compiler's advice
                work = Rehearsal(self._model, self._parts, kind, given, state.rewind)
                timed = self._settings.measure and kind == "training"
                run = work.timed if timed else work.compile
                self._times |= run() if alone else self._within.run(run)
        except Overdue as overdue:
            return f"compilation {overdue}, continuing eager"
        except Exception as error:
            return f"compiling failed ({type(error).__name__}: {_first_line(error)})"
        except BaseException as error:  # Ctrl-C: what is half compiled is nobody's to use
            self._stop(kind, f"compiling was interrupted ({type(error).__name__})")
            raise
        finally:
            self._busy = False
        return None

    def _stop(self, kind: str, problem: str) -> None:
        """Lets calls of a kind be eager; without training there is no point in the rest."""
        if kind == "training":
            self._reject(problem)
        elif self.evaluation_reason is None:
            self.evaluation_reason = problem
            name = type(self._model).__name__
            warn(f"{name} is not compiled in evaluation: {problem}")

    def _verdict(self, kind: str, frames: int, limits: int) -> str | None:
        """Returns why what was compiled is not to be used, or None."""
        limit, breaks = self._settings.most_breaks, self._mark.breaks()
        eager_s, compiled_s = self._times.get("eager"), self._times.get("compiled")
        if frames == 0:
            told = next((words for part in self._parts for words in part.told), None)
            return "nothing was compiled" + (f": it {told}" if told else "")
        if len(breaks) > limit:
            places = "; ".join(str(b) for b in breaks[:3])
            return f"{len(breaks)} graph breaks, more than {limit}, first at {places}"
        if limits:
            return f"the limit of recompiles was met: {self._told()}"
        if kind == "training" and eager_s is not None and compiled_s is not None:
            even = break_even_steps(self._compile_s, eager_s, compiled_s)
            left = self._settings.steps_left
            if compiled_s > eager_s * (1 + SLOWER_FRAC):
                return f"slower by {100 * (compiled_s / eager_s - 1):.0f} % ({eager_s * 1e3:.3g} ms eager, {compiled_s * 1e3:.3g} ms compiled)"
            if left is not None and (even is None or even > left):
                return f"paid back after {even or 'no number of'} steps, and {left} are left"
        return None

    def _told(self) -> str:
        return "; ".join(str(r) for r in self._mark.recompiles()[:3])

    def _again(self, kind: str, frames: int) -> None:
        """Counts what has been compiled in a later call."""
        now = tally() - self._start
        self._recompiles[kind] += frames
        self._compile_s = max(self._compile_s, now.compile_s)
        met, self._limits = now.limits > self._limits, now.limits
        if self._recompiles[kind] > self._settings.most_recompiles or met:
            words = ", and the limit of recompiles was met" if met else ""
            self._stop(
                kind,
                f"compiled {self._recompiles[kind]} times more{words}: {self._told()}. Now running eager",
            )

    # What a user asks for.

    def verify(
        self,
        *args: Any,
        loss: Callable[[Any], torch.Tensor] | None = None,
        steps: int = 3,
        **kwargs: Any,
    ) -> Numerics:
        """Returns whether compiled training is as near to float64 as eager over some steps; if not, it is taken back.

        Args:
            args, kwargs: one call of the model.
            loss: makes the scalar that backward starts from; None for a scalar output, or the mean square of outputs.
            steps: of gradient descent, each arm along its own gradients.

        The library's dropout layers are off: compiled code draws from another stream. Where random numbers are drawn
        all the same, the compared code draws as eager does, and eager is the reference. The module is left as it was.
        """
        model = self._model
        call = Call(args, kwargs, loss)
        parts = [CompiledCall(p.module, self._settings, {}) for p in self._parts]
        whole = parts[0] if parts and parts[0].module is model else None
        eager: Callable[..., Any] = model._call_impl

        def compiled(*a: Any, **k: Any) -> Any:
            if whole is not None:
                return whole.function("training")(*a, **k)
            with calls_on(parts):
                return eager(*a, **k)

        def bare(*a: Any, **k: Any) -> Any:
            with calls_off(self._parts):
                return eager(*a, **k)

        self._busy = True
        try:
            with warnings.catch_warnings(), without_dropout(model), kept(model) as state:
                warnings.simplefilter("ignore")
                call.run(bare)
                draws = state.rng.moved()
                state.rewind()
                with _inductor_patch(fallback_random=draws):
                    result = compare(model, call, bare, compiled, state, steps)
        finally:
            self._busy = False
            for part in parts:
                part.forget()
        if not result.passed:
            self._reject(f"the numbers differ: {result.reason}")
        return result

    def report(self) -> CompileReport:
        """Returns what compiling came to so far."""
        eager_s, compiled_s = self._times.get("eager"), self._times.get("compiled")
        even = None
        if eager_s is not None and compiled_s is not None:
            even = break_even_steps(self._compile_s, eager_s, compiled_s)
        return CompileReport(
            modules=len(self._parts),
            shared=len({likeness(p.module) for p in self._parts}),
            cured=self._cured,
            frames=self._counts["training"] + self._recompiles["training"],
            breaks=tuple(self._mark.breaks()),
            recompiles=tuple(self._mark.recompiles()),
            compile_s=self._compile_s,
            eager_s=eager_s,
            compiled_s=compiled_s,
            break_even_steps=even,
            evaluation_frames=self._counts["evaluation"] + self._recompiles["evaluation"],
            limits=self._limits,
            sizes=varying(self._shapes),
            cudagraph_skips=_cudagraph_skips() - self._skips,
            reason=self.reason,
            evaluation_reason=self.evaluation_reason,
        )

    def remove(self) -> None:
        """Takes the compiled code out: the model is as it was before."""
        if self._parts:
            own = vars(self._model)
            own["_compiled_call_impl"] = self._root
            for part in self._parts:
                part.off()
                part.forget()
        self.reason = self.reason or "removed"

    def _reject(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self.remove()
            self._warn()

    def _warn(self) -> None:
        warn(f"{type(self._model).__name__} is not compiled: {self.reason}")


def _inductor_patch(**values: Any) -> Any:
    from torch._inductor import config

    return config.patch(**values)


def _cudagraph_skips() -> int:
    """Returns how often torch's own CUDA graphs were passed over in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["inductor"]["cudagraph_skips"]) if utils is not None else 0


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error, and the next one where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
