from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.fixes.interface import Facts, Scene
from flopwise.fixes.slot import (
    AUTOCAST,
    COMPILED,
    INPUTS,
    Layers,
    Slot,
    forward_problem,
    inner,
    script_compiles,
    slot_problem,
)
from flopwise.meter.found import compiled_parts


def times(factor: float) -> Any:
    def layer(call: Any) -> Any:
        return lambda *args, **kwargs: call(*args, **kwargs) * factor

    return layer


def plus(term: float) -> Any:
    def layer(call: Any) -> Any:
        return lambda *args, **kwargs: call(*args, **kwargs) + term

    return layer


def one() -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return module


X = torch.ones(1, 1)


class TestLayers:
    @pytest.mark.parametrize("order", list(itertools.permutations([COMPILED, INPUTS, AUTOCAST])))
    def test_compose_by_rank_whatever_the_order_of_switching(self, order: tuple[int, ...]) -> None:
        module, slot_before = one(), dict(vars(one()))
        slot = Slot.of(module)
        layers = {COMPILED: times(2), INPUTS: plus(3), AUTOCAST: times(5)}
        for rank in order:
            slot.put(rank, layers[rank])
        assert module(X).item() == (1 * 2 + 3) * 5
        slot.take(order[0])
        left = sorted(order[1:])
        wanted = 1.0
        for rank in left:
            wanted = {COMPILED: wanted * 2, INPUTS: wanted + 3, AUTOCAST: wanted * 5}[rank]
        assert module(X).item() == wanted
        for rank in order[1:]:
            slot.take(rank)
        assert module(X).item() == 1
        assert vars(module).keys() == slot_before.keys()

    def test_two_fixes_share_one_slot(self) -> None:
        module = one()
        a, b = Layers([module], AUTOCAST), Layers([module], COMPILED)
        a.on([times(5)])
        b.on([plus(1)])
        assert module(X).item() == 10
        a.off()
        assert module(X).item() == 2
        a.on([times(5)])
        b.off()
        a.off()
        assert "_compiled_call_impl" not in vars(module)

    def test_are_not_used_without_gradients(self) -> None:
        module = one()
        Slot.of(module).put(AUTOCAST, times(5))
        with torch.no_grad():
            assert module(X).item() == 1
        assert module(X).item() == 5

    def test_bypassed(self) -> None:
        module = one()
        slot = Slot.of(module)
        slot.put(AUTOCAST, times(5), 2.0**-8)
        with slot.bypassed():
            assert module(X).item() == 1
        assert module(X).item() == 5
        assert slot.unit_roundoff() == 2.0**-8

    def test_only_a_compiled_layer_counts_as_compiled(self) -> None:
        module = nn.Sequential(one())
        slot = Slot.of(module[0])
        slot.put(AUTOCAST, times(5))
        assert compiled_parts(module) == 0
        slot.put(COMPILED, times(2))
        assert compiled_parts(module) == 1
        assert compiled_parts(module, by_script=True) == 0
        with slot.bypassed():
            assert compiled_parts(module) == 0
        slot.take(COMPILED)
        slot.take(AUTOCAST)
        module[0]._compiled_call_impl = times(7)(module[0]._call_impl)
        assert compiled_parts(module) == 1
        slot.put(AUTOCAST, times(5))
        assert compiled_parts(module) == 1
        assert compiled_parts(module, by_script=True) == 1

    def test_hooks_still_run_inside(self) -> None:
        module = one()
        module.register_forward_hook(lambda m, args, out: out + 1)
        Slot.of(module).put(AUTOCAST, times(5))
        assert module(X).item() == 10

    def test_copies_and_pickles_are_plain_and_have_their_own_weights(self) -> None:
        module = one()
        keep = Slot.of(module)
        keep.put(AUTOCAST, times(5))
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.copy(module)):
            nn.init.constant_(twin.weight, 2.0) if twin.weight is not module.weight else None
            assert twin(X).item() == twin.weight.item()

    def test_settled_needs_a_call(self) -> None:
        module = one()
        layers = Layers([module], AUTOCAST)
        assert layers.settled()
        layers.on([times(5)])
        assert not layers.settled()
        module(X)
        assert layers.settled()

    def test_what_the_script_compiled_is_called_inside_and_put_back(self) -> None:
        module = one()
        own = times(7)(module._call_impl)
        module._compiled_call_impl = own
        slot = Slot.of(module)
        slot.put(AUTOCAST, plus(1))
        assert module(X).item() == 8
        slot.take(AUTOCAST)
        assert module._compiled_call_impl is own

    def test_what_the_script_sets_later_is_left_to_it(self) -> None:
        module = one()
        layers = Layers([module], AUTOCAST)
        layers.on([times(5)])
        own = times(7)(module._call_impl)
        module._compiled_call_impl = own
        layers.off()
        assert module._compiled_call_impl is own
        assert "itself" in layers.failure()

    def test_a_module_is_freed_with_its_layers(self) -> None:
        module = one()
        layers = Layers([module], AUTOCAST)
        layers.on([times(5)])
        gone = weakref.ref(module)
        del module
        gc.collect()
        assert gone() is None
        layers.off()


class TestAFailure:
    @staticmethod
    def broken(call: Any) -> Any:
        def raises(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("view size is not compatible\n\nand more")

        return raises

    def test_of_a_layer_is_caught_and_ends_all_layers(self) -> None:
        module = one()
        broken, other = Layers([module], INPUTS), Layers([module], AUTOCAST)
        other.on([times(5)])
        broken.on([self.broken])
        assert module(X).item() == 1
        assert module(X).item() == 1
        assert broken.failure() == "the forward raised RuntimeError: view size is not compatible"
        assert other.failure() is not None
        assert "_compiled_call_impl" not in vars(module)
        broken.on([self.broken])
        assert module(X).item() == 1

    def test_of_the_script_stays_the_scripts_and_the_layers_stay(self) -> None:
        module = one()
        layers = Layers([module], AUTOCAST)
        layers.on([times(5)])
        with pytest.raises(RuntimeError, match="shapes"):
            module(torch.ones(1, 3))
        assert layers.failure() is None
        assert module(X).item() == 5

    def test_is_forgotten_when_the_fix_is_applied_anew(self) -> None:
        module = one()
        first = Layers([module], INPUTS)
        first.on([self.broken])
        module(X)
        second = Layers([module], INPUTS)
        assert second.failure() is None


class TestProblems:
    @pytest.mark.parametrize(
        ("module", "reason"),
        [
            (nn.DataParallel(nn.Linear(1, 1)), "DataParallel"),
            (torch.compile(nn.Linear(1, 1)), "__call__"),
        ],
        ids=["data parallel", "compiled wrapper"],
    )
    def test_are_named(self, module: nn.Module, reason: str) -> None:
        assert reason in slot_problem(module)

    def test_a_plain_module_has_none(self) -> None:
        assert slot_problem(nn.Sequential(nn.Linear(1, 1))) is None

    def test_inner_of_a_plain_module_is_itself(self) -> None:
        module = one()
        assert inner(module) is module


class TestForwardProblem:
    @pytest.mark.parametrize(
        ("scene", "reason"),
        [
            (Scene(roots=(one(),), facts=Facts(compiles=True)), "it all would compile it again"),
            (Scene(compute_frac=0.9), "no root module was found"),
            (Scene(roots=(one(), nn.DataParallel(one())), compute_frac=0.9), "DataParallel copies"),
            (Scene(roots=(one(),)), "spent in forward and backward was not measured"),
            (Scene(roots=(one(),), compute_frac=0.049), "only 4.9 % of a step is spent"),
        ],
    )
    def test_is_the_first_reason_against_changing_the_forward(
        self, scene: Scene, reason: str
    ) -> None:
        assert reason in str(forward_problem(scene, "it all"))

    def test_is_none_for_a_plain_model_that_computes(self) -> None:
        assert forward_problem(Scene(roots=(one(),), compute_frac=0.05), "it all") is None


def test_an_early_end_of_a_recomputation_is_no_failure() -> None:
    """Activation checkpointing leaves a block by an exception once it has all that it saved."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twin = copy.deepcopy(module)
    slot = Slot.of(module)
    slot.put(INPUTS, plus(0.0))
    x = torch.ones(2, 4)
    for each in (module, twin):
        checkpoint(each, x, use_reentrant=False).sum().backward()
    assert slot.failures == {}
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    slot.take(INPUTS)


def test_code_that_a_fix_has_compiled_is_not_the_scripts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers = Layers([model], COMPILED)
    layers.on([lambda call: call])
    assert Slot.of(model).compiles
    assert not script_compiles(model)
    layers.off()
    model[1].compile(backend="eager")
    assert script_compiles(model)
    layers = Layers([model[1]], COMPILED)
    layers.on([lambda call: call])
    assert script_compiles(model)
    layers.off()
    assert script_compiles(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert not script_compiles(nn.Linear(2, 2))
