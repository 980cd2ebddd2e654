"""16-bit weights with float32 masters: what autocast computes to the bit, float32 in checkpoints, ties kept."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from flopwise.errors import PrecisionError
from flopwise.kit.precision import DynamicScaler, MasterWeights, MixedPrecision
from flopwise.kit.precision.master_weights import master_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h))))
        return self.head(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, **options)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1))


def train(
    masters: bool,
    dtype: str = "bfloat16",
    steps: int = 10,
    micro: int = 1,
    scaler: Callable[[], GradScaler] | None = None,
    clip: str = "",
    zero: str = "optimizer",
    **options: Any,
) -> list[torch.Tensor]:
    """Returns losses and the state dict's values of a training under autocast, with or without masters."""
    model = net()
    optimizer = adamw(model, **options)
    scaling = scaler() if scaler else GradScaler("cpu", enabled=False)
    held = MasterWeights(model, optimizer, dtype) if masters else None
    mixed = MixedPrecision(model, dtype)
    assert mixed.declined is None
    losses = []
    for step in range(steps):
        optimizer.zero_grad() if zero == "optimizer" else model.zero_grad()
        for part in range(micro):
            loss = loss_of(model, step * micro + part) / micro
            scaling.scale(loss).backward()
            losses.append(loss.detach())
        if clip:
            scaling.unscale_(optimizer)
            of = model.parameters() if clip == "model" else optimizer.param_groups[0]["params"]
            torch.nn.utils.clip_grad_norm_(of, 0.1)
        scaling.step(optimizer)
        scaling.update()
    assert (held is not None) == any(p.dtype is DTYPES[dtype] for p in model.parameters())
    return [*losses, *model.state_dict().values()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestWhatIsComputed:
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("micro", [1, 3])
    def test_bfloat16_equals_autocast_to_the_bit(self, fused: bool, micro: int) -> None:
        options = {"fused": fused, "micro": micro}
        assert equal(train(True, **options), train(False, **options))

    @pytest.mark.parametrize("kind", [DynamicScaler, GradScaler])
    def test_float16_with_a_scaler_equals_autocast_to_the_bit(self, kind: Any) -> None:
        options = {"dtype": "float16", "scaler": lambda: kind("cpu"), "fused": True}
        assert equal(train(True, **options), train(False, **options))

    @pytest.mark.parametrize("clip", ["model", "masters"])
    def test_clipping_by_either_name_is_the_same(self, clip: str) -> None:
        assert equal(train(True, clip=clip), train(False, clip="model"))

    @pytest.mark.parametrize("unscale", [False, True])
    def test_the_scalers_clip_knows_weights_by_their_masters(self, unscale: bool) -> None:
        def clipped(masters: bool) -> list[torch.Tensor]:
            model, scaler = net(), DynamicScaler("cpu")
            optimizer = adamw(model, fused=True)
            if masters:
                MasterWeights(model, optimizer, "float16")
            MixedPrecision(model, "float16")
            scaler.scale(loss_of(model, 0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            norm = scaler.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            return [norm, *model.state_dict().values()]

        assert equal(clipped(True), clipped(False))

    def test_a_compiled_model_trains_alike(self) -> None:
        def trained(compiled: bool) -> list[torch.Tensor]:
            model = net()
            optimizer = adamw(model)
            MasterWeights(model, optimizer)
            if compiled:
                model.compile(backend="aot_eager")
            MixedPrecision(model)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            return list(model.state_dict().values())

        assert equal(trained(True), trained(False))

    @pytest.mark.parametrize("zero", ["optimizer", "model"])
    def test_zeroed_gradients_take_no_memory_while_the_next_step_computes(self, zero: str) -> None:
        model = net()
        optimizer = adamw(model)
        masters = MasterWeights(model, optimizer)
        MixedPrecision(model)
        loss_of(model, 0).backward()
        optimizer.step()
        gradients = [weakref.ref(pair.weight.grad) for pair in masters.pairs]
        assert all(ref() is not None for ref in gradients)
        (optimizer if zero == "optimizer" else model).zero_grad()
        loss = loss_of(model, 1)
        assert all(ref() is None for ref in gradients)
        loss.backward()
        assert all(pair.weight.grad is pair.master.grad for pair in masters.pairs)
        before = [pair.weight.grad for pair in masters.pairs]
        loss_of(model, 2)  # what was not zeroed stays
        assert all(b is p.weight.grad for b, p in zip(before, masters.pairs, strict=True))

    def test_a_copy_does_not_hold_the_optimizer(self) -> None:
        model = net()
        MasterWeights(model, adamw(model))
        hook = next(h for h in copy.deepcopy(model)._forward_pre_hooks.values() if vars(h))
        assert list(hook._pairs) == []

    def test_zeroing_through_the_model_is_the_same(self) -> None:
        assert equal(train(True, zero="model", micro=2), train(False, zero="model", micro=2))

    def test_updates_smaller_than_a_bfloat16_step_are_not_lost(self) -> None:
        layer = nn.Linear(4, 4, bias=False)
        nn.init.ones_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), 1e-4)
        MasterWeights(layer, optimizer)
        for _ in range(100):
            optimizer.zero_grad()
            layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        # bfloat16 cannot tell 0.9999 from 1; 100 updates of 1e-4 are 0.99
        assert layer.state_dict()["weight"].flatten().tolist() == pytest.approx(
            [0.99] * 16, rel=1e-5
        )
        assert layer.weight.dtype is torch.bfloat16
        assert layer.weight.flatten().tolist() == pytest.approx([0.99] * 16, abs=2**-8)

    def test_a_skipped_step_leaves_weights_and_masters(self) -> None:
        model = net()
        optimizer = adamw(model, fused=True)
        MasterWeights(model, optimizer)
        before = copy.deepcopy(dict(model.state_dict()))
        scaler = DynamicScaler("cpu")
        scaler.scale(loss_of_inf(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped == 1
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert all(torch.equal(p.to(torch.bfloat16), q) for p, q in pairs(model))


def loss_of_inf(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, 0) * float("inf")


def pairs(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(m.detach(), p.detach()) for p in model.parameters() if (m := master_of(p)) is not None]


class TestState:
    def test_state_dicts_are_float32_in_both_directions(self) -> None:
        model = net()
        optimizer = adamw(model)
        MasterWeights(model, optimizer)
        state = model.state_dict()
        assert {v.dtype for v in state.values()} == {torch.float32}
        assert list(state) == list(net().state_dict())
        assert {v.dtype for v in model.up.state_dict().values()} == {torch.float32}
        other = {k: torch.randn_like(v) for k, v in state.items()}
        other["head.weight"] = other["embed.weight"]
        model.load_state_dict(other)
        assert all(torch.equal(v, other[k]) for k, v in model.state_dict().items())
        assert torch.equal(model.up.weight.detach(), other["up.weight"].bfloat16())

    def test_a_checkpoint_goes_to_and_fro(self) -> None:
        saved = io.BytesIO()
        model = net()
        optimizer = adamw(model)
        MasterWeights(model, optimizer)
        MixedPrecision(model)
        loss_of(model, 0).backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        plain = net()
        plain.load_state_dict(state["model"])
        plain_optimizer = adamw(plain)
        plain_optimizer.load_state_dict(state["optimizer"])
        assert plain.up.weight.dtype is torch.float32
        assert {s["exp_avg"].dtype for s in plain_optimizer.state.values()} == {torch.float32}

    def test_an_optimizers_state_is_loaded_for_the_masters(self) -> None:
        model = net()
        optimizer = adamw(model)
        loss_of(model, 0).backward()
        optimizer.step()
        other = net()
        other_optimizer = adamw(other)
        held = MasterWeights(other, other_optimizer)
        other_optimizer.load_state_dict(optimizer.state_dict())
        of_master = other_optimizer.state[held.pairs[0].master]
        of_weight = optimizer.state[dict(model.named_parameters())[held.pairs[0].name]]
        assert torch.equal(of_master["exp_avg"], of_weight["exp_avg"])

    def test_ties_are_kept(self) -> None:
        model = net()
        optimizer = adamw(model)
        held = MasterWeights(model, optimizer, also=["embed"])
        assert model.head.weight is model.embed.weight
        assert model.head.weight.dtype is torch.bfloat16
        state = model.state_dict()
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        assert [p.name for p in held.pairs].count("embed.weight") == 1

    def test_a_tie_to_an_embedding_keeps_float32_unless_asked(self) -> None:
        model = net()
        held = MasterWeights(model, adamw(model), keep_float32=["down.bias"])
        assert held.kept == {
            "embed.weight": "Embedding computes with it in float32",
            "norm.weight": "LayerNorm computes with it in float32",
            "norm.bias": "LayerNorm computes with it in float32",
            "down.bias": "asked to be kept",
        }
        assert model.head.weight.dtype is torch.float32

    @pytest.mark.filterwarnings("ignore:backward hook")  # torch's: hooks are not in a pickle
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_a_copy_of_the_model_has_weights_of_its_own(self, copied: Any) -> None:
        model = net()
        MasterWeights(model, adamw(model))
        twin = copied(model)
        with torch.no_grad():
            twin.up.weight.zero_()
        assert not twin.state_dict()["up.weight"].any()
        assert model.state_dict()["up.weight"].any()

    def test_undo_gives_float32_back_with_the_same_parameters(self) -> None:
        model = net()
        optimizer = adamw(model)
        params = list(model.parameters())
        MasterWeights(model, optimizer).undo()
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert {p.dtype for p in params} == {torch.float32}
        assert all(torch.equal(a, b) for a, b in zip(params, net().parameters(), strict=True))
        assert all(a is b for a, b in zip(params, optimizer.param_groups[0]["params"], strict=True))

    def test_training_goes_on_after_undo_as_if_never_held(self) -> None:
        def run(held_steps: int) -> list[torch.Tensor]:
            model = net()
            optimizer = adamw(model)
            held = MasterWeights(model, optimizer) if held_steps else None
            MixedPrecision(model)
            for step in range(6):
                if held is not None and step == held_steps:
                    held.undo()
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            return list(model.state_dict().values())

        assert equal(run(3), run(0))

    def test_it_can_start_in_the_middle_of_a_training(self) -> None:
        def run(start: int | None) -> list[torch.Tensor]:
            model = net()
            optimizer = adamw(model)
            MixedPrecision(model)
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if step == start:
                    MasterWeights(model, optimizer)  # gradients and state are there already
                optimizer.step()
            return list(model.state_dict().values())

        assert equal(run(3), run(None))


class TestMemory:
    def test_it_is_told_by_category(self) -> None:
        model = nn.Linear(100, 50, bias=False)  # 5,000 weights
        optimizer = adamw(model)
        held = MasterWeights(model, optimizer)
        model(torch.ones(1, 100, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        before, after = held.before, held.memory()
        assert (before.weights_bytes, before.masters_bytes, before.autocast_bytes) == (
            20_000,
            0,
            10_000,
        )
        assert (after.weights_bytes, after.masters_bytes, after.autocast_bytes) == (
            10_000,
            20_000,
            0,
        )
        assert after.gradients_bytes == 20_000  # one tensor for weight and master
        assert after.state_bytes == 40_000 + 4  # two moments and the count of steps
        assert "weights 10 kB, masters 20 kB, gradients 20 kB" in str(after)


class TestRefusals:
    def test_a_gradient_replaced_on_one_side_is_refused_before_the_step(self) -> None:
        model = nn.Linear(4, 4)
        optimizer = adamw(model)
        MasterWeights(model, optimizer)
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad = model.weight.grad * 2
        with pytest.raises(PrecisionError, match=r"gradient of weight was replaced"):
            optimizer.step()

    def test_gradients_zeroed_on_one_side_are_not_stepped(self) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        MasterWeights(model, optimizer)
        before = model.state_dict()["weight"].clone()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        model.zero_grad()
        optimizer.step()
        assert torch.equal(model.state_dict()["weight"], before)

    def test_ddp_is_refused_before_and_after(self, one_rank: None) -> None:
        model = nn.Linear(4, 4)
        wrapped = DistributedDataParallel(model)
        with pytest.raises(PrecisionError, match="DistributedDataParallel"):
            MasterWeights(wrapped, adamw(model))
        model = nn.Linear(4, 4)
        MasterWeights(model, adamw(model))
        wrapped = DistributedDataParallel(model)
        with pytest.raises(PrecisionError, match="DistributedDataParallel"):
            wrapped(torch.ones(1, 4, dtype=torch.bfloat16))

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda m: MasterWeights(m, adamw(m), "float8"), "it is one of bfloat16, float16"),
            (lambda m: MasterWeights(m, adamw(m), also=["nothing"]), "no submodule or parameter"),
            (lambda m: MasterWeights(m, adamw(nn.Linear(1, 1))), "no optimizer steps it"),
            (lambda m: MasterWeights(m.bfloat16(), adamw(m)), "cannot be had back"),
            (lambda m: [MasterWeights(m, adamw(m)) for _ in range(2)], "has a master already"),
        ],
    )
    def test_what_cannot_be_is_said(self, make: Callable[[nn.Module], Any], words: str) -> None:
        with pytest.raises(PrecisionError, match=words):
            make(nn.Linear(4, 4))

    def test_lazy_layers_are_called_first(self) -> None:
        model = nn.LazyLinear(2)
        with pytest.raises(PrecisionError, match="call the model once, then MasterWeights"):
            MasterWeights(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))

    def test_assigning_a_state_is_refused(self) -> None:
        model = nn.Linear(4, 4)
        MasterWeights(model, adamw(model))
        with pytest.raises(PrecisionError, match="assign"):
            model.load_state_dict(model.state_dict(), assign=True)

    def test_mixed_precision_wants_the_same_dtype(self) -> None:
        model = nn.Linear(4, 4)
        MasterWeights(model, adamw(model))
        with pytest.warns(match="ask for the same dtype"):
            mixed = MixedPrecision(model, "float16")
        assert mixed.declined is not None
