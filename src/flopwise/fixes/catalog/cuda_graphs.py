"""FW115 cuda-graphs: the compiled forward and backward launched as CUDA graphs."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.fixes.compile_settings import Surroundings, given_deadline_s, time_problem
from flopwise.fixes.compiling import Compiling
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import GRAPHED, Call, Slot, forward_problem, inner, script_compiles
from flopwise.fixes.time_limit import alarm_problem
from flopwise.kit.compiler import compiler_problem
from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.replay import Replay, Snapshot

#: Without a measured wait for launches graphs are tried only where compiling is, and on steps that compute for less.
#: A compiled model still launches some thousand kernels a step, at some 10 us each with its Python; compiling and lower
#: precision make a step up to ten times shorter. What is longer hides its launches. Our choice.
LONGEST_STEP_S = 0.4
#: What is held through a step is held twice: in the memory of the graphs, and in that of eager steps. Our margin.
MEMORY_MARGIN = 1.1
#: Runs of one kind until it is replayed: torch warms up in the first and records in the second.
#: Source: `CUDAGraphTreeManager._run` in torch/_inductor/cudagraph_trees.py, torch 2.11 to 2.13.
RUNS_UNTIL_REPLAYED = 4
#: Above this share of odd calls graphs are given up.
MOST_ODD_FRAC = 0.25

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class CudaGraphs(Fix):
    """Forward and backward of the compiled model replayed as CUDA graphs.

    What it does:
    Compiles the root module as compile-model does, with the mode "reduce-overhead": torch records the kernels of
    forward and backward once and launches them as graphs from then on. Outputs, and gradients that are still there
    in the next step, are copied out of the memory that the next replay writes to. Where compile-model is on as well,
    graphs stand in front of it. The optimizer's step stays as it is.

    Why it helps:
    A graph is launched at once: the device does not wait for the host between kernels, and a host that is busy with
    loading does not hold it up.

    When it declines:
    Everything for which compile-model declines; the device is not a CUDA device; the model is wrapped in
    DistributedDataParallel; gradients lie in one buffer; no time was lost between launches, and steps are so long that
    a compiled model's launches hide in them; the allocator uses expandable segments; what a step holds does not fit
    into the memory twice. It is taken back when torch passes over its graphs, under activation checkpointing, when
    outputs cannot be copied out, when the shapes of the inputs keep changing, and for the reasons of compile-model.

    What can change:
    As with compile-model. Kernels are the same, launched in the same order. The memory of graphs is reserved for as
    long as the fix is on, up to what a step holds. An error inside a replayed graph is reported without the line of
    the model in which it arose.
    """

    code = "FW115"
    name = "cuda-graphs"
    causes = ("launch-bound",)
    findings = ("L103",)
    numerics = "reordered"
    late = True
    conflicts = ("FW116",)

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether graphs may be tried."""
        if scene.device.type != "cuda":
            return Declined("CUDA graphs need a CUDA device")
        if any(isinstance(m, DistributedDataParallel) for r in scene.roots for m in r.modules()):
            return Declined(
                "DistributedDataParallel sends gradients from hooks, which no graph would hold"
            )
        if scene.facts.compiles or any(script_compiles(root) for root in scene.roots):
            return Declined("the script compiles its model itself")
        reason = (
            forward_problem(scene, "ours")
            or _cause_problem(scene)
            or compiler_problem(scene.device)
            or alarm_problem()
            or time_problem(scene)
            or _gradients_problem(scene)
            or _allocator_problem()
            or _memory_problem(scene)
        )
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module, switched off; nothing is compiled before `verify` or the first call."""
        modules = [inner(root) for root in scene.roots]
        return _Applied(modules, given_deadline_s(setting, scene), scene.cores)


class _Applied(Compiling):
    rank = GRAPHED
    steady_calls = RUNS_UNTIL_REPLAYED
    rehearsals = RUNS_UNTIL_REPLAYED

    def __init__(self, modules: Sequence[nn.Module], deadline_s: float, cores: int) -> None:
        self._surroundings = Surroundings(cores)
        self._skips = _skips()
        self._told: set[str] = set()  # what torch's graphs cannot do here
        super().__init__(modules, deadline_s, mode="reduce-overhead", blocks_allowed=False)

    def compiled(self, module: nn.Module, function: types.FunctionType) -> Call:
        """Returns a frame's compiled call, whose results are in memory that no graph writes to."""
        from flopwise.kit.graph.graph_memory import copied_out

        return copied_out(module, super().compiled(module, function), self._told)

    def odd(self, module: nn.Module, call: Call) -> Call:
        """Returns the plain call: compiling for odd ones is not worth it, also where compile-model is on."""
        return Slot.of(module).plain

    def _enable_for_comparison(self, snapshot: Snapshot) -> Callable[[], None]:
        """Returns what switches the fix on and has the graphs recorded, so that a replay is compared."""

        def enable() -> None:
            self.enable()
            with kept_module(snapshot.module) as state, kept_rng() as rng:
                for _ in range(RUNS_UNTIL_REPLAYED - 1):
                    Replay(snapshot, state, rng).run()

        return enable

    def _counted(self) -> str | None:
        if self._told:
            return f"the model {min(self._told)}"
        if _skips() > self._skips:
            return "torch passed over its CUDA graphs (TORCH_LOGS=perf_hints says why)"
        odd = max((part.odd_frac for part in self._parts), default=0.0)
        if odd > MOST_ODD_FRAC:
            return f"{100 * odd:.0f} % of the calls have other shapes than were recorded"
        return super()._counted()

    def undo(self) -> None:
        self.disable()
        if self._frames:
            self._keep_gradients()
        super().undo()
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:
            trees.reset_cudagraph_trees()  # which gives the graphs' memory back
        self._surroundings.restore()

    @torch.no_grad()
    def _keep_gradients(self) -> None:
        """Copies gradients, which may lie in the memory of graphs."""
        for root in self._roots:
            for parameter in root.parameters():
                if parameter.grad is not None and parameter.grad.layout == torch.strided:
                    parameter.grad = parameter.grad.clone()


def _skips() -> int:
    """Returns how often torch passed over its graphs in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["inductor"]["cudagraph_skips"]) if utils is not None else 0


def _cause_problem(scene: Scene) -> str | None:
    """Returns why nothing is to be won from launches, or None."""
    if "L103" in scene.findings:
        return None
    if not {"L107", "L112"} & set(scene.findings):
        return "the device was not seen to wait for launches"
    computing_s = (scene.step_s or 0.0) * (scene.compute_frac or 0.0)
    if computing_s > LONGEST_STEP_S:
        return (
            f"the device was not seen to wait for launches, and a step computes for {computing_s:.2g} s: the launches "
            "of compiled code hide in it"
        )
    return None


def _gradients_problem(scene: Scene) -> str | None:
    """Returns why gradients cannot be copied, or None."""
    for root in scene.roots:
        for parameter in root.parameters():
            grad = parameter.grad
            if grad is None or grad.layout != torch.strided:
                continue
            if grad.untyped_storage().nbytes() > grad.nbytes:
                return "gradients are parts of a larger buffer, which copies would not be"
    return None


def _allocator_problem() -> str | None:
    """Returns why the allocator does not go with graphs, or None. Source: pytorch/pytorch#158029."""
    setting = ",".join(os.environ.get(name, "") for name in _NAMES).lower().replace(" ", "")
    if "expandable_segments:true" in setting:
        return "the allocator uses expandable segments, which are not combined with CUDA graphs"
    if "backend:cudamallocasync" in setting:
        return "the pools of CUDA graphs are kept by the native allocator only"
    return None


def _memory_problem(scene: Scene) -> str | None:
    """Returns why there is too little memory, or None.

    At the worst the graphs' memory comes to what a step holds beyond weights, gradients and optimizer state.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    free = torch.cuda.mem_get_info(scene.device)[0]
    own = torch.cuda.memory_reserved(scene.device)
    peak = torch.cuda.max_memory_allocated(scene.device)
    staying = _staying_bytes(scene)
    needed = MEMORY_MARGIN * (staying + 2 * max(0, peak - staying))
    if needed <= free + own:
        return None
    return (
        f"a step holds up to {peak / 1e9:.3g} GB, {staying / 1e9:.3g} GB of it for good: graphs would need up to "
        f"{needed / 1e9:.3g} GB, and there are {(free + own) / 1e9:.3g} GB"
    )


def _staying_bytes(scene: Scene) -> int:
    """Returns the bytes of weights, buffers and optimizer state on the device, each once."""
    tensors = [t for root in scene.roots for t in (*root.parameters(), *root.buffers())]
    for optimizer in scene.optimizers:
        for entry in optimizer.state.values():
            tensors += [t for t in entry.values() if isinstance(t, torch.Tensor)]
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda
    }
    return sum(found.values())
