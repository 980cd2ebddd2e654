"""The fixes there are, in the order in which they are tried: what frees the device first, what speeds it up after."""

from __future__ import annotations

from flopwise.fixes.catalog.allocator_settings import AllocatorSettings
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.catalog.chunked_loss import ChunkedLoss
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.cross_batch_packing import CrossBatchPacking
from flopwise.fixes.catalog.cuda_graphs import CudaGraphs
from flopwise.fixes.catalog.cudnn_benchmark import CudnnBenchmark
from flopwise.fixes.catalog.device_prefetch import DevicePrefetch
from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.catalog.host_settings import HostSettings
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.late_loss_reads import LateLossReads
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.catalog.needless_mask import NeedlessMask
from flopwise.fixes.catalog.padded_dimension import PaddedDimension
from flopwise.fixes.catalog.recompute_off import RecomputeOff
from flopwise.fixes.catalog.tf32_matmul import Tf32Matmul
from flopwise.fixes.catalog.tuned_kernels import TunedKernels
from flopwise.fixes.catalog.unpadded_batches import UnpaddedBatches
from flopwise.fixes.interface import HEADINGS, Fix

FIXES: tuple[type[Fix], ...] = (
    LoaderWorkers,
    DevicePrefetch,
    HostSettings,
    FusedOptimizer,
    LateLossReads,
    ChannelsLast,
    Tf32Matmul,
    Bf16Autocast,
    NeedlessMask,
    UnpaddedBatches,
    PaddedDimension,
    LabelledLogits,
    ChunkedLoss,
    RecomputeOff,
    CudnnBenchmark,
    AllocatorSettings,
    CompileModel,
    CrossBatchPacking,
    CudaGraphs,
    TunedKernels,
)

_INTRODUCTION = """\
# Fixes

A fix is tried only on a measured cause, inside the running script: it is switched on and off in short random blocks,
and kept only if steps got faster and the numbers held. This page is made from the docstrings of
`flopwise.fixes.catalog`.

Numerics classes: *identical* means equal to the bit. *Reordered* means the same mathematics with other rounding: the
error against a float64 reference stays within what the script already had, or within what one rounding of the
arithmetic in use makes of this very step. *Lossy* gives up more than rounding; no such fix is here yet.

Fixes marked *opt-in* change more than time and rounding, the order of the data, say. They are tried only when `--allow FIX` or `--fixes FIX`
names them; the plan, the report and each run with the plan say what they change.

| code | fix | treats | numerics |
|---|---|---|---|
"""


def page() -> str:
    """Returns docs/fixes.md."""
    rows = "".join(
        f"| {f.code} | [{f.name}](#{f.code.lower()}-{f.name}) | {', '.join(f.causes)} | "
        f"{f.numerics}{', opt-in' if f.opt_in else ''} |\n"
        for f in FIXES
    )
    return _INTRODUCTION + rows + "".join(_chapter(fix) for fix in FIXES)


def _chapter(fix: type[Fix]) -> str:
    sections = fix.sections()
    body = "".join(f"\n**{title}.** {sections[title]}\n" for title in HEADINGS)
    changes = f"\n**Opt-in.** It changes {fix.changes}.\n" if fix.opt_in else ""
    return f"\n## {fix.code} {fix.name}\n\n{sections['']}\n{changes}{body}"
