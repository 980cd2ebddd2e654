from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast, custom_functions
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.meter.replay import Snapshot


class Product(torch.autograd.Function):
    """AMP-11: saves float32 and meets bfloat16 in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad.mm(w.t()), x.t().mm(grad)


class Declared(Product):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Product.forward(ctx, x, w)


class Custom(nn.Module):
    def __init__(self, function: Any = Product) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.first(x), self.weight)


Pair = namedtuple("Pair", ["one", "two"])


class Many(nn.Module):
    """Returns every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.l(x)
        return {"a": [y, (y, 3)], "pair": Pair(y, "text"), "int": torch.ones(2, dtype=torch.int64)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def x() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, frac: float | None = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no root"),
            (lambda: scene(net(), facts=Facts(autocast=True)), "mixed precision itself"),
            (lambda: scene(net(), facts=Facts(grad_scaler=True)), "mixed precision itself"),
            (lambda: scene(net(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(net(), facts=Facts(custom_functions=("Product",))), "Product"),
            (lambda: scene(net().bfloat16()), "bfloat16, not all float32"),
            (lambda: scene(net().double()), "float64"),
            (lambda: scene(nn.DataParallel(net())), "DataParallel"),
            (lambda: scene(net(), device=torch.device("mps")), "mps"),
            (lambda: scene(net(), frac=0.01), "1.0 %"),
            (lambda: scene(net(), frac=None), "not measured"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = Bf16Autocast().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_float32_model_though_this_cpu_may_be_slower(self) -> None:
        assert isinstance(Bf16Autocast().check(scene(net())), Eligible)

    def test_amp_11_a_custom_function_is_found_in_the_graph(self) -> None:
        torch.manual_seed(0)
        model = Custom()
        assert custom_functions([model(x())]) == ("Product",)
        applied = Bf16Autocast().apply(scene(model))
        parity = applied.verify(Snapshot(model, (x(),)))
        assert not parity.passed
        assert "Product" in parity.detail
        model(x()).sum().backward()

    def test_amp_11_a_declared_policy_is_accepted(self) -> None:
        torch.manual_seed(0)
        model = Custom(Declared)
        assert custom_functions([model(x())]) == ()
        assert Bf16Autocast().apply(scene(model)).verify(Snapshot(model, (x(),))).passed

    def test_functions_of_torch_itself_are_not_meant(self) -> None:
        from torch.utils.checkpoint import checkpoint

        out = checkpoint(net(), x().requires_grad_(), use_reentrant=True)
        assert custom_functions([out]) == ()


class TestEffect:
    def test_products_are_bfloat16_and_outputs_and_gradients_float32(self) -> None:
        model = net()
        seen = []
        model[0].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
        applied = Bf16Autocast().apply(scene(model))
        for on in (False, True, False):
            applied.enable() if on else applied.disable()
            out = model(x())
            assert out.dtype == torch.float32
            model.zero_grad()
            F.cross_entropy(out, torch.zeros(8, dtype=torch.int64)).backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert seen == [torch.float32, torch.bfloat16, torch.float32]

    def test_containers_keep_their_kinds(self) -> None:
        model = Many()
        applied = Bf16Autocast().apply(scene(model))
        applied.enable()
        out = model(x())
        assert out["a"][0].dtype == out["a"][1][0].dtype == out["pair"].one.dtype == torch.float32
        assert out["a"][1][1] == 3
        assert isinstance(out["pair"], Pair)
        assert out["pair"].two == "text"
        assert out["int"].dtype == torch.int64
        applied.undo()

    def test_an_evaluation_is_untouched(self) -> None:
        model = net()
        applied = Bf16Autocast().apply(scene(model))
        with torch.no_grad():
            before = model(x())
            applied.enable()
            assert torch.equal(model(x()), before)

    def test_copies_for_averaging_are_plain(self) -> None:
        model = net()
        applied = Bf16Autocast().apply(scene(model))
        applied.enable()
        model(x())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                twin[3].weight.zero_()
                twin[3].bias.zero_()
            assert torch.equal(twin(x()), torch.zeros(8, 4))

    @pytest.mark.parametrize(
        "model",
        [
            net(),
            nn.Sequential(
                nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
            ),
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
        ],
        ids=["dense", "conv", "transformer"],
    )
    def test_the_numbers_stay_within_rounding(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        shape = {"Linear": (8, 6), "Conv2d": (8, 1, 6, 6)}.get(
            type(next(m for m in model.modules() if not list(m.children()))).__name__, (4, 5, 16)
        )
        if isinstance(model, nn.TransformerEncoderLayer):
            shape = (4, 5, 16)
        parity = Bf16Autocast().apply(scene(model)).verify(Snapshot(model, (torch.randn(shape),)))
        assert parity.passed, parity.detail
        assert 1e-4 < parity.grad_rel < 0.2

    @pytest.mark.parametrize("factor", [1.05, 0.95])
    def test_a_wrong_fix_fails_by_its_bound(
        self, factor: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flopwise.fixes.catalog import bf16_autocast

        right = bf16_autocast._in_float32
        monkeypatch.setattr(bf16_autocast, "_in_float32", lambda t: right(t) * factor)
        model = net()
        assert not Bf16Autocast().apply(scene(model)).verify(Snapshot(model, (x(),))).passed


class TestUndo:
    def test_nothing_is_left(self) -> None:
        model = net()
        names, state = [sorted(vars(m)) for m in model.modules()], copy.deepcopy(model.state_dict())
        applied = Bf16Autocast().apply(scene(model))
        applied.verify(Snapshot(model, (x(),)))
        for _ in range(3):
            applied.enable()
            applied.disable()
        applied.enable()
        applied.undo()
        assert [sorted(vars(m)) for m in model.modules()] == names
        assert all(
            torch.equal(a, b)
            for a, b in zip(state.values(), model.state_dict().values(), strict=True)
        )
        assert type(model) is nn.Sequential
        assert not torch.is_autocast_enabled("cpu")

    def test_an_exception_in_the_forward_leaves_autocast(self) -> None:
        model = net()
        applied = Bf16Autocast().apply(scene(model))
        applied.enable()
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
        assert not torch.is_autocast_enabled("cpu")
        assert applied.failure() is None
