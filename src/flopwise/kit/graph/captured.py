"""A whole step of training in one CUDA graph: launched once instead of kernel by kernel, and checked before it is trusted."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flopwise.errors import GraphError
from flopwise.kit.graph.arguments import check_whole, listed, several
from flopwise.kit.graph.buckets import Buckets
from flopwise.kit.graph.deferred import Deferred
from flopwise.kit.graph.forms import Form, applied
from flopwise.kit.graph.guards import Guards, conditions, static_problem
from flopwise.kit.graph.parts import Watch, is_scaler, parts_of
from flopwise.kit.graph.saved import Constants, Saved, distance, state_bytes, state_tensors
from flopwise.kit.graph.saying import warn
from flopwise.kit.graph.shapes import Shape, StepReport, advice
from flopwise.kit.graph.signature import Unseen, fill, plain_values, signature, sizes, static_copy
from flopwise.kit.graph.surface import CudaSurface, NoSurface, Surface, is_move, is_optimizers
from flopwise.kit.nested import map_tensors, tensors_in

#: A replay may differ from eager by so many times what two eager runs of one step differ by.
MOST_TIMES_NOISE = 4.0
#: So many steps are run eagerly twice to know what two runs differ by.
NOISE_RUNS = 2
#: Two eager runs of a step that differ by more than this, as a share, do not differ by rounding: atomic additions in
#: bfloat16 differ by some of its 8 bits in single entries, and by less over all.
MOST_NOISE = 0.05
#: The capturable form of an optimizer may differ from its own by this much, as a share of a tensor's length: its
#: numbers are rounded to float32 where Python's have 53 bits.
FORM_TOLERANCE = 1e-4
#: Results of a step that is not deterministic may differ by this much in any case: some last digits of a float32.
RESULTS_ROUNDOFF = 1e-6
#: So often may something that a graph depends on change before capturing is given up.
MOST_RECAPTURES = 4
#: More shapes than this are not remembered.
MOST_SHAPES = 4096

Step = Callable[..., Any]


class CapturedStep:
    """Runs a step of training from a CUDA graph once that has been shown to do the same; eagerly otherwise.

        step = CapturedStep(train_step, model, optimizer)
        for batch in loader:
            loss = step(batch)

    `train_step` is one whole step: forward, backward, optimizer (and scaler), in one function that leaves nothing on
    the host: no `.item()`, no printing, no scheduler. What it returns comes back as detached copies. Learning rates
    may change between steps as usual.

    The first steps of every shape run eagerly, and are looked at: what makes the host wait, or changes something in
    Python, cannot be replayed. Then the step is captured, and replayed and run eagerly side by side, from the same
    state with the same random numbers, for `verify` steps; a graph is trusted if both end equal to the bit (or no
    further apart than two eager runs are, where kernels are not deterministic). Whatever goes wrong, the state is put
    back and the step runs as if there had never been a graph, with one GraphWarning.

    Args:
        step: the step. Modules, optimizers, scalers and schedulers that its code names are found by themselves.
        model: the module or modules that it trains.
        optimizer: the optimizer or optimizers.
        scaler: a `torch.amp.GradScaler` or `flopwise.kit.precision.DynamicScaler`, if there is one.
        state: other modules, tensors or generators that the step changes (a moving average of weights).
        buckets: pads batches to a few sizes, so that a few graphs are enough.
        warm_up: eager steps of every shape before it is captured, 2 at least.
        verify: steps of every graph that are run both ways before it is trusted, 1 at least.
        recheck_every: replays after which one step is run both ways again; None for never.
        most_graphs: more shapes than this are not captured.
        patience: steps within which some shape has to come back often enough.
        surface: where to capture; None for CUDA where the model is on a GPU.

    Raises:
        GraphError: an argument is not what it has to be.
    """

    def __init__(
        self,
        step: Step,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        scaler: Any = None,
        state: Iterable[Any] = (),
        buckets: Buckets | None = None,
        warm_up: int = 3,
        verify: int = 3,
        recheck_every: int | None = None,
        most_graphs: int = 8,
        patience: int = 64,
        surface: Surface | None = None,
    ) -> None:
        if not callable(step):
            raise GraphError(f"step is a function that makes one training step, not {step!r}")
        check_whole(warm_up, "warm_up", 2)
        check_whole(verify, "verify", 1)
        check_whole(most_graphs, "most_graphs", 1)
        check_whole(patience, "patience", 1)
        if recheck_every is not None:
            check_whole(recheck_every, "recheck_every", 1)
        if buckets is not None and not callable(buckets):
            raise GraphError(f"buckets={buckets!r}: it is a Buckets, as in Buckets((128, 256))")
        if scaler is not None and not is_scaler(scaler):
            raise GraphError(f"scaler={scaler!r} has not the methods of torch.amp.GradScaler")
        modules = listed(model, nn.Module, "model")
        optimizers = listed(optimizer, Optimizer, "optimizer")
        scalers = [scaler] if scaler is not None else []
        state = several(state, "state")
        self._step = step
        self._parts = parts_of(step, modules, optimizers, scalers, state)
        self._deferred = Deferred(self._parts.scalers)
        self._scaled = any(getattr(s, "is_enabled", lambda: True)() for s in self._parts.scalers)
        self._forms = [Form(o, self._scaled) for o in self._parts.optimizers]
        self._buckets, self._warm_up, self._verify_steps = buckets, warm_up, verify
        self._recheck, self._most_graphs, self._patience = recheck_every, most_graphs, patience
        self._surface: Surface = surface or _surface(modules, optimizers)
        self._shapes: dict[Hashable, Shape] = {}
        self._last: Shape | None = None
        self._form_proven = False
        self._noise: dict[str, float] | None = None
        self._noise_runs = 0  # still to be made
        self._calls = self._replays = self._eager_runs = self._captures = self._recaptures = 0
        self._capture_s, self._graph_bytes = 0.0, 0
        self._full_said = False
        self._reason = self._surface.problem() or static_problem(self._parts)
        if self._reason is not None and not getattr(self._surface, "expected", False):
            self._say(self._reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; returns what the step returns, its tensors as detached copies."""
        self._calls += 1
        if self._reason is not None:
            self._eager_runs += 1
            return _detached(self._step(*args, **kwargs))
        given = (args, kwargs)
        if self._buckets is not None:
            args, kwargs = tuple(self._buckets(a) for a in args), self._buckets(kwargs)
        shape = self._shape((args, kwargs))
        if shape is None:
            self._eager_runs += 1
            return _detached(self._step(*given[0], **given[1]))
        if shape.graph is not None and shape.guards is not None:
            stale = shape.guards.broken(self._parts, self._forms)
            if stale is not None:
                self._drop(shape, stale)
                if self._reason is not None:
                    self._eager_runs += 1
                    return _detached(self._step(*given[0], **given[1]))
            elif shape.left == 0:
                result = self._replay(shape, args, kwargs)
                self._deferred.make_up()
                return result
        result = self._learn(shape, args, kwargs)
        self._deferred.make_up()
        return result

    def report(self) -> StepReport:
        """Returns what became of the steps so far."""
        shapes: dict[tuple[tuple[int, ...], ...], int] = {}
        for shape in self._shapes.values():
            shapes[shape.sizes] = shapes.get(shape.sizes, 0) + shape.seen
        trusted = sum(s.graph is not None and s.left == 0 for s in self._shapes.values())
        return StepReport(
            trusted, self._replays, self._eager_runs, self._captures, self._capture_s,
            self._graph_bytes, None if self._noise is None else self._noise.get("weights", 0.0), shapes, self._reason,
        )  # fmt: skip

    def inputs(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the static buffers of arguments with these shapes, for a prefetcher to fill; None without a graph.

        A step that is called with the buffers themselves copies nothing.
        """
        key = self._key((args, kwargs))
        shape = self._shapes.get(key) if key is not None else None
        return shape.inputs if shape is not None and shape.graph is not None else None

    def close(self) -> None:
        """Drops the graphs and puts the optimizers back into their own form; steps run eagerly from here on."""
        self._release()
        self._reason = self._reason or "closed"

    # What is known of a shape.

    def _key(self, tree: Any) -> Hashable | None:
        try:
            return (signature(tree), conditions(self._parts), tuple(self._parts.read().items()))
        except Unseen as unseen:
            self._give_up(f"the batch holds {unseen}")
            return None

    def _shape(self, tree: Any) -> Shape | None:
        key = self._key(tree)
        if key is None:
            return None
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes = {k: s for k, s in self._shapes.items() if s.graph is not None}
            shape = self._shapes[key] = Shape(sizes(tree), self._parts.read())
        shape.seen += 1
        if self._calls >= self._patience and self._captures == 0 and shape.seen <= self._warm_up:
            self._give_up(
                f"no shapes came back often enough in {self._calls} steps{advice(self._shapes.values())}"
            )
            return None
        return shape

    # The ways to run a step.

    def _run(self, args: Any, kwargs: Any, own: bool = False) -> Any:
        """Runs a step eagerly, on the stream of captures and in the capturable form once there is one."""
        self._eager_runs += 1
        forms = [] if own else self._forms
        with self._surface.aside(), applied(forms), self._deferred.run():
            return _detached(self._step(*args, **kwargs))

    def _launch(self, shape: Shape, args: Any, kwargs: Any) -> Any:
        """Fills the buffers, replays, and lets gradients be those of this graph; returns copies of the outputs."""
        assert shape.graph is not None
        assert shape.guards is not None
        fill(shape.inputs, (args, kwargs))
        for form in self._forms:
            form.refresh()
        if shape.guards.accumulates:
            shape.guards.bring_grads(self._parts)
        shape.graph.replay()
        self._deferred.left = shape.deferred
        if self._last is not shape or shape.guards.grads_moved(self._parts, shape.grads):
            for parameter, grad in zip(self._parts.parameter_list, shape.grads, strict=True):
                parameter.grad = grad
            self._last = shape
        return map_tensors(shape.output, lambda t: t.clone())

    def _replay(self, shape: Shape, args: Any, kwargs: Any) -> Any:
        self._replays += 1
        if self._recheck and self._replays % self._recheck == 0:
            shape.left = 1
            return self._verify(shape, args, kwargs)
        return self._launch(shape, args, kwargs)

    def _learn(self, shape: Shape, args: Any, kwargs: Any) -> Any:
        """Runs a step whose shape has no trusted graph, and comes one step nearer to one."""
        if (
            shape.graph is None
            and sum(s.graph is not None for s in self._shapes.values()) >= self._most_graphs
        ):
            if not self._full_said:
                self._full_said = True
                self._say(
                    f"more than {self._most_graphs} shapes{advice(self._shapes.values())}; those without a graph run eagerly"
                )
            return self._run(args, kwargs)
        if shape.seen < self._warm_up:
            return self._run(args, kwargs)
        if not shape.looked:
            return self._look(shape, args, kwargs)
        if self._noise_runs > 0:
            return self._measure_noise(args, kwargs)
        if not self._form_proven:
            return self._prove_form(args, kwargs)
        if shape.graph is None and not self._capture(shape, args, kwargs):
            self._eager_runs += 1
            return _detached(self._step(*args, **kwargs))
        return self._verify(shape, args, kwargs)

    def _look(self, shape: Shape, args: Any, kwargs: Any) -> Any:
        """Runs a step eagerly and gives up if it does in Python, or on the host, what no replay would do."""
        watch, constants = Watch(self._parts, self._surface.device), Constants(self._parts)
        with self._stepping():
            result, syncs = self._surface.syncs(lambda: self._run(args, kwargs))
        changes = watch.changes()
        constants.leave_out()
        problem = next((p for p in (f.problem() for f in self._forms) if p), None)
        if changes:
            self._give_up(
                f"the step changes {', '.join(changes[:3])} in Python, which a replay would not"
            )
        elif problem is not None:
            self._give_up(problem)
        elif self._form_proven or not self._scaled:
            # A scaler may wait in the optimizer's own form only, and so may an optimizer (ASGD reads its step count).
            own = [] if self._form_proven else [place for place in syncs if is_optimizers(place)]
            self._refuse_waits([place for place in syncs if place not in own], (args, kwargs))
        missing = next((w for w in (f.waiting() for f in self._forms) if w), None)
        shape.looked = missing is None
        if missing is not None and self._calls >= self._patience:
            self._give_up(missing)
        return result

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Takes the optimizers among those found that make a step in the block for parts of the step."""
        made: list[Optimizer] = []
        handles = [
            o.register_step_post_hook(lambda optimizer, *_: made.append(optimizer))
            for o in self._parts.found
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for optimizer in dict.fromkeys(made):
            self._parts.found.remove(optimizer)
            self._parts.optimizers.append(optimizer)
            self._forms.append(Form(optimizer, self._scaled))
            self._form_proven = False
        self._parts.refresh()

    def _refuse_waits(self, waits: list[str], given: tuple[Any, Any]) -> None:
        """Gives up where the step waits; not where it moves a batch from the host, which graphs have on the device."""
        if any(t.device != self._surface.device for t in tensors_in(given)):
            waits = [place for place in waits if not is_move(place)]
        if waits:
            self._give_up(f"the step makes the host wait for the device, at {', '.join(waits[:3])}")

    def _prove_form(self, args: Any, kwargs: Any) -> Any:
        """Runs a step in the optimizers' own form and in the capturable one, and compares; the own result stands."""
        for form in self._forms:
            if not form.prepared:
                form.prepare()
        waits: list[str] = []

        def own(args: Any, kwargs: Any) -> Any:
            return self._run(args, kwargs, own=True)

        def capturable(args: Any, kwargs: Any) -> Any:
            result, found = self._surface.syncs(lambda: self._run(args, kwargs))
            waits.extend(found)
            return result

        result, apart, problem = self._both((args, kwargs), own, capturable)
        if problem is not None:
            self._give_up(f"the capturable form of the optimizer fails ({problem})")
        elif apart is not None and self._agree(apart, FORM_TOLERANCE):
            self._form_proven = True
            self._refuse_waits(waits, (args, kwargs))
        elif apart is not None and self._noise is not None:
            self._give_up(
                f"the optimizer's capturable form differs from its own: {self._worst(apart)}"
            )
        elif apart is not None:
            self._noise, self._noise_runs = {}, NOISE_RUNS
        return result

    def _both(
        self, given: tuple[Any, Any], first: Callable[..., Any], second: Callable[..., Any]
    ) -> tuple[Any, dict[str, float] | None, str | None]:
        """Runs a step in two ways from the same state; the first result stands, to the bit.

        Returns it, how far the second ended from it, and why the second failed. An error of the first way is the
        step's own, but for a lack of memory, which may be due to what is kept here: then the step runs plainly. The
        second way gets copies of the batch, which the first may have written to.
        """
        saved = self._saved()
        if saved is None:
            return first(*given), None, None
        again = map_tensors(given, _copied)
        try:
            result = first(*given)
        except torch.OutOfMemoryError:
            saved.rewind()
            del saved
            self._give_up("there is no memory to check a graph beside the step itself")
            return first(*again), None, None
        left = self._deferred.left
        saved.swap()
        try:
            other = second(*again)
        except Exception as error:
            saved.take_first()
            self._deferred.left = left
            return result, None, f"{type(error).__name__}: {_first_line(error)}"
        self._deferred.left = left
        apart = saved.apart() | _outputs_apart(other, result)
        saved.take_first()
        return result, apart, None

    def _agree(self, apart: dict[str, float], allowed: float = 0.0) -> bool:
        """Whether two runs are no further apart than allowed, or than two eager runs are."""
        noise = self._noise or {}
        # A scalar loss moves in steps of its last digit: two runs may well have met in the same one.
        floor = {"results": RESULTS_ROUNDOFF} if any(noise.values()) else {}
        return all(
            d <= max(allowed, MOST_TIMES_NOISE * noise.get(n, 0.0), floor.get(n, 0.0))
            for n, d in apart.items()
        )

    def _worst(self, apart: dict[str, float]) -> str:
        """Returns the kind of state that is furthest apart, against what two eager runs are, in words."""
        noise = self._noise or {}
        name = max(apart, key=lambda n: apart[n] / max(noise.get(n, 0.0), 1e-30))
        return f"{name} are {apart[name]:.2g} away, where two eager runs are {noise.get(name, 0.0):.2g} apart"

    def _capture(self, shape: Shape, args: Any, kwargs: Any) -> bool:
        """Captures the step for one shape; False if that failed, and all is as before."""
        saved = Saved(self._parts, self._surface.device, values=False)  # nothing is executed there
        started, held = time.perf_counter(), self._surface.reserved_bytes()
        before = state_tensors(self._parts)
        entry = [p.grad for p in self._parts.parameter_list]
        try:
            inputs = static_copy((args, kwargs), self._surface.device)
            with applied(self._forms), self._deferred.run():
                graph, output = self._surface.capture(
                    lambda: self._step(*inputs[0], **inputs[1]), self._parts.generators
                )
        except Exception as error:
            saved.rewind()
            self._give_up(
                f"the step could not be captured ({type(error).__name__}: {_first_line(error)})"
            )
            return False
        shape.graph, shape.inputs, shape.output = graph, inputs, _detached(output)
        shape.deferred, self._deferred.left = self._deferred.left, []
        shape.grads = [p.grad for p in self._parts.parameter_list]
        shape.guards = Guards(self._parts, self._forms, entry, shape.grads)
        shape.left = self._verify_steps
        replaced = {id(t) for _, t in state_tensors(self._parts)} != {id(t) for _, t in before}
        saved.rewind()
        self._captures += 1
        self._capture_s += time.perf_counter() - started
        graph_bytes = max(0, self._surface.reserved_bytes() - held)
        self._graph_bytes += graph_bytes
        if replaced:
            self._give_up("the step replaces tensors of its state by new ones")
        elif self._surface.free_bytes() < graph_bytes:
            self._give_up("there is no memory for a graph and an eager step beside it")
        return self._reason is None

    def _verify(self, shape: Shape, args: Any, kwargs: Any) -> Any:
        """Runs a step eagerly and replays it from the same start; the eager result stands."""
        result, apart, problem = self._both(
            (args, kwargs), self._run, functools.partial(self._launch, shape)
        )
        if problem is not None:
            self._give_up(f"a replay fails ({problem})")
        elif apart is not None and self._agree(apart):
            shape.left -= 1
        elif apart is not None and self._noise is not None:
            self._give_up(f"a replay does not do what the eager step does: {self._worst(apart)}")
        elif apart is not None:
            self._noise, self._noise_runs = {}, NOISE_RUNS
        return result

    def _measure_noise(self, args: Any, kwargs: Any) -> Any:
        """Runs a step eagerly twice, to know how far apart that is."""
        result, apart, problem = self._both((args, kwargs), self._run, self._run)
        noise = self._noise or {}
        if apart is not None:
            self._noise = {n: max(d, noise.get(n, 0.0)) for n, d in apart.items()}
            self._noise_runs -= 1
            worst = max(self._noise, key=lambda n: self._noise[n] if self._noise else 0.0)
            if self._noise[worst] > MOST_NOISE:
                self._give_up(
                    f"two eager runs of a step from the same state differ, by {self._noise[worst]:.2g} in its {worst}: "
                    "it draws, reads or counts something that is not found here (name it in state=)"
                )
        elif problem is not None:
            self._give_up(f"a step cannot be run twice from the same state ({problem})")
        return result

    # Giving up.

    def _saved(self) -> Saved | None:
        """Returns the state kept on the device, or on the host where it does not fit; None after giving up."""
        device = self._surface.device
        fits = (
            1.2 * state_bytes(self._parts) < self._surface.free_bytes()
        )  # cached memory is the step's
        try:
            return Saved(self._parts, device, device if fits else torch.device("cpu"))
        except (RuntimeError, MemoryError) as error:
            self._give_up(f"the state cannot be kept for the comparison ({_first_line(error)})")
            return None

    def _drop(self, shape: Shape, why: str) -> None:
        """Forgets the graph of a shape that no longer fits; it will be captured anew."""
        shape.forget()
        shape.looked = False  # state that is new may have to be made first
        self._parts.refresh()
        self._last = None
        self._recaptures += 1
        if self._recaptures > MOST_RECAPTURES:
            self._give_up(f"what graphs depend on keeps changing: {why}")

    def _release(self) -> None:
        for shape in self._shapes.values():
            shape.forget()
        self._last = None
        for form in self._forms:
            if form.prepared:
                form.undo()

    def _give_up(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._release()
            self._say(reason)

    def _say(self, reason: str) -> None:
        warn(f"the step is not captured: {reason}. It runs eagerly, with the same results")


def _surface(modules: list[nn.Module], optimizers: list[Optimizer]) -> Surface:
    """Returns what can capture the steps that train these."""
    devices = {p.device for m in modules for p in m.parameters()}
    devices |= {p.device for o in optimizers for g in o.param_groups for p in g["params"]}
    device = next(iter(devices), torch.device("cpu"))
    if len(devices) == 1 and device.type == "cuda":
        return CudaSurface(device)
    if len(devices) > 1:
        return NoSurface(device, "parameters are on several devices")
    expected = device.type == "cpu"
    return NoSurface(device, f"devices of type {device.type} have no graphs", expected)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _detached(tree: Any) -> Any:
    """Returns a result without its graph; one that cannot be built anew is returned as it is."""
    try:
        return map_tensors(tree, lambda t: t.detach())
    except TypeError:
        return tree


def _outputs_apart(a: Any, b: Any) -> dict[str, float]:
    """Returns how far apart two results of a step are; infinite where they differ in what is not a tensor."""
    if plain_values(a) != plain_values(b):
        return {"results": float("inf")}
    return {"results": distance(zip(tensors_in(a), tensors_in(b), strict=True))}


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
