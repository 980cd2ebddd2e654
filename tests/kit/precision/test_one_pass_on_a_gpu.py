"""The kernels of the loss scaler on a CUDA device, against torch's own and against GradScaler."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.profiler import ProfilerActivity, profile

from flopwise.kit.precision import DynamicScaler
from flopwise.kit.precision.checking import check, check_and_unscale
from flopwise.kit.precision.one_pass import OnePass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(280, method="thread"),
    # torch says so once, at the first switch
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
]

Checked = tuple[dict[torch.device, torch.Tensor], list[torch.Tensor]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 2, 3, 5, 31, 4095, 4096, 4097, 65_535, 65_537, 300_001)


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def reader() -> OnePass:
    return OnePass()


def same(ours: Checked | None, theirs: Checked) -> None:
    """Asserts that two checks say the same, NaN like NaN."""
    assert ours is not None
    assert ours[0].keys() == theirs[0].keys()
    for device, found in theirs[0].items():
        assert ours[0][device].item() == found.item()
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert a.dtype is b.dtype is torch.float32
        assert a.shape == b.shape == ()
        x, y = a.item(), b.item()
        assert x == y or (math.isnan(x) and math.isnan(y))


@pytest.mark.parametrize("count", [1, 2, 17, 150, 500])
@pytest.mark.parametrize("mixed", [False, True])
def test_it_says_what_torchs_kernels_say(reader: OnePass, mixed: bool, count: int) -> None:
    random.seed(count)
    torch.manual_seed(count)
    for case in range(6):
        grads = []
        for _ in range(count):
            n = random.choice(SIZES) if count < 100 else random.choice(SIZES[:9])
            shift = random.randint(0, 9)
            held = torch.randn(n + shift, device=cuda()) * 10 ** random.uniform(-9, 4)
            grads.append(held.to(random.choice(DTYPES) if mixed else torch.float32)[shift:])
        grads.append(torch.randn(33, 65, device=cuda()).t())
        bad = (None, math.inf, -math.inf, math.nan)[case % 4]
        if bad is not None:
            grad = random.choice([g for g in grads if g.numel()])
            grad[(random.choice([0, -1]),) * grad.dim()] = bad
        for look in (True, False):
            same(reader.check(grads, cuda(), look), check(grads, cuda(), look))
    assert reader.declined is None
    assert reader.used


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_anything_not_finite_is_found_wherever_it_is(reader: OnePass, bad: float) -> None:
    # a load, a thread's loads, a warp, a block and a tensor each have their ends
    edges = [0, 1, 3, 4, 127, 128, 1023, 1024, 4095, 4096, 8191, 8192, 65_535, 99_997, 99_999]
    for shift in (0, 1, 3):
        for position in edges:
            grad = torch.ones(100_003, device=cuda())[shift : shift + 100_000]
            grads = [torch.ones(7, device=cuda()), grad, torch.ones(5000, device=cuda())]
            same(reader.check(grads, cuda(), True), ({cuda(): torch.zeros(())}, [torch.ones(())]))
            grad[position] = bad
            checked = reader.check(grads, cuda(), True)
            assert checked is not None
            assert checked[0][cuda()].item() == 1.0, position
            assert math.isnan(checked[1][0].item()) == math.isnan(bad), position


def test_what_lies_beside_a_tensor_is_not_read(reader: OnePass) -> None:
    for shift, n in ((1, 5), (3, 4096), (2, 9000), (0, 4095)):
        held = torch.full((20_000,), math.nan, device=cuda())
        held[shift : shift + n] = 2.0
        grads = [held[shift : shift + n]]
        same(reader.check(grads, cuda(), True), ({cuda(): torch.zeros(())}, [torch.tensor(2.0)]))


def test_tables_hold_while_the_host_is_far_ahead(reader: OnePass) -> None:
    # every check has tensors, and so a table, of its own, and the device begins when all are asked for
    torch.cuda._sleep(200_000_000)
    checks = []
    for i in range(1, 60):
        grads = [torch.full((1 + 37 * i % 900,), float(i + j), device=cuda()) for j in range(40)]
        checks.append(reader.check(grads, cuda(), True))
        del grads
    for i, checked in enumerate(checks, 1):
        same(checked, ({cuda(): torch.zeros(())}, [torch.tensor(float(i + 39))]))


def test_streams_do_not_meet(reader: OnePass) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    grads = [torch.ones(3_000_000, device=cuda()) * (i + 1) for i in range(3)]
    torch.cuda.synchronize()
    checks: list[tuple[int, Any]] = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                checks.append((i, reader.check([grads[i]], cuda(), True)))
    torch.cuda.synchronize()
    for i, checked in checks:
        same(checked, ({cuda(): torch.zeros(())}, [torch.tensor(i + 1.0)]))


def test_nothing_waits(reader: OnePass, waits_raise: Any) -> None:
    reader.check([torch.ones(5, device=cuda())], cuda(), True)
    torch.cuda.synchronize()
    with waits_raise():
        for n in range(1, 30):
            reader.check([torch.ones(n, device=cuda())], cuda(), True)
    assert reader.declined is None


def test_many_entries_take_longer_spans(reader: OnePass, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwise.kit.precision import tables

    monkeypatch.setattr(tables, "MOST_SPANS", 7)
    grads = [torch.rand(n, device=cuda()) for n in (1, 500_003, 40_000)]
    same(reader.check(grads, cuda(), True), check(grads, cuda(), True))
    grads[1][-1] = math.inf
    same(reader.check(grads, cuda(), True), check(grads, cuda(), True))


def test_unscaling_takes_magnitudes_by_it(reader: OnePass) -> None:
    grads = [torch.full((70_000,), -3.0, device=cuda()), torch.ones(7, device=cuda())]
    found, amaxes = check_and_unscale(
        grads, torch.zeros((), device=cuda()), torch.full((), 0.25, device=cuda()), True, reader
    )
    assert reader.used
    assert [f.item() for f in found.values()] == [0.0]
    assert [a.item() for a in amaxes] == [3.0]
    assert {g.unique().item() for g in grads} == {-0.75, 0.25}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_device_is_read_on_its_own(reader: OnePass) -> None:
    grads = [torch.full((9000,), i + 1.0, device=f"cuda:{i}") for i in range(2)]
    same(reader.check(grads, cuda(), True), check(grads, cuda(), True))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).to(
        cuda()
    )


def trained(scaler: GradScaler, kind: str, steps: int = 30) -> dict[str, torch.Tensor]:
    """Returns scales, weights and optimizer state after a training with overflows."""
    model = net()
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), 1e-2, momentum=0.9, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    x = torch.randn(8, 64, device=cuda(), generator=torch.Generator(cuda()).manual_seed(1))
    scales = []
    for i in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = out.float().square().mean() * (math.inf if i in (5, 16) else 1.0)
        scaler.scale(loss).backward()
        if kind == "clipped":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler._scale is not None
        scales.append(scaler._scale.clone())
    found = {"scales": torch.stack(scales)}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        for key, value in optimizer.state[param].items():
            found[f"{name}: {key}"] = value
    return found


@pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
@pytest.mark.parametrize("init_scale", [2.0**16, 50_000.0])
@pytest.mark.parametrize("kind", ["adamw", "clipped", "sgd"])
def test_a_training_equals_gradscalers_to_the_bit(kind: str, init_scale: float) -> None:
    def growing(make: Callable[..., GradScaler], **more: Any) -> dict[str, torch.Tensor]:
        return trained(make("cuda", init_scale, growth_interval=4, **more), kind)

    ours = growing(DynamicScaler, schedule="growth", alarm_skips=100)
    torchs = growing(DynamicScaler, schedule="growth", alarm_skips=100, kernels="torch")
    theirs = growing(GradScaler)
    assert len(set(theirs["scales"].tolist())) >= 3  # it grew and backed off
    assert {k for k in theirs if not torch.equal(ours[k], theirs[k])} == set()
    assert {k for k in theirs if not torch.equal(torchs[k], theirs[k])} == set()


@pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
@pytest.mark.parametrize("kind", ["adamw", "clipped", "sgd"])
def test_reviews_are_those_of_torchs_kernels(kind: str) -> None:
    def run(kernels: str) -> tuple[dict[str, torch.Tensor], list[Any], int, str]:
        scaler = DynamicScaler(review_steps=7, alarm_skips=100, kernels=kernels)
        found = trained(scaler, kind)
        said = scaler.report()
        reviews = [(r.update, r.amax, r.scale) for r in scaler.reviews]
        if kernels == "auto":
            assert scaler._one_pass.declined is None
            assert scaler._one_pass.used
        return found, reviews, scaler.skipped, said

    ours, theirs = run("auto"), run("torch")
    assert {k for k in theirs[0] if not torch.equal(ours[0][k], theirs[0][k])} == set()
    assert ours[1:] == theirs[1:]
    assert ours[2] >= 2
    assert len(ours[1]) == 4


def kernels_of(work: Callable[[], None], steps: int) -> list[str]:
    """Returns the names of all kernels that steps launch."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    assert profiled.profiler is not None
    raw: Any = profiled.profiler.kineto_results
    on_device = torch.autograd.DeviceType.CUDA
    return [
        event.name()
        for event in raw.events()
        if event.device_type() == on_device and not event.name().startswith(("Mem", "steps"))
    ]


def test_a_step_has_fewer_kernels() -> None:
    def launched(scaler: DynamicScaler) -> list[str]:
        weight = nn.Parameter(torch.ones(1000, device=cuda()))
        optimizer = torch.optim.AdamW([weight], 1e-3, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        for _ in range(15):
            step()
        return kernels_of(step, 10)

    ours, torchs = launched(DynamicScaler()), launched(DynamicScaler(kernels="torch"))
    assert sum("flopwise_read_gradients" in name for name in ours) == 10
    assert sum("flopwise_end_update" in name for name in ours) == 10
    assert not any("flopwise" in name for name in torchs)
    assert len(ours) <= len(torchs) - 10 * 3


def test_a_captured_step_takes_torchs_kernels() -> None:
    reader, grads = OnePass(), [torch.ones(100, device=cuda())]
    reader.check(grads, cuda(), True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert reader.check(grads, cuda(), True) is None
        found, amaxes = check(grads, cuda(), True, reader)
    grads[0][3] = math.inf
    graph.replay()
    assert [f.item() for f in found.values()] == [1.0]
    assert amaxes[0].item() == math.inf
    assert reader.declined is None
