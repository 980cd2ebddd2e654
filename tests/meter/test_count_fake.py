"""Counting on fake tensors: the numbers of the real step, and a module that never notices."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from flopwise.errors import AttachError
from flopwise.meter.count import StepCounter, count_fake
from flopwise.records.rank import FlopCount


def real_step(net: nn.Module, x: torch.Tensor) -> FlopCount:
    counter = StepCounter("test")
    counter.start()
    try:
        net(x).sum().backward()
    finally:
        count = counter.stop()
    return count


class Block(nn.Module):
    """A block with habits: it counts its calls, keeps its inputs and may checkpoint itself."""

    def __init__(self, width: int = 16, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = torch.ones(width)  # a tensor that is neither parameter nor buffer
        self.register_buffer("seen", torch.zeros(()))
        self.reentrant, self.calls, self.kept = reentrant, 0, []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x * self.scale)), 0.1, self.training))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept.append(x)
        self.seen += 1
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
        ),
        torch.randn(2, 3, 8, 8),
    ),
    "encoder": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        torch.randn(2, 5, 16),
    ),
    "blocks": lambda: (nn.Sequential(Block(), Block()), torch.randn(4, 16)),
    "checkpointed": lambda: (
        nn.Sequential(Block(reentrant=False), Block(reentrant=False)),
        torch.randn(4, 16),
    ),
    "reentrant": lambda: (
        nn.Sequential(Block(reentrant=True), Block(reentrant=True)),
        torch.randn(4, 16, requires_grad=True),
    ),
    "weight norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        torch.randn(2, 8),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_counts_are_those_of_the_real_step(name: str) -> None:
    net, x = NETS[name]()
    real, fake = real_step(net, x), count_fake(net, (x,), {}, "shape")
    assert fake.needed == real.needed
    assert fake.executed == real.executed
    assert fake.by_op == real.by_op
    assert (fake.shape, fake.method, fake.coverage_frac) == ("shape", "fake tensors", 1.0)


class Rows(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


def test_recurrent_layers_keep_their_flat_weights() -> None:
    net, x = Rows(nn.LSTM(8, 8, 2)), torch.randn(5, 3, 8)
    assert count_fake(net, (x,), {}, "").needed == real_step(net, x).needed


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_nothing_of_the_users_is_touched(reentrant: bool | None) -> None:
    net = nn.Sequential(Block(reentrant=reentrant), nn.BatchNorm1d(16), Block(reentrant=reentrant))
    net[2].eval()
    x = torch.randn(4, 16, requires_grad=True)
    net(x).sum().backward()
    fired: list[str] = []
    net[0].up.register_forward_hook(lambda *_: fired.append("forward"))
    net[0].up.weight.register_hook(lambda _: fired.append("gradient"))
    every = nn.modules.module.register_module_forward_pre_hook(lambda *_: fired.append("global"))
    before = copy.deepcopy(net.state_dict())
    grads = [p.grad for p in net.parameters()]
    values = [g.clone() for g in grads if g is not None]
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    x_grad = x.grad
    try:
        count_fake(net, (x,), {}, "")
    finally:
        every.remove()
    assert fired == []
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(p.grad is g for p, g in zip(net.parameters(), grads, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True) if g is not None)
    assert x.grad is x_grad
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert (net[0].calls, len(net[0].kept), net[0].training, net[2].training) == (1, 1, True, False)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in (*net.parameters(), *net[0].kept))


class Draws(nn.Module):
    """Layer drop, as people write it: the random numbers it takes are given back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random()
        np.random.rand()
        return self.layer(x) * torch.rand(4)


def test_random_states_stay() -> None:
    net, x = Draws(), torch.randn(2, 4)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    count_fake(net, (x,), {}, "")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


NEEDED = 2 * 4 * 16 * 16 * 5  # two layers forward and their weights, one input gradient


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo's own, between two layers
    "ignore:Using `torch.compile.module.` when there are global hooks",
)
class TestCompiled:
    def compiled(self, how: str, backend: Any) -> nn.Module:
        net: nn.Module = Net()
        if how == "wrapped":
            return torch.compile(net, backend=backend)  # type: ignore[return-value]
        if how == "whole graph":
            return torch.compile(net, backend=backend, fullgraph=True)  # type: ignore[return-value]
        if how == "in place":
            net.compile(backend=backend)
        elif how == "forward":
            net.forward = torch.compile(net.forward, backend=backend)
        elif how == "by layer":
            net.first.compile(backend=backend)
            net.second = torch.compile(net.second, backend=backend)
        return net

    @pytest.mark.parametrize("how", ["wrapped", "whole graph", "in place", "forward", "by layer"])
    def test_counts_without_compiling_or_forgetting(self, how: str) -> None:
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        compiles = CompileCounter()
        net, x = self.compiled(how, compiles), torch.randn(4, 16)
        net(x).sum().backward()
        before = compiles.frame_count
        assert before >= 1
        assert count_fake(net, (x,), {}, "").needed == {"fp32": NEEDED}
        assert compiles.frame_count == before
        net(x).sum().backward()
        assert compiles.frame_count == before
        torch._dynamo.reset()

    def test_from_inside_a_forward_pre_hook_of_a_compiled_model(self) -> None:
        torch._dynamo.reset()
        net, x = torch.compile(Net(), backend="eager"), torch.randn(4, 16)
        counts: list[FlopCount] = []

        def hook(module: nn.Module, args: Any) -> None:
            if module is net and not counts:
                counts.append(count_fake(module, args, {}, ""))

        handle = nn.modules.module.register_module_forward_pre_hook(torch.compiler.disable(hook))
        try:
            net(x).sum().backward()
        finally:
            handle.remove()
        assert counts[0].needed == {"fp32": NEEDED}
        torch._dynamo.reset()


class TestWrapped:
    def test_data_parallel_is_taken_off(self) -> None:
        net = nn.DataParallel(Net())
        assert count_fake(net, (torch.randn(4, 16),), {}, "").needed == {"fp32": NEEDED}

    def test_ddp_is_taken_off(self, tmp_path: Any) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            net = nn.parallel.DistributedDataParallel(Net())
            assert count_fake(net, (torch.randn(4, 16),), {}, "").needed == {"fp32": NEEDED}
        finally:
            dist.destroy_process_group()

    def test_a_collective_in_forward_is_refused_not_waited_for(self, tmp_path: Any) -> None:
        import torch.distributed as dist

        class Gathers(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                dist.all_reduce(y)
                return y

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            with pytest.raises(AttachError, match="collective"):
                count_fake(Gathers(), (torch.randn(4, 16),), {}, "")
        finally:
            dist.destroy_process_group()

    def test_sync_batch_norm_counts_without_its_collectives(self) -> None:
        net = nn.Sequential(nn.Linear(16, 16), nn.SyncBatchNorm(16))
        assert count_fake(net, (torch.randn(4, 16),), {}, "").needed == {
            "fp32": 2 * 2 * 4 * 16 * 16
        }


class TestAutocast:
    def test_as_it_is_when_called(self) -> None:
        net, x = Net(), torch.randn(4, 16)
        with torch.autocast("cpu", torch.bfloat16):
            count = count_fake(net, (x,), {}, "")
            out = net(x)  # finds no fake weight in autocast's cache
        assert count.needed == {"bf16": NEEDED}
        assert type(out) is torch.Tensor
        out.sum().backward()

    def test_in_the_slot_where_compiled_code_goes(self) -> None:
        net = Net()
        net._compiled_call_impl = torch.autocast("cpu", torch.bfloat16)(net._call_impl)
        assert count_fake(net, (torch.randn(4, 16),), {}, "").needed == {"bf16": NEEDED}

    def test_around_a_forward_that_was_replaced(self) -> None:
        net = Net()
        inner = net.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return inner(x)

        net.forward = forward  # type: ignore[method-assign]
        assert count_fake(net, (torch.randn(4, 16),), {}, "").needed == {"bf16": NEEDED}
        assert all(p.grad is None for p in net.parameters())

    def test_under_no_grad_the_step_is_still_a_training_step(self) -> None:
        with torch.no_grad():
            assert count_fake(Net(), (torch.randn(4, 16),), {}, "").needed == {"fp32": NEEDED}


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor
    extra: torch.Tensor


class Model(nn.Module):
    """With a loss inside, as Hugging Face models have it, and an output that the loss does not need."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.net, self.spare, self.form = Net(), nn.Linear(16, 16, bias=False), form

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = self.net(x)
        loss = F.cross_entropy(h, labels) if labels is not None else None
        out = Output(loss, h, self.spare(x))
        if self.form == "dict":
            return vars(out)
        if self.form == "tuple":
            return tuple(v for v in vars(out).values() if v is not None)
        return out


@pytest.mark.parametrize("form", ["data class", "dict", "tuple"])
def test_the_loss_decides_what_is_differentiated(form: str) -> None:
    x, labels = torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    spare = 2 * 4 * 16 * 16
    with_loss = count_fake(Model(form), (), {"x": x, "labels": labels}, "")
    assert with_loss.needed == {"fp32": NEEDED + spare}
    assert count_fake(Model(form), (x,), {}, "").needed == {"fp32": NEEDED + 2 * spare}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 3, 2, 16).unbind(1)
        ends = cu_seqlens.to(torch.int32)
        return torch.ops.flopwise_fake.packed(q, k, v, ends, ends)


@torch.library.custom_op("flopwise_fake::packed", mutates_args=())
def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> torch.Tensor:
    return torch.zeros_like(q)


packed.register_fake(lambda q, *_: torch.empty_like(q))
packed.register_autograd(lambda ctx, grad: (grad, grad, grad, None, None))


class TestPackedSequences:
    @pytest.fixture(autouse=True)
    def _a_rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flopwise.flops.table import RULES

        monkeypatch.setitem(
            RULES, "flopwise_fake::packed", RULES["flash_attn::_flash_attn_varlen_forward"]
        )

    def test_lengths_among_the_arguments_are_read(self) -> None:
        lengths = (3, 5, 12)
        ends = torch.tensor([0, 3, 8, 20], dtype=torch.int32)
        count = count_fake(Packed(), (torch.randn(20, 32), ends), {}, "")
        core = 4 * 2 * 16 * sum(n * n for n in lengths)
        assert count.by_op["flopwise_fake::packed"] == core
        assert count.coverage_frac == 1.0

    def test_lengths_that_are_computed_are_not_and_are_not_guessed(self) -> None:
        ends = torch.tensor([0, 3, 8, 20])  # cast inside: fake from there on
        count = count_fake(Packed(), (torch.randn(20, 32), ends), {}, "")
        assert "flopwise_fake::packed" not in count.by_op
        assert count.coverage_frac < 1
        assert any("not visible" in note for note in count.notes)


class Flex(nn.Module):
    """Its head alone is trained: torch has no flex_attention backward on a CPU."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48).requires_grad_(False), nn.Linear(8, 8, bias=False)
        self.mask, self.blocks = mask, self.causal()

    def causal(self) -> BlockMask:
        return create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=16
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 64, 3, 2, 8).permute(2, 0, 3, 1, 4)
        made = {"kept": lambda: self.blocks, "made": self.causal, "none": lambda: None}[self.mask]()
        return self.head(flex_attention(q, k, v, block_mask=made))  # type: ignore[no-any-return]


class TestFlexAttention:
    CORE, BLOCK = 4 * 2 * 2 * 64 * 64 * 8, 4 * 2 * 2 * 16 * 16 * 8

    def count(self, mask: str) -> FlopCount:
        count = count_fake(Flex(mask), (torch.randn(2, 64, 16),), {}, "")
        assert count.by_op["higher_order::flex_attention"] == self.CORE
        assert count.coverage_frac == 1.0
        return count

    def masked(self, count: FlopCount) -> int:
        return sum(count.needed.values()) - sum(count.needed_causal.values())

    def test_blocks_that_the_module_keeps_are_read(self) -> None:
        count = self.count("kept")
        assert self.masked(count) == (4 * 4 - 4 * 5 // 2) * self.BLOCK

    def test_blocks_made_on_the_way_are_counted_full_and_said(self) -> None:
        count = self.count("made")
        assert self.masked(count) == 0
        assert any("blocks of a flex_attention mask" in note for note in count.notes)

    def test_no_mask_is_nothing_to_say(self) -> None:
        count = self.count("none")
        assert self.masked(count) == 0
        assert not any("flex" in note for note in count.notes)


class TestRefusals:
    def refusal(self, net: nn.Module, *args: Any) -> str:
        with pytest.raises(AttachError) as caught:
            count_fake(net, args, {}, "")
        return str(caught.value)

    def test_values_decide_what_is_computed(self) -> None:
        class Routes(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) if x.sum() > 0 else x

        text = self.refusal(Routes(), torch.randn(4, 16))
        assert text.startswith("Routes cannot be counted on fake tensors: DataDependentOutput")

    def test_nothing_to_train(self) -> None:
        assert "requires a gradient" in self.refusal(nn.ReLU(), torch.randn(4, 16))

    def test_torchscript(self) -> None:
        with pytest.warns(DeprecationWarning, match="torch.jit"):
            scripted = torch.jit.script(Net())
        assert "TorchScript" in self.refusal(scripted, torch.randn(4, 16))

    def test_an_error_of_the_module_is_told_as_such(self) -> None:
        text = self.refusal(Net(), torch.randn(4, 17))
        assert "RuntimeError" in text
        assert "\n" not in text
