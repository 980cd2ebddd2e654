"""Checks FLOP counts against hand totals on the device that is there: python benchmarks/gpu/count_check.py [cuda|cpu]

Each line is one case: what was counted, what the hand says, ok or WRONG. On a GPU the backward pass runs in autograd's
own threads and the coverage comes from CUDA events; no case may make the host wait for the device while it counts.
Exit code 1 if a case is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flopwise.meter.count import CaptureCounter, StepCounter, count_fake
from flopwise.records.rank import FlopCount

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"
wrong: list[str] = []


def check(name: str, got: object, hand: object, remark: str = "") -> None:
    """Prints one line and remembers a wrong one."""
    verdict = "ok" if got == hand else "WRONG"
    if got != hand:
        wrong.append(name)
    print(f"{verdict:5} {name:44} {got!s:44} hand {hand!s} {remark}", flush=True)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Turns a synchronisation with the device into an error."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")


def counted(step: Callable[[], object]) -> FlopCount:
    """Returns the count of one step, in which nothing may wait for the device."""
    counter = StepCounter("check")
    with no_waiting():
        counter.start()
        try:
            step()
        except BaseException:
            counter.abandon()
            raise
    return counter.stop()


def tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """Returns random numbers on the device."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def linear() -> None:
    """A layer in each precision."""
    net, x = nn.Linear(1024, 512, bias=False, device=DEVICE), tensor(256, 1024, grad=False)
    hand = 2 * 2 * 256 * 1024 * 512
    count = counted(lambda: net(x).sum().backward())
    check("linear, forward and weight gradient", count.needed, {"fp32": hand})
    check("linear, coverage", round(count.coverage_frac, 3), 1.0, count.coverage_basis)
    with torch.autocast(DEVICE, torch.bfloat16):
        check(
            "linear under autocast", counted(lambda: net(x).sum().backward()).needed, {"bf16": hand}
        )
    torch.set_float32_matmul_precision("high")
    name = "tf32" if CUDA else "fp32"
    check("linear, TF32 allowed", counted(lambda: net(x).sum().backward()).needed, {name: hand})
    torch.set_float32_matmul_precision("highest")


def convolution() -> None:
    """Plain, depthwise and transposed."""
    name = "tf32" if CUDA else "fp32"
    for groups in (1, 32):
        net = nn.Conv2d(32, 64, 3, padding=1, groups=groups, bias=False, device=DEVICE)
        hand = 2 * 4 * 64 * 28 * 28 * 32 // groups * 9
        x = tensor(4, 32, 28, 28)
        count = counted(lambda net=net, x=x: net(x).sum().backward())
        check(
            f"convolution in {groups} groups",
            count.needed,
            {name: 3 * hand},
            count.cross_check or "",
        )
    back = nn.ConvTranspose2d(16, 8, 4, 2, bias=False, device=DEVICE)
    x = tensor(2, 16, 9, 9)
    hand = 3 * 2 * 2 * 16 * 9 * 9 * 8 * 16
    check("transposed convolution", counted(lambda: back(x).sum().backward()).needed, {name: hand})


def attention() -> None:
    """Each backend of the device, causal and grouped."""
    b, h, h_kv, t, d = 2, 8, 2, 256, 64
    full, causal = 12 * b * h * t * t * d, 12 * b * h * (t * (t + 1) // 2) * d
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for name, backend in backends.items() if CUDA else [("flash", backends["flash"])]:
        q, k, v = (tensor(b, h, t, d, dtype=torch.bfloat16) for _ in range(3))

        def step(q: Any = q, k: Any = k, v: Any = v) -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        with sdpa_kernel([backend]):
            count = counted(step)
        runs_in = (
            "fp32" if name == "math" else "bf16"
        )  # the unfused form keeps 16-bit inputs in fp32
        check(f"attention, {name}", count.needed, {runs_in: full})
        if name != "math":
            check(f"attention, {name}, causal", count.needed_causal, {"bf16": causal})
            check(f"attention, {name}, scores again", count.recomputed, full // 6)
    q = tensor(b, h, t, d, dtype=torch.bfloat16)
    k, v = (tensor(b, h_kv, t, d, dtype=torch.bfloat16) for _ in range(2))

    def grouped() -> None:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()

    check("attention, grouped queries", counted(grouped).needed, {"bf16": full})


def packed() -> None:
    """Sequences laid end to end."""
    from torch.nn.attention.varlen import varlen_attn

    lengths, h, d = (100, 37, 255), 8, 64
    ends = torch.tensor([0, 100, 137, 392], device=DEVICE, dtype=torch.int32)
    q, k, v = (tensor(392, h, d, dtype=torch.bfloat16) for _ in range(3))
    count = counted(lambda: varlen_attn(q, k, v, ends, ends, 255, 255).sum().backward())
    check("packed attention", count.needed, {"bf16": 12 * h * d * sum(n * n for n in lengths)})


def recomputation() -> None:
    """Checkpoints of each kind, and a double backward that is none."""
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False, device=DEVICE) for _ in range(4)])
    one, x = 2 * 64 * 256 * 256, tensor(64, 256)
    for name, again, step in (
        ("none", 0, lambda: net(x)),
        ("checkpoint", 3, lambda: checkpoint(net, x, use_reentrant=False)),
        ("reentrant checkpoint", 4, lambda: checkpoint(net, x, use_reentrant=True)),
        (
            "nested reentrant",
            8,
            lambda: checkpoint(
                lambda y: checkpoint(net, y, use_reentrant=True), x, use_reentrant=True
            ),
        ),
    ):
        count = counted(lambda step=step: step().sum().backward())
        check(
            f"recomputation: {name}",
            (count.needed, count.recomputed),
            ({"fp32": 12 * one}, again * one),
        )

    def penalty() -> None:
        (grad,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
        grad.square().sum().backward()

    count = counted(penalty)
    check("gradient penalty", (count.needed, count.recomputed), ({"fp32": 24 * one}, 0))


def recurrent() -> None:
    """A fused LSTM: what autograd asks for is needed, all that the kernel computes is executed."""
    name = "tf32" if CUDA else "fp32"
    for layers, directions in ((1, 1), (2, 2)):
        net = nn.LSTM(32, 64, layers, bidirectional=directions == 2, device=DEVICE)
        widths = [32] + [64 * directions] * (layers - 1)
        forward = directions * sum(10 * 4 * 2 * 4 * 64 * (width + 64) for width in widths)
        start = layers * directions * 4 * 2 * 4 * 64 * 64  # a step of each sequence through W_hh
        for grad in (True, False):
            x = tensor(10, 4, 32, grad=grad)
            net(x)
            count = counted(lambda net=net, x=x: net(x)[0].sum().backward())
            raw = 0 if grad else directions * 10 * 4 * 2 * 4 * 64 * 32
            hand = ({name: 3 * forward - start - raw}, {name: 3 * forward})
            kind = (
                f"LSTM, {layers} x {directions}, {'input wants a gradient' if grad else 'raw data'}"
            )
            check(kind, (count.needed, count.executed), hand, ", ".join(count.by_op))


def coverage() -> None:
    """An op without a rule."""

    @torch.library.custom_op("flopwise_check::mystery", mutates_args=())
    def mystery(a: torch.Tensor) -> torch.Tensor:
        return a @ a

    x = tensor(2048, 2048, grad=False)
    count = counted(lambda: mystery(x) @ x)
    share = count.coverage_frac
    check(
        "an unknown op takes its share", 0.2 < share < 0.8, True, f"{share:.2f} {count.uncovered}"
    )


def triton_kernels() -> None:
    """A kernel that never passes torch's dispatcher."""
    import triton
    import triton.language as tl

    @triton.jit
    def double(x_ptr, y_ptr, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

    x = tensor(1 << 24, grad=False)
    y = torch.empty_like(x)
    double[(1 << 14,)](x, y, 1 << 24, block=1024)
    count = counted(lambda: double[(1 << 14,)](x, y, 1 << 24, block=1024))
    named = bool(count.uncovered) and "double" in count.uncovered[0]
    check("a Triton kernel is noticed", named, True, f"{count.uncovered} {count.coverage_frac:.2f}")
    check("and computes what it did", torch.equal(y, 2 * x), True)


def graphs() -> None:
    """A captured forward and backward, and its replay."""
    net, x = nn.Linear(256, 256, bias=False, device=DEVICE), tensor(64, 256, grad=False)
    for _ in range(3):
        net.weight.grad = None
        net(x).sum().backward()
    net.weight.grad = None
    graph, counter = torch.cuda.CUDAGraph(), CaptureCounter("graph")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        net(x).sum().backward()
        net.weight.grad = None
        with torch.cuda.graph(graph, stream=side):
            counter.start()
            net(x).sum().backward()
            count = counter.stop()
    torch.cuda.current_stream().wait_stream(side)
    check("a captured step", count.needed, {"fp32": 2 * 2 * 64 * 256 * 256})
    graph.replay()
    expected = torch.ones(64, 256, device=DEVICE).T @ x
    close = torch.allclose(net.weight.grad, expected, rtol=1e-4, atol=1e-4)
    check("and its replay", close, True)


def same_bits() -> None:
    """Training with and without the counter."""

    def train(count: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.LazyLinear(10),
        ).to(DEVICE)
        optimizer = None
        for _ in range(4):
            x = torch.randn(16, 3, 16, 16, device=DEVICE)
            loss = net(x).square().mean() if optimizer is None else None
            optimizer = optimizer or torch.optim.AdamW(net.parameters(), fused=True)

            def step(x: torch.Tensor = x, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = net(x).square().mean()
                loss.backward()
                optimizer.step()

            counted(step) if count else step()
            del loss
        return [copy.deepcopy(p.detach()) for p in net.parameters()] + [
            torch.rand(4, device=DEVICE)
        ]

    kept = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    bare, again, watched = train(False), train(False), train(True)
    torch.backends.cudnn.deterministic = kept
    if all(torch.equal(a, b) for a, b in zip(bare, again, strict=True)):
        check("same bits", all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True)), True)
    else:
        print("      same bits: not judged, two bare runs differ already")


def fake() -> None:
    """A compiled model."""
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(DEVICE)
    compiled, x = torch.compile(net), tensor(32, 64, grad=False)
    compiled(x).sum().backward()
    before = torch.cuda.memory_allocated() if CUDA else 0
    count = count_fake(compiled, (x,), {}, "32x64")
    check("fake tensors", count.needed, {"fp32": 2 * 32 * (2 * 64 * 128 + 3 * 128 * 8)})
    if CUDA:
        check("fake tensors use no device memory", torch.cuda.memory_allocated() - before, 0)


def main() -> int:
    """Runs all cases and returns the exit code."""
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if CUDA else 'cpu'}")
    cases = [linear, convolution, attention, recomputation, recurrent, coverage, same_bits]
    cases += [packed, triton_kernels, graphs] if CUDA else []
    for case in [*cases, fake]:  # compiled code last: it keeps CUDA graphs from being counted
        try:
            case()
        except Exception as error:
            wrong.append(case.__name__)
            print(f"WRONG {case.__name__}: {type(error).__name__}: {error}")
    print(f"{len(wrong)} wrong: {', '.join(wrong)}" if wrong else "all ok")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
