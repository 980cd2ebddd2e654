"""What a CUDA device reaches: matrix products in a burst and sustained, copies, links, launches.

Times are CUDA events'; clocks, throttle reasons and energy are NVML's, read while the device works
off what is queued.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flopwise.meter import nvml
from flopwise.records.ceilings import GemmCeiling, HostLink

SIZES = (4096, 8192, 16384)
LAYOUTS = ("nn", "nt")
ZEROS_S = 0.15  # in which the clock reaches its highest, and before the power controller lowers it
BURST_S = 0.06
PAUSE_S = 0.4  # before a burst, so that clocks and power recover
SUSTAINED_S = 2.4  # above nvml.MIN_WINDOW_S, so that energy counts
BLOCK_S = 0.05
MAX_CALL_S = 0.25  # a shape whose product takes longer is left out
LINK_BYTES = 1 << 28
_DEVICE = "cuda"
_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass
class Found:
    """The measurements of one device; what is missing has its reason in `not_measured`."""

    gemm: list[GemmCeiling] = field(default_factory=list)
    copy_bytes_per_s: float | None = None
    copy_size_bytes: int | None = None
    dispatch_s: float | None = None
    launch_s: float | None = None
    link: HostLink | None = None
    not_measured: dict[str, str] = field(default_factory=dict)


def measure(index: int, device: nvml.Device) -> Found:
    """Returns the ceilings of one CUDA device; takes about half a minute."""
    found = Found()

    def attempt(what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # out of memory, or an operation that this build lacks
            found.not_measured[what] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        torch.cuda.empty_cache()

    with torch.cuda.device(index):
        for name in ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8"):
            why_not = _unsupported(name, index)
            if why_not:
                found.not_measured[f"{name} matrix product"] = why_not
            else:
                attempt(f"{name} matrix product", functools.partial(_gemm, name, device, found))
        attempt("copy", lambda: _copy(found))
        attempt("host link", lambda: _link(found))
        attempt("dispatch", lambda: _dispatch(found))
        attempt("launch", lambda: _launch(found))
    return found


def _gemm(name: str, device: nvml.Device, found: Found) -> None:
    found.gemm.append(gemm(name, device))


def gemm(name: str, device: nvml.Device) -> GemmCeiling:
    """Returns the ceilings of one dtype: the fastest shape's burst, and that shape sustained.

    Raises:
        RuntimeError: no shape fits into memory and time, or torch lacks the operation.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        best = (0.0, 0, "")
        for n in SIZES:
            flops = 2 * n**3
            if not _fits(name, n) or (best[0] and flops / best[0] > MAX_CALL_S):
                break
            for layout in LAYOUTS if name != "fp8" else ("nt",):
                best = max(best, (flops / _burst_s(_product(name, n, layout)), n, layout))
        if not best[0]:
            raise RuntimeError(f"{SIZES[0]} x {SIZES[0]} does not fit into the free memory")
        return _sustained(name, best, device)
    finally:
        torch.set_float32_matmul_precision(before)


def _sustained(name: str, best: tuple[float, int, str], device: nvml.Device) -> GemmCeiling:
    """Returns the ceiling of a shape with its rate over the last third of `SUSTAINED_S`."""
    burst_flops_per_s, n, layout = best
    flops = 2 * n**3
    call = _product(name, n, layout)
    call()
    per_block = max(1, int(BLOCK_S * burst_flops_per_s / flops))
    blocks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    clocks: list[int | None] = []
    reasons: list[list[str]] = []
    window = nvml.Window(device, period_s=None)
    torch.cuda.synchronize()
    window.open()
    end = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < end:
        blocks.append((_event(), _event()))
        blocks[-1][0].record()
        for _ in range(per_block):
            call()
        blocks[-1][1].record()
        if len(blocks) > 1:  # one block stays queued while this thread reads
            blocks[-2][1].synchronize()
        clocks.append(device.read_sm_mhz())
        reasons.append(device.read_throttle() or [])
    torch.cuda.synchronize()
    telemetry = window.close()
    last = max(1, len(blocks) // 3)
    seconds = sum(a.elapsed_time(b) for a, b in blocks[-last:]) / 1e3
    watts = None
    if telemetry.energy_j is not None and telemetry.window_s:
        watts = telemetry.energy_j / telemetry.window_s
    known = sorted(c for c in clocks[-last:] if c is not None)
    del call
    return GemmCeiling(
        dtype=name,
        flops_per_clock=_flops_per_clock(name, n, layout, device),
        burst_flops_per_s=burst_flops_per_s,
        shape=f"{n}x{n}x{n} {layout}",
        sustained_flops_per_s=last * per_block * flops / seconds,
        sm_mhz_end=known[len(known) // 2] if known else None,
        power_w=watts,
        throttle=list(dict.fromkeys(reason for seen in reasons[-last:] for reason in seen)),
        note="e4m3, fast accumulation" if name == "fp8" else None,
    )


def _flops_per_clock(name: str, n: int, layout: str, device: nvml.Device) -> float | None:
    """Returns the most FLOPs in a period of the highest clock, over sizes up to n; None where that clock is not known.

    A reading of the clock is off by some percent while the power limit moves it (seen on an H200: 1440 MHz read while kernels
    ran as at 1510). Products of zeros run at the highest clock for tens of milliseconds, with the same kernels and FLOPs; the
    fastest of them are taken, so that a clock that was lower after all makes this too small, and never too large. Whoever uses
    it sees that by the sustained rate, which has its reading.
    """
    highest_mhz = device.read_sm_max_mhz()
    if not highest_mhz:
        return None
    best = 0.0
    for size in (one for one in SIZES if one <= n and _fits(name, one)):
        call = _product(name, size, layout, zeros=True)
        call()
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        marks = [_event()]
        marks[0].record()
        end = time.perf_counter() + ZEROS_S
        while time.perf_counter() < end or len(marks) < 6:
            call()
            marks.append(_event())
            marks[-1].record()
            if len(marks) > 4:  # a few calls stay queued
                marks[-4].synchronize()
        torch.cuda.synchronize()
        each_s = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        three_s = min(statistics.fmean(each_s[k : k + 3]) for k in range(len(each_s) - 2))
        best = max(best, 2 * size**3 / three_s)
    return best / (highest_mhz * 1e6) or None


def _product(name: str, n: int, layout: str, *, zeros: bool = False) -> Callable[[], object]:
    """Returns a call that multiplies two random n x n matrices, or two of zeros."""
    dtype = _DTYPES[name]
    make = torch.zeros if zeros else torch.randn
    a, b = (make(n, n, device=_DEVICE).to(dtype) for _ in range(2))
    right = b if layout == "nn" else b.t()
    if name == "fp8":
        one = torch.ones((), device=_DEVICE)
        return functools.partial(
            torch._scaled_mm,
            a,
            right,
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    out = torch.empty(n, n, device=_DEVICE, dtype=dtype)
    return functools.partial(torch.mm, a, right, out=out)


def _unsupported(name: str, index: int) -> str | None:
    """Returns why a dtype is not tried on this device."""
    capability = torch.cuda.get_device_capability(index)
    if name in ("tf32", "fp8") and torch.version.hip is not None:
        return "not tried on AMD"
    if name == "tf32" and capability < (8, 0):
        return "needs compute capability 8.0"
    if name == "fp8" and (capability < (8, 9) or not hasattr(torch, "_scaled_mm")):
        return "needs compute capability 8.9 and torch._scaled_mm"
    return None


def _fits(name: str, n: int) -> bool:
    """Returns whether two operands and their float32 originals leave half of the memory free."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return n * n * (2 * 4 + 3 * _DTYPES[name].itemsize) < free_bytes / 2


def _burst_s(call: Callable[[], object]) -> float:
    """Returns seconds a call over about `BURST_S`, after a pause."""
    call()
    once_s = _events_s(call, 2)
    time.sleep(PAUSE_S)
    return _events_s(call, max(2, int(BURST_S / once_s)))


def _best_s(call: Callable[[], object], rounds: int = 5, round_s: float = 0.06) -> float:
    """Returns seconds a call, the best of some rounds."""
    call()
    once_s = _events_s(call, 2)
    n = max(2, int(round_s / once_s))
    return min(_events_s(call, n) for _ in range(rounds))


def _events_s(call: Callable[[], object], n: int) -> float:
    begin, end = _event(), _event()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(n):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / n


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _copy(found: Found) -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    n_bytes = min(1 << 32, free_bytes // 4) // 4 * 4
    source = torch.randn(n_bytes // 4, device=_DEVICE)
    target = torch.empty_like(source)
    found.copy_bytes_per_s = 2 * n_bytes / _best_s(lambda: target.copy_(source))
    found.copy_size_bytes = n_bytes


def _link(found: Found) -> None:
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device=_DEVICE)
    pageable = torch.full((LINK_BYTES,), 3, dtype=torch.uint8)
    pinned = pageable.pin_memory()

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        return LINK_BYTES / _best_s(lambda: target.copy_(source, non_blocking=True))

    found.link = HostLink(
        h2d_pinned=rate(device, pinned),
        d2h_pinned=rate(pinned, device),
        h2d_pageable=rate(device, pageable),
        d2h_pageable=rate(pageable, device),
        size_bytes=LINK_BYTES,
    )


def _dispatch(found: Found) -> None:
    """Host time of an eager operation; the device takes less, so the queue never fills up."""
    x = torch.zeros(1, device=_DEVICE)
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(500):
            x.add_(1)
        rounds.append((time.perf_counter() - begin) / 500)
    found.dispatch_s = min(rounds)


def _launch(found: Found) -> None:
    x = torch.zeros(1, device=_DEVICE)
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            x.add_(1)
    found.launch_s = _best_s(graph.replay) / 1000
