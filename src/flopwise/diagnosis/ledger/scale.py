"""What a device could do: the rates that the lines of its ledger are measured against."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from flopwise.hardware import accelerators
from flopwise.hardware.accelerators import Accelerator, Peak
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling

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
    #: By executed dtype: the most FLOPs a clock that were measured, over those of the data sheet.
    eta: dict[str, float] = field(default_factory=dict)
    phi: float | None = (
        None  # the SM clock of these steps over the one that the peaks are stated at
    )
    notes: tuple[str, ...] = ()  # where the ceilings come from

    def rate(self, dtype: str) -> float:
        """Returns the peak of an executed dtype; of one without a figure, that of the next wider one."""
        for name in (dtype, *_WIDER.get(dtype, ())):
            if name in self.peaks:
                return self.peaks[name]
        return self.reference_flops_per_s

    def reached(self, dtype: str) -> float:
        """Returns which share of its peak the device was measured to reach; 1 where nobody measured."""
        return self.reached_frac.get(dtype, 1.0)

    def limits(self, dtype: str) -> tuple[float, float | None]:
        """Returns what the device reaches of its peak: a clock and by its clock; one figure where one of them is not known."""
        if self.phi is not None and dtype in self.eta:
            return self.eta[dtype], self.phi
        return self.reached(dtype), None


_WIDER = {"fp8": ("bf16", "fp16"), "bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",)}
_SAME_UNITS = {"bf16": "fp16", "fp16": "bf16"}
MHZ = 1e6
#: A clock that the power limit moves is read so much too low at the most. Source: an H200, 1440 MHz read while kernels ran
#: as at 1510.
READING_FRAC = 0.05


def scale_of(
    device_name: str | None,
    memory_bytes: int | None,
    *,
    ceilings: CeilingsRecord | None = None,
    sm_mhz: float | None = None,
    boost_mhz: float | None = None,
    peak: Peak | None = None,
) -> tuple[Scale | None, str]:
    """Returns the scale of a device by its exact name, or None with the reason.

    Args:
        device_name: as torch or the driver gives it.
        memory_bytes: its whole memory.
        ceilings: what this device was measured to reach; another device's are left aside.
        sm_mhz: the mean SM clock while the steps ran.
        boost_mhz: the clock that the peaks are stated at, for a device whose row does not say.
        peak: one that the user gave; it replaces the table's and serves a device that the table does not have.
    """
    match = accelerators.lookup(device_name, memory_bytes=memory_bytes) if device_name else None
    reason = match.reason if match else "the trace does not name its device"
    row = match.row if match else None
    reference = peak or (accelerators.reference_peak(match) if match else None)
    if reference is None:
        return None, reason
    peaks = _peaks(row, peak)
    notes: list[str] = []
    if peak is not None and (row is None or not peaks.keys() - {"bf16", "fp16", peak.dtype}):
        notes.append(f"{peak.source}: all dtypes without a peak of their own are held against it")
    if row is None:
        notes.append("the memory's bandwidth is not known: what bytes need is not told apart")
    reached, eta, told = _measured(ceilings, device_name, peaks, row, boost_mhz)
    stated, by = _stated(row, peaks, set(reached))
    reached = {**stated, **reached}
    stated_mhz = _stated_mhz(row, boost_mhz)
    bandwidth = row.bandwidth_gb_per_s if row else None
    scale = Scale(
        reference.flops_per_s,
        reference.source,
        peaks,
        reached,
        bandwidth * 1e9 if bandwidth else None,
        eta,
        sm_mhz / stated_mhz if sm_mhz and stated_mhz else None,
        (*notes, *told, *by),
    )
    return scale, reason


def scale_of_cpu(
    ceilings: CeilingsRecord | None, peak: Peak | None = None
) -> tuple[Scale | None, str]:
    """Returns the scale of a CPU: what it was measured to reach is its peak, or what the user gave.

    Args:
        ceilings: of this CPU, with as many threads.
        peak: instead of the fastest measured dtype.
    """
    measured = {g.dtype: g.burst_flops_per_s for g in ceilings.gemm} if ceilings else {}
    if peak is not None:
        measured.setdefault(peak.dtype, peak.flops_per_s)
        reference, source = peak.flops_per_s, peak.source
    elif measured:
        dtype = max(measured, key=lambda name: measured[name])
        reference, source = measured[dtype], f"the fastest products measured on this CPU, {dtype}"
    else:
        return None, "a trace does not name its CPU, and nobody measured what it reaches"
    bandwidth = ceilings.copy_bytes_per_s if ceilings else None
    return Scale(reference, source, measured, bandwidth_bytes_per_s=bandwidth), ""


def _peaks(row: Accelerator | None, given: Peak | None) -> dict[str, float]:
    """Returns the dense peaks by dtype, FLOP/s; a given one stands for its dtype, or for 16 bit where it names none."""
    rates = {d: accelerators.peak_of(row, d) for d in accelerators.DTYPES} if row else {}
    peaks = {dtype: rate for dtype, rate in rates.items() if rate is not None}
    if given is not None:
        for dtype in ("bf16", "fp16") if given.dtype == "unstated" else (given.dtype,):
            peaks[dtype] = given.flops_per_s
    return peaks


def _stated_mhz(row: Accelerator | None, boost_mhz: float | None) -> float | None:
    return (row.peak_clock_mhz if row else None) or boost_mhz


def _measured(
    ceilings: CeilingsRecord | None,
    device_name: str | None,
    peaks: dict[str, float],
    row: Accelerator | None,
    boost_mhz: float | None,
) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Returns, of measured ceilings, the best rate over the peak and the most FLOPs a clock over the data sheet's, by dtype."""
    if ceilings is None:
        return {}, {}, []
    if accelerators.normalised(ceilings.device_name) != accelerators.normalised(device_name or ""):
        return {}, {}, [f"the ceilings are those of another device, {ceilings.device_name}"]
    stated_mhz = _stated_mhz(row, boost_mhz)
    reached: dict[str, float] = {}
    eta: dict[str, float] = {}
    for gemm in ceilings.gemm:
        if gemm.dtype not in peaks:
            continue
        best = max(gemm.burst_flops_per_s, gemm.sustained_flops_per_s or 0.0)
        reached[gemm.dtype] = best / peaks[gemm.dtype]
        a_clock = _flops_a_clock(gemm, ceilings.sm_max_mhz)
        if a_clock and stated_mhz:
            eta[gemm.dtype] = a_clock * stated_mhz * MHZ / peaks[gemm.dtype]
    source = f"measured on this device on {ceilings.created[:10]}, the best matrix products"
    return _shared(reached, peaks), _shared(eta, peaks), [f"ceilings: {source}"] if reached else []


def _flops_a_clock(gemm: GemmCeiling, sm_max_mhz: float | None) -> float | None:
    """Returns the most FLOPs a clock that one dtype was measured to do, of the whole device.

    By products of zeros, if they ran at the highest clock: where they fall behind the sustained ones, whose clock was read,
    they did not (a clock that is locked, or that the device never reaches). Else by these, and by the burst, which has no
    reading and ran at the highest clock at most.
    """
    read = burst = 0.0
    if gemm.sustained_flops_per_s and gemm.sm_mhz_end:
        read = gemm.sustained_flops_per_s / (gemm.sm_mhz_end * MHZ)
    if sm_max_mhz:
        burst = gemm.burst_flops_per_s / (sm_max_mhz * MHZ)
    zeros = gemm.flops_per_clock or 0.0
    if zeros > 0 and read <= zeros * (1 + READING_FRAC):
        return max(zeros, burst)
    return max(read, burst) or None


def _stated(
    row: Accelerator | None, peaks: dict[str, float], known: set[str]
) -> tuple[dict[str, float], list[str]]:
    """Returns what others measured such a device to reach of dtypes that are not known better, and where that is from."""
    if row is None:
        return {}, []
    rates = {d: rate for d, rate in row.reached_tflops.items() if d in peaks and d not in known}
    if not rates:
        none = "what the device reaches of its peak was not measured: it is taken as all of it"
        return {}, [] if known else [none]
    words = ", ".join(f"{dtype} {rate:g}" for dtype, rate in rates.items())
    note = f"ceilings: {words} TFLOP/s, the best matrix products by {row.reached_source}"
    return _shared({d: rate * 1e12 / peaks[d] for d, rate in rates.items()}, peaks), [note]


def _shared(found: dict[str, float], peaks: dict[str, float]) -> dict[str, float]:
    """Returns the shares with those of bf16 and fp16 for each other: the same units run both at one rate."""
    more = {
        dtype: found[other]
        for dtype, other in _SAME_UNITS.items()
        if other in found and dtype not in found and peaks.get(dtype) == peaks[other]
    }
    return {**found, **more}


def runs_on_tf32(kernels: Iterable[str]) -> bool:
    """Whether one of these kernels multiplies 32-bit floats on TF32 units."""
    return any(_TF32.search(kernel) for kernel in kernels)
