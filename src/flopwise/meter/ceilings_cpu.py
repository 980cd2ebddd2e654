"""What a CPU reaches with torch's current threads: matrix products by dtype, copying, dispatch.

Each part has a budget, all together about three seconds; a shape that would not fit into what is left
of it is not tried. The rate is that of the fastest single product, since other work on the machine
only ever slows one down. With several threads even the fastest may be slowed (each product waits for
its last thread), so the CPU time that was really had is held against it: see `gemm`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flopwise.hardware import host
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
#: Batch, channels in and out, image size, kernel, stride: all small enough for the caches.
CONVOLUTIONS = ((4, 256, 256, 14, 3, 1), (8, 128, 128, 28, 3, 1), (8, 64, 128, 32, 4, 2))
COPY_BYTES = 1 << 28
_TURN_S = 0.03
_ELEMENT_S = 4e-9  # making one number of the operands, on a slow core
_BLOCK = (1 << 18) + 3  # random numbers, repeated to fill an operand: many more take too long
# A product that has all its cores shows a share near 1; one that lacks one of two, 0.5.
_FULL_SHARE = 0.8
# Products scale this well over threads where nothing else runs.
_FULL_SCALING = 0.85


@dataclass
class _Trial:
    """One shape of one dtype, and the durations of its products so far."""

    n: int
    layout: str
    call: Callable[[], object] | None = None
    times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def flops(self) -> int:
        return 2 * self.n**3

    @property
    def rate(self) -> float:
        return self.flops / min(self.times_s) if self.times_s else 0.0

    def share(self, cores: int) -> float:
        """Returns CPU time had over CPU time asked for."""
        return self.cpu_s / (sum(self.times_s) * cores)

    def turn(self, dtype: torch.dtype, seconds: float) -> None:
        """Multiplies for some time, at least once."""
        if self.call is None:
            self.call = _product(self.n, self.layout, dtype)
            self.call()  # the first product also compiles kernels and starts threads
        cpu_s, end = time.process_time(), time.perf_counter() + seconds
        while True:
            begin = time.perf_counter()
            self.call()
            done = time.perf_counter()
            self.times_s.append(done - begin)
            if done >= end:
                break
        self.cpu_s += time.process_time() - cpu_s


@dataclass(frozen=True)
class Attempt:
    """The fastest product of one dtype, and whether its rate is good for anything."""

    ceiling: GemmCeiling
    disturbed: str | None = None  # why it is not
    at_most_flops_per_s: float = 0.0  # then: what so many single threads would reach


@dataclass
class Found:
    """The matrix products of this CPU, as the record has them."""

    gemm: list[GemmCeiling] = field(default_factory=list)
    disturbed: dict[str, float] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)


def gemms(budgets_s: dict[str, float] | None = None) -> Found:
    """Returns the ceilings of the dtypes, and why others are missing.

    What was disturbed is tried once more at the end: the other work may be over by then.
    """
    budgets_s = budgets_s or BUDGET_S
    attempts: dict[str, Attempt] = {}
    found = Found()
    torch.set_float32_matmul_precision("highest")
    for again in (False, True):
        for name, budget_s in budgets_s.items():
            if again and (name not in attempts or not attempts[name].disturbed):
                continue
            try:
                attempts[name] = gemm(name, budget_s)
            except RuntimeError as error:  # this build multiplies no matrices of this dtype
                found.not_measured[f"{name} matrix product"] = str(error).splitlines()[0][:200]
    for name, attempt in attempts.items():
        if attempt.disturbed:
            found.disturbed[name] = attempt.at_most_flops_per_s
            found.not_measured[f"{name} matrix product"] = attempt.disturbed
        else:
            found.gemm.append(max(attempt.ceiling, _convolution(name), key=_rate))
    return found


def _rate(ceiling: GemmCeiling) -> float:
    return ceiling.burst_flops_per_s


def gemm(name: str, budget_s: float) -> Attempt:
    """Returns the fastest square matrix product of one dtype that `budget_s` seconds can find.

    It is disturbed if several threads were to run, got less than their CPU time, and were slower
    together than so many single ones.
    """
    dtype = DTYPES[name]
    trials = [_Trial(n, layout) for n in SIZES for layout in LAYOUTS]
    deadline = time.perf_counter() + budget_s
    turns = 1
    while turns:
        turns = 0
        for trial in trials:
            left_s = deadline - time.perf_counter()
            expected_s = _expected_s(trial, trials)
            first = trial.n == SIZES[0] and not trial.times_s
            if first or 0 < expected_s < 0.5 * left_s:
                trial.turn(dtype, min(_TURN_S, max(left_s, 0.0)))
                turns += 1
    best = max(trials, key=lambda trial: trial.rate)
    ceiling = GemmCeiling(name, best.rate, f"{best.n}x{best.n}x{best.n} {best.layout}")
    cores = min(torch.get_num_threads(), host.usable_cores())
    share = best.share(cores)
    if cores == 1 or share >= _FULL_SHARE:
        return Attempt(ceiling)
    together = cores * _alone(dtype)
    if best.rate >= _FULL_SCALING * together:
        return Attempt(ceiling)
    why = f"other work left it {100 * share:.0f} % of the CPU time that it asked for"
    return Attempt(ceiling, why, max(together, best.rate))


def _convolution(name: str, repeats: int = 12) -> GemmCeiling:
    """Returns the fastest of a few convolutions, counted directly (no Winograd discount).

    On some CPUs the library of the convolutions uses wider vectors than that of the matrix products: an AMD EPYC
    multiplied float32 matrices at 109 GFLOP/s on one thread, and convolved at 222.
    """
    best, shape, dtype = 0.0, "none", DTYPES[name]
    for n, channels, out, size, kernel, stride in CONVOLUTIONS:
        x = torch.randn(n, channels, size, size).to(dtype)
        w = torch.randn(out, channels, kernel, kernel).to(dtype)
        padding = kernel // 2 if stride == 1 else 1

        def call(
            x: torch.Tensor = x, w: torch.Tensor = w, s: int = stride, p: int = padding
        ) -> object:
            return torch.conv2d(x, w, stride=s, padding=p)

        if name not in ("fp32", "bf16"):  # emulated where it exists at all
            break
        call()
        seconds = min(_once_s(call) for _ in range(repeats))
        rate = 2 * n * out * channels * kernel**2 * (size // stride) ** 2 / seconds
        if rate > best:
            best, shape = (
                rate,
                f"convolution {kernel}x{kernel}, {n}x{channels}x{size}x{size} to {out}",
            )
    return GemmCeiling(name, best, shape)


def copy_bytes_per_s(budget_s: float = 0.3, n_bytes: int = COPY_BYTES) -> float:
    """Returns the best rate of copying a block too large for the caches, bytes read plus written."""
    source = torch.ones(n_bytes // 4)
    target = torch.zeros_like(source)
    return 2 * n_bytes / _fastest_s(lambda: target.copy_(source), budget_s)


def dispatch_s(budget_s: float = 0.05) -> float:
    """Returns the time of one eager operation on one number: what torch itself costs."""
    x = torch.ones(1)

    def batch() -> None:
        for _ in range(200):
            x.add_(1)

    return _fastest_s(batch, budget_s) / 200


def _expected_s(trial: _Trial, trials: list[_Trial]) -> float:
    """Returns what a turn of this trial may take, from what is known; 0: nothing is known."""
    if trial.times_s:
        return min(trial.times_s)
    smaller = [t for t in trials if t.layout == trial.layout and t.n < trial.n and t.times_s]
    if not smaller:
        return 0.0
    return 2 * (trial.flops / smaller[-1].rate + trial.n**2 * _ELEMENT_S)


def _product(n: int, layout: str, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (_random(n, dtype) for _ in range(2))
    right = b if layout == "nn" else b.t()
    out = torch.empty(n, n, dtype=dtype)
    return lambda: torch.mm(a, right, out=out)


def _random(n: int, dtype: torch.dtype) -> torch.Tensor:
    block = torch.randn(min(n * n, _BLOCK)).to(dtype)
    return block.repeat(-(-n * n // block.numel()))[: n * n].view(n, n)


def _alone(dtype: torch.dtype, budget_s: float = 0.1) -> float:
    """Returns the rate of one thread by itself, which other work hardly lowers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trials = [_Trial(SIZES[0], layout) for layout in LAYOUTS]
        for trial in trials:
            trial.turn(dtype, budget_s / len(trials))
        return max(trial.rate for trial in trials)
    finally:
        torch.set_num_threads(threads)


def _once_s(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return max(time.perf_counter() - begin, 1e-9)


def _fastest_s(call: Callable[[], object], seconds: float) -> float:
    """Returns the shortest duration of repeated calls; at least two after a first, dropped one."""
    call()
    times_s: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_s) < 2 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin)
    return min(times_s)
