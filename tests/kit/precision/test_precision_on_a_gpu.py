"""The precision room on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from flopwise.kit.precision import (
    DynamicScaler,
    MasterWeights,
    MixedPrecision,
    effective_dtypes,
    find_nonfinite,
    float8,
)
from flopwise.kit.precision.checking import check, check_and_unscale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
    # torch says so once, at the first switch
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CUDA = torch.device("cuda")
Make = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, foreach=True),
    "adamw capturable": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, capturable=True),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9, fused=True),
    "sgd foreach": lambda m: torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9, foreach=True),
    "adam fused, decay": lambda m: torch.optim.Adam(
        m.parameters(), 1e-3, weight_decay=0.1, fused=True
    ),
    "sgd fused, nesterov, decay": lambda m: torch.optim.SGD(
        m.parameters(), 1e-2, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True
    ),
}
#: Those whose steps the scaler takes back or that skip by themselves.
UNWAITING = ("adamw fused", "adamw capturable", "sgd fused", "sgd foreach")


@pytest.fixture(autouse=True)
def _sync_as_found() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def net(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, width)
    ).to(CUDA)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, clip: bool = False
) -> Callable[..., None]:
    x = torch.randn(8, 64, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))

    def step(factor: float = 1.0) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        scaler.scale(out.float().square().mean() * factor).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return step


class TestScaler:
    @pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
    @pytest.mark.parametrize(
        "init_scale", [2.0**16, 50_000.0]
    )  # unscaled by a product, by a division
    @pytest.mark.parametrize("clip", [False, True])
    @pytest.mark.parametrize("name", MAKERS)
    def test_it_equals_gradscaler_to_the_bit(
        self, name: str, clip: bool, init_scale: float
    ) -> None:
        def trained(scaler: GradScaler) -> dict[str, torch.Tensor]:
            model = net()
            optimizer = MAKERS[name](model)
            step = step_of(model, optimizer, scaler, clip)
            scales = []
            for i in range(24):
                step(math.inf if i in (5, 16) else 1.0)
                assert scaler._scale is not None
                scales.append(scaler._scale.clone())
            found = {"scales": torch.stack(scales)}
            for name_, param in model.named_parameters():
                found[name_] = param.detach()
                for key, value in optimizer.state[param].items():
                    found[f"{name_}: {key}"] = value
            return found

        def growing(kind: type[GradScaler], **more: Any) -> dict[str, torch.Tensor]:
            return trained(kind("cuda", init_scale, growth_interval=4, **more))

        ours = growing(DynamicScaler, schedule="growth", alarm_skips=100)
        theirs, again = growing(GradScaler), growing(GradScaler)
        assert len(set(theirs["scales"].tolist())) >= 3  # it grew and backed off
        assert {k for k in theirs if not torch.equal(theirs[k], again[k])} == set()
        assert {k for k in theirs if not torch.equal(ours[k], theirs[k])} == set()

    def test_a_skipped_first_step_leaves_no_momentum(self) -> None:
        def trained(scaler: GradScaler, fused: bool) -> list[torch.Tensor]:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, fused=fused)
            for factor in (math.inf, 1.0, 2.0):
                optimizer.zero_grad()
                (
                    scaler.scale(model(torch.ones(2, 64, device=CUDA)).square().mean()) * factor
                ).backward()
                scaler.step(optimizer)
                scaler.update()
            return [
                t for p in model.parameters() for t in (p, optimizer.state[p]["momentum_buffer"])
            ]

        dirt = [torch.full((64, 128), 1e30, device=CUDA) for _ in range(8)]
        del dirt  # memory as it is found is not zero now
        ours = trained(DynamicScaler(alarm_skips=100, alarm_frac=1.0), True)
        theirs = trained(GradScaler("cuda", 1024.0), False)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    @pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
    @pytest.mark.parametrize("schedule", ["magnitude", "growth"])
    @pytest.mark.parametrize("name", UNWAITING)
    def test_no_step_waits_reviews_and_reads_included(self, name: str, schedule: str) -> None:
        model = net()
        optimizer = MAKERS[name](model)
        scaler = DynamicScaler(schedule=schedule, review_steps=10, alarm_skips=100)
        step = step_of(model, optimizer, scaler)
        for _ in range(12):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for i in range(25):
            step(math.inf if i == 12 else 1.0)
        torch.cuda.set_sync_debug_mode("default")
        assert scaler.skipped <= 1
        scaler.drain()
        assert scaler.skipped == 1

    def test_gradscaler_waits_where_this_does_not(self) -> None:
        model = net()
        step = step_of(model, MAKERS["sgd foreach"](model), GradScaler("cuda"))
        step()
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            step()

    def test_the_scale_follows_gradients_of_all_sizes(self) -> None:
        weight = nn.Parameter(torch.zeros(1000, device=CUDA))
        optimizer = torch.optim.SGD([weight], 0.0, fused=True)
        scaler = DynamicScaler(review_steps=4)
        chosen = []
        for exponent in (0, -10, -20, 3):
            for _ in range(4):
                weight.grad = None
                scaler.scale((weight * 2.0**exponent).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            chosen.append(scaler.get_scale())
        # 65504 / 16 = 4094: 2048 for gradients of 1, at most 2**24
        assert chosen == [2.0**11, 2.0**21, 2.0**24, 2.0**8]

    def test_late_numbers_are_those_of_a_cpu(self) -> None:
        def run(device: str) -> tuple[int, list[Any], float]:
            weight = nn.Parameter(torch.zeros(3, device=device))
            optimizer = torch.optim.SGD([weight], 0.0, fused=True)
            scaler = DynamicScaler(device, review_steps=7, alarm_skips=100)
            for i in range(40):
                weight.grad = None
                size = math.inf if i in (3, 17, 18) else 10.0 ** -(i % 5)
                scaler.scale((weight * size).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            scaler.drain()
            return (
                scaler.skipped,
                [(r.update, r.amax, r.scale) for r in scaler.reviews],
                scaler.get_scale(),
            )

        assert run("cuda") == run("cpu")

    @pytest.mark.parametrize("at", [0, 1, 149, 150, 299])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_anything_not_finite_is_found_in_many_tensors(self, bad: float, at: int) -> None:
        def grads() -> list[torch.Tensor]:
            made = [torch.ones(1 + i * 97 % 5000, device=CUDA) for i in range(300)]
            made[at][-1] = bad
            return made

        one = torch.ones((), device=CUDA)
        for found, amaxes in (
            check(grads(), CUDA),
            check_and_unscale(grads(), torch.zeros((), device=CUDA), one),
            check_and_unscale(grads(), torch.zeros((), device=CUDA), one, look=False),
        ):
            assert [f.item() for f in found.values()] == [1.0]
            assert not math.isfinite(amaxes[0].item())

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_anything_not_finite_is_found_wherever_it_is(self, bad: float) -> None:
        # a thread, a warp and a chunk of the kernel each take their part
        at = [0, 1, 3, 4, 31, 32, 33, 511, 512, 2047, 2048, 65535, 65536, 99_998, 99_999]
        for position in at:
            grad = torch.ones(100_000, device=CUDA)
            grad[position] = bad
            grads = [grad, torch.ones(7, device=CUDA)]
            one, zero = torch.ones((), device=CUDA), torch.zeros((), device=CUDA)
            for found, amaxes in (
                check(grads, CUDA),
                check_and_unscale(grads, zero.clone(), one),
                check_and_unscale(grads, zero.clone(), one, look=False),
            ):
                assert [f.item() for f in found.values()] == [1.0], position
                assert not math.isfinite(amaxes[0].item()), position

    def test_finite_gradients_are_found_finite_without_a_look(self) -> None:
        grads = [torch.full((70_000,), 3.0, device=CUDA), torch.ones(7, device=CUDA)]
        found_inf = torch.zeros((), device=CUDA)
        found, amaxes = check_and_unscale(
            grads, found_inf, torch.full((), 0.25, device=CUDA), look=False
        )
        assert [f.item() for f in found.values()] == [0.0]
        assert [a.item() for a in amaxes] == [0.0]
        assert {g.unique().item() for g in grads} == {0.75, 0.25}

    def test_of_a_long_window_every_tenth_update_makes_the_scale(self) -> None:
        weight = nn.Parameter(torch.zeros(3, device=CUDA))
        optimizer = torch.optim.SGD([weight], 1.0, fused=True)
        scaler = DynamicScaler(alarm_skips=100)
        sizes = [2.0**-4] * 100
        sizes[42], sizes[49], sizes[70] = 1.0, 2.0**-2, math.inf  # updates 43, 50 and 71
        moved = []
        for size in sizes:
            weight.data.zero_()
            weight.grad = None
            scaler.scale((weight * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(weight.detach().clone())
        scaler.drain()
        assert [m[0].item() for m in moved] == [0.0 if s == math.inf else -s for s in sizes]
        # gradients allow 2**13; 1024 has overflowed
        assert [(r.amax, r.scale) for r in scaler.reviews] == [(2.0**-2, 512.0)]
        assert scaler.skipped == 1

    def test_a_captured_step_follows_gradscalers_schedule(self) -> None:
        weight = nn.Parameter(torch.ones(8, device=CUDA))
        optimizer = torch.optim.AdamW([weight], 1e-2, fused=True, capturable=True)
        scaler = DynamicScaler(init_scale=4.0, growth_interval=3)
        factor = torch.ones((), device=CUDA)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(match="captured in a CUDA graph"), torch.cuda.graph(graph):
            step()
        before = scaler.get_scale()
        for _ in range(6):
            graph.replay()
        assert scaler.get_scale() > before
        grown, held = scaler.get_scale(), weight.detach().clone()
        factor.fill_(math.inf)
        graph.replay()
        assert scaler.get_scale() == grown / 2
        assert torch.equal(weight.detach(), held)


class TestMixed:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_it_takes_effect(self, dtype: str) -> None:
        model, x = net(), torch.randn(8, 64, device=CUDA)
        mixed = MixedPrecision(model, dtype)
        seen = effective_dtypes(lambda: model(x).square().mean().backward(), asked=mixed)
        assert seen.took_effect
        assert seen.share() == 1.0
        assert model(x).dtype is torch.float32

    def test_around_a_compiled_module_it_computes_alike(self) -> None:
        model, x = net(), torch.randn(8, 64, device=CUDA)
        MixedPrecision(model)
        plain = model(x)
        twin = net()
        # Tracing and autograd of a compiled model; what code comes of it is no matter of the dtype, and slow to make.
        twin.compile(backend="aot_eager")
        MixedPrecision(twin)
        out = twin(x)
        assert out.dtype is torch.float32
        assert torch.allclose(out, plain, atol=3e-2)
        out.sum().backward()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in twin.parameters())

    @pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
        reason="needs TF32",
    )
    def test_tf32_is_in_this_module_only(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2048, 2048, bias=False).to(CUDA)
        x = torch.randn(2048, 2048, device=CUDA, requires_grad=True)
        exact = x.double() @ model.weight.double().t()

        def error(out: torch.Tensor) -> float:
            return float(((out.double() - exact).norm() / exact.norm()).item())

        assert error(model(x)) < 2e-6
        mixed = MixedPrecision(model, "tf32")
        assert mixed.declined is None
        out = model(x)
        # 10 bits of mantissa: about 3e-4
        assert 5e-5 < error(out) < 2e-3
        assert error(x @ model.weight.t()) < 2e-6
        seen = effective_dtypes(lambda: model(x).sum().backward(), asked=mixed)
        assert seen.took_effect
        out.sum().backward()
        assert torch.backends.cuda.matmul.fp32_precision != "tf32"
        assert 5e-5 < mixed.verify(x.detach(), tolerance=1e-2).largest < 2e-3
        assert mixed.active
        with pytest.warns(match="tf32 is taken back"):
            mixed.verify(x.detach(), tolerance=1e-5)
        assert error(model(x)) < 2e-6

    @pytest.mark.skipif(
        not torch.cuda.is_available() or float8.unavailable(CUDA) is None,
        reason="for devices without float8 units, or without torchao",
    )
    def test_float8_is_declined_with_the_reason(self) -> None:
        model, x = nn.Linear(2048, 2048).to(CUDA), torch.randn(64, 2048, device=CUDA)
        plain = model(x)
        with pytest.warns(match="torchao is not installed|has no float8 tensor cores"):
            mixed = MixedPrecision(model, "float8")
        assert mixed.declined is not None
        assert not mixed.active
        assert torch.equal(model(x), plain)

    @pytest.mark.skipif(
        not torch.cuda.is_available() or float8.unavailable(CUDA) is not None,
        reason="needs float8 units and torchao",
    )
    def test_float8_converts_and_comes_back(self) -> None:
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 16)).to(CUDA)
        layers, x = list(model), torch.randn(64, 2048, device=CUDA)
        plain = model(x)
        mixed = MixedPrecision(model, "float8")
        out = model(x)
        assert out.dtype is torch.float32
        assert torch.allclose(out, plain, atol=0.2)
        out.sum().backward()
        mixed.undo()
        assert all(a is b for a, b in zip(model, layers, strict=True))


class TestMasters:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("fused", [False, True])
    def test_they_equal_autocast_to_the_bit(self, dtype: str, fused: bool) -> None:
        def trained(masters: bool) -> list[torch.Tensor]:
            model = net()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
            if masters:
                MasterWeights(model, optimizer, dtype)
            MixedPrecision(model, dtype)
            scaler = DynamicScaler(enabled=dtype == "float16", unfused="wait")
            for i in range(10):
                optimizer.zero_grad()
                x = torch.randn(8, 64, device=CUDA, generator=torch.Generator(CUDA).manual_seed(i))
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            return list(model.state_dict().values())

        ours, theirs = trained(True), trained(False)
        assert all(
            a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
        )

    def test_memory_is_what_the_allocator_has(self) -> None:
        gc.collect()  # so that nothing of other tests goes meanwhile
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        model = nn.Linear(4096, 4096, bias=False).to(CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        held = MasterWeights(model, optimizer)
        model(torch.ones(1, 4096, device=CUDA, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        taken = torch.cuda.memory_allocated() - start
        # 2 + 4 + 4 + 8 bytes a weight, and the workspace of the product
        assert held.memory().total_bytes == pytest.approx(18 * 4096**2, rel=1e-6)
        assert taken >= held.memory().total_bytes
        assert taken - held.memory().total_bytes < 128 * 2**20


def test_the_first_bad_value_is_found_in_backward_of_a_device() -> None:
    model = net()

    def step() -> None:
        x = torch.zeros(4, 64, device=CUDA, requires_grad=True)
        (model(x).sum() + x.square().sum().sqrt()).backward()

    found = find_nonfinite(step, module=model)
    assert found is not None
    assert (found.phase, found.op) == ("backward", "backward of sqrt")
    assert found.line is not None
    assert "test_precision_on_a_gpu.py" in found.line
