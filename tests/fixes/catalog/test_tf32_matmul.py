from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.fixes.catalog import tf32_matmul
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.tf32_matmul import Tf32Matmul
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.kit.precision.tf32 import Flags
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import TF32

SEEN: list[tuple[str, bool]] = []


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """The defaults: off for products, on for cuDNN. They can be set without a GPU."""
    SEEN.clear()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    before = Flags.read()
    yield
    assert Flags.read() == before


@pytest.fixture
def _with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32_matmul, "_device_problem", lambda device: None)


class Looks(torch.autograd.Function):
    """Notes the switch of products, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(("forward", torch.backends.cuda.matmul.allow_tf32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        SEEN.append(("backward", torch.backends.cuda.matmul.allow_tf32))
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, fail: bool = False) -> Any:
        y = self.last(Looks.apply(self.first(x).relu()))
        if fail:
            raise ValueError("the script's own")
        return {"logits": y}


def net(kind: Any = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def x() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, frac: float | None = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


class TestCheck:
    @pytest.mark.usefixtures("_with_device")
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no root"),
            (lambda: scene(net(), facts=Facts(autocast=True)), "mixed precision itself"),
            (lambda: scene(net(), facts=Facts(grad_scaler=True)), "mixed precision itself"),
            (lambda: scene(net(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(net().bfloat16()), "bfloat16, not float32"),
            (lambda: scene(net(), frac=0.01), "1.0 %"),
            (lambda: scene(net(), findings={"L101": 0.5}), "no time is lost"),
        ],
    )
    def test_declines_with_a_reason(self, made: Any, reason: str) -> None:
        answer = Tf32Matmul().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_declines_where_the_device_has_none(self) -> None:
        answer = Tf32Matmul().check(scene(net()))
        assert isinstance(answer, Declined)
        assert answer.reason == "there is no TF32 on devices of type cpu"

    def test_declines_on_older_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a T4")
        assert tf32_matmul._device_problem(torch.device("cuda")) == "a T4 has no TF32"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert tf32_matmul._device_problem(torch.device("cuda")) is None

    @pytest.mark.usefixtures("_with_device")
    @pytest.mark.parametrize("found", [{}, {"L104": 0.4}])
    def test_takes_a_float32_model(self, found: Any) -> None:
        assert Tf32Matmul().check(scene(net(), findings=found)) == Eligible()

    @pytest.mark.usefixtures("_with_device")
    def test_declines_where_it_is_on_for_all_that_the_model_does(self) -> None:
        conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            for model in (net(), conv):
                assert Tf32Matmul().check(scene(model)) == Declined("TF32 is on already")
            torch.backends.cudnn.allow_tf32 = False
            assert Tf32Matmul().check(scene(net())) == Declined("TF32 is on already")
            assert Tf32Matmul().check(scene(conv)) == Eligible()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = True


class TestEffect:
    def test_it_is_on_in_forward_and_backward_and_nowhere_else(self) -> None:
        model = net()
        applied = Tf32Matmul().apply(scene(model))
        for on in (False, True, False, True):
            SEEN.clear()
            applied.enable() if on else applied.disable()
            out = model(x())["logits"]
            assert torch.backends.cuda.matmul.allow_tf32 is False
            out.sum().backward()
            assert torch.backends.cuda.matmul.allow_tf32 is False
            assert [("forward", on), ("backward", on)] == SEEN
        applied.undo()

    def test_an_evaluation_is_untouched(self) -> None:
        model = net()
        applied = Tf32Matmul().apply(scene(model))
        applied.enable()
        with torch.no_grad():
            model(x())
        assert SEEN == [("forward", False)]
        applied.undo()

    def test_an_error_in_the_forward_leaves_the_switches(self) -> None:
        model = net()
        applied = Tf32Matmul().apply(scene(model))
        applied.enable()
        with pytest.raises(ValueError, match="own"):
            model(x(), fail=True)
        assert torch.backends.cuda.matmul.allow_tf32 is False
        assert applied.failure() is None
        applied.undo()

    def test_beside_autocast_it_changes_nothing(self) -> None:
        model = net()
        here = scene(model)
        low, fix = Bf16Autocast().apply(here), Tf32Matmul().apply(here)
        fix.enable()
        low.enable()
        model(x())["logits"].sum().backward()
        low.disable()
        model(x())["logits"].sum().backward()
        assert [on for _, on in SEEN] == [False, False, True, True]
        fix.undo()
        low.undo()
        assert "_compiled_call_impl" not in vars(model)

    def test_what_tf32_does_passes_and_more_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rounding of operands is played, where there is no device that does it."""

        def rounding(roundoff: float) -> Any:
            def layer(slot: Any, call: Any) -> Any:
                def rounded(x: torch.Tensor) -> Any:
                    out = call(x)
                    return {"logits": out["logits"] * (1 + roundoff)}

                return rounded

            return layer

        for roundoff, passes in ((TF32, True), (64 * TF32, False)):
            monkeypatch.setattr(tf32_matmul, "_layer", rounding(roundoff))
            model = net()
            applied = Tf32Matmul().apply(scene(model))
            assert applied.verify(Snapshot(model, (x(),))).passed is passes
            applied.undo()


def test_nothing_is_left() -> None:
    model = net()
    names, rng = [sorted(vars(m)) for m in model.modules()], torch.get_rng_state()
    state = copy.deepcopy(model.state_dict())
    applied = Tf32Matmul().apply(scene(model))
    assert applied.verify(Snapshot(model, (x(),))).passed
    for _ in range(3):
        applied.enable()
        applied.disable()
    applied.enable()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    applied.undo()
    for one in (model, *twins):
        assert [sorted(vars(m)) for m in one.modules()] == names
        pairs = zip(state.values(), one.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(torch.get_rng_state(), rng)
