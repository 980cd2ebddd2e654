from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flopwise.kit.memory.same_results import why_unlike


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def scaled(layer: nn.Linear, by: float) -> Iterator[None]:
    hook = layer.register_forward_hook(lambda m, args, out: out * by)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        (1.0, None),
        (1 + 1e-7, None),
        (1.001, "outputs differ by 0.001 of"),
        (0.0, "outputs differ by 1 of"),
    ],
)
def test_rounding_is_told_from_other_values(
    model: nn.Sequential, x: torch.Tensor, by: float, verdict: str | None
) -> None:
    last = model[3]
    assert isinstance(last, nn.Linear)
    why = why_unlike(model, lambda: model(x).mean().backward(), lambda: scaled(last, by))
    assert (why is None) if verdict is None else verdict in str(why)


def test_gradients_are_compared_where_outputs_are_the_same(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * g

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        hook = model[0].register_forward_hook(lambda m, args, out: Twice.apply(out))
        try:
            yield
        finally:
            hook.remove()

    why = why_unlike(model, lambda: model(x).mean().backward(), changed)
    assert why is not None
    assert why.startswith("its gradients differ by")


def test_in_16_bits_more_is_rounding(model: nn.Sequential, x: torch.Tensor) -> None:
    last = model[3]
    assert isinstance(last, nn.Linear)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x).mean().backward()

    assert why_unlike(model, step, lambda: scaled(last, 1.01)) is None
    assert why_unlike(model, step, lambda: scaled(last, 1.5)) is not None


def test_where_one_rounding_moves_much_as_much_is_allowed(x: torch.Tensor) -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1e7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).sin()

    model = Steep()

    @contextlib.contextmanager
    def another_rounding() -> Iterator[None]:
        hook = model.register_forward_pre_hook(lambda m, args: args[0] * (1 + 2.0**-23))
        try:
            yield
        finally:
            hook.remove()

    assert why_unlike(model, lambda: model(x).mean().backward(), another_rounding) is None

    smooth = nn.Sequential(nn.Linear(16, 4))
    layer = smooth[0]
    assert isinstance(layer, nn.Linear)
    assert why_unlike(smooth, lambda: smooth(x).mean().backward(), lambda: scaled(layer, -1.0))


def test_not_a_number_is_never_the_same(model: nn.Sequential, x: torch.Tensor) -> None:
    last = model[3]
    assert isinstance(last, nn.Linear)
    why = why_unlike(model, lambda: model(x).mean().backward(), lambda: scaled(last, float("nan")))
    assert why is not None
    assert "differ by nan" in why


def test_where_results_are_not_finite_anyway_nothing_is_compared(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    x[0, 0] = float("nan")
    why = why_unlike(model, lambda: model(x).mean().backward(), contextlib.nullcontext)
    assert why == "its outputs are not finite as it is: there is nothing to compare"


def test_dropout_is_on_again_afterwards(model: nn.Sequential, x: torch.Tensor) -> None:
    why_unlike(model, lambda: model(x).mean().backward(), contextlib.nullcontext)
    assert model[1].training
    assert not model._forward_hooks
