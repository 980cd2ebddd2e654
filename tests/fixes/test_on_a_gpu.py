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
from flopwise.fixes.catalog.device_prefetch import DevicePrefetch
from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
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
