"""Autograd Functions without an autocast policy: found, traced to their modules, kept in float32 there."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("inside", [False, True])
def test_code_that_is_compiled_afterwards_is_looked_at_eagerly_first(inside: bool) -> None:
    torch._dynamo.reset()
    root = model()
    mixed = MixedPrecision(root)
    compiled = torch.compile((lambda x: root(x)) if inside else root, backend="eager")
    with pytest.warns(PrecisionWarning, match=r"1\.0 \(Using\) stays in float32"):
        compiled(torch.ones(1, 4)).sum().backward()
    assert list(mixed.kept) == ["1.0"]
    compiled(torch.ones(1, 4)).sum().backward()


def test_the_module_is_kept_from_the_first_call_on() -> None:
    root = model()
    mixed = MixedPrecision(root)
    seen = []
    with pytest.warns(PrecisionWarning, match=r"1\.0 \(Using\) stays in float32"):
        out = root(torch.ones(1, 4))
    out.sum().backward()
    root[1][0].register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    root(torch.ones(1, 4)).sum().backward()
    assert seen == [(torch.float32, torch.float32)]
    mixed.undo()
    assert all(
        "_compiled_call_impl" not in vars(m) or vars(m)["_compiled_call_impl"] is None
        for m in root.modules()
    )


def test_without_such_functions_the_first_step_is_as_any_other() -> None:
    root = model(Declared)
    mixed = MixedPrecision(root)
    assert root(torch.ones(1, 4)).dtype is torch.float32
    seen = effective_dtypes(lambda: root(torch.ones(1, 4)).sum().backward(), asked=mixed)
    assert seen.share("bfloat16") > 0


def test_the_call_is_made_again_from_the_same_state() -> None:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Using(Undeclared))
    twin = copy.deepcopy(root)
    x = torch.randn(8, 4)
    MixedPrecision(root)
    MixedPrecision(twin, keep_float32=["3"])
    torch.manual_seed(1)
    with pytest.warns(PrecisionWarning, match="stays in float32"):
        out = root(x)
    after = torch.rand(1)
    torch.manual_seed(1)
    with pytest.warns(PrecisionWarning, match="stays in float32"):
        expected = twin(x)
    assert torch.equal(out, expected)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(root[1].running_mean, twin[1].running_mean)
    assert root[1].num_batches_tracked.item() == 1


def test_a_function_that_refuses_16_bits_in_forward_is_found_too() -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if x.dtype is not torch.float32:
                raise RuntimeError("expected float32")
            return x + w.sum()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0], None

    root = model(Refusing)
    mixed = MixedPrecision(root)
    with pytest.warns(PrecisionWarning, match="stays in float32"):
        root(torch.ones(1, 4)).sum().backward()
    assert list(mixed.kept) == ["1.0"]


def test_an_error_under_autocast_alone_is_raised_as_it_is() -> None:
    class Only(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.bfloat16:
                raise RuntimeError("of its own")
            return x

    root = nn.Sequential(nn.Linear(4, 4), Only())
    MixedPrecision(root)
    with pytest.raises(RuntimeError, match="of its own"):
        root(torch.ones(1, 4))


def test_an_error_of_another_kind_is_raised_as_it_is() -> None:
    root = nn.Sequential(nn.Linear(4, 4))
    MixedPrecision(root)
    with pytest.raises(RuntimeError, match="shapes"):
        root(torch.ones(1, 5))


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
