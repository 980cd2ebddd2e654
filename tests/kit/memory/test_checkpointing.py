from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.memory import checkpointing
from flopwise.kit.memory.checkpointing import checkpoint_blocks
from flopwise.kit.memory.step_memory import StepMemory, step_memory


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


ROWS = 256


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1))


def gradients(net: nn.Module, x: torch.Tensor, seed: int = 5) -> tuple[torch.Tensor, list[Any]]:
    torch.manual_seed(seed)
    net.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]


def peak(net: nn.Module, x: torch.Tensor) -> int:
    return step_memory(net, lambda: net(x).square().mean().backward(), ["blocks.0"]).peak_bytes


class TestAgainstATarget:
    @pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
    def test_the_predicted_peak_is_the_measured_one_and_within_the_target(
        self, net: Net, x: torch.Tensor, share: float
    ) -> None:
        before = peak(net, x)
        floor = checkpoint_blocks(net, lambda: net(x).square().mean().backward(), 0, rounds=0)
        floor.undo()
        target = int(floor.choice.peak_bytes + share * (before - floor.choice.peak_bytes))
        made = checkpoint_blocks(net, lambda: net(x).square().mean().backward(), target)
        assert made.choice.peak_before_bytes == before
        assert made.fits
        assert made.choice.fits
        assert 0 < len(made.choice.blocks) < 6
        assert made.peak_bytes is not None
        assert peak(net, x) == made.peak_bytes <= target
        assert made.choice.peak_bytes == pytest.approx(made.peak_bytes, rel=0.05)
        assert made.peak_bytes <= made.choice.peak_bytes
        assert made.step is not None
        assert made.step.rounds == 3

    @pytest.mark.parametrize("inside", [False, True])
    def test_backward_inside_and_outside_of_autocast(
        self, net: Net, x: torch.Tensor, inside: bool
    ) -> None:
        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x).square().mean()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()

        floor = checkpoint_blocks(net, step, 0, rounds=0)
        floor.undo()
        target = (floor.choice.peak_before_bytes + floor.choice.peak_bytes) // 2
        made = checkpoint_blocks(net, step, target)
        assert made.peak_bytes is not None
        assert made.peak_bytes <= made.choice.peak_bytes <= target
        assert made.choice.peak_bytes == pytest.approx(made.peak_bytes, rel=0.1)

    def test_a_lower_target_takes_more_blocks(self, net: Net, x: torch.Tensor) -> None:
        def blocks(target: int) -> int:
            made = checkpoint_blocks(net, lambda: net(x).mean().backward(), target, rounds=0)
            made.undo()
            return len(made.choice.blocks)

        full = peak(net, x)
        counts = [blocks(int(full * share)) for share in (1.1, 0.9, 0.7, 0.5)]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] >= 3

    @pytest.mark.parametrize(("off", "more"), [(5000, 1), (10**7, 3)])
    def test_one_that_is_missed_by_a_little_is_reached_by_a_set_that_frees_more(
        self,
        net: Net,
        x: torch.Tensor,
        monkeypatch: pytest.MonkeyPatch,
        off: int,
        more: int,
    ) -> None:
        step = functools.partial(gradients, net, x)
        exact = checkpoint_blocks(net, step, 0.8 * peak(net, x))
        exact.undo()

        class Rounding(StepMemory):
            @property
            def peak_bytes(self) -> int:
                return super().peak_bytes + off

        def rounded(module: nn.Module, step: Any, blocks: Any) -> StepMemory:
            found = step_memory(module, step, blocks)
            kept = any("forward" in m.__dict__ for m in module.modules())
            return Rounding(**vars(found)) if kept else found

        monkeypatch.setattr(checkpointing, "step_memory", rounded)
        made = checkpoint_blocks(net, step, exact.choice.peak_bytes)
        assert made.target_bytes == made.choice.target_bytes == exact.choice.peak_bytes
        assert made.fits is (off == 5000), str(made)
        assert len(made.choice.blocks) >= len(exact.choice.blocks) + more
        assert set(made._forwards) == set(made.choice.blocks)
        made.undo()
        assert not any("forward" in m.__dict__ for m in net.modules())

    def test_a_target_out_of_reach_is_said(self, net: Net, x: torch.Tensor) -> None:
        made = checkpoint_blocks(net, lambda: net(x).mean().backward(), 1000)
        assert not made.fits
        assert len(made.choice.blocks) >= 5
        assert "(target 1 kB, which is not reached)" in str(made)
        assert "predicted" in str(made)
        assert " of forward again a step; step " in str(made)

    def test_a_target_that_is_kept_already(self, net: Net, x: torch.Tensor) -> None:
        made = checkpoint_blocks(net, lambda: net(x).mean().backward(), 10**9)
        assert made.choice.blocks == ()
        assert str(made).startswith("no block checkpointed: the peak is ")


@pytest.fixture
def made(net: Net, x: torch.Tensor) -> Any:
    return checkpoint_blocks(net, lambda: net(x).mean().backward(), 0, rounds=0)


class TestNumbers:
    def test_loss_and_gradients_with_dropout_are_those_without_to_the_last_bit(
        self, net: Net, x: torch.Tensor, made: Any
    ) -> None:
        loss, grads = gradients(net, x)
        made.undo()
        plain_loss, plain = gradients(net, x)
        assert torch.equal(loss, plain_loss)
        assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
        assert gradients(net, x, seed=6)[0] != loss

    def test_under_autocast_too(self, net: Net, x: torch.Tensor, made: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            _, grads = gradients(net, x)
            made.undo()
            _, plain = gradients(net, x)
        assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))

    def test_evaluation_computes_nothing_twice(self, net: Net, x: torch.Tensor, made: Any) -> None:
        calls = []
        net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            net(x)
        assert len(calls) == 1
        net(x).mean().backward()
        assert len(calls) == 3

    def test_compiled_gives_the_same(self, net: Net, x: torch.Tensor, made: Any) -> None:
        net.eval()  # dropout of a compiled graph draws other numbers
        _, plain = gradients(net, x)
        compiled = torch.compile(net, backend="aot_eager")
        _, grads = gradients(compiled, x)
        for a, b in zip(grads, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class TestRemovable:
    def test_undo_leaves_no_trace(self, net: Net, made: Any) -> None:
        assert "forward" in net.blocks[0].__dict__
        made.undo()
        made.undo()
        assert all("forward" not in block.__dict__ for block in net.blocks)
        made.apply()
        assert "forward" in net.blocks[0].__dict__

    def test_state_dicts_are_those_without(self, net: Net, made: Any) -> None:
        assert list(net.state_dict()) == list(Net().state_dict())
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        Net().load_state_dict(torch.load(file, weights_only=True))

    def test_a_copy_computes_with_its_own_weights(
        self, net: Net, x: torch.Tensor, made: Any
    ) -> None:
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert twin.blocks[0].forward.block is twin.blocks[0]
            with torch.no_grad():
                for p in twin.parameters():
                    p.zero_()
            assert float(twin(x).detach().abs().max()) == 0
        assert float(net(x).detach().abs().max()) > 0

    def test_a_forward_that_someone_replaced_is_not_taken(self, net: Net, x: torch.Tensor) -> None:
        net.blocks[2].forward = lambda x, scale: x
        with pytest.raises(ValueError, match=r"the forward of \['blocks.2'\] is replaced already"):
            checkpoint_blocks(net, lambda: net(x).mean().backward(), 0)

    def test_a_step_that_fails_leaves_the_model_as_it_was(self, net: Net, x: torch.Tensor) -> None:
        def step() -> None:
            net(x).mean().backward()
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(torch.OutOfMemoryError):
            checkpoint_blocks(net, step, 0)
        assert all("forward" not in block.__dict__ for block in net.blocks)
        assert all(not module._forward_hooks for module in net.modules())
        assert all(p.grad is None for p in net.parameters())


class TestOutOfMemory:
    """A step that fits only while at least three of its six blocks are checkpointed."""

    @pytest.fixture
    def step(self, net: Net, x: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            if sum("forward" in block.__dict__ for block in net.blocks) < 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            net(x).square().mean().backward()

        return run

    def test_the_set_is_chosen_by_what_a_run_with_all_blocks_checkpointed_shows(
        self, net: Net, x: torch.Tensor, step: Callable[[], None]
    ) -> None:
        full = peak(net, x)
        made = checkpoint_blocks(net, step, int(0.6 * full))
        assert made.ran_out
        assert full <= made.choice.peak_before_bytes <= 1.1 * full
        assert 3 <= len(made.choice.blocks) < 6
        assert made.fits
        assert made.peak_bytes is not None
        assert made.peak_bytes <= made.choice.peak_bytes <= int(0.6 * full)
        assert made.choice.peak_bytes == pytest.approx(made.peak_bytes, rel=0.1)
        assert made.step is None
        assert ", for which there is no memory, -> " in str(made)

    def test_it_is_the_set_that_would_be_chosen_if_it_fitted(
        self, net: Net, x: torch.Tensor, step: Callable[[], None]
    ) -> None:
        target = int(0.6 * peak(net, x))
        plain = checkpoint_blocks(net, lambda: net(x).square().mean().backward(), target, rounds=0)
        plain.undo()
        made = checkpoint_blocks(net, step, target, rounds=0)
        assert len(made.choice.blocks) == len(plain.choice.blocks)

    def test_where_it_does_not_fit_either_the_model_is_put_back(self, net: Net) -> None:
        def step() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(torch.OutOfMemoryError):
            checkpoint_blocks(net, step, 10**9)
        assert all("forward" not in block.__dict__ for block in net.blocks)
