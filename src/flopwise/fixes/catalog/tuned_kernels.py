"""FW120 tuned-kernels: the model compiled with a search for the fastest kernel of each product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from flopwise.fixes.compile_settings import Surroundings, given_deadline_s, time_problem
from flopwise.fixes.compiling import Compiling
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import AUTOTUNED, Slot, forward_problem, inner, script_compiles
from flopwise.fixes.time_limit import alarm_problem
from flopwise.kit.compiler import compiler_problem

MODE = "max-autotune-no-cudagraphs"
#: Inductor searches products on GPUs with so many processors or more.
#: Source: `is_big_gpu` in torch/_inductor/utils.py, torch 2.11 to 2.13.
FEWEST_SMS = 68


class TunedKernels(Fix):
    """The model compiled with a search for the fastest kernel of each product.

    What it does:
    Compiles the root module as compile-model does, with torch's mode "max-autotune-no-cudagraphs": for each shape of a matrix
    product or convolution Inductor writes several Triton kernels, times them and the library's on the device, and takes the
    fastest; block sizes of other kernels are tuned by coordinate descent. Winners are kept in Inductor's cache: that of
    the tune's folder in trials and the proof, the user's own in other runs. Where compile-model is on as well, tuned code
    stands in front of it, and odd calls go to it.

    Why it helps:
    The library's choice is made for a shape alone. A Triton kernel can write what follows a product (bias, activation, a
    residual) in the same pass.

    When it declines:
    Everything for which compile-model declines; the device is not a CUDA device with 68 multiprocessors or more; repeated
    blocks are compiled one by one; CUDA graphs were kept, whose code stands in front. It is taken back when compiling and
    the search take longer than 240 s; what was found until then stays in the cache, for the next try.

    What can change:
    As with compile-model: results differ by rounding, held against a float64 reference. Winners depend on what the device
    did while it was timed, so a search of another day may choose kernels that sum in another order: two runs agree to the
    bit only with one cache. A run whose cache does not hold the winners begins with minutes of search.
    """

    code = "FW120"
    name = "tuned-kernels"
    causes = ("memory-bound", "slow-products")
    findings = ("L107", "L112", "L103")
    numerics = "reordered"
    opt_in = True
    changes = (
        "how a run begins, and whether two runs agree to the bit: where the compile cache does not hold the kernels, minutes are "
        "spent on a search, and another search may choose others"
    )
    late = True
    conflicts = ("FW115",)

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether a search may be tried."""
        if scene.facts.compiles or any(script_compiles(root) for root in scene.roots):
            return Declined("the script compiles its model itself")
        reason = (
            _device_problem(scene.device)
            or forward_problem(scene, "ours")
            or compiler_problem(scene.device)
            or alarm_problem()
            or time_problem(scene)
            or _blocks_problem(scene)
        )
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module, switched off; nothing is compiled before `verify` or the first call."""
        modules = [inner(root) for root in scene.roots]
        return _Applied(modules, given_deadline_s(setting, scene), scene.cores)


class _Applied(Compiling):
    rank = AUTOTUNED

    def __init__(self, modules: Sequence[nn.Module], deadline_s: float, cores: int) -> None:
        self._surroundings = Surroundings(cores)
        super().__init__(modules, deadline_s, mode=MODE, blocks_allowed=False)

    def undo(self) -> None:
        super().undo()
        self._surroundings.restore()


def _device_problem(device: torch.device) -> str | None:
    """Returns why Inductor would not search on this device, or None."""
    if device.type != "cuda":
        return "kernels are searched on a CUDA device"
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if sms < FEWEST_SMS:
        return f"torch searches no products on a device with {sms} multiprocessors: {FEWEST_SMS} or more"
    return None


def _blocks_problem(scene: Scene) -> str | None:
    """Returns why compiled code of the whole cannot stand in front of what is compiled, or None."""
    for root in scene.roots:
        top = inner(root)
        if any(m is not top and Slot.of(m).compiles for m in root.modules()):
            return "compile-model compiles the model block by block"
    return None
