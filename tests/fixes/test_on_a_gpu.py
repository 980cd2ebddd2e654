"""The fixes on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from flopwise.fixes import chunked_loss
from flopwise.fixes.catalog.allocator_settings import AllocatorSettings
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.catalog.chunked_loss import ChunkedLoss
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.cuda_graphs import CudaGraphs
from flopwise.fixes.catalog.cudnn_benchmark import CudnnBenchmark
from flopwise.fixes.catalog.device_prefetch import DevicePrefetch
from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.catalog.needless_mask import NeedlessMask
from flopwise.fixes.catalog.padded_dimension import PaddedDimension
from flopwise.fixes.catalog.recompute_off import RecomputeOff, kept_bytes
from flopwise.fixes.catalog.tf32_matmul import Tf32Matmul
from flopwise.fixes.interface import Eligible, Scene
from flopwise.fixes.lazy_logits import LazyLogits
from flopwise.meter.replay import Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]

CUDA = torch.device("cuda")


class Gpt(nn.Module):
    """Returns logits and, given targets, the loss; dropout in every block."""

    def __init__(
        self, layers: int = 4, width: int = 256, vocabulary: int = 1000, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        h = self.embed(i)
        mask = nn.Transformer.generate_square_subsequent_mask(
            i.shape[1], device=i.device, dtype=h.dtype
        )
        for block in self.blocks:
            h = block(h, mask)
        logits = self.head(self.norm(h))
        if targets is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def gpt() -> Snapshot:
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (8, 128), device=CUDA)
    return Snapshot(Gpt().to(CUDA), (ids,), {"targets": ids.roll(-1, 1)})


def cnn() -> Snapshot:
    torch.manual_seed(0)
    return Snapshot(Cnn().to(CUDA), (torch.randn(16, 3, 32, 32, device=CUDA),))


def scene(snapshot: Snapshot, **more: Any) -> Scene:
    given = {"device": CUDA, "compute_frac": 0.9, "optimizer_frac": 0.5, "findings": {"L103": 0.3}}
    return Scene(roots=[snapshot.module], **{**given, **more})


def frames() -> int:
    return int(torch._dynamo.utils.counters["frames"]["ok"])


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch._dynamo.reset()


FORWARD = [Bf16Autocast, CompileModel, ChannelsLast, CudaGraphs]


@pytest.mark.parametrize("fix", FORWARD, ids=lambda f: f.code)
@pytest.mark.parametrize("made", [gpt, cnn])
def test_the_numbers_hold_and_everything_is_taken_back(fix: Any, made: Any) -> None:
    snapshot = made()
    if fix is ChannelsLast and made is gpt:
        pytest.skip("no convolutions")
    names = [sorted(vars(m)) for m in snapshot.module.modules()]
    rng = torch.cuda.get_rng_state()
    here = scene(snapshot)
    assert isinstance(fix().check(here), Eligible)
    applied = fix().apply(here)
    parity = applied.verify(snapshot)
    print(fix.code, made.__name__, parity)
    assert parity.passed, parity.detail
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    applied.enable()
    compiled = frames()
    out = snapshot.module(*snapshot.args, **snapshot.kwargs)
    loss = out["loss"] if isinstance(out, dict) else out.square().mean()
    assert loss.dtype == torch.float32
    loss.backward()
    assert applied.failure() is None
    assert frames() == compiled  # what training runs was compiled in the comparison
    applied.undo()
    assert [sorted(vars(m)) for m in snapshot.module.modules()] == names


@pytest.mark.parametrize("fix", FORWARD, ids=lambda f: f.code)
def test_weights_off_by_one_percent_fail(fix: Any) -> None:
    snapshot = cnn()
    applied = fix().apply(scene(snapshot))
    enable, disable = applied.enable, applied.disable

    def wrong() -> None:
        enable()
        with torch.no_grad():
            for p in snapshot.module.parameters():
                p.mul_(1.05 if fix is Bf16Autocast else 1.01)

    def right() -> None:
        disable()

    applied.enable, applied.disable = wrong, right
    parity = applied.verify(snapshot)
    print(fix.code, parity)
    assert not parity.passed


def test_bf16_and_compile_stack() -> None:
    snapshot = gpt()
    low, fast = Bf16Autocast().apply(scene(snapshot)), CompileModel().apply(scene(snapshot))
    assert low.verify(snapshot).passed
    low.enable()
    parity = fast.verify(snapshot)
    print(parity)
    assert parity.passed, parity.detail
    fast.enable()
    loss = snapshot.module(*snapshot.args, **snapshot.kwargs)["loss"]
    loss.backward()
    assert low.failure() is None
    assert fast.failure() is None
    fast.undo()
    low.undo()
    assert "_compiled_call_impl" not in vars(snapshot.module)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fused_updates_agree_and_step_counters_move(kind: Any) -> None:
    snapshot = gpt()
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(snapshot.module.parameters(), lr=1e-3, **momentum)

    def step() -> None:
        optimizer.zero_grad()
        snapshot.module(*snapshot.args, **snapshot.kwargs)["loss"].backward()
        optimizer.step()

    step()
    counters = [s.get("step") for s in optimizer.state.values()]
    applied = FusedOptimizer().apply(scene(snapshot, optimizers=[optimizer]))
    parity = applied.verify(snapshot)
    print(kind.__name__, parity)
    assert parity.passed, parity.detail
    for _ in range(2):
        applied.enable()
        step()
        assert all(s["step"].is_cuda for s in optimizer.state.values() if "step" in s)
        applied.disable()
        step()
    if counters[0] is not None:
        assert all(s["step"] is c for s, c in zip(optimizer.state.values(), counters, strict=True))
        assert {float(c) for c in counters} == {5.0}
    applied.undo()


def test_fused_on_channels_last_weights() -> None:
    snapshot = cnn()
    optimizer = torch.optim.AdamW(snapshot.module.parameters(), fused=True)
    applied = ChannelsLast().apply(scene(snapshot, optimizers=[optimizer]))
    for k in range(4):
        applied.enable() if k % 2 else applied.disable()
        optimizer.zero_grad()
        snapshot.module(*snapshot.args).square().mean().backward()
        optimizer.step()
    applied.undo()


def test_batches_of_workers_are_pinned_and_in_order() -> None:
    torch.zeros(1, device=CUDA)
    data = TensorDataset(torch.arange(96).float())
    loader = DataLoader(data, batch_size=4)
    applied = LoaderWorkers().apply(Scene(loaders=[loader], device=CUDA, data_frac=0.5, cores=4))
    seen, pinned = [], []
    for k, (batch,) in enumerate(loader):
        seen += batch.tolist()
        pinned.append(batch.is_pinned())
        if k == 3:
            assert applied.verify().passed
            applied.enable()
        batch.to(CUDA, non_blocking=True)
    applied.undo()
    assert seen == list(range(96))
    assert pinned == [False] * 4 + [True] * 20


class Written(nn.Module):
    """GPT whose attention is written out, as in minGPT; given a mask of tokens it hides what that hides, too."""

    def __init__(self, layers: int = 2, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(1000, width), heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)
        self.register_buffer("bias", torch.tril(torch.ones(256, 256)).view(1, 1, 256, 256))

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        h = self.embed(ids)
        b, t, c = h.shape
        for layer in self.qkv:
            q, k, v = layer(h).split(c, 2)
            q, k, v = (x.view(b, t, self.heads, c // self.heads).transpose(1, 2) for x in (q, k, v))
            if attention_mask is None:
                scores = (q @ k.transpose(-2, -1)) * (1.0 / (c // self.heads) ** 0.5)
                scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
                y = F.softmax(scores, dim=-1) @ v
            else:
                seen = attention_mask[:, None, None].bool() & (self.bias[:, :, :t, :t] == 1)
                y = F.scaled_dot_product_attention(q, k, v, seen)
            h = h + y.transpose(1, 2).reshape(b, t, c)
        return self.head(h)


def written() -> Snapshot:
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (8, 256), device=CUDA)
    return Snapshot(Written().to(CUDA), (ids,))


def kernels(snapshot: Snapshot) -> set[str]:
    """Returns the names of the kernels of one forward and backward."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as seen:
        snapshot.module(*snapshot.args, **snapshot.kwargs).float().square().mean().backward()
        torch.cuda.synchronize()
    return {event.name for event in seen.events() or ()}


def _fused(names: set[str]) -> bool:
    words = ("flash", "fmha", "cudnn_generated_fort_native_sdpa", "attention")
    return any(word in name.lower() for name in names for word in words)


@pytest.mark.parametrize("low", [True, False])
def test_written_out_attention_runs_fused_when_compiled(low: bool) -> None:
    snapshot = written()
    autocast, fast = Bf16Autocast().apply(scene(snapshot)), CompileModel().apply(scene(snapshot))
    assert not _fused(kernels(snapshot))
    if low:
        autocast.enable()
    parity = fast.verify(snapshot)
    print(parity)
    assert parity.passed, parity.detail
    assert fast.setting["attention"] == "replaced 2"
    fast.enable()
    names = kernels(snapshot)
    print(sorted(names))
    assert _fused(names)
    fast.undo()
    autocast.undo()


def test_written_out_attention_in_tf32_is_left_to_tensor_cores() -> None:
    snapshot = written()
    tf32, fast = Tf32Matmul().apply(scene(snapshot)), CompileModel().apply(scene(snapshot))
    tf32.enable()
    parity = fast.verify(snapshot)
    assert parity.passed, parity.detail
    assert "attention" not in fast.setting
    fast.undo()
    tf32.undo()


def test_tf32_rounds_and_no_more_and_only_inside() -> None:
    snapshot = gpt()
    here = scene(snapshot, findings={"L104": 0.5})
    assert isinstance(Tf32Matmul().check(here), Eligible)
    applied = Tf32Matmul().apply(here)
    parity = applied.verify(snapshot)
    print(parity)
    assert parity.passed, parity.detail
    assert parity.grad_rel is not None
    assert parity.grad_rel > 1e-5  # it did round
    applied.enable()
    snapshot.module(*snapshot.args, **snapshot.kwargs)["loss"].backward()
    assert torch.backends.cuda.matmul.allow_tf32 is False
    applied.undo()


def test_a_needless_mask_is_left_out_without_waiting(waits_raise: Any) -> None:
    snapshot = written()
    mask = torch.ones(8, 256, dtype=torch.int64)
    snapshot = snapshot._replace(kwargs={"attention_mask": mask.to(CUDA)})
    applied = NeedlessMask().apply(scene(snapshot))
    parity = applied.verify(snapshot)
    print(parity)
    assert parity.passed, parity.detail
    applied.enable()
    model, (ids,) = snapshot.module, snapshot.args
    there = mask.pin_memory().to(CUDA, non_blocking=True)
    with waits_raise():
        out = model(ids, attention_mask=there)
    assert torch.equal(out, model(ids))
    padded = mask.clone()
    padded[0, 200:] = 0
    assert not torch.equal(model(ids, attention_mask=padded.to(CUDA)), out)
    applied.undo()


class Inverted(nn.Module):
    """A block as in EfficientNet: pointwise, depthwise, squeezed and excited, pointwise."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        wide = 4 * width
        self.grow = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide))
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 5, padding=2, groups=wide, bias=False), nn.BatchNorm2d(wide)
        )
        self.squeeze, self.excite = nn.Conv2d(wide, 16, 1), nn.Conv2d(16, wide, 1)
        self.shrink = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.depthwise(F.silu(self.grow(x))))
        gate = self.excite(F.silu(self.squeeze(h.mean((2, 3), keepdim=True))))
        return x + self.shrink(h * torch.sigmoid(gate))


class Depthwise(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 96, 3, 2, 1, bias=False)
        self.blocks = nn.ModuleList(Inverted() for _ in range(blocks))
        self.head = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def depthwise(batch: int = 32) -> Snapshot:
    torch.manual_seed(0)
    return Snapshot(Depthwise().to(CUDA), (torch.randn(batch, 3, 96, 96, device=CUDA),))


class Deep(nn.Module):
    """Many small layers: the host is what takes the time."""

    def __init__(self, layers: int = 60, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def deep() -> Snapshot:
    torch.manual_seed(0)
    return Snapshot(Deep().to(CUDA), (torch.randn(32, 64, device=CUDA),))


def milliseconds(step: Any, switches: dict[str, Any], rounds: int = 5, steps: int = 10) -> Any:
    """Returns the median time of a step after each of the switches, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in switches}
    for _ in range(rounds):
        for name, switch in switches.items():
            switch()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) / steps)
    return {name: 1e3 * median(seen) for name, seen in times.items()}


def train(snapshot: Snapshot, optimizer: Any, sizes: list[int], accumulate: int = 1) -> None:
    """Trains on batches of these sizes, with gradients clipped and added up over `accumulate` of them."""
    source = torch.Generator(CUDA).manual_seed(3)
    module, shape = snapshot.module, snapshot.args[0].shape[1:]
    for k, size in enumerate(sizes):
        x = torch.randn(size, *shape, device=CUDA, generator=source)
        (module(x).square().mean() / accumulate).backward()
        if (k + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(k % 2))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_graphs_train_as_compiled_code_does(accumulate: int) -> None:
    def weights(fix: Any) -> torch.Tensor:
        torch._dynamo.reset()
        snapshot = deep()
        optimizer = torch.optim.AdamW(snapshot.module.parameters(), lr=1e-3, fused=True)
        applied = fix().apply(scene(snapshot, optimizers=[optimizer]))
        parity = applied.verify(snapshot)
        assert parity.passed, parity.detail
        applied.enable()
        train(snapshot, optimizer, [32] * 12 + [7] + [32] * 12, accumulate)
        with torch.no_grad():
            snapshot.module.eval()(torch.randn(5, 64, device=CUDA))
        snapshot.module.train()
        train(snapshot, optimizer, [32] * 6, accumulate)
        assert applied.failure() is None
        applied.undo()
        return torch.cat([p.detach().flatten() for p in snapshot.module.parameters()])

    torch.testing.assert_close(weights(CudaGraphs), weights(CompileModel), rtol=1e-5, atol=1e-6)


def test_graphs_are_launched_and_faster_where_the_host_is_slow() -> None:
    snapshot = deep()
    graphs, compiled = CudaGraphs().apply(scene(snapshot)), CompileModel().apply(scene(snapshot))
    for applied in (compiled, graphs):
        parity = applied.verify(snapshot)
        assert parity.passed, parity.detail
        applied.enable()

    def step() -> None:
        snapshot.module(*snapshot.args).sum().backward()
        snapshot.module.zero_grad()

    for _ in range(5):
        step()
    assert graphs.settled()
    with torch.profiler.profile(acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    launches = [e for e in seen.events() or () if e.name == "cudaGraphLaunch"]
    assert len(launches) == 2  # forward and backward

    def eager() -> None:
        graphs.disable()
        compiled.disable()

    def both() -> None:
        compiled.enable()
        graphs.enable()

    times = milliseconds(
        step, {"eager": eager, "graphs": both, "compiled": graphs.disable}, steps=20
    )
    print(times)
    assert times["graphs"] < 0.7 * times["compiled"] < 0.7 * times["eager"]
    graphs.undo()
    compiled.undo()


def test_graphs_give_their_memory_back() -> None:
    snapshot = depthwise()
    for _ in range(2):
        snapshot.module(*snapshot.args).sum().backward()
        snapshot.module.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    applied = CudaGraphs().apply(scene(snapshot))
    assert applied.verify(snapshot).passed
    applied.enable()
    for _ in range(5):
        snapshot.module(*snapshot.args).sum().backward()
    held = torch.cuda.memory_reserved()
    grads = [p.grad.clone() for p in snapshot.module.parameters()]
    applied.undo()
    del applied
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    print(before, held, torch.cuda.memory_reserved())
    assert torch.cuda.memory_reserved() < before + 0.25 * (held - before)
    for a, p in zip(grads, snapshot.module.parameters(), strict=True):
        assert torch.equal(a, p.grad)


def test_everything_together_on_a_depthwise_net() -> None:
    snapshot = depthwise()
    optimizer = torch.optim.SGD(snapshot.module.parameters(), lr=0.01, momentum=0.9)
    here = scene(snapshot, optimizers=[optimizer], findings={"L107": None}, step_s=0.05)
    names = [sorted(vars(m)) for m in snapshot.module.modules()]
    strides = [p.stride() for p in snapshot.module.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        snapshot.module(*snapshot.args).square().mean().backward()
        optimizer.step()

    step()
    applied = []
    for fix in (FusedOptimizer, ChannelsLast, Bf16Autocast, CompileModel, CudaGraphs):
        assert isinstance(fix().check(here), Eligible), fix.code
        applied.append(fix().apply(here))
        parity = applied[-1].verify(snapshot)
        print(fix.code, parity.detail)
        assert parity.passed, (fix.code, parity.detail)
        applied[-1].enable()
    compiled = frames()
    for _ in range(8):
        step()
    assert frames() == compiled
    assert all(a.failure() is None and a.settled() for a in applied)
    # One taken out: what was not rehearsed is eager until it is, and nothing compiles in a step.
    low = applied[2]
    low.disable()
    step()
    assert frames() == compiled
    assert applied[4].rehearse(snapshot) is None
    compiled = frames()
    for _ in range(3):
        step()
    assert frames() == compiled
    low.enable()
    for _ in range(6):
        step()
    assert frames() == compiled
    assert applied[4].settled()
    for fix in reversed(applied):
        fix.undo()
    assert [sorted(vars(m)) for m in snapshot.module.modules()] == names
    assert [p.stride() for p in snapshot.module.parameters()] == strides
    step()


def test_channels_last_pays_on_depthwise_convolutions_in_bf16() -> None:
    snapshot = depthwise(64)
    low, last = Bf16Autocast().apply(scene(snapshot)), ChannelsLast().apply(scene(snapshot))
    low.enable()
    parity = last.verify(snapshot)
    assert parity.passed, parity.detail

    def step() -> None:
        snapshot.module(*snapshot.args).square().mean().backward()
        snapshot.module.zero_grad()

    times = milliseconds(step, {"first": last.disable, "last": last.enable})
    print(times)
    assert times["last"] < 0.8 * times["first"]
    last.undo()
    low.undo()


def test_blocks_of_a_gpt_are_compiled_where_the_whole_may_not_be() -> None:
    snapshot = gpt()
    applied = CompileModel().apply(scene(snapshot), {"parts": "blocks"})
    assert applied.setting["parts"] == "blocks"
    parity = applied.verify(snapshot)
    assert parity.passed, parity.detail
    applied.enable()
    compiled = frames()
    for _ in range(3):
        snapshot.module(*snapshot.args, **snapshot.kwargs)["loss"].backward()
    assert frames() == compiled
    applied.undo()


@pytest.mark.parametrize("scaled", [False, True])
def test_fused_groups_with_a_schedule_and_a_scaler(scaled: bool) -> None:
    def run(fuse: bool) -> torch.Tensor:
        snapshot = deep()
        layers = list(snapshot.module.layers)
        groups = [
            {"params": [p for m in layers[:30] for p in m.parameters()], "lr": 1e-3},
            {
                "params": [p for m in layers[30:] for p in m.parameters()],
                "lr": torch.tensor(1e-3, device=CUDA),
            },
        ]
        optimizer = torch.optim.AdamW(groups)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, enabled=scaled)
        applied = FusedOptimizer().apply(scene(snapshot, optimizers=[optimizer]))
        for k in range(10):
            if fuse and k > 1:
                applied.enable() if k % 3 else applied.disable()
            optimizer.zero_grad()
            loss = snapshot.module(*snapshot.args).square().mean()
            scaler.scale(loss * (float("inf") if scaled and k == 5 else 1.0)).backward()
            if k % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(snapshot.module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        applied.undo()
        steps = {float(s["step"]) for s in optimizer.state.values()}
        assert steps == {9.0 if scaled else 10.0}
        return torch.cat([p.detach().flatten() for p in snapshot.module.parameters()])

    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-5)


def test_expandable_segments_are_in_use_in_a_process_that_is_started_with_them() -> None:
    code = (
        "import torch; from flopwise.fixes.catalog.allocator_settings import AllocatorSettings; "
        "x = torch.zeros(1 << 20, device='cuda'); print(AllocatorSettings.at_start({}).trouble())"
    )
    bare = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}

    def said(env: dict[str, str]) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert said({**bare, **AllocatorSettings.environment({})}) == "None"
    assert "left out" in said(bare)


class Masked(nn.Module):
    """A masked language model of an odd vocabulary, whose blocks may be checkpointed."""

    def __init__(
        self, vocabulary: int = 30001, width: int = 512, checkpoints: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, F.gelu, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        h = self.embed(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpoints else block(h)
        logits = self.head(h)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        return {"loss": loss, "logits": logits}


def masked(checkpoints: bool = False) -> Snapshot:
    torch.manual_seed(0)
    ids = torch.randint(0, 30001, (16, 256), device=CUDA)
    labels = torch.where(torch.rand(ids.shape, device=CUDA) < 0.15, ids, -100)
    return Snapshot(Masked(checkpoints=checkpoints).to(CUDA), (), {"ids": ids, "labels": labels})


def test_an_odd_vocabulary_is_padded_where_it_is_faster_alone_and_with_the_others() -> None:
    snapshot = masked()
    here = scene(snapshot, findings={"L110": 0.1})
    applied = PaddedDimension().apply(here)
    parity = applied.verify(snapshot)
    print(parity, applied.setting)
    assert parity.passed, parity.detail
    assert applied.setting == {"head": "30016x512"}
    low, fast = Bf16Autocast().apply(here), CompileModel().apply(here)
    for fix in (low, fast):
        assert fix.verify(snapshot).passed
        fix.enable()
    for on in (True, False, True):
        applied.enable() if on else applied.disable()
        out = snapshot.module(**snapshot.kwargs)
        assert out["logits"].shape == (16, 256, 30001)
        out["loss"].backward()
    assert [fix.failure() for fix in (applied, low, fast)] == [None] * 3
    for fix in (applied, low, fast):
        fix.undo()
    assert type(snapshot.module.head) is nn.Linear


@pytest.mark.parametrize("compiled", [False, True])
def test_labelled_places_alone_under_autocast(compiled: bool) -> None:
    snapshot = masked()
    here = scene(snapshot)
    applied = LabelledLogits().apply(here)
    while not applied.ready():
        snapshot.module(**snapshot.kwargs)["loss"].backward()
    parity = applied.verify(snapshot)
    print(parity, applied.setting)
    assert parity.passed, parity.detail
    low, fast = Bf16Autocast().apply(here), CompileModel().apply(here)
    low.enable()
    if compiled:
        fast.enable()
    losses, peaks = [], []
    for on in (False, True, False, True):
        applied.enable() if on else applied.disable()
        snapshot.module.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        out = snapshot.module(**snapshot.kwargs)
        out["loss"].backward()
        assert isinstance(out["logits"], LazyLogits) == on
        losses.append(out["loss"].item())
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)
    assert peaks[3] < peaks[2]
    assert applied.failure() is None
    for fix in (applied, fast, low):
        fix.undo()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_in_chunks_takes_less_memory_under_autocast(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked_loss.CHUNK_BYTES, "cuda", 128 << 20)
    found = masked()
    snapshot = found._replace(kwargs={"ids": found.kwargs["ids"], "labels": found.kwargs["ids"]})
    here = scene(snapshot)
    applied = ChunkedLoss().apply(here)
    while not applied.ready():
        snapshot.module(**snapshot.kwargs)["loss"].backward()
    parity = applied.verify(snapshot)
    print(parity, applied.setting)
    assert parity.passed, parity.detail
    assert applied.setting["saves"].endswith("1024 of 4096 places")
    low, fast = Bf16Autocast().apply(here), CompileModel().apply(here)
    low.enable()
    if compiled:
        fast.enable()
    losses, peaks, took_s = [], [], []
    for on in (False, True) * 4:
        applied.enable() if on else applied.disable()
        snapshot.module.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = snapshot.module(**snapshot.kwargs)
        out["loss"].backward()
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began)
        assert isinstance(out["logits"], LazyLogits) == on
        losses.append(out["loss"].item())
        peaks.append(torch.cuda.max_memory_allocated())
    print(
        f"peaks {peaks[6:]}, plain {min(took_s[2::2]):.4f} s, in chunks {min(took_s[3::2]):.4f} s"
    )
    assert losses == pytest.approx([losses[0]] * 8, rel=1e-3)
    assert peaks[7] < peaks[6]
    assert applied.failure() is None
    for fix in (applied, fast, low):
        fix.undo()


def test_what_checkpoints_would_keep_is_what_they_keep() -> None:
    snapshot = masked(checkpoints=True)

    def held() -> int:
        before = torch.cuda.memory_allocated()
        out = snapshot.module(**snapshot.kwargs)
        after = torch.cuda.memory_allocated()
        del out
        return after - before

    kept, calls = kept_bytes(snapshot.module, held)
    assert calls == 4
    applied = RecomputeOff().apply(scene(snapshot, findings={"L106": 0.2}))
    parity = applied.verify(snapshot)
    assert parity.passed, parity.detail
    less = held()
    applied.enable()
    more = held()
    applied.undo()
    print(f"{kept} predicted, {more - less} measured")
    assert 0.9 < kept / (more - less) < 1.5


def test_cudnns_search_is_judged_by_a_step_and_the_switch_left_as_it_was() -> None:
    snapshot = cnn()
    before = torch.backends.cudnn.benchmark
    applied = CudnnBenchmark().apply(scene(snapshot))
    while not applied.ready():
        snapshot.module(*snapshot.args)
    parity = applied.verify(snapshot)
    print(parity)
    assert parity.passed or "cudnn.benchmark off" in parity.detail
    applied.undo()
    assert torch.backends.cudnn.benchmark == before


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64 * 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((1000,), float(i)), i


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("spelling", ["to", "non_blocking", "cuda"])
def test_batches_that_were_sent_are_whole_and_in_order(
    workers: int, pinned: bool, spelling: str
) -> None:
    moves = {
        "to": lambda t: t.to("cuda"),
        "non_blocking": lambda t: t.to(CUDA, non_blocking=True),
        "cuda": lambda t: t.cuda(),
    }
    loader = DataLoader(Pairs(), 64, num_workers=workers, pin_memory=pinned)
    applied = DevicePrefetch().apply(Scene(loaders=[loader], device=CUDA))
    busy = torch.randn(2048, 2048, device=CUDA)
    sums, wanted, answered = [], [], 0
    for k, (x, y) in enumerate(loader):
        there, labels = moves[spelling](x), moves[spelling](y)
        for _ in range(5):  # what is queued before the batch is used
            busy = busy @ busy / 50
        sums.append(there.double().sum() + labels.sum())
        wanted.append(float(x.double().sum() + y.sum()))
        del there, labels
        if k == 5:
            parity = applied.verify()
            assert parity.passed, parity.detail
        if k > 5:
            applied.enable() if (k // 6) % 2 else applied.disable()
        answered = applied._moves.answered
    applied.undo()
    assert applied.failure() is None
    assert answered > 20
    assert [float(s) for s in sums] == wanted
    assert "to" not in vars(torch.Tensor)


def test_a_batch_moved_on_another_stream_is_waited_for_there() -> None:
    loader = DataLoader(Pairs(), 64, num_workers=2, pin_memory=True)
    applied = DevicePrefetch().apply(Scene(loaders=[loader], device=CUDA))
    applied.enable()
    side, sums, wanted = torch.cuda.Stream(), [], []
    for x, _ in loader:
        with torch.cuda.stream(side):
            sums.append(x.to(CUDA, non_blocking=True).double().sum())
        wanted.append(float(x.double().sum()))
    torch.cuda.synchronize()
    answered = applied._moves.answered
    applied.undo()
    assert answered > 20
    assert [float(s) for s in sums] == wanted


def test_a_host_tensor_may_be_written_to_after_a_blocking_move() -> None:
    loader = DataLoader(Pairs(), 64, num_workers=0, pin_memory=True)
    applied = DevicePrefetch().apply(Scene(loaders=[loader], device=CUDA))
    applied.enable()
    sums, wanted = [], []
    for x, _ in loader:
        wanted.append(float(x.double().sum()))
        there = x.to(CUDA)
        x.fill_(-1)
        sums.append(there.double().sum())
    applied.undo()
    assert [float(s) for s in sums] == wanted


def test_moves_inside_a_capture_are_torchs_own() -> None:
    loader = DataLoader(Pairs(), 64, num_workers=2, pin_memory=True)
    applied = DevicePrefetch().apply(Scene(loaders=[loader], device=CUDA))
    applied.enable()
    target = torch.empty(64, 1000, device=CUDA)
    for k, (x, _) in enumerate(loader):
        if k != 8:
            x.to(CUDA)
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.copy_(x.to(CUDA, non_blocking=True))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(target.cpu(), x)
        break
    applied.undo()


def test_more_workers_pin_and_keep_order_and_moves_are_answered() -> None:
    loader = DataLoader(Pairs(), 64, num_workers=1)
    scene_ = Scene(loaders=[loader], device=CUDA, data_frac=0.5, step_s=0.01, cores=4)
    more, ahead = LoaderWorkers().apply(scene_), DevicePrefetch().apply(scene_)
    seen, pinned = [], []
    for k, (x, y) in enumerate(loader):
        seen += y.to(CUDA, non_blocking=True).tolist()
        x.to(CUDA)
        pinned.append(x.is_pinned())
        if k == 6:
            assert more.verify().passed
            assert ahead.verify().passed
            more.enable()
            ahead.enable()
    answered = ahead._moves.answered
    more.undo()
    ahead.undo()
    assert seen == list(range(64 * 40))
    assert all(pinned[12:])
    assert answered > 30
