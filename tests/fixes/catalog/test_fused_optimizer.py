from __future__ import annotations

import copy
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.meter.replay import Snapshot


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, dtype=dtype)), nn.Parameter(torch.randn(7, dtype=dtype))]


def steps(optimizer: Optimizer, n: int = 3, seed: int = 0) -> Optimizer:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return optimizer


def scene(*optimizers: Optimizer, frac: float | None = 0.3, roots: Any = ()) -> Scene:
    return Scene(optimizers=optimizers, optimizer_frac=frac, roots=roots)


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def compiled_step() -> Optimizer:
    optimizer = AdamW(parameters())
    optimizer.step = torch.compile(optimizer.step)
    return optimizer


def half_with_momentum() -> Optimizer:
    first, second = parameters()
    optimizer = SGD([first, second], lr=0.1, momentum=0.9)
    first.grad = torch.ones_like(first)
    optimizer.step()
    return optimizer


def sparse() -> Scene:
    table = nn.Embedding(4, 3, sparse=True)
    return scene(SGD(table.parameters(), lr=0.1), roots=(table,))


KINDS = {
    "Adam": lambda: Adam(parameters()),
    "Adam amsgrad": lambda: Adam(parameters(), amsgrad=True),
    "AdamW": lambda: AdamW(parameters(), weight_decay=0.1),
    "AdamW maximize": lambda: AdamW(parameters(), maximize=True),
    "AdamW foreach": lambda: AdamW(parameters(), foreach=True),
    "AdamW float64": lambda: AdamW(parameters(torch.float64)),
    "AdamW bfloat16": lambda: AdamW(parameters(torch.bfloat16)),
    "AdamW tensor rate": lambda: AdamW(parameters(), lr=torch.tensor(1e-3)),
    "SGD tensor rate": lambda: SGD(parameters(), lr=torch.tensor(0.1), momentum=0.9),
    "SGD": lambda: SGD(parameters(), lr=0.1),
    "SGD nesterov": lambda: SGD(
        parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD dampening": lambda: SGD(parameters(), lr=0.1, momentum=0.9, dampening=0.1),
    "Adagrad": lambda: Adagrad(parameters(), lr_decay=0.1),
    "two groups": lambda: AdamW(
        [{"params": [p], "lr": 10.0**-i} for i, p in enumerate(parameters(), 2)]
    ),
}


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no torch optimizer"),
            (lambda: scene(torch.optim.RMSprop(parameters())), "RMSprop"),
            (lambda: scene(OwnStep(parameters())), "OwnStep"),
            (lambda: scene(compiled_step()), "replaced"),
            (lambda: scene(AdamW(parameters(), fused=True)), "fused already"),
            (lambda: scene(AdamW(parameters(), capturable=True)), "capturable"),
            (lambda: scene(AdamW(parameters(), differentiable=True)), "differentiable"),
            (lambda: scene(Adagrad(parameters(), lr=torch.tensor(1e-3))), "lr is a tensor"),
            (lambda: scene(AdamW(parameters(torch.complex64))), "complex64"),
            (lambda: scene(SGD([nn.Parameter(torch.ones(2, device="meta"))], lr=0.1)), "meta"),
            (lambda: scene(half_with_momentum()), "no momentum yet"),
            (sparse, "sparse"),
            (lambda: scene(AdamW(parameters()), frac=0.01), "1.0 %"),
            (lambda: scene(AdamW(parameters()), frac=None), "not measured"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = FusedOptimizer().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    @pytest.mark.parametrize("made", KINDS.values(), ids=KINDS.keys())
    def test_not_what_has_a_fused_kernel(self, made: Any) -> None:
        assert isinstance(FusedOptimizer().check(scene(made())), Eligible)

    def test_not_a_step_that_a_scheduler_has_wrapped(self) -> None:
        optimizer = AdamW(parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert isinstance(FusedOptimizer().check(scene(optimizer)), Eligible)


class TestEffect:
    @pytest.mark.parametrize("made", KINDS.values(), ids=KINDS.keys())
    def test_the_update_agrees(self, made: Any) -> None:
        optimizer = steps(made())
        applied = FusedOptimizer().apply(scene(optimizer))
        parity = applied.verify(Snapshot(nn.Identity()))
        assert parity.passed, parity.detail

    def test_the_fused_kernel_runs_while_it_is_on_and_only_then(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran = []
        kernel = torch._fused_adamw_
        monkeypatch.setattr(
            torch, "_fused_adamw_", lambda *a, **k: (ran.append(1), kernel(*a, **k))
        )
        optimizer = steps(AdamW(parameters()))
        applied = FusedOptimizer().apply(scene(optimizer))
        steps(optimizer, 2)
        assert ran == []
        applied.enable()
        steps(optimizer, 2)
        assert len(ran) == 2
        applied.disable()
        steps(optimizer, 2)
        assert len(ran) == 2

    def test_toggled_training_follows_the_bare_one(self) -> None:
        bare, ours = steps(AdamW(parameters())), steps(AdamW(parameters()))
        applied = FusedOptimizer().apply(scene(ours))
        for k in range(12):
            applied.enable() if k % 3 else applied.disable()
            steps(bare, 1, k)
            steps(ours, 1, k)
        for a, b in zip(
            bare.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert all(s["step"].item() == 15 for s in ours.state.values())

    def test_a_wrong_kernel_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = torch._fused_adamw_

        def wrong(*args: Any, **kwargs: Any) -> Any:
            kwargs["lr"] *= 1.01
            return kernel(*args, **kwargs)

        monkeypatch.setattr(torch, "_fused_adamw_", wrong)
        optimizer = steps(AdamW(parameters()))
        assert not FusedOptimizer().apply(scene(optimizer)).verify(Snapshot(nn.Identity())).passed

    @pytest.mark.parametrize("scaled", [True, False], ids=["told", "not told"])
    def test_a_grad_scaler_skips_and_unscales_the_same_way(self, scaled: bool) -> None:
        def run(fuse: bool) -> list[Any]:
            params = parameters()
            optimizer = AdamW(params)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            told = Facts(grad_scaler=scaled)
            applied = FusedOptimizer().apply(replace(scene(optimizer), facts=told))
            for k in range(6):
                optimizer.zero_grad()
                factor = float("inf") if k == 3 else 1.0
                loss = sum((p**2).sum() for p in params) * factor
                scaler.scale(loss).backward()
                if fuse:
                    applied.enable() if k % 2 else applied.disable()
                scaler.step(optimizer)
                scaler.update()
            applied.undo()
            counts = [s["step"].item() for s in optimizer.state.values()]
            return [torch.cat([p.detach().view(-1) for p in params]), scaler.get_scale(), counts]

        bare, ours = run(False), run(True)
        torch.testing.assert_close(ours[0], bare[0], rtol=1e-5, atol=1e-7)
        assert ours[1:] == bare[1:]
        assert bare[2] == [5.0, 5.0]

    @pytest.mark.parametrize("scaler", [True, False])
    @pytest.mark.parametrize("framework", ["", "lightning_fabric", "lightning.fabric"])
    def test_lightning_is_not_told_that_the_kernel_unscales(
        self, monkeypatch: pytest.MonkeyPatch, framework: str, scaler: bool
    ) -> None:
        """Its precision plugins refuse to clip gradients for such an optimizer, and the script would end there."""
        for name in ("lightning_fabric", "lightning.fabric"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        if framework:
            monkeypatch.setitem(sys.modules, framework, ModuleType(framework))
        optimizer = steps(AdamW(parameters()))
        before = dict(vars(optimizer))
        facts = Facts(grad_scaler=scaler)
        applied = FusedOptimizer().apply(replace(scene(optimizer), facts=facts))
        applied.enable()
        told = getattr(optimizer, "_step_supports_amp_scaling", False)
        assert told is (scaler and not framework)
        steps(optimizer)
        applied.undo()
        assert vars(optimizer).keys() == before.keys()

    def test_what_has_become_impossible_is_left_off(self) -> None:
        optimizer = steps(AdamW(parameters()))
        applied = FusedOptimizer().apply(scene(optimizer))
        optimizer.param_groups[0]["weight_decay"] = torch.tensor(1e-3)
        applied.enable()
        assert "tensor" in applied.failure()
        assert not optimizer.param_groups[0]["fused"]

    def test_a_group_that_is_added_meanwhile_is_fused_and_put_back(self) -> None:
        optimizer = steps(AdamW(parameters()))
        applied = FusedOptimizer().apply(scene(optimizer))
        applied.enable()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        steps(optimizer, 2)
        assert [g["fused"] for g in optimizer.param_groups] == [True, True]
        applied.disable()
        assert [g["fused"] for g in optimizer.param_groups] == [None, None]
        assert [g["foreach"] for g in optimizer.param_groups] == [None, None]
        steps(optimizer, 1)
        assert [s["step"] for s in optimizer.state.values()] == [6, 6, 3]

    def test_what_is_saved_while_it_is_on_is_what_the_script_would_have_saved(self) -> None:
        bare, ours = steps(AdamW(parameters())), steps(AdamW(parameters()))
        applied = FusedOptimizer().apply(scene(ours))
        applied.enable()
        steps(ours, 2, 7)
        steps(bare, 2, 7)
        live = ours.state[ours.param_groups[0]["params"][0]]["step"]
        saved, expected = ours.state_dict(), bare.state_dict()
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        for index, entry in expected["state"].items():
            assert saved["state"][index].keys() == entry.keys()
            assert torch.equal(saved["state"][index]["step"], entry["step"])
        assert ours.param_groups[0]["fused"] is True
        assert ours.state[ours.param_groups[0]["params"][0]]["step"] is live

    def test_a_state_that_is_loaded_while_it_is_on_is_fused_as_well(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bare, ours = steps(AdamW(parameters()), 4), steps(AdamW(parameters()))
        checkpoint = copy.deepcopy(bare.state_dict())
        applied = FusedOptimizer().apply(scene(ours))
        applied.enable()
        ours.load_state_dict(checkpoint)
        ran, kernel = [], torch._fused_adamw_
        monkeypatch.setattr(
            torch, "_fused_adamw_", lambda *a, **k: (ran.append(1), kernel(*a, **k))
        )
        steps(ours, 1)
        assert ran == [1]
        applied.disable()
        steps(ours, 1)
        assert ran == [1]
        assert [s["step"] for s in ours.state.values()] == [6, 6]
        assert str(ours.state_dict()["param_groups"]) == str(checkpoint["param_groups"])

    @pytest.mark.parametrize("clips", [False, True])
    def test_a_schedule_and_clipping_go_on_as_without(self, clips: bool) -> None:
        def run(fuse: bool) -> list[torch.Tensor]:
            optimizer = AdamW(parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
            applied = FusedOptimizer().apply(scene(optimizer))
            generator = torch.Generator().manual_seed(0)
            for k in range(12):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.randn(p.shape, generator=generator)
                if clips:
                    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                if fuse:
                    applied.enable() if k % 4 else applied.disable()
                optimizer.step()
                schedule.step()
            applied.undo()
            return optimizer.param_groups[0]["params"]

        for a, b in zip(run(True), run(False), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_a_float64_step_counter_is_moved_and_put_back(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            optimizer = steps(AdamW(parameters(torch.float32)))
            counters = [s["step"] for s in optimizer.state.values()]
            assert counters[0].dtype == torch.float64
            applied = FusedOptimizer().apply(scene(optimizer))
            applied.enable()
            steps(optimizer, 2)
            applied.disable()
            assert [s["step"] for s in optimizer.state.values()] == [5, 5]
            for state, counter in zip(optimizer.state.values(), counters, strict=True):
                assert state["step"] is counter
        finally:
            torch.set_default_dtype(torch.float32)


class TestUndo:
    @pytest.fixture(params=list(KINDS))
    def optimizer(self, request: pytest.FixtureRequest) -> Optimizer:
        return steps(KINDS[request.param]())

    def test_groups_state_and_attributes_are_as_before(self, optimizer: Optimizer) -> None:
        def look() -> Any:
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            state = [{k: id(v) for k, v in s.items()} for s in optimizer.state.values()]
            hooks = [len(v) for n, v in vars(optimizer).items() if n.endswith("_hooks")]
            own = sorted(vars(optimizer)), dict(optimizer.defaults), hooks
            return groups, [list(g) for g in groups], state, own

        before, saved = look(), copy.deepcopy(optimizer.state_dict())
        applied = FusedOptimizer().apply(scene(optimizer))
        for _ in range(3):
            applied.enable()
            applied.enable()
            applied.disable()
            applied.disable()
        applied.enable()
        applied.undo()
        assert look() == before
        assert str(optimizer.state_dict()) == str(saved)

    def test_after_the_script_has_loaded_a_state(self) -> None:
        optimizer = steps(AdamW(parameters()))
        applied = FusedOptimizer().apply(scene(optimizer))
        applied.enable()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        applied.undo()
        assert not any(g["fused"] for g in optimizer.param_groups)
        steps(optimizer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    def test_step_counters_move_with_the_switch(self) -> None:
        params = [nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(4)]
        optimizer = AdamW(params)

        def run(n: int) -> None:
            for _ in range(n):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()

        run(3)
        counters = [s["step"] for s in optimizer.state.values()]
        applied = FusedOptimizer().apply(scene(optimizer))
        assert applied.verify(Snapshot(nn.Identity())).passed
        applied.enable()
        assert all(s["step"].is_cuda for s in optimizer.state.values())
        run(2)
        applied.disable()
        assert [s["step"] for s in optimizer.state.values()] == [5.0] * 4
        assert all(a is s["step"] for a, s in zip(counters, optimizer.state.values(), strict=True))
        run(1)

    def test_capturable_counters_stay_on_the_device(self) -> None:
        params = [nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(4)]
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = AdamW(params, lr=rate, capturable=True)

        def run(n: int) -> None:
            for _ in range(n):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()

        run(3)
        applied = FusedOptimizer().apply(scene(optimizer))
        parity = applied.verify(Snapshot(nn.Identity()))
        assert parity.passed, parity.detail
        counters = [s["step"] for s in optimizer.state.values()]
        applied.enable()
        run(2)
        applied.disable()
        assert all(a is s["step"] for a, s in zip(counters, optimizer.state.values(), strict=True))
        assert all(s["step"].is_cuda for s in optimizer.state.values())
        run(1)
        assert [float(s["step"]) for s in optimizer.state.values()] == [6.0] * 4
