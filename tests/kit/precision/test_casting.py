"""A module's call replaced in place, and taken back."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.precision.casting import Wrapped, WrappedForward, in_float32


def doubled(call: Any) -> Any:
    return lambda *args: call(*args) * 2


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_it_is_called_and_taken_back() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain = module(x)
    wrapped = Wrapped(module, doubled)
    assert torch.equal(module(x), plain * 2)
    assert wrapped.take_back()
    assert torch.equal(module(x), plain)
    assert "_compiled_call_impl" not in vars(module)


def test_wraps_nest_and_are_taken_back_in_reverse() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain = module(x)
    inner, outer = Wrapped(module, doubled), Wrapped(module, doubled)
    assert torch.equal(module(x), plain * 4)
    assert not inner.take_back()  # the outer one is there
    assert outer.take_back()
    assert inner.take_back()
    assert torch.equal(module(x), plain)


def test_a_compiled_module_is_wrapped_around_its_compiled_call() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    module.compile(backend="eager")
    compiled = vars(module)["_compiled_call_impl"]
    plain = module(x)
    wrapped = Wrapped(module, doubled)
    assert torch.equal(module(x), plain * 2)
    assert wrapped.take_back()
    assert vars(module)["_compiled_call_impl"] is compiled


def test_state_type_hooks_and_copies_are_as_ever() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain, state = module(x), list(module.state_dict())
    Wrapped(module, doubled)
    assert list(module.state_dict()) == state
    assert type(module) is nn.Linear
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), plain)


class TestForward:
    def test_it_is_called_and_taken_back(self) -> None:
        module, x = nn.Linear(2, 2), torch.ones(1, 2)
        plain = module(x)
        wrapped = WrappedForward(module, doubled)
        assert wrapped.active
        assert torch.equal(module(x), plain * 2)
        assert torch.equal(wrapped.plain(x), plain)
        assert wrapped.take_back()
        assert not wrapped.take_back()
        assert "forward" not in vars(module)

    @pytest.mark.parametrize("own", [False, True])
    def test_copies_have_the_forward_that_was_found(self, own: bool) -> None:
        module, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
        if own:
            vars(module[0])["forward"] = negated
        plain = module(x)
        WrappedForward(module[0], doubled)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin(x), plain)
            if not own:
                twin[0].weight.data.zero_()
                assert torch.equal(twin(x)[0], twin[0].bias)  # it computes with its own weights
        assert torch.equal(module(x), plain * 2)

    def test_its_signature_is_the_modules(self) -> None:
        module = nn.MultiheadAttention(2, 1)
        signature = inspect.signature(module.forward)
        WrappedForward(module, doubled)
        assert inspect.signature(module.forward) == signature
        assert module.forward.__name__ == "forward"

    def test_it_is_exported(self) -> None:
        module, x = nn.Linear(2, 2), torch.ones(1, 2)
        WrappedForward(module, doubled)
        exported = torch.export.export(module, (x,))
        assert torch.equal(exported.module()(x), module(x))

    def test_a_forward_that_was_found_comes_back(self) -> None:
        module = nn.Linear(2, 2)
        vars(module)["forward"] = negated
        wrapped = WrappedForward(module, doubled)
        assert module(torch.ones(1)).item() == -2
        assert wrapped.take_back()
        assert vars(module)["forward"] is negated


def test_only_halves_become_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert in_float32(torch.ones(1, dtype=dtype)).dtype is torch.float32
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        tensor = torch.ones(1, dtype=dtype)
        assert in_float32(tensor) is tensor
