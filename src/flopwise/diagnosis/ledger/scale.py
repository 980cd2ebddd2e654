"""What a device could do: the rates that the lines of its ledger are measured against."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from flopwise.hardware import accelerators

#: Names of kernels that multiply 32-bit floats on TF32 tensor cores. Sources: cuBLAS and cuDNN name theirs
#: `..._tf32f32_...`, `..._s1688...` (the TF32 instruction of sm80) or `...tf32...`; CUTLASS `tensorop_s1688`.
_TF32 = re.compile(r"tf32|s1688|s168816", re.IGNORECASE)


@dataclass(frozen=True)
class Scale:
    """One device's rates. Source of each: its row of the table of accelerators, or a measured ceiling."""

    reference_flops_per_s: float  # P*: the fastest dense 16-bit peak
    source: str
    peaks: dict[str, float] = field(default_factory=dict)  # by executed dtype, dense, FLOP/s
    reached_frac: dict[str, float] = field(default_factory=dict)  # the best measured over the peak
    bandwidth_bytes_per_s: float | None = None

    def rate(self, dtype: str) -> float:
        """Returns the peak of an executed dtype; of one without a figure, that of the next wider one."""
        for name in (dtype, *_WIDER.get(dtype, ())):
            if name in self.peaks:
                return self.peaks[name]
        return self.reference_flops_per_s

    def reached(self, dtype: str) -> float:
        """Returns which share of its peak the device was measured to reach; 1 where nobody measured."""
        return self.reached_frac.get(dtype, 1.0)


_WIDER = {"fp8": ("bf16", "fp16"), "bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",)}


def scale_of(device_name: str | None, memory_bytes: int | None) -> tuple[Scale | None, str]:
    """Returns the scale of a device by its exact name, or None with the reason."""
    if not device_name:
        return None, "the trace does not name its device"
    match = accelerators.lookup(device_name, memory_bytes=memory_bytes)
    peak = accelerators.reference_peak(match)
    if match.row is None or peak is None:
        return None, match.reason
    peaks = {
        dtype: rate
        for dtype in accelerators.DTYPES
        if (rate := accelerators.peak_of(match.row, dtype)) is not None
    }
    bandwidth = match.row.bandwidth_gb_per_s
    return (
        Scale(
            peak.flops_per_s,
            peak.source,
            peaks,
            bandwidth_bytes_per_s=bandwidth * 1e9 if bandwidth else None,
        ),
        match.reason,
    )


def runs_on_tf32(kernels: Iterable[str]) -> bool:
    """Whether one of these kernels multiplies 32-bit floats on TF32 units."""
    return any(_TF32.search(kernel) for kernel in kernels)
