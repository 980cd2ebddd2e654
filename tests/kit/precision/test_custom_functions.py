"""Autograd Functions without an autocast policy: found, traced to their modules, kept in float32 there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionError, PrecisionWarning
from flopwise.kit.precision import MasterWeights, MixedPrecision, effective_dtypes
from flopwise.kit.precision.custom_functions import any_defined, traced_to_modules


class Undeclared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0].mm(w.t()), x.t().mm(grads[0])


class Declared(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0].mm(w.t()), x.t().mm(grads[0])


class Using(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, self.weight)


def model(function: Any = Undeclared) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Using(function)), nn.Linear(4, 4))


def test_such_functions_are_known_to_be_there() -> None:
    assert any_defined()


def test_the_innermost_module_is_named() -> None:
    root = model()
    with traced_to_modules(root) as found:
        root(torch.ones(1, 4))
    assert {type(m).__name__: names for m, names in found.items()} == {"Using": ("Undeclared",)}
    assert all(not m._forward_hooks for m in root.modules())


def test_a_declared_policy_is_no_finding() -> None:
    root = model(Declared)
    with traced_to_modules(root) as found:
        root(torch.ones(1, 4))
    assert found == {}
    mixed = MixedPrecision(root)
    root(torch.ones(1, 4)).sum().backward()
    assert mixed.kept == {}


def test_the_module_is_kept_from_the_second_call_on() -> None:
    root = model()
    mixed = MixedPrecision(root)
    with pytest.warns(PrecisionWarning, match=r"1\.0 \(Using\) stays in float32"):
        root(torch.ones(1, 4)).sum().backward()
    seen = []
    root[1][0].register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    root(torch.ones(1, 4)).sum().backward()
    assert seen == [(torch.float32, torch.float32)]
    mixed.undo()
    assert all(
        "_compiled_call_impl" not in vars(m) or vars(m)["_compiled_call_impl"] is None
        for m in root.modules()
    )


def test_the_first_step_is_told_from_those_that_count() -> None:
    root = model(Declared)
    mixed = MixedPrecision(root)
    x = torch.ones(1, 4)
    assert mixed.first_call_looks
    first = effective_dtypes(lambda: root(x).sum().backward(), asked=mixed)
    assert not first.took_effect
    assert first.reasons[0].startswith("the first step runs in float32")
    assert not mixed.first_call_looks
    second = effective_dtypes(lambda: root(x).sum().backward(), asked=mixed)
    assert second.share("bfloat16") > 0
    assert not any("first step" in r for r in second.reasons)


def test_a_check_of_numerics_is_not_of_the_first_call() -> None:
    root = model(Declared)
    mixed = MixedPrecision(root)
    assert mixed.verify(torch.randn(4, 4), tolerance=1.0).largest > 1e-5


def test_a_function_of_the_root_itself_takes_the_dtype_back() -> None:
    root = Using(Undeclared)
    mixed = MixedPrecision(root)
    with pytest.warns(PrecisionWarning, match="bfloat16 is taken back"):
        root(torch.ones(1, 4)).sum().backward()
    assert not mixed.active
    assert mixed.declined is not None
    assert root(torch.ones(1, 4)).dtype is torch.float32


def test_with_masters_it_is_refused_before_backward() -> None:
    root = model()
    MasterWeights(root, torch.optim.SGD(root.parameters(), 0.1))
    MixedPrecision(root)
    with pytest.raises(
        PrecisionError, match=r"1\.0: the model uses autograd Functions of its own \(Undeclared\)"
    ):
        root(torch.ones(1, 4))
