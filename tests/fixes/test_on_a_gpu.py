"""The fixes on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.catalog.needless_mask import NeedlessMask
from flopwise.fixes.catalog.tf32_matmul import Tf32Matmul
from flopwise.fixes.interface import Eligible, Scene
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
    return Scene(roots=[snapshot.module], device=CUDA, compute_frac=0.9, optimizer_frac=0.5, **more)


@pytest.mark.parametrize("fix", [Bf16Autocast, CompileModel, ChannelsLast], ids=lambda f: f.code)
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
    out = snapshot.module(*snapshot.args, **snapshot.kwargs)
    loss = out["loss"] if isinstance(out, dict) else out.square().mean()
    assert loss.dtype == torch.float32
    loss.backward()
    assert applied.failure() is None
    applied.undo()
    assert [sorted(vars(m)) for m in snapshot.module.modules()] == names


@pytest.mark.parametrize("fix", [Bf16Autocast, CompileModel, ChannelsLast], ids=lambda f: f.code)
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
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
    here = scene(snapshot)
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


def test_a_needless_mask_is_left_out_without_waiting() -> None:
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = model(ids, attention_mask=there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, model(ids))
    padded = mask.clone()
    padded[0, 200:] = 0
    assert not torch.equal(model(ids, attention_mask=padded.to(CUDA)), out)
    applied.undo()
