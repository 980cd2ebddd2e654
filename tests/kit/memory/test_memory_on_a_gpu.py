"""The memory room on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.memory import (
    CANDIDATES,
    allocator_state,
    audit_alignment,
    checkpoint_blocks,
    choose_channels_last,
    choose_cudnn_benchmark,
    compare_settings,
    empty_cache_cost,
    fragmentation_now,
    memory_timeline,
    own_settings,
    pad_dimensions,
    pinned_plan,
)
from flopwise.kit.memory.checkpointed import Checkpointed
from flopwise.kit.memory.settings_comparison import DEFAULT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]

CUDA = torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Lm(nn.Module):
    def __init__(self, vocabulary: int = 50257, width: int = 768, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)  # of 1, softmax saturates: no gradient is left
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def step_of(model: nn.Module, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            # Not what it is given: tied weights know that one, and there is nothing to learn.
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        return loss.detach()

    return step


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(
        50257, (8, 512), device=CUDA, generator=torch.Generator(CUDA).manual_seed(0)
    )


@pytest.fixture
def model() -> Lm:
    torch.manual_seed(0)
    return Lm().to(CUDA)


class TestPadding:
    def test_the_odd_vocabulary_is_padded_for_it_is_faster(
        self, model: Lm, tokens: torch.Tensor
    ) -> None:
        made = pad_dimensions(model, step_of(model, tokens))
        assert [p.name for p in made.layers] == ["head"], str(made)
        assert made.layers[0].padded == (50304, 768)
        assert made.layers[0].measured is not None
        assert made.layers[0].measured.faster

    @pytest.mark.parametrize(
        "compiled",
        [
            False,
            # The compiler warns, of TF32 for one, and leaves processes and files behind.
            pytest.param(True, marks=[pytest.mark.alone, pytest.mark.filterwarnings("ignore")]),
        ],
    )
    def test_losses_gradients_and_the_winners_are_those_of_the_unpadded_model(
        self, model: Lm, tokens: torch.Tensor, compiled: bool
    ) -> None:
        model.eval()
        plain = copy.deepcopy(model)
        pad_dimensions(model, dtype=torch.bfloat16)
        run: Any = torch.compile(model) if compiled else model
        loss, expected = step_of(run, tokens)(), step_of(plain, tokens)()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
        a, b = model.head.weight.grad, plain.head.weight.grad
        assert a is not None
        assert b is not None
        assert float(b.norm()) > 1e-3
        assert float((a - b).norm() / b.norm()) < 0.02
        with torch.no_grad():
            logits, reference = model(tokens), plain(tokens)
        assert logits.shape == reference.shape
        assert float((logits.argmax(-1) == reference.argmax(-1)).float().mean()) > 0.99

    def test_the_audit_names_the_head_and_after_padding_no_more(
        self, model: Lm, tokens: torch.Tensor
    ) -> None:
        found = audit_alignment(model, step_of(model, tokens))
        assert {f.module for f in found.worst()} == {"head", "backward"}
        assert all("50257 -> 50304" in f.defect.cure for f in found.worst())
        pad_dimensions(model, dtype=torch.bfloat16)
        assert audit_alignment(model, step_of(model, tokens)).worst() == []


class TestMemory:
    def test_the_time_line_agrees_with_the_allocator(self, model: Lm, tokens: torch.Tensor) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        step = step_of(model, tokens)
        for _ in range(2):
            step()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        outside = torch.cuda.memory_allocated() - sum(
            t.untyped_storage().nbytes()
            for t in {
                t.data_ptr(): t
                for t in [
                    *model.parameters(),
                    *(v for s in optimizer.state.values() for v in s.values() if v.is_cuda),
                ]
            }.values()
        )
        with memory_timeline(model, [optimizer], tokens) as recorder:
            step()
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - outside
        assert recorder.timeline.peak.total_bytes == pytest.approx(peak, rel=0.05)

    @pytest.mark.parametrize("share", [0.4, 0.8])
    def test_checkpoints_reach_the_target_as_predicted_with_the_same_dropout(
        self, tokens: torch.Tensor, share: float
    ) -> None:
        torch.manual_seed(0)
        model = Lm(vocabulary=1000, width=1024, layers=8).to(CUDA)
        small = tokens % 1000
        step = step_of(model, small)

        def result() -> tuple[torch.Tensor, torch.Tensor]:
            torch.manual_seed(1)
            model.zero_grad()
            loss = step()
            grad = model.blocks[0].up.weight.grad
            assert grad is not None
            return loss, grad.clone()

        plain = result()
        assert float(plain[1].norm()) > 1e-4
        model.zero_grad()
        least = checkpoint_blocks(model, step, 0, rounds=0)
        least.undo()
        before, floor = least.choice.peak_before_bytes, least.choice.peak_bytes
        made = checkpoint_blocks(model, step, int(floor + share * (before - floor)))
        assert made.fits, str(made)
        seen = f"{made}; {before=}, {floor=}, again: {made.choice.peak_before_bytes}"
        assert made.peak_bytes is not None, seen
        assert made.choice.peak_bytes == pytest.approx(made.peak_bytes, rel=0.1)
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(result(), plain, strict=True)]
        assert apart == [0.0, 0.0]

    @pytest.mark.parametrize("call", ["by name", "in a box"])
    def test_dropout_is_the_same_however_a_block_is_called(self, call: str) -> None:
        class Boxed(Block):
            def forward(self, x: Any = None, box: Any = None) -> torch.Tensor:
                return super().forward(x if box is None else box.x)

        class Box:
            def __init__(self, x: torch.Tensor) -> None:
                self.x = x

        torch.manual_seed(0)
        block = Boxed(64).to(CUDA)
        x = torch.randn(256, 64, device=CUDA)

        def gradients() -> list[torch.Tensor]:
            torch.manual_seed(1)
            y = block(x=x) if call == "by name" else block(box=Box(x))
            torch.rand(1000, device=CUDA)  # others draw too before backward
            return list(torch.autograd.grad(y.square().mean(), list(block.parameters())))

        plain = gradients()
        block.forward = Checkpointed(block)  # type: ignore[method-assign]
        assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))

    def test_buffers_move_once_a_step(self) -> None:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(CUDA)
        plain = copy.deepcopy(block)
        block.forward = Checkpointed(block)  # type: ignore[method-assign]
        x = torch.randn(4, 8, 16, 16, device=CUDA)
        for net in (block, plain):
            for _ in range(2):
                net(x).square().mean().backward()
        assert all(map(torch.equal, block.buffers(), plain.buffers()))

    def test_pinned_memory_is_what_is_planned(self) -> None:
        sizes = [9 << 20, 5 << 20]
        torch.cuda.init()  # before it there are no statistics
        before = torch.cuda.host_memory_stats()
        buffers = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]
        after = torch.cuda.host_memory_stats()
        key = "active_bytes.current"
        assert after[key] - before.get(key, 0) == sum(pinned_plan(sizes).given_bytes)
        del buffers

    def test_emptying_the_cache_asks_the_driver_in_every_step(self) -> None:
        net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(CUDA)
        x = torch.randn(64, 2048, device=CUDA)  # little to compute beside the driver's work

        def step() -> None:
            net(x).mean().backward()
            net.zero_grad()
            torch.cuda.empty_cache()

        cost = empty_cache_cost(step, rounds=15)
        assert cost.driver_calls is not None
        assert cost.driver_calls[0] > 2 > cost.driver_calls[1], str(cost)
        assert cost.step is not None
        assert cost.step.faster, str(cost)

    def test_fragmentation_is_read(self) -> None:
        gc.collect()  # graphs of other tests hold pools of their own until then
        torch.cuda.empty_cache()
        tensors = [torch.empty(3 << 20, dtype=torch.uint8, device=CUDA) for _ in range(20)]
        del tensors[::2]
        found, state = fragmentation_now(), allocator_state()
        assert found is not None
        assert state is not None
        assert found.reserved_bytes == state.reserved_bytes
        assert found.trapped_bytes > 0


CNN = """
import torch, torch.nn as nn
def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1)).cuda()
    x = torch.randn(8, 3, 64, 64, device="cuda")
    def step():
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss
    return step
"""


class TestAllocators:
    def test_every_setting_and_the_own_allocator_train_alike(self, tmp_path: Path) -> None:
        file = tmp_path / "train.py"
        file.write_text(CNN)
        made = compare_settings(
            f"{file}:build", {**CANDIDATES, **own_settings(1 << 30)}, steps=5, warmup=2
        )
        assert made.failed == {}
        assert set(made.runs) == {DEFAULT, *CANDIDATES, *own_settings(0)}
        for runs in made.runs.values():
            for run in runs:
                assert run.state is not None
                assert run.state.peak_reserved_bytes >= run.state.peak_allocated_bytes > 0
        pool = made.runs["pool by pointer"][0].state
        assert pool is not None
        assert pool.peak_reserved_bytes >= 1 << 30
        assert pool.driver_allocations == 0


@pytest.mark.alone
class TestLayout:
    def test_channels_last_is_decided_and_results_stay(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(64, 256, 3), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 256, 3)
        ).to(CUDA)
        x = torch.randn(32, 64, 56, 56, device=CUDA)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                net(x).float().square().mean().backward()

        with torch.no_grad():
            plain = net(x)
        made = choose_channels_last(net, step)
        assert made.measured is not None, str(made)
        assert made.adopted is made.measured.faster
        with torch.no_grad():
            y = net(x)
        assert y.stride() == plain.stride()
        assert float((y - plain).norm() / plain.norm()) < 5e-3

    def test_the_search_is_measured_for_fixed_shapes(self) -> None:
        net = nn.Conv2d(64, 64, 3).to(CUDA)
        x = torch.randn(8, 64, 56, 56, device=CUDA)
        before = torch.backends.cudnn.benchmark
        try:
            choice = choose_cudnn_benchmark(net, lambda: net(x).mean().backward())
            assert choice.measured is not None
            assert torch.backends.cudnn.benchmark is choice.on is choice.measured.faster
            assert choice.search_s is not None
        finally:
            torch.backends.cudnn.benchmark = before
