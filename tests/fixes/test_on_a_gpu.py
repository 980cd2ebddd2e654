"""The fixes on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.cudnn_benchmark import CudnnBenchmark
from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.catalog.padded_dimension import PaddedDimension
from flopwise.fixes.catalog.recompute_off import RecomputeOff, kept_bytes
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
