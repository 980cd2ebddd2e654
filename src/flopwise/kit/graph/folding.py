"""Evaluation graphs made smaller: batch norms folded, constants computed, dead branches dropped, and the result checked."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from flopwise.errors import GraphError
from flopwise.kit.graph import fold_passes as passes
from flopwise.kit.graph.arguments import check_module
from flopwise.kit.graph.counting import count_kernels
from flopwise.kit.graph.kept import device_of, kept
from flopwise.kit.graph.numerics import FEWEST_ROUNDOFFS, MOST_TIMES, ROUNDOFF, plain, relative
from flopwise.kit.graph.timing import interleaved
from flopwise.kit.nested import map_tensors, tensors_in


@dataclass(frozen=True)
class FoldReport:
    """What folding made of a graph."""

    nodes_before: int  # operations in the exported graph
    nodes_after: int
    kernels_before: (
        int | None
    )  # on a GPU kernels, by the profiler; on a CPU operations that compute; None: it has branches, or no `measure` on a GPU
    kernels_after: int | None
    folded: dict[str, int]  # by what was done
    error_before: (
        float | None
    )  # of the model against float64, relative; None: it does not run in float64
    error_after: float
    before_s: float | None  # seconds a call, measured in turns; None: not asked for
    after_s: float | None

    def __str__(self) -> str:
        done = (
            ", ".join(f"{times} {name}" for name, times in self.folded.items() if times)
            or "nothing to fold"
        )
        text = f"{self.nodes_before} nodes to {self.nodes_after}"
        if self.kernels_before is not None or self.kernels_after is not None:
            kernels = [
                "unknown" if k is None else str(k)
                for k in (self.kernels_before, self.kernels_after)
            ]
            text += f", {kernels[0]} kernels to {kernels[1]}"
        text += f" ({done})"
        if self.before_s is not None and self.after_s is not None:
            text += f"; {self.before_s * 1e3:.3g} ms to {self.after_s * 1e3:.3g} ms"
        before = f", {self.error_before:.1e} unfolded" if self.error_before is not None else ""
        return f"{text}; error {self.error_after:.1e}{before}"


class Folded(nn.Module):
    """A folded evaluation graph, with weights of its own; it cannot be trained."""

    report: FoldReport

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returned in evaluation."""
        return self.graph(*args, **kwargs)

    def train(self, mode: bool = True) -> Folded:
        """Refuses training mode.

        Raises:
            GraphError: `mode` is True.
        """
        if mode:
            raise GraphError(
                "a folded model cannot be trained: its batch norms are gone. Train the original and fold it again"
            )
        return self


def fold(
    model: nn.Module,
    *example: Any,
    measure: bool = False,
    dynamic_batch: bool = True,
    **keywords: Any,
) -> Folded:
    """Returns a smaller graph of a model in evaluation mode that gives the same results; the model is untouched.

    Folds batch norms into the convolutions and linear layers before them (in float64), takes out dropout and other
    operations that do nothing, computes once what depends on weights alone, drops branches on constant conditions,
    and lets ReLUs write in place; on a GPU a convolution with its ReLU becomes one cuDNN call where that is faster.
    Outputs are held against the model in float64 before the graph is handed out.

    Args:
        model: in evaluation mode.
        example, keywords: one call of it. Its first dimensions may differ in later calls if `dynamic_batch`.
        measure: time both, in turns, and on a GPU count kernels by the profiler.

    Raises:
        GraphError: the model is in training mode, is TorchScript, cannot be exported, or the folded graph is not as
            near to float64 as the model is.
    """
    check_module(model, "fold")
    problem = _problem(model)
    if problem is not None:
        raise GraphError(f"{type(model).__name__} cannot be folded: {problem}")
    device = device_of(model)
    example, keywords = map_tensors(
        (example, keywords), lambda t: t.clone()
    )  # a forward may write to it
    with torch.no_grad(), kept(model, weights=False) as state:
        graph = _exported(model, example, keywords, dynamic_batch)
        nodes_before, branches = passes.count_nodes(graph), passes.has_branches(graph)
        folded = _fold(graph)
        result = Folded(graph)
        own = [(t, t.clone()) for t in passes.written_tensors(graph)]

        def rewind() -> None:
            state.rewind()
            for tensor, value in own:
                tensor.copy_(value)

        def run(module: Any) -> Callable[[], Any]:
            return lambda: module(*example, **keywords)

        before, after, passed, reason = _errors(model, result, example, keywords, rewind)
        if not passed:
            raise GraphError(f"{type(model).__name__} is not folded: {reason}")
        if device.type == "cuda" and not own:
            _try_cudnn_relu(model, result, example, keywords, folded, rewind)
            before, after, _, _ = _errors(model, result, example, keywords, rewind)
        # The profiler stays attached to the process, which slows what the host launches afterwards.
        counted = measure or device.type != "cuda"
        times = interleaved({"before": run(model), "after": run(result)}, device) if measure else {}
        result.report = FoldReport(
            nodes_before,
            passes.count_nodes(result.graph),
            None if branches or not counted else count_kernels(run(model), device),
            None
            if passes.has_branches(result.graph) or not counted
            else count_kernels(run(result), device),
            folded,
            before,
            after,
            times.get("before"),
            times.get("after"),
        )
        rewind()
    return result


def _problem(model: nn.Module) -> str | None:
    if isinstance(model, torch.jit.ScriptModule):
        return "it is TorchScript, which has torch.jit.freeze for this"
    training = [
        name or "the model"
        for name, part in model.named_modules()
        if part.training and _matters(part)
    ]
    if training:
        return f"{training[0]} is in training mode; call .eval() first"
    return None


def _matters(part: nn.Module) -> bool:
    """Whether a module behaves differently in training (a container's own flag changes nothing)."""
    return not isinstance(part, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def _exported(model: nn.Module, example: Any, keywords: Any, dynamic_batch: bool) -> fx.GraphModule:
    """Returns the graph of a copy of the model, so that nothing is shared with it."""
    shapes = None
    sizes = {t.shape[0] for t in tensors_in((example, keywords)) if t.dim() > 0}
    if dynamic_batch and len(sizes) == 1 and min(sizes) > 1:
        auto = torch.export.Dim.AUTO
        shapes = map_shapes((example, keywords), lambda t: {0: auto} if t.dim() > 0 else None)
        shapes = (
            (*shapes[0], *shapes[1].values()) if not keywords else {"args": shapes[0], **shapes[1]}
        )
    try:
        twin = copy.deepcopy(model)
        if keywords and shapes is not None:
            shapes = None  # names of positional parameters are not known here: keep the sizes of the example
        program = torch.export.export(twin, example, keywords or None, dynamic_shapes=shapes)
        graph: fx.GraphModule = program.module()
        return graph
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GraphError(
            f"{type(model).__name__} cannot be folded: torch.export fails ({first})"
        ) from error


def map_shapes(tree: Any, of: Callable[[torch.Tensor], Any]) -> Any:
    """Returns the tree with something else in the place of each tensor, None in that of everything else."""
    if isinstance(tree, torch.Tensor):
        return of(tree)
    if isinstance(tree, dict):
        return {k: map_shapes(v, of) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_shapes(v, of) for v in tree)
    return None


def _fold(graph: fx.GraphModule) -> dict[str, int]:
    """Runs all passes; returns what was done."""
    folded = {"identities": passes.drop_identities(graph)}
    folded.update(passes.fold_batch_norms(graph))
    folded["constants"] = passes.fold_constants(graph)
    folded["branches"] = passes.choose_branches(graph)
    before = passes.count_nodes(graph)
    graph.graph.eliminate_dead_code()
    folded["dead"] = before - passes.count_nodes(graph)
    folded["relu in place"] = passes.relu_in_place(graph)
    graph.delete_all_unused_submodules()
    _drop_unused(graph)
    graph.recompile()
    return folded


def _drop_unused(graph: fx.GraphModule) -> None:
    """Frees weights that no node reads any more."""
    used = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    for name, _ in [
        *graph.named_parameters(remove_duplicate=False),
        *graph.named_buffers(remove_duplicate=False),
    ]:
        if name not in used:
            owner, _, last = name.rpartition(".")
            part = graph.get_submodule(owner)
            part._parameters.pop(last, None)
            part._buffers.pop(last, None)


def _try_cudnn_relu(
    model: nn.Module,
    result: Folded,
    example: Any,
    keywords: Any,
    folded: dict[str, int],
    rewind: Callable[[], None],
) -> None:
    """Fuses convolutions with their ReLUs if the outcome is right and faster, on a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on copying an exported graph
        trial = copy.deepcopy(result.graph)
    fused = passes.fuse_relu(trial)
    if not fused:
        return
    trial.recompile()
    try:
        other = Folded(trial)
        _, _, passed, _ = _errors(model, other, example, keywords, rewind)
        arms = {
            "apart": lambda: result(*example, **keywords),
            "fused": lambda: other(*example, **keywords),
        }
        times = interleaved(arms, device_of(model))
    except RuntimeError:
        return  # cuDNN has no such kernel for these shapes
    if passed and times["fused"] < times["apart"]:
        result.graph = trial
        folded["conv+relu in one call"] = fused


def _errors(
    model: nn.Module, result: Folded, example: Any, keywords: Any, rewind: Callable[[], None]
) -> tuple[float | None, float, bool, str]:
    """Returns the errors against float64 before and after, whether the latter will do, and why not."""

    def outputs(module: Any, tree: tuple[Any, Any]) -> list[torch.Tensor]:
        rewind()  # the same random numbers, counters and caches for all
        args, kwargs = map_tensors(tree, lambda t: t.clone())
        return [t for t in tensors_in(plain(module(*args, **kwargs))) if t.is_floating_point()]

    given = (example, keywords)
    old, new = outputs(model, given), outputs(result, given)
    roundoff = max((ROUNDOFF.get(t.dtype, 2.0**-24) for t in old), default=2.0**-24)
    wide = map_tensors(given, lambda t: t.double() if t.is_floating_point() else t)
    try:
        rewind()
        exact = outputs(copy.deepcopy(model).double(), wide)
        before: float | None = relative(old, exact)
        after = relative(new, exact)
    except RuntimeError:
        before, after = None, relative(new, old)
    allowed = max(MOST_TIMES * (before or 0.0), FEWEST_ROUNDOFFS * roundoff)
    if not math.isfinite(after) and before is not None and not math.isfinite(before):
        return before, after, True, "neither is finite"
    reason = f"its error is {after:.2g}, the model's {before if before is not None else 0.0:.2g}, allowed {allowed:.2g}"
    return before, after, after <= allowed, reason
