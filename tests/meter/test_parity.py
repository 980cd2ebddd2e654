from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.meter.parity import compare_batches, compare_forward, compare_update
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import BFLOAT16


def nothing() -> None:
    pass


class Net(nn.Module):
    """Convolution, batch norm, dropout, a counter, a cache: everything that a forward can leave behind."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)
        self.seen = 0
        self.cache: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = torch.relu(self.norm(self.conv(x)))
        self.cache.append(h)
        self.last = h
        return self.head(self.drop(h.mean((2, 3))))


class WithLoss(nn.Module):
    """Returns its own loss, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 7))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def image_snapshot(dropout: float = 0.0) -> Snapshot:
    torch.manual_seed(0)
    return Snapshot(Net(dropout), (torch.randn(4, 3, 8, 8),))


def loss_snapshot() -> Snapshot:
    torch.manual_seed(0)
    return Snapshot(WithLoss(), (torch.randn(8, 16), torch.randint(0, 7, (8,))))


class Scaled:
    """A deliberately wrong fix: the module's weights are scaled."""

    def __init__(self, module: nn.Module, factor: float) -> None:
        self.module, self.factor, self.old = module, factor, []

    def enable(self) -> None:
        self.old = [p.detach().clone() for p in self.module.parameters()]
        with torch.no_grad():
            for p in self.module.parameters():
                p.mul_(self.factor)

    def disable(self) -> None:
        with torch.no_grad():
            for p, old in zip(self.module.parameters(), self.old, strict=False):
                p.copy_(old)
        self.old = []


class Hooked:
    """A fix that changes the module's output by a function."""

    def __init__(self, module: nn.Module, change: Any) -> None:
        self.module, self.change, self.handle = module, change, None

    def enable(self) -> None:
        self.handle = self.module.register_forward_hook(lambda m, args, out: self.change(out))

    def disable(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def state_of(snapshot: Snapshot) -> dict[str, Any]:
    module = snapshot.module
    return {
        "parameters": {n: p.detach().clone() for n, p in module.named_parameters()},
        "objects": {n: id(p) for n, p in module.named_parameters()},
        "buffers": {n: b.clone() for n, b in module.named_buffers()},
        "buffer objects": {n: id(b) for n, b in module.named_buffers()},
        "grads": {
            n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()
        },
        "flags": [m.training for m in module.modules()],
        "names": [sorted(vars(m)) for m in module.modules()],
        "seen": getattr(module, "seen", None),
        "cache": [id(t) for t in getattr(module, "cache", [])],
        "inputs": [a.clone() for a in snapshot.args],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class TestAFixThatChangesNothing:
    @pytest.mark.parametrize("numerics", ["identical", "reordered"])
    @pytest.mark.parametrize(
        "snapshot", [image_snapshot(), loss_snapshot()], ids=["outputs", "loss"]
    )
    def test_passes_with_no_difference(self, snapshot: Snapshot, numerics: str) -> None:
        parity = compare_forward(snapshot, nothing, nothing, numerics=numerics)
        assert parity.passed, parity.detail
        assert parity.grad_rel == 0.0
        assert parity.output_rel == 0.0
        assert parity.grad_cosine == pytest.approx(1.0, abs=1e-12)
        assert parity.numerics == numerics

    def test_gives_the_loss_of_a_module_that_returns_one(self) -> None:
        snapshot = loss_snapshot()
        parity = compare_forward(snapshot, nothing, nothing)
        assert (
            parity.loss_old
            == parity.loss_new
            == float(snapshot.module(*snapshot.args)["loss"].detach())
        )
        assert parity.loss_rel == 0.0

    def test_without_a_loss_none_is_invented(self) -> None:
        parity = compare_forward(image_snapshot(), nothing, nothing)
        assert parity.loss_old is None
        assert parity.loss_new is None
        assert parity.loss_rel is None


class TestAWrongFix:
    @pytest.mark.parametrize(
        "snapshot", [image_snapshot(), loss_snapshot()], ids=["outputs", "loss"]
    )
    @pytest.mark.parametrize("numerics", ["identical", "reordered"])
    def test_weights_off_by_one_percent_fail(self, snapshot: Snapshot, numerics: str) -> None:
        wrong = Scaled(snapshot.module, 1.01)
        parity = compare_forward(snapshot, wrong.enable, wrong.disable, numerics=numerics)
        assert not parity.passed
        assert parity.grad_rel is not None
        assert parity.grad_rel > max(parity.bound, 1e-4)

    def test_weights_off_by_a_millionth_fail(self) -> None:
        snapshot = loss_snapshot()
        wrong = Scaled(snapshot.module, 1 + 2e-5)
        assert not compare_forward(snapshot, wrong.enable, wrong.disable).passed

    def test_a_loss_off_by_a_hundredth_fails_even_by_the_bound_of_bfloat16(self) -> None:
        snapshot = loss_snapshot()
        wrong = Hooked(snapshot.module, lambda out: {**out, "loss": out["loss"] + 1e-2})
        fp32 = compare_forward(snapshot, wrong.enable, wrong.disable)
        bf16 = compare_forward(snapshot, wrong.enable, wrong.disable, unit_roundoff=BFLOAT16)
        assert not fp32.passed
        assert fp32.grad_rel == 0.0
        assert fp32.loss_new == pytest.approx(fp32.loss_old + 1e-2, rel=1e-5)
        assert fp32.loss_bound < 1e-5
        assert bf16.passed == (1e-2 / bf16.loss_old <= bf16.loss_bound)

    def test_a_gradient_that_is_wrong_alone_fails(self) -> None:
        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 1.001

        snapshot = image_snapshot()
        wrong = Hooked(snapshot.module.conv, Wrong.apply)
        parity = compare_forward(snapshot, wrong.enable, wrong.disable)
        assert not parity.passed
        assert parity.output_rel == 0.0

    def test_a_nan_fails(self) -> None:
        snapshot = image_snapshot()
        wrong = Hooked(snapshot.module, lambda out: out * float("nan"))
        assert not compare_forward(snapshot, wrong.enable, wrong.disable).passed

    def test_one_bit_fails_for_identical_and_passes_for_reordered(self) -> None:
        snapshot = image_snapshot()
        fix = Hooked(snapshot.module, lambda out: out * (1 + 2**-23))
        assert not compare_forward(snapshot, fix.enable, fix.disable, numerics="identical").passed
        assert compare_forward(snapshot, fix.enable, fix.disable, numerics="reordered").passed


class TestARoundingFix:
    def test_bfloat16_passes_by_its_own_bound_and_fails_by_that_of_float32(self) -> None:
        snapshot = loss_snapshot()
        linear = snapshot.module.body[0]

        def rounded(out: torch.Tensor) -> torch.Tensor:
            return out.bfloat16().float()

        fix = Hooked(linear, rounded)
        assert compare_forward(snapshot, fix.enable, fix.disable, unit_roundoff=BFLOAT16).passed
        assert not compare_forward(snapshot, fix.enable, fix.disable).passed

    def test_a_result_closer_to_float64_than_before_passes_though_it_differs(self) -> None:
        # bf16 layer of the script against a float32 one: TC-06's first half.
        class Low(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l, self.low = nn.Linear(16, 16), True

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                h = self.l(x)
                return h.bfloat16().to(x.dtype) if self.low and x.dtype == torch.float32 else h

        torch.manual_seed(0)
        net = Low()
        parity = compare_forward(
            Snapshot(net, (torch.randn(4, 16),)),
            lambda: setattr(net, "low", False),
            lambda: setattr(net, "low", True),
        )
        assert parity.output_rel > 1e-4
        assert parity.passed, parity.detail

    def test_dropout_is_compared_with_dropout_off_and_that_is_said(self) -> None:
        snapshot = image_snapshot(dropout=0.5)
        draw = Hooked(snapshot.module, lambda out: out + 0 * torch.rand(1))  # another random stream
        parity = compare_forward(snapshot, draw.enable, draw.disable)
        assert parity.passed, parity.detail
        assert "dropout off" in parity.detail
        assert snapshot.module.drop.p == 0.5

    def test_noise_that_cannot_be_switched_off_is_compared_from_the_same_random_state(self) -> None:
        class Noisy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.l(x) + torch.randn(x.shape)

        torch.manual_seed(0)
        snapshot = Snapshot(Noisy(), (torch.randn(4, 8),))
        assert compare_forward(snapshot, nothing, nothing).passed
        wrong = Scaled(snapshot.module, 1.01)
        assert not compare_forward(snapshot, wrong.enable, wrong.disable).passed


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_after_a_comparison(self, dropout: float) -> None:
        snapshot = image_snapshot(dropout)
        net = snapshot.module
        net(*snapshot.args).sum().backward()
        net.drop.eval()
        before = state_of(snapshot)
        wrong = Scaled(net, 1.01)
        compare_forward(snapshot, wrong.enable, wrong.disable)
        assert same(before, state_of(snapshot))

    @pytest.mark.parametrize("when", ["forward", "backward", "enable"])
    def test_when_the_fix_raises(self, when: str) -> None:
        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                if when == "forward":
                    raise RuntimeError("broken")
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("broken")

        snapshot = image_snapshot()
        fix = Hooked(snapshot.module.head, Raises.apply)

        def enable() -> None:
            fix.enable()
            if when == "enable":
                raise RuntimeError("broken")

        snapshot.module(*snapshot.args).sum().backward()
        before = state_of(snapshot)
        parity = compare_forward(snapshot, enable, fix.disable)
        assert not parity.passed
        assert "broken" in parity.detail
        assert same(before, state_of(snapshot))

    def test_the_scripts_hooks_on_gradients_do_not_step(self) -> None:
        # An optimizer in the backward must not make a step here.
        snapshot = image_snapshot()
        fired = []
        for p in snapshot.module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: fired.append(p))
        compare_forward(snapshot, nothing, nothing)
        assert fired == []

    def test_a_reason_to_reject_ends_it(self) -> None:
        parity = compare_forward(image_snapshot(), nothing, nothing, reject=lambda out: "custom")
        assert not parity.passed
        assert parity.detail == "custom"


def optimizer_with_state(kind: Any = torch.optim.AdamW, **settings: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))]
    optimizer = kind(parameters, lr=1e-2, **settings)
    for _ in range(3):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    values = [
        (p.detach().clone(), p.grad.clone() if p.grad is not None else None, id(p.grad))
        for g in optimizer.param_groups
        for p in g["params"]
    ]
    state = [
        (name, id(v), v.clone() if isinstance(v, torch.Tensor) else v)
        for entry in optimizer.state.values()
        for name, v in entry.items()
    ]
    flags = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return values, state, flags, sorted(vars(optimizer))


class TestUpdates:
    def test_no_change_is_equal(self) -> None:
        assert compare_update(optimizer_with_state(), nothing, nothing, numerics="identical").passed
        assert compare_update(optimizer_with_state(), nothing, nothing).grad_rel == 0.0

    @pytest.mark.parametrize("setting", ["lr", "eps", "weight_decay"])
    def test_another_setting_fails(self, setting: str) -> None:
        optimizer = optimizer_with_state()
        group = optimizer.param_groups[0]
        right = group[setting]
        wrong = {"lr": 1.01e-2, "eps": 1e-4, "weight_decay": 0.02}[setting]
        parity = compare_update(
            optimizer,
            lambda: group.__setitem__(setting, wrong),
            lambda: group.__setitem__(setting, right),
        )
        assert not parity.passed

    @pytest.mark.parametrize("grads", ["at hand", "cleared"])
    def test_everything_is_as_before(self, grads: str) -> None:
        optimizer = optimizer_with_state()
        if grads == "cleared":
            optimizer.zero_grad()
        before, rng = optimizer_state(optimizer), torch.get_rng_state()
        compare_update(optimizer, nothing, nothing)
        assert same(before, optimizer_state(optimizer))
        assert torch.equal(rng, torch.get_rng_state())

    def test_everything_is_as_before_when_the_fix_raises(self) -> None:
        optimizer = optimizer_with_state()
        before = optimizer_state(optimizer)

        def enable() -> None:
            optimizer.param_groups[0]["lr"] = "x"

        parity = compare_update(optimizer, enable, nothing)
        assert not parity.passed
        assert same(before, optimizer_state(optimizer))

    def test_hooks_and_schedulers_do_not_see_it(self) -> None:
        optimizer = optimizer_with_state()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        seen = []
        optimizer.register_step_post_hook(lambda *args: seen.append(1))
        compare_update(optimizer, nothing, nothing)
        assert seen == []
        assert scheduler.last_epoch == 0

    def test_an_optimizer_that_has_not_stepped_has_no_state_afterwards(self) -> None:
        optimizer = torch.optim.Adam([nn.Parameter(torch.randn(3))])
        assert compare_update(optimizer, nothing, nothing).passed
        assert dict(optimizer.state) == {}


class TestBatches:
    BATCH = staticmethod(
        lambda: {"x": torch.arange(6.0).view(2, 3), "y": [torch.ones(2), "name", 3]}
    )

    def test_equal_batches_pass_as_identical(self) -> None:
        parity = compare_batches([self.BATCH()] * 2, [self.BATCH()] * 2)
        assert parity.passed
        assert parity.numerics == "identical"

    @pytest.mark.parametrize(
        "change",
        [
            lambda b: b["x"].view(-1).__setitem__(5, 6.0),
            lambda b: b.__setitem__("x", b["x"].double()),
            lambda b: b.__setitem__("x", b["x"].t()),
            lambda b: b["y"].append(0),
            lambda b: b["y"].__setitem__(1, "other"),
            lambda b: b.__setitem__("z", 1),
            lambda b: b["y"].__setitem__(0, -torch.zeros(2)),
        ],
    )
    def test_any_difference_fails(self, change: Any) -> None:
        new = self.BATCH()
        change(new)
        assert not compare_batches([self.BATCH()], [new]).passed

    def test_a_negative_zero_is_not_a_zero(self) -> None:
        assert not compare_batches([torch.zeros(2)], [-torch.zeros(2)]).passed

    def test_a_nan_equals_a_nan(self) -> None:
        nan = torch.tensor([1.0, float("nan")])
        assert compare_batches([nan], [nan.clone()]).passed

    def test_random_augmentation_is_compared_by_shape_and_said_to_be_reordered(self) -> None:
        parity = compare_batches([torch.ones(2)], [torch.zeros(2)], draws_random_numbers=True)
        assert parity.passed
        assert parity.numerics == "reordered"
        assert "random" in parity.detail
        assert not compare_batches(
            [torch.ones(2)], [torch.ones(3)], draws_random_numbers=True
        ).passed

    def test_nothing_to_compare_does_not_pass(self) -> None:
        assert not compare_batches([], []).passed
