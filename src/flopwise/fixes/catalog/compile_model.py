"""FW105 compile-model: the root module compiled in place, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.fixes.compile_settings import (
    DEADLINE_S,
    Surroundings,
    given_deadline_s,
    time_problem,
)
from flopwise.fixes.compiling import Compiling
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, cores_of_this_rank
from flopwise.fixes.slot import forward_problem, inner, script_compiles
from flopwise.fixes.time_limit import alarm_problem
from flopwise.kit.compiler import compiler_problem


class CompileModel(Fix):
    """The root module compiled by torch.compile, in place.

    What it does:
    Compiles the call of the root module (inside DistributedDataParallel: of the module in it) with the default mode
    and puts it in the module's own slot for that, so that type, state dict, copies and pickles stay as they are.
    Containers of library layers, which `Module.compile` silently leaves uncompiled, are compiled too; that frames
    were really compiled is checked. Where the whole does not compile in time, or breaks into pieces, its repeated
    blocks are compiled instead; inside DistributedDataParallel they are tried first, so that gradients can be sent
    while others are computed. Only while gradients are recorded. A call whose shapes were not seen
    before (an odd last batch) runs eagerly, and compiles nothing; where such calls are no exception they get code of
    their own. The compiler has as many worker processes as this rank has cores, and during a tune it keeps its
    results in the tune's folder, for the processes that come after; both only where the user has set nothing.
    Attention that is written out (products and a softmax) becomes the fused operator in the compiled code. Masks that
    come from buffers and constants are looked at before anything is compiled: for one that hides every later place and
    no other the causal flag stands, and one that hides nothing is left out; also of attention that is fused already.

    Why it helps:
    Chains of small operations become one kernel: less memory traffic, fewer launches, less Python. Fused attention
    keeps the scores of all pairs of places out of memory. Models that consist of large matrix products gain little.

    When it declines:
    The script compiles by itself; there is no C++ compiler (CPU) or no Triton with a C compiler (GPU); the model's
    call cannot be wrapped; no time limit can be set (not in the main thread, or the script uses the alarm signal);
    forward and backward are too small a share of the step; too few steps are left to pay a compilation back. It is
    taken back when compiling takes longer than 120 s (240 s where the time for trials has room), when nothing was
    compiled, after more than 8 graph breaks or more than 8 further compilations, when compiled code raises,
    and when a mask that attention was compiled with is written. The
    trial also states after how many steps the compilation is paid back.

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
    late = True

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether compiling may be tried."""
        if scene.facts.compiles or any(script_compiles(root) for root in scene.roots):
            return Declined("the script compiles its model itself")
        reason = (
            forward_problem(scene, "ours")
            or compiler_problem(scene.device)
            or alarm_problem()
            or time_problem(scene)
        )
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module, switched off; nothing is compiled before `verify` or the first call.

        `setting` may hold `parts` ("whole" or "blocks") and `deadline_s`.
        """
        parts = (setting or {}).get("parts")
        in_ddp = any(isinstance(root, DistributedDataParallel) for root in scene.roots)
        return _Applied(
            [inner(root) for root in scene.roots],
            given_deadline_s(setting, scene),
            cores=scene.cores,
            blocks_first=parts == "blocks" if parts else in_ddp,
            blocks_allowed=parts != "whole",
        )


class _Applied(Compiling):
    def __init__(
        self,
        modules: Sequence[nn.Module],
        deadline_s: float = DEADLINE_S,
        *,
        cores: int | None = None,
        blocks_first: bool = False,
        blocks_allowed: bool = True,
    ) -> None:
        self._surroundings = Surroundings(cores or cores_of_this_rank())
        super().__init__(
            modules, deadline_s, blocks_first=blocks_first, blocks_allowed=blocks_allowed
        )

    def undo(self) -> None:
        super().undo()
        self._surroundings.restore()
