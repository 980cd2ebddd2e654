"""What the compiler made of a training step: kernels and bytes, before and after."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.errors import GraphError
from flopwise.kit.compiler import call_problem, compiler_problem, forget, frame
from flopwise.kit.graph.arguments import check_module
from flopwise.kit.graph.counting import count_kernels, count_operations
from flopwise.kit.graph.kept import device_of, kept
from flopwise.kit.graph.numerics import Call, scalar
from flopwise.kit.nested import tensors_in
from flopwise.units import size


@dataclass(frozen=True)
class FusedKernel:
    """One kernel of the compiled step."""

    name: str
    operations: tuple[str, ...]  # of the graph that it came from
    moved_bytes: int  # read and written, each buffer once

    def __str__(self) -> str:
        return f"{size(self.moved_bytes)}: {' + '.join(self.operations) or self.name}"


@dataclass(frozen=True)
class FusionReport:
    """Forward and backward of one call, eager and compiled.

    Bytes are those of the tensors that operations or kernels read and write, each once: what has to be moved if no
    cache helps. They are counted, not measured. An eager operation may launch several kernels, and is one here; the
    compiler takes some apart (batch norms in training), so that there may be more kernels than there were operations.
    """

    kernels_before: int  # eager operations that compute
    kernels_after: int  # in the compiled code: generated ones, and calls of libraries
    bytes_before: int
    bytes_after: int
    kernels: tuple[FusedKernel, ...]  # most bytes first
    launches_before: int | None = None  # kernels on a GPU, by the profiler; None: not asked for
    launches_after: int | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.kernels_before} operations to {self.kernels_after} kernels, "
            f"{size(self.bytes_before)} to {size(self.bytes_after)} moved"
        ]
        if self.launches_before is not None:
            lines.append(f"{self.launches_before} launches to {self.launches_after}")
        lines += [f"  {k}" for k in self.kernels[:5] if len(k.operations) > 1]
        return "\n".join(lines)


def fusion_report(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    measure: bool = False,
    **kwargs: Any,
) -> FusionReport:
    """Returns what torch.compile fuses in forward and backward of one call; the model is left as it was.

    Args:
        model: in the mode in which it is to be looked at.
        args, kwargs: one call of it.
        loss: makes the scalar that backward starts from; None for a scalar output, or the mean square of outputs.
        measure: on a GPU, count what both launch, by the profiler, which slows what the host launches later.

    Raises:
        GraphError: there is no compiler here, the model's call cannot be replaced, or it cannot be compiled.
    """
    check_module(model, "fusion_report")
    if loss is not None and not callable(loss):
        raise GraphError(f"loss={loss!r}: it is a function that makes a scalar of the output")
    device = device_of(model)
    problem = compiler_problem(device) or call_problem(model)
    if problem is not None:
        raise GraphError(f"what fuses in {type(model).__name__} cannot be told: {problem}")
    call = Call(args, kwargs, loss)
    found: list[FusedKernel] = []
    function = frame(model._call_impl)

    def step(run: Callable[..., Any]) -> None:
        a, k = call.fresh()
        out = run(*a, **k)
        leaves: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        leaves += [t for t in tensors_in((a, k)) if t.requires_grad]
        if leaves and torch.is_grad_enabled():
            torch.autograd.grad(scalar(out, call.loss), leaves, allow_unused=True)

    with kept(model, weights=False) as state, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operations, eager_bytes = count_operations(lambda: step(model._call_impl))
        state.rewind()
        launches: list[int | None] = [None, None]
        try:
            compiled = torch.compile(function)
            with _watched(found):
                step(compiled)
            if measure and device.type == "cuda":
                for k, run in enumerate((model._call_impl, compiled)):
                    state.rewind()
                    launches[k] = count_kernels(functools.partial(step, run), device)
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise GraphError(
                f"{type(model).__name__} cannot be compiled ({type(error).__name__}: {first})"
            ) from error
        finally:
            forget(function)
    found.sort(key=lambda k: -k.moved_bytes)
    total = sum(k.moved_bytes for k in found)
    return FusionReport(operations, len(found), eager_bytes, total, tuple(found), *launches)


def _watched(found: list[FusedKernel]) -> Any:
    """Returns a context in which Inductor compiles anew and its kernels are written down.

    An operation with several results is one kernel; each result is a node as well, which launches nothing.
    Source: `_post_fusion_custom_pass` in torch/_inductor/config.py and scheduler.py, torch 2.11 to 2.13.
    """
    from torch._inductor import config
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import NopKernelSchedulerNode

    def look(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            inner = getattr(node, "node", None)
            if not isinstance(node, NopKernelSchedulerNode) and not isinstance(inner, MultiOutput):
                found.append(FusedKernel(node.get_name(), _operations(node), _moved(node)))
        return nodes

    return config.patch(_post_fusion_custom_pass=look, force_disable_caches=True)


def _operations(node: Any) -> tuple[str, ...]:
    """Returns the names of the graph's operations that went into a kernel, in order."""
    names: dict[str, None] = {}
    for part in node.get_nodes():
        inner = getattr(part, "node", None)
        for origin in sorted(getattr(inner, "origins", ()), key=str):
            if origin.op == "call_function":
                names[_short(origin.target)] = None
    return tuple(names)


def _short(target: Any) -> str:
    """Returns `relu` for `aten.relu.default`, and a function's own name."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def _moved(node: Any) -> int:
    try:
        return int(node.get_read_write_buffers_sizes())
    except Exception:  # sizes that are known at run time only
        return 0
