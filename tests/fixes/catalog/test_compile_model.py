from __future__ import annotations

import contextlib
import copy
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import checkpoint

from flopwise.fixes import compiling
from flopwise.fixes.catalog import compile_model
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.compile_model import CompileModel, alarm_problem
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.kit.compiler import break_even_steps, compiler_problem
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo and AOTAutograd as ever, without code generation."""
    monkeypatch.setattr(compiling, "BACKEND", lookup_backend("aot_eager"))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(dropout), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.sin(self.first(x)) * 2))


@torch._dynamo.disable
def aside(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Breaks(Net):
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


def net(kind: Any = Net, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**kwargs)


def x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, frac: float | None = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


def compiled_in_place() -> nn.Module:
    module = net()
    module.compile(backend="eager")
    return module


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no root"),
            (lambda: scene(net(), facts=Facts(compiles=True)), "compiles its model itself"),
            (lambda: scene(compiled_in_place()), "compiles its model itself"),
            (lambda: scene(nn.DataParallel(net())), "DataParallel"),
            (lambda: scene(net(), device=torch.device("mps")), "mps"),
            (lambda: scene(net(), frac=0.01), "1.0 %"),
            (lambda: scene(net(), frac=None), "not measured"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = CompileModel().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_plain_model(self) -> None:
        assert isinstance(CompileModel().check(scene(net())), Eligible)

    def test_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        assert compiler_problem(torch.device("cpu")) == "there is no C++ compiler"

    def test_outside_the_main_thread(self) -> None:
        found: list[str | None] = []
        thread = threading.Thread(target=lambda: found.append(alarm_problem()))
        thread.start()
        thread.join()
        assert "main thread" in found[0]

    def test_where_the_script_uses_the_alarm(self) -> None:
        before = signal.signal(signal.SIGALRM, lambda *args: None)
        try:
            assert "alarm" in CompileModel().check(scene(net())).reason
        finally:
            signal.signal(signal.SIGALRM, before)

    @pytest.mark.usefixtures("quick")
    def test_after_more_graph_breaks_than_stated(self) -> None:
        model = net(Breaks)
        applied = CompileModel().apply(scene(model))
        parity = applied.verify(Snapshot(model, (x(),)))
        assert not parity.passed
        assert "graph breaks, more than 8" in parity.detail
        applied.undo()

    def test_when_nothing_was_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        model = net()
        applied = CompileModel().apply(scene(model))
        assert applied.verify(Snapshot(model, (x(),))).detail == "nothing was compiled"

    @pytest.mark.usefixtures("quick")
    def test_when_it_keeps_compiling(self) -> None:
        class Counts(Net):  # TC-01: a guard on an attribute that changes
            calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return super().forward(x) * (1 + 0 * self.calls)

        model = net(Counts)
        applied = CompileModel().apply(scene(model))
        applied.enable()
        torch._dynamo.config.recompile_limit, before = 20, torch._dynamo.config.recompile_limit
        try:
            for _ in range(12):
                model(x())
        finally:
            torch._dynamo.config.recompile_limit = before
        assert "times more while it was on" in applied.failure()


class TestTimeLimit:
    def test_tc_08_a_compilation_without_end_is_abandoned_and_the_run_goes_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def endless(graph: Any, inputs: Any) -> Any:
            while True:
                with contextlib.suppress(Exception):  # as compilers do
                    time.sleep(0.05)

        monkeypatch.setattr(compiling, "BACKEND", endless)
        model = net()
        weights = copy.deepcopy(model.state_dict())
        applied = compile_model._Applied([model], deadline_s=0.5)
        started = time.monotonic()
        parity = applied.verify(Snapshot(model, (x(),)))
        assert time.monotonic() - started < 10
        assert not parity.passed
        assert "abandoned after" in parity.detail
        assert "continuing eager" in parity.detail
        applied.enable()
        model(x()).sum().backward()
        assert all(
            torch.equal(a, b)
            for a, b in zip(weights.values(), model.state_dict().values(), strict=True)
        )
        assert alarm_problem() is None
        applied.undo()

    def test_without_a_rehearsal_the_first_forward_is_limited(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def endless(graph: Any, inputs: Any) -> Any:
            while True:
                time.sleep(0.05)

        monkeypatch.setattr(compiling, "BACKEND", endless)
        model = net()
        applied = compile_model._Applied([model], deadline_s=0.5)
        wanted = model(x())
        applied.enable()
        assert torch.equal(model(x()), wanted)
        assert "abandoned" in applied.failure()
        assert torch.equal(model(x()), wanted)

    def test_a_compiler_that_raises_is_a_failure_of_the_fix_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(graph: Any, inputs: Any) -> Any:
            raise ValueError("no such kernel")

        monkeypatch.setattr(compiling, "BACKEND", broken)
        model = net()
        applied = CompileModel().apply(scene(model))
        parity = applied.verify(Snapshot(model, (x(),)))
        assert not parity.passed
        assert "no such kernel" in parity.detail
        model(x())


class TestEffect:
    def test_compiled_by_inductor_the_numbers_agree_and_switching_compiles_nothing(self) -> None:
        model = (
            net(nn.Sequential)
            if False
            else nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
        )
        applied = CompileModel().apply(scene(model))
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        assert parity.grad_rel < 1e-4
        assert applied.compile_s > 0
        compiled = frames()
        assert compiled >= 1  # a container of library layers, which Module.compile leaves alone
        for on in (True, False, True):
            applied.enable() if on else applied.disable()
            model(x()).sum().backward()
        assert frames() == compiled
        assert applied.failure() is None
        applied.undo()

    @pytest.mark.usefixtures("quick")
    def test_dropout_is_off_in_the_comparison_and_the_training_variant_is_compiled_too(
        self,
    ) -> None:
        model = net(dropout=0.5)
        applied = CompileModel().apply(scene(model))
        rng = torch.get_rng_state()
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        assert "dropout off" in parity.detail
        assert torch.equal(torch.get_rng_state(), rng)
        compiled = frames()
        applied.enable()
        model(x()).sum().backward()
        assert frames() == compiled

    @pytest.mark.usefixtures("quick")
    def test_an_evaluation_is_not_compiled(self) -> None:
        model = net()
        applied = CompileModel().apply(scene(model))
        applied.verify(Snapshot(model, (x(),)))
        applied.enable()
        compiled = frames()
        with torch.no_grad():
            model.eval()(x(5))
        assert frames() == compiled

    def test_tc_06_a_wrong_compiler_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(graph: Any, inputs: Any) -> Any:
            return lambda *args: tuple(o * 1.01 for o in graph(*args))

        monkeypatch.setattr(compiling, "BACKEND", wrong)
        model = net()
        assert not CompileModel().apply(scene(model)).verify(Snapshot(model, (x(),))).passed

    def test_tc_04_break_even(self) -> None:
        assert break_even_steps(6.0, 0.003, 0.002) == 6000
        assert break_even_steps(6.0, 162e-6, 276e-6) is None


class Written(nn.Module):
    """Attention that is written out, with its mask in a buffer; part of it may be checkpointed."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.qkv, self.last, self.drop = nn.Linear(6, 18), nn.Linear(6, 3), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)))
        self.checkpointed = checkpointed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 3)).transpose(1, 2) for y in self.qkv(x).split(6, 2))
        scores = q @ k.transpose(-2, -1) / 3**0.5
        scores = scores.masked_fill(self.bias[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)
        return self.last(y)


class TestAttention:
    def inputs(self) -> torch.Tensor:
        return torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("checkpointed", [False, True])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_is_fused_and_the_numbers_hold(
        self, checkpointed: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiling, "BACKEND", lookup_backend("aot_eager"))
        model = net(Written, checkpointed=checkpointed)
        low = Bf16Autocast().apply(scene(model))
        if autocast:
            low.enable()
        applied = CompileModel().apply(scene(model))
        parity = applied.verify(Snapshot(model, (self.inputs(),)))
        assert parity.passed, parity.detail
        assert applied.setting["attention"] == "replaced 1"
        applied.undo()
        low.undo()

    @pytest.mark.usefixtures("quick")
    @pytest.mark.parametrize("alike", [True, False])
    def test_blocks_share_code_where_their_masks_are_equal(self, alike: bool) -> None:
        class Block(Written):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.attend(x)

        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

        model = net(Stack)
        if not alike:
            model.blocks[2].bias[0, 1] = 1.0
        applied = CompileModel().apply(scene(model), {"parts": "blocks"})
        parity = applied.verify(Snapshot(model, (self.inputs(),)))
        assert parity.passed, parity.detail
        assert applied.setting["parts"] == "blocks"
        assert applied.setting["attention"] == "replaced 1"
        model.blocks[1].bias.zero_()
        applied.enable()
        model(self.inputs())
        assert ("bias" in (applied.failure() or "")) is alike
        applied.undo()

    def test_by_inductor_without_a_change_of_its_settings(self) -> None:
        from torch._inductor import config

        before = config.save_config()
        model = net(Written)
        applied = CompileModel().apply(scene(model))
        parity = applied.verify(Snapshot(model, (self.inputs(),)))
        assert parity.passed, parity.detail
        assert applied.setting["attention"] == "replaced 1"
        applied.undo()
        assert config.save_config() == before

    @pytest.mark.usefixtures("quick")
    def test_a_mask_that_the_script_writes_later_ends_it(self) -> None:
        model = net(Written)
        model.drop.p = 0.0
        applied = CompileModel().apply(scene(model))
        applied.verify(Snapshot(model, (self.inputs(),)))
        applied.enable()
        before = model(self.inputs())
        assert applied.failure() is None
        model.bias.fill_(1.0)  # everything is seen now
        after = model(self.inputs())
        assert torch.equal(after, model._call_impl(self.inputs()))
        assert not torch.allclose(before, after)
        assert "bias, a mask that attention was compiled with" in applied.failure()
        applied.undo()


@pytest.mark.usefixtures("quick")
class TestStacking:
    @pytest.mark.parametrize("first", ["bf16", "compile"])
    @pytest.mark.parametrize("off", ["bf16", "compile"])
    def test_with_bf16_in_any_order(self, first: str, off: str) -> None:
        model = net()
        names = sorted(vars(model))
        seen = []
        model.first.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
        fixes = {"bf16": Bf16Autocast(), "compile": CompileModel()}
        order = [first, "compile" if first == "bf16" else "bf16"]
        applied = {}
        for name in order:
            applied[name] = fixes[name].apply(scene(model))
            parity = applied[name].verify(Snapshot(model, (x(),)))
            assert parity.passed, parity.detail
            assert "against float64" in parity.bound_source
            applied[name].enable()
        seen.clear()
        compiled = frames()
        out = model(x())
        out.sum().backward()
        assert out.dtype == torch.float32
        assert 1e-4 < (out - model._call_impl(x())).abs().max() < 0.1  # bf16 is on
        applied[off].disable()
        if off == "compile":
            assert (model(x()) - out).abs().max() < 0.02
        else:
            torch.testing.assert_close(model(x()), model._call_impl(x()))
        applied[off].enable()
        assert torch.equal(model(x()), out)
        for name in reversed(order):
            applied[name].undo()
        assert sorted(vars(model)) == names
        assert frames() >= compiled


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Square() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) + x


@pytest.mark.usefixtures("quick")
class TestDdp:
    @pytest.fixture(autouse=True)
    def _group(self, tmp_path: Path) -> Iterator[None]:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.parametrize("setting", [None, {"parts": "whole"}])
    def test_the_module_inside_is_compiled_by_blocks_unless_a_plan_says_otherwise(
        self, setting: Any
    ) -> None:
        def grads(fixed: bool) -> list[torch.Tensor]:
            model = nn.parallel.DistributedDataParallel(net(Deep))
            applied = CompileModel().apply(scene(model), setting)
            if fixed:
                parity = applied.verify(Snapshot(model, (x(),)))
                assert parity.passed, parity.detail
                assert applied.setting["parts"] == ("whole" if setting else "blocks")
                applied.enable()
                compiled = frames()
            for k in range(4):
                with model.no_sync() if k % 2 else contextlib.nullcontext():
                    model(x()).sum().backward()
            if fixed:
                assert frames() == compiled
                assert applied.settled()
            assert applied.failure() is None
            applied.undo()
            assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
            return [p.grad for p in model.module.inner.parameters()]

        for a, b in zip(grads(True), grads(False), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("quick")
class TestUndo:
    def test_type_state_attributes_and_signals_are_as_before(self) -> None:
        model = net()
        names, state = [sorted(vars(m)) for m in model.modules()], list(model.state_dict())
        applied = CompileModel().apply(scene(model))
        applied.verify(Snapshot(model, (x(),)))
        for _ in range(2):
            applied.enable()
            model(x())
            applied.disable()
        applied.enable()
        applied.undo()
        assert type(model) is Net
        assert [sorted(vars(m)) for m in model.modules()] == names
        assert list(model.state_dict()) == state
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    def test_it_can_be_applied_again(self) -> None:
        model = net()
        for _ in range(2):
            applied = CompileModel().apply(scene(model))
            assert applied.verify(Snapshot(model, (x(),))).passed
            applied.undo()
