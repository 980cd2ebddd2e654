"""Captured steps on a CUDA device: equal to eager to the last bit, and eager again after every kind of failure."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import GraphWarning
from flopwise.kit.graph import CapturedStep
from flopwise.kit.precision import DynamicScaler

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(before)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.relu(self.norm(self.conv(x))).flatten(1)))


def training(
    make: Any, scaled: bool = False, own: Any = None, **options: Any
) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = make(net.parameters(), **options)
    scaler = own or torch.amp.GradScaler(
        "cuda", init_scale=2.0**8, growth_interval=11, enabled=scaled
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16, enabled=scaled):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return net, optimizer, step


def batches(count: int, sizes: tuple[int, ...] = (32,)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    found = []
    for k in range(count):
        n = sizes[k % len(sizes)]
        x = torch.randn(n, 3, 8, 8, generator=source)
        found.append((x.cuda(), torch.randint(0, 10, (n,), generator=source).cuda()))
    return found


def run(step: Any, data: Any, schedule: Any = None) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for batch in data:
        losses.append(step(*batch).detach())
        if schedule is not None:
            schedule.step()
    return [loss.item() for loss in losses]


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize(
    ("make", "options"),
    [
        # Rates that float32 holds exactly: a captured rate is a float32 tensor.
        (
            torch.optim.SGD,
            {"lr": 2.0**-6, "momentum": 0.9, "weight_decay": 2.0**-13, "fused": True},
        ),
        (torch.optim.AdamW, {"lr": 2.0**-10, "fused": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(2.0**-10), "capturable": True, "foreach": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_two_hundred_steps_equal_eager_to_the_last_bit(make: Any, options: Any) -> None:
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    net, optimizer, step = training(make, **options)
    twin, _, plain = training(make, **options)
    captured = CapturedStep(step, net, optimizer)
    data = batches(200)
    assert run(captured, data) == run(plain, data)
    assert_same(net, twin)
    report = captured.report()
    assert report.reason is None
    assert report.replays > 180


def test_a_schedule_and_two_shapes() -> None:
    def pair(captured: bool) -> tuple[nn.Module, list[float]]:
        net, optimizer, step = training(torch.optim.SGD, lr=2.0**-5, momentum=0.9, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 2.0 ** -(k // 20))
        run_step = CapturedStep(step, net, optimizer) if captured else step
        return net, run(run_step, batches(80, (32, 32, 20)), schedule)

    (net, losses), (twin, expected) = pair(True), pair(False)
    assert losses == expected
    assert_same(net, twin)


def test_a_scaler_in_fp16() -> None:
    def losses_of(captured: bool) -> list[float]:
        net, optimizer, step = training(torch.optim.AdamW, True, lr=2.0**-10, fused=True)
        run_step = CapturedStep(step, net, optimizer) if captured else step
        data = batches(60)
        data[40] = (data[40][0] * 1e30, data[40][1])  # overflows: the step has to be skipped
        return run(run_step, data)

    losses, expected = losses_of(True), losses_of(False)
    assert losses[:40] == expected[:40]
    assert losses[41:] == expected[41:]


def test_a_dynamic_scaler_goes_on_reviewing() -> None:
    def run_of(captured: bool) -> Any:
        scaler = DynamicScaler("cuda", review_steps=20)
        net, optimizer, step = training(torch.optim.AdamW, True, scaler, lr=2.0**-10, fused=True)
        run_step = CapturedStep(step, net, optimizer) if captured else step
        data = batches(130)
        for k in (50, 51, 90):
            data[k] = (data[k][0] * 1e30, data[k][1])
        losses = run(run_step, data)
        if captured:
            assert run_step.report().reason is None
            assert run_step.report().replays > 100
        scaler.drain()
        reviews = [(r.update, r.amax, r.scale) for r in scaler.reviews]
        return [str(loss) for loss in losses], scaler.get_scale(), scaler.skipped, reviews

    found, expected = run_of(True), run_of(False)
    assert found == expected
    assert found[2] == 3
    assert [r[0] for r in found[3]] == [20, 40, 60, 80, 100, 120]


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
    ],
)
def test_every_capturable_optimizer_is_captured_or_told(kind: Any) -> None:
    net, optimizer, step = training(kind, lr=1e-3)
    _, _, plain = training(kind, lr=1e-3)
    captured = CapturedStep(step, net, optimizer)
    losses, expected = run(captured, batches(40)), run(plain, batches(40))
    assert captured.report().reason is None
    assert losses == pytest.approx(expected, rel=1e-2)
    assert isinstance(optimizer.param_groups[0]["lr"], float)


def fallback(
    step: Any, net: nn.Module, optimizer: Any, plain: Any, twin: nn.Module, match: str
) -> None:
    captured = CapturedStep(step, net, optimizer)
    with pytest.warns(GraphWarning, match=match):
        losses = run(captured, batches(30))
    assert losses == run(plain, batches(30))
    assert_same(net, twin)
    F.dropout(torch.ones(4, device="cuda"))  # the generator is out of the capture


def test_a_step_with_item_in_it() -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=2.0**-6, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=2.0**-6, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        assert loss.item() < 1e6
        return loss

    fallback(
        step, net, optimizer, plain, twin, "wait for the device, at .*test_captured_on_a_gpu.py"
    )


def test_a_wait_that_only_the_capture_meets() -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=2.0**-6, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=2.0**-6, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return loss

    fallback(step, net, optimizer, plain, twin, "could not be captured")


def test_out_of_memory_amid_the_capture() -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=2.0**-6, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=2.0**-6, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return loss

    fallback(step, net, optimizer, plain, twin, "could not be captured .*OutOfMemoryError")


def test_an_optimizer_that_cannot_be_captured() -> None:
    net, optimizer, step = training(torch.optim.Adagrad, lr=1e-2)
    twin, _, plain = training(torch.optim.Adagrad, lr=1e-2)
    fallback(step, net, optimizer, plain, twin, "Adagrad has no form that can be captured")


def test_batches_from_the_host_and_a_generator_of_its_own() -> None:
    def pair(captured: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(8, 4).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-4, fused=True)
        generator = torch.Generator("cuda").manual_seed(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            x = x.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            noise = torch.rand(x.shape, device="cuda", generator=generator)
            loss = net(x * noise).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run_step = CapturedStep(step, net, optimizer) if captured else step
        source = torch.Generator().manual_seed(5)
        data = [(torch.randn(16, 8, generator=source).pin_memory(),) for _ in range(50)]
        return run(run_step, data)

    assert pair(True) == pair(False)


def test_a_loaded_checkpoint_is_captured_anew_though_gradients_of_the_old_graph_live() -> None:
    def run_of(captured: bool) -> list[float]:
        net, optimizer, step = training(torch.optim.AdamW, lr=2.0**-10, fused=True)
        run_step = CapturedStep(step, net, optimizer) if captured else step
        losses = []
        for batch in batches(3):
            losses += run(run_step, [batch] * 20)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if captured:
            report = run_step.report()
            assert report.reason is None
            assert report.captures == 3
        return losses

    assert run_of(True) == run_of(False)


def test_a_constant_of_the_host_moved_without_waiting_is_never_silently_stale() -> None:
    def run_of(captured: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(8, 4).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-4, fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).to("cuda", non_blocking=True)
            optimizer.zero_grad()
            loss = (net(x).square() * weight).mean()
            loss.backward()
            optimizer.step()
            return loss

        run_step = CapturedStep(step, net, optimizer) if captured else step
        source = torch.Generator().manual_seed(5)
        losses, clutter = [], []
        for _ in range(60):
            losses.append(run_step(torch.randn(16, 8, generator=source).cuda()).detach())
            clutter.append([torch.full((4,), 7.0) for _ in range(50)])  # takes the host's memory
        return [loss.item() for loss in losses]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)  # that it is declined is right, too
        found = run_of(True)
    assert found == run_of(False)


@pytest.mark.parametrize("stray", [False, True])
def test_a_failed_capture_leaves_generators_usable(stray: bool) -> None:
    net = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6, fused=True)
    own = torch.Generator("cuda").manual_seed(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(F.dropout(x) * torch.rand(x.shape, device="cuda", generator=own)).sum()
        loss.backward()
        optimizer.step()
        if torch.cuda.is_current_stream_capturing():
            if stray:
                raise ValueError("amid the capture")
            torch.cuda.current_stream().synchronize()
        return loss

    captured = CapturedStep(step, net, optimizer)
    with pytest.warns(GraphWarning, match="could not be captured"):
        run(captured, [(torch.ones(4, 8, device="cuda"),)] * 8)
    torch.rand(4, device="cuda", generator=own)
    F.dropout(torch.ones(4, device="cuda"))
    graph = torch.cuda.CUDAGraph()  # and others can be captured
    with torch.cuda.graph(graph):
        torch.ones(4, device="cuda")
