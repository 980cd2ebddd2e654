from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import checkpoint

from flopwise.fixes import compiling
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.compiling import Compiling
from flopwise.fixes.interface import Applied, Scene
from flopwise.kit.nested import copies
from flopwise.meter.replay import Snapshot

# The time limit under test is the alarm signal, which the usual method of pytest-timeout takes for itself.
pytestmark = pytest.mark.timeout(200, method="thread")


def frames() -> int:
    return torch._dynamo.utils.counters["frames"]["ok"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo and AOTAutograd as ever, without code generation."""
    monkeypatch.setattr(compiling, "BACKEND", lookup_backend("aot_eager"))


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.grow = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.drop, self.shrink = nn.Dropout(dropout), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shrink(self.drop(F.gelu(self.grow(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Breaks(Stack):
    """Nine graph breaks, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        x = aside(x) * 2
        return super().forward(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.depthwise(F.silu(self.norm(self.conv(x)))))
        return self.head(x.mean((2, 3)))


def stack(**options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**options)


def x(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def images(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(rows))


def tried(model: nn.Module, given: torch.Tensor, **options: Any) -> Compiling:
    """Returns the fix verified and switched on."""
    applied = Compiling([model], 60.0, **options)
    parity = applied.verify(Snapshot(model, (given,)))
    assert parity.passed, parity.detail
    applied.enable()
    return applied


@torch._dynamo.disable
def aside(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


class TestKindsOfCalls:
    def test_nothing_compiles_in_training_after_the_rehearsal(self) -> None:
        model = stack(dropout=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        applied = tried(model, x())
        compiled = frames()
        for k in range(8):
            loss = F.mse_loss(model(x()), torch.zeros(6, 4)) / 2  # the loss lies outside
            loss.backward()
            if k % 2:  # gradients are accumulated over two batches
                optimizer.step()
                optimizer.zero_grad()
            if k == 3:
                with torch.no_grad():
                    model.eval()(x(5))
                model.train()
            if k == 5:
                model.eval()(x(5))  # an evaluation that records gradients
                model.train()
        assert frames() == compiled
        assert applied.failure() is None
        applied.undo()

    def test_inputs_that_are_one_tensor_or_slices_of_another_are_rehearsed_as_such(self) -> None:
        class Loss(Stack):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return F.mse_loss(super().forward(x), labels[:, :4])

        torch.manual_seed(0)
        long = torch.randn(6, 9)
        for given in ((long[:, :-1], long[:, 1:]), (x(), None)):
            args = given if given[1] is not None else (given[0], given[0])
            model = Loss()
            applied = Compiling([model], 60.0)
            snapshot = Snapshot(model, copies(args))
            assert applied.verify(snapshot).passed
            applied.enable()
            compiled = frames()
            for _ in range(3):
                model(*args).backward()
            assert frames() == compiled
            assert applied.settled()
            applied.undo()

    def test_an_odd_last_batch_runs_eagerly_and_leaves_the_code_of_the_others_alone(self) -> None:
        model = stack()
        applied = tried(model, x())
        compiled = frames()
        for _ in range(6):
            for rows in (6, 6, 6, 6, 6, 6, 2):
                assert torch.allclose(model(x(rows)), model._call_impl(x(rows)), atol=1e-6)
        assert frames() == compiled
        assert applied.failure() is None
        applied.undo()

    def test_a_new_size_that_stays_gets_code_of_its_own_once(self) -> None:
        model = stack()
        applied = tried(model, x())
        compiled = frames()
        for k in range(40):
            model(x(9)).sum().backward()
            if k == compiling.ODD_CALLS - 2:
                assert frames() == compiled
        assert frames() == compiled + 1
        for _ in range(5):
            model(x(6))
        assert frames() == compiled + 1
        assert applied.failure() is None
        applied.undo()

    def test_changing_sizes_get_code_for_any_size_and_the_first_keeps_its_own(self) -> None:
        model = stack()
        applied = tried(model, x())
        compiled = frames()
        sizes = [5, 7, 9, 11, 13, 14, 15, 16, 17, 18, 19, 20, 21]
        for k in range(60):
            given = x(sizes[k % 13])
            out = model(given)
            assert torch.allclose(out, model._call_impl(given), atol=1e-6)
            assert not any(part._marked for part in applied._parts)
        assert frames() == compiled + 1
        for _ in range(10):
            model(x(6))
        assert frames() == compiled + 1
        assert applied.failure() is None
        applied.undo()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_disabled_autocast_of_another_dtype_is_the_same_kind(self, dtype: Any) -> None:
        model = stack()
        applied = tried(model, x())
        compiled = frames()
        with torch.autocast("cpu", dtype=dtype, enabled=False):
            model(x())
        assert frames() == compiled
        applied.undo()

    def test_under_a_mode_that_counts_operations_it_is_eager(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        model = stack()
        applied = tried(model, x())
        compiled = frames()
        with FlopCounterMode(display=False) as counter:
            model(x())
        assert counter.get_total_flops() == 6 * 2 * (3 * 2 * 8 * 16 + 8 * 4)
        assert frames() == compiled
        applied.undo()


class TestBesideOthers:
    """The combination that is timed is the one that was rehearsed."""

    def fixes(self, model: nn.Module) -> dict[str, Applied]:
        scene = Scene(roots=(model,), compute_frac=0.9)
        return {"last": ChannelsLast().apply(scene), "low": Bf16Autocast().apply(scene)}

    def test_verified_with_others_on_it_compiles_nothing_more(self) -> None:
        torch.manual_seed(0)
        model = Cnn()
        others = self.fixes(model)
        for other in others.values():
            other.enable()
        applied = Compiling([model], 60.0)
        parity = applied.verify(Snapshot(model, (images(),)))
        assert parity.passed, parity.detail
        assert "against float64" in parity.bound_source
        applied.enable()
        compiled = frames()
        for _ in range(4):
            model(images()).sum().backward()
            assert applied.settled()
        assert frames() == compiled
        assert applied.failure() is None

    def test_a_combination_that_was_not_verified_is_eager_until_it_is_rehearsed(self) -> None:
        torch.manual_seed(0)
        model = Cnn()
        applied = tried(model, images())
        others = self.fixes(model)
        for other in others.values():
            other.enable()
        compiled = frames()
        model(images()).sum().backward()
        assert frames() == compiled
        assert not applied.settled()
        state = copy.deepcopy(model.state_dict())
        rng = torch.get_rng_state()
        assert applied.rehearse(Snapshot(model, (images(),))) is None
        assert torch.equal(torch.get_rng_state(), rng)
        assert all(
            torch.equal(a, b)
            for a, b in zip(state.values(), model.state_dict().values(), strict=True)
        )
        assert frames() == compiled + 1
        for _ in range(3):
            model(images()).sum().backward()
        assert frames() == compiled + 1
        assert applied.settled()
        # Back to what was verified alone: still there.
        for other in others.values():
            other.disable()
        model(images()).sum().backward()
        assert frames() == compiled + 1
        assert applied.settled()
        applied.undo()
        for other in others.values():
            other.undo()
        assert "_compiled_call_impl" not in vars(model)

    def test_switching_back_and_forth_is_settled_with_the_first_call(self) -> None:
        model = stack()
        applied = tried(model, x())
        compiled = frames()
        for _ in range(3):
            model(x())
            assert applied.settled()
            applied.disable()
            assert applied.settled()
            model(x())
            applied.enable()
        assert frames() == compiled
        applied.undo()


class TestBlocks:
    def test_of_a_model_with_too_many_breaks(self) -> None:
        torch.manual_seed(0)
        model = Breaks(dropout=0.2)
        applied = Compiling([model], 60.0)
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        assert "the whole model: 10 graph breaks, more than 8; 3 blocks: " in parity.detail
        assert applied.setting["parts"] == "blocks"
        applied.enable()
        compiled = frames()
        for _ in range(4):
            model(x()).sum().backward()
        assert frames() == compiled
        assert applied.settled()
        applied.undo()
        assert not any("_compiled_call_impl" in vars(m) for m in model.modules())

    def test_blocks_that_are_alike_share_their_code(self) -> None:
        model = stack(blocks=6)
        applied = Compiling([model], 60.0, blocks_first=True)
        assert applied.verify(Snapshot(model, (x(),))).passed
        assert frames() == 2  # the first one's input needs no gradient
        applied.undo()

    def test_of_a_model_that_does_not_compile_in_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slow_for_many(graph: Any, inputs: Any) -> Any:
            while sum(node.op == "call_function" for node in graph.graph.nodes) > 12:
                time.sleep(0.05)
            return graph

        monkeypatch.setattr(compiling, "BACKEND", slow_for_many)
        model = stack(blocks=4)
        applied = Compiling([model], 2.0)
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        assert "the whole model: compilation abandoned after 2 s" in parity.detail
        assert applied.setting == {"mode": "default", "parts": "blocks", "deadline_s": "2"}
        applied.undo()

    def test_of_a_model_that_a_compiler_breaks_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken_for_many(graph: Any, inputs: Any) -> Any:
            if sum(node.op == "call_function" for node in graph.graph.nodes) > 12:
                raise ValueError("no such kernel")
            return graph

        monkeypatch.setattr(compiling, "BACKEND", broken_for_many)
        model = stack(blocks=4)
        applied = Compiling([model], 60.0)
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        assert "no such kernel" in parity.detail
        applied.undo()

    def test_a_model_without_repeated_blocks_has_the_reason_of_the_whole(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(graph: Any, inputs: Any) -> Any:
            raise ValueError("no such kernel")

        monkeypatch.setattr(compiling, "BACKEND", broken)
        model = nn.Sequential(nn.Linear(8, 4))
        applied = Compiling([model], 60.0)
        parity = applied.verify(Snapshot(model, (x(),)))
        assert not parity.passed
        assert "no such kernel" in parity.detail
        applied.undo()

    def test_blocks_that_read_numbers_of_their_own_get_code_of_their_own(self) -> None:
        class Place(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * (1 + self.place)

        torch.manual_seed(0)
        model = Stack()
        model.blocks = nn.ModuleList(Place() for _ in range(10))
        for k, block in enumerate(model.blocks):
            block.place = 1.0 / (k + 2)
        applied = Compiling([model], 60.0, blocks_first=True)
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        applied.enable()
        compiled = frames()
        out = model(x())
        assert frames() == compiled
        assert torch.allclose(out, _eager(model, x()), atol=1e-6)
        applied.undo()


def _eager(model: Stack, given: torch.Tensor) -> torch.Tensor:
    twin = copy.deepcopy(model)  # a copy is without layers
    assert not any("_compiled_call_impl" in vars(m) for m in twin.modules())
    return twin(given)


class TestFailures:
    def test_compiled_code_that_raises_is_left_and_the_other_fixes_stay(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []

        def breaks_later(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                calls.append(1)
                if len(calls) > 4:
                    raise RuntimeError("illegal")
                return graph(*args)

            return run

        monkeypatch.setattr(compiling, "BACKEND", breaks_later)
        model = stack()
        low = Bf16Autocast().apply(Scene(roots=(model,), compute_frac=0.9))
        applied = tried(model, x())
        low.enable()
        wanted = model(x())
        assert applied.rehearse(Snapshot(model, (x(),))) is None
        for _ in range(6):
            assert torch.allclose(model(x()), wanted, atol=0.05)
        assert "illegal" in applied.failure()
        assert low.failure() is None
        plain = model._call_impl(x())
        assert (model(x()) - plain).abs().max() > 1e-4  # bf16 is still on
        applied.undo()
        low.undo()

    def test_an_error_of_the_script_stays_the_scripts(self) -> None:
        model = stack()
        applied = tried(model, x())
        with pytest.raises(RuntimeError, match=r"size|shape"):
            model(torch.zeros(6, 5))
        assert applied.failure() is None
        model(x())
        assert applied.settled()
        applied.undo()

    @pytest.mark.parametrize("parts", ["whole", "blocks"])
    def test_activation_checkpointing_goes_on(self, parts: str) -> None:
        class Checkpointed(Stack):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return self.head(x)

        def grads(fixed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Checkpointed()
            applied = Compiling([model], 60.0, blocks_first=parts == "blocks")
            if fixed:
                parity = applied.verify(Snapshot(model, (x(),)))
                assert parity.passed, parity.detail
                applied.enable()
            model(x()).sum().backward()
            checkpoint(model, x(), use_reentrant=False).sum().backward()
            assert applied.failure() is None
            applied.undo()
            return [p.grad for p in model.parameters()]

        for a, b in zip(grads(True), grads(False), strict=True):
            torch.testing.assert_close(a, b)

    def test_it_is_left_out_of_copies_and_files(self) -> None:
        model = stack()
        applied = tried(model, x())
        model(x())
        assert "_compiled_call_impl" not in vars(copy.deepcopy(model))
        pickle.dumps(model)
        applied.undo()
