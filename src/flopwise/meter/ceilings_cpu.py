"""What a CPU reaches with torch's current threads: matrix products by dtype, copying, dispatch.

Everything together takes at most about four seconds: each part has a budget, and a shape that would
not fit into what is left of it is not tried.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from flopwise.records.ceilings import GemmCeiling

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
BUDGET_S = {"fp32": 0.8, "bf16": 0.8, "fp16": 0.3, "fp64": 0.4}
SIZES = (256, 512, 1024, 2048, 4096)
LAYOUTS = ("nn", "nt")  # nt is the product of nn.Linear, and the fast one of some dtypes
COPY_BYTES = 1 << 28
_UNSTEADY = 1.25


def gemms(budgets_s: dict[str, float] | None = None) -> tuple[list[GemmCeiling], dict[str, str]]:
    """Returns the ceilings of the dtypes, and why others are missing."""
    found: list[GemmCeiling] = []
    missing: dict[str, str] = {}
    torch.set_float32_matmul_precision("highest")
    for name, budget_s in (budgets_s or BUDGET_S).items():
        try:
            found.append(gemm(name, budget_s))
        except RuntimeError as error:  # this build multiplies no matrices of this dtype
            missing[f"{name} matrix product"] = str(error).splitlines()[0][:200]
    return found, missing


def gemm(name: str, budget_s: float) -> GemmCeiling:
    """Returns the fastest square matrix product of one dtype that `budget_s` seconds can find."""
    dtype = DTYPES[name]
    deadline = time.perf_counter() + budget_s
    slice_s = budget_s / (len(SIZES) * len(LAYOUTS))
    latest: dict[str, float] = {}  # layout -> rate at the size before
    best = GemmCeiling(name, 0.0, "")
    for n in SIZES:
        flops = 2 * n**3
        left_s = deadline - time.perf_counter()
        layouts = LAYOUTS if n == SIZES[0] else _affordable(flops, latest, left_s)
        if not layouts:
            break
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype)
        for layout in layouts:
            right = b if layout == "nn" else b.t()
            times_s = _repeat(functools.partial(torch.mm, a, right, out=out), slice_s)
            latest[layout] = flops / times_s[0]
            if latest[layout] > best.burst_flops_per_s:
                note = _unsteady(times_s)
                best = GemmCeiling(name, latest[layout], f"{n}x{n}x{n} {layout}", note=note)
    return best


def _affordable(flops: int, latest: dict[str, float], left_s: float) -> tuple[str, ...]:
    """Returns the layouts of which four products, and the operands, fit into the time left."""
    return tuple(k for k in LAYOUTS if k in latest and 4 * flops / latest[k] < left_s)


def copy_bytes_per_s(budget_s: float = 0.3, n_bytes: int = COPY_BYTES) -> float:
    """Returns the best rate of copying a block too large for the caches, bytes read plus written."""
    source = torch.ones(n_bytes // 4)
    target = torch.zeros_like(source)
    return 2 * n_bytes / _repeat(lambda: target.copy_(source), budget_s)[0]


def dispatch_s(budget_s: float = 0.05) -> float:
    """Returns the time of one eager operation on one number: what torch itself costs."""
    x = torch.ones(1)

    def batch() -> None:
        for _ in range(200):
            x.add_(1)

    return _repeat(batch, budget_s)[0] / 200


def _repeat(call: Callable[[], object], seconds: float) -> list[float]:
    """Returns the durations of repeated calls, sorted; at least two after a first that is dropped."""
    clock = time.perf_counter
    call()
    times_s: list[float] = []
    end = clock() + seconds
    while len(times_s) < 2 or clock() < end:
        begin = clock()
        call()
        times_s.append(clock() - begin)
    return sorted(times_s)


def _unsteady(times_s: list[float]) -> str | None:
    ratio = times_s[len(times_s) // 2] / times_s[0]
    if ratio < _UNSTEADY:
        return None
    return f"unsteady: the median repeat took {ratio:.2f} times as long as the fastest"
