from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint  # as scripts do: before anything is replaced

from flopwise.fixes.catalog import recompute_off
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.recompute_off import RecomputeOff, kept_bytes
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.meter.replay import Snapshot

BEFORE = (
    torch_checkpoint._checkpoint_without_reentrant_generator,
    torch_checkpoint.CheckpointFunction,
)
WIDTH, LAYERS = 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.calls = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return x + self.drop(self.out(torch.relu(self.into(x))))


class Net(nn.Module):
    """Checkpoints by itself, in one of the two ways."""

    def __init__(self, reentrant: bool = False, on: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.reentrant, self.on = reentrant, on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0 * self.blocks[0].into.weight.sum()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x

    def calls(self) -> int:
        return sum(b.calls[0] for b in self.blocks)  # type: ignore[index, misc]


class Layer(Block):
    """As those of transformers: a flag, which the library sets."""

    gradient_checkpointing = False

    def __call__(self, *args: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self.checkpoint(functools.partial(super().__call__, *args))
        return super().__call__(*args)

    def checkpoint(self, function: Any) -> Any:
        return checkpoint(function, use_reentrant=False)


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        for block in self.blocks:
            block.gradient_checkpointing = True
        self.cached: list[bool] = []

    def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        checkpoints = self.training and self.blocks[0].gradient_checkpointing
        self.cached.append(not checkpoints if use_cache is None else use_cache)
        for block in self.blocks:
            x = block(x)
        return x

    calls = Net.calls


def net(kind: Any = Net, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(**more)


def x() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, found: bool = True, frac: float = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, findings={"L106": 0.2} if found else {}, **more)


def replaced() -> bool:
    now = (
        torch_checkpoint._checkpoint_without_reentrant_generator,
        torch_checkpoint.CheckpointFunction,
    )
    return now != BEFORE


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(net(), found=False), "no forward was found to run again"),
            (lambda: scene(), "no root"),
            (lambda: scene(net(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(net(), device=torch.device("mps")), "mps"),
            (lambda: scene(net(), frac=0.01), "1.0 %"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = RecomputeOff().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_model_that_checkpoints(self) -> None:
        assert isinstance(RecomputeOff().check(scene(net())), Eligible)

    def test_a_peak_that_would_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept, _ = kept_bytes(model := net(), lambda: model(x()))
        for room, fits in (
            (int((1000 + kept) / 0.85) + 2, True),
            (int((1000 + kept) / 0.85) - 2, False),
        ):
            monkeypatch.setattr(recompute_off, "memory", lambda _, room=room: (1000, room))
            model = net()
            fix = RecomputeOff().apply(scene(model))
            parity = fix.verify(Snapshot(model, (x(),)))
            assert parity.passed == fits, parity.detail
            assert fits or "is predicted" in parity.detail
            fix.enable()
            assert replaced() == fits
            fix.undo()

    def test_another_implementation(self) -> None:
        model = net(on=False)
        fix = RecomputeOff().apply(scene(model))
        assert "calls no torch.utils.checkpoint" in fix.verify(Snapshot(model, (x(),))).detail


class TestPrediction:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_what_would_be_kept_is_added_up(self, reentrant: bool) -> None:
        model = net(reentrant=reentrant).eval()
        kept, calls = kept_bytes(model, lambda: model(x()))
        assert calls == LAYERS
        # A block keeps its input, and what relu gives, which both products and relu itself save.
        assert kept == LAYERS * 4 * (8 * WIDTH + 8 * 4 * WIDTH)
        assert not replaced()

    def test_an_error_leaves_everything_as_it_was(self) -> None:
        with pytest.raises(RuntimeError):
            kept_bytes(net(), lambda: net()(torch.randn(8, 3)))
        assert not replaced()


class TestEffect:
    @pytest.mark.parametrize(
        ("kind", "more"), [(Net, {}), (Net, {"reentrant": True}), (Flagged, {})], ids=str
    )
    def test_each_block_runs_once_and_gives_the_same(self, kind: Any, more: Any) -> None:
        model = net(kind, **more)
        fix = RecomputeOff().apply(scene(model))
        parity = fix.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        found = []
        for on in (False, True, False, True):
            fix.enable() if on else fix.disable()
            before = model.calls()
            model.zero_grad()
            torch.manual_seed(3)
            out = model(x())
            out.square().sum().backward()
            assert model.calls() - before == (LAYERS if on else 2 * LAYERS)
            found.append([out, *(p.grad for p in model.parameters())])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        if kind is Flagged:
            assert not any(model.cached)
        assert fix.settled()
        assert fix.failure() is None
        fix.undo()
        assert not replaced()

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by the compiler itself
    def test_compiled_flags_are_seen(self) -> None:
        model = net(Flagged)
        here = scene(model)
        fix, fast = RecomputeOff().apply(here), CompileModel().apply(here)
        assert fix.verify(Snapshot(model, (x(),))).passed
        fast.enable()
        for on in (True, False):
            fix.enable() if on else fix.disable()
            model(x()).sum().backward()
        assert fast.failure() is None
        assert fix.failure() is None
        fast.undo()
        fix.undo()

    def test_a_plan_predicts_before_it_acts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for room in (10**12, 10):
            monkeypatch.setattr(recompute_off, "memory", lambda _, room=room: (0, room))
            model = net()
            fix = RecomputeOff().apply(scene(model), {"checkpointing": "off"})
            fix.enable()
            assert not replaced()
            model(x()).sum().backward()
            assert replaced() == (room > 10)
            assert (fix.failure() is None) == (room > 10)
            fix.undo()
            assert not replaced()

    def test_a_forward_that_runs_out_of_memory_runs_again_as_before(self) -> None:
        model = net()
        fix = RecomputeOff().apply(scene(model))
        assert fix.verify(Snapshot(model, (x(),))).passed
        fix.enable()
        limit = model.blocks[0].forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if replaced():
                raise torch.OutOfMemoryError("no memory")
            return limit(x)

        model.blocks[0].forward = forward
        assert model(x()).shape == (8, WIDTH)
        assert "no memory" in str(fix.failure())
        assert not replaced()


def test_a_reentrant_checkpoint_without_inputs_that_are_trained_stays_without_gradients() -> None:
    torch.manual_seed(0)
    block = Block()
    head = nn.Linear(WIDTH, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = block, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=True))

    model = Model()
    fix = RecomputeOff().apply(scene(model))
    assert fix.verify(Snapshot(model, (x(),))).passed
    fix.enable()
    model(x()).sum().backward()
    fix.undo()
    assert block.into.weight.grad is None
    assert head.weight.grad is not None


class TestUndo:
    @pytest.mark.parametrize("kind", [Net, Flagged])
    def test_nothing_is_left(self, kind: Any) -> None:
        model = net(kind)
        names = [sorted(vars(m)) for m in model.modules()]
        rng = torch.get_rng_state()
        fix = RecomputeOff().apply(scene(model))
        fix.verify(Snapshot(model, (x(),)))
        for _ in range(2):
            fix.enable()
            fix.enable()
            fix.disable()
            fix.disable()
        fix.enable()
        copy.deepcopy(model), pickle.dumps(model)
        fix.undo()
        assert not replaced()
        assert [sorted(vars(m)) for m in model.modules()] == names
        assert all(getattr(m, "gradient_checkpointing", True) for m in model.modules())
        assert torch.equal(torch.get_rng_state(), rng)
