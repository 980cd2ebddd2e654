"""Mixed precision around one module: float32 at its borders, in place, removable, and declined with a reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionError, PrecisionWarning
from flopwise.kit.precision import DynamicScaler, MixedPrecision, effective_dtypes


class Seen(nn.Module):
    """Passes on, and keeps the dtype that came in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtype = x.dtype
        return x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Seen(), nn.ReLU(), nn.Linear(8, 2))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
class TestAutocast:
    def test_inside_it_is_the_dtype_and_outside_float32(
        self, name: str, dtype: torch.dtype
    ) -> None:
        model = net()
        plain = model(X)
        MixedPrecision(model, name)
        out = model(X)
        assert model[1].dtype is dtype
        assert out.dtype is torch.float32
        assert torch.allclose(out, plain, atol=2e-2)
        assert not torch.equal(out, plain)
        loss = out.square().mean()
        loss.backward()
        assert loss.dtype is torch.float32
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}  # type: ignore[union-attr]

    def test_it_computes_what_autocast_computes(self, name: str, dtype: torch.dtype) -> None:
        model, plain = net(), net()
        MixedPrecision(model, name)
        with torch.autocast("cpu", dtype=dtype):
            expected = plain(X)
        assert torch.equal(model(X), expected.float())

    def test_undo_leaves_nothing(self, name: str, dtype: torch.dtype) -> None:
        model = net()
        before, attributes = model(X), {n: set(vars(m)) for n, m in model.named_modules()}
        made = MixedPrecision(model, name, keep_float32=["3"])
        assert made.active
        made.undo()
        assert not made.active
        assert torch.equal(model(X), before)
        assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes


def test_the_state_dict_is_unchanged_and_copies_are_plain() -> None:
    model, plain = net(), net()
    MixedPrecision(model)
    assert {k: v.dtype for k, v in model.state_dict().items()} == {
        k: v.dtype for k, v in plain.state_dict().items()
    }
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), plain(X))


def test_it_works_as_a_context() -> None:
    model = net()
    with MixedPrecision(model):
        model(X)
        assert model[1].dtype is torch.bfloat16
    model(X)
    assert model[1].dtype is torch.float32


def test_submodules_asked_to_be_kept_stay_float32() -> None:
    model = net()
    made = MixedPrecision(model, keep_float32=iter(["3"]))
    seen: list[Any] = []
    model[3].register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    model(X)
    assert seen == [(torch.float32, torch.float32)]
    assert model[1].dtype is torch.bfloat16
    assert str(made) == "bfloat16 around Sequential\n  in float32: 3, because asked to be kept"


def test_evaluation_can_be_left_as_it_was() -> None:
    model = net()
    MixedPrecision(model, training_only=True)
    with torch.no_grad():
        model(X)
    assert model[1].dtype is torch.float32
    model(X)
    assert model[1].dtype is torch.bfloat16


@dataclass
class Output:
    logits: torch.Tensor
    name: str


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda t: (t, [t]), lambda o: [o[0], o[1][0]]),
        (lambda t: {"loss": t, "more": {"logits": t}}, lambda o: [o["loss"], o["more"]["logits"]]),
        (lambda t: Output(t, "x"), lambda o: [o.logits]),
        (lambda t: Pair(t, t), lambda o: [o.a, o.b]),
    ],
)
def test_outputs_in_any_nest_come_back_in_float32(
    wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            out = self.layer(x)
            assert out.dtype is torch.bfloat16
            return wrap(out)

    model = Nested()
    MixedPrecision(model)
    out = model(X)
    assert type(out) is type(wrap(X))
    assert {t.dtype for t in unwrap(out)} == {torch.float32}


def test_a_compiled_model_is_wrapped_and_counts_as_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.compile(backend="eager")
    made = MixedPrecision(model)
    assert model(X).dtype is torch.float32
    assert effective_dtypes(lambda: model(X).sum().backward(), asked=made).took_effect


@pytest.mark.parametrize("wrap", ["compile", "ddp", "data parallel"])
def test_wrapped_models_are_wrapped_around(wrap: str, one_rank: None) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(X).float()
    model: Any = {
        "compile": lambda: torch.compile(plain, backend="eager"),
        "ddp": lambda: nn.parallel.DistributedDataParallel(plain),
        "data parallel": lambda: nn.DataParallel(plain),
    }[wrap]()
    made = MixedPrecision(model)
    out = model(X)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert {p.grad.dtype for p in plain.parameters()} == {torch.float32}  # type: ignore[union-attr]
    made.undo()
    assert model(X).dtype is torch.float32
    assert not torch.equal(model(X), expected)


class Block(nn.Module):
    """A module of the script's own: torch.compile calls those and torch's own in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def compiled_in_place(model: nn.Module, keep: list[str]) -> Any:
    model.compile(backend="eager")
    MixedPrecision(model, keep_float32=keep)
    return model


def compiled_in_place_afterwards(model: nn.Module, keep: list[str]) -> Any:
    MixedPrecision(model, keep_float32=keep)
    model.compile(backend="eager")
    return model


def around_compiled(model: nn.Module, keep: list[str]) -> Any:
    compiled = torch.compile(model, backend="eager")
    MixedPrecision(compiled, keep_float32=keep)
    return compiled


def compiled_afterwards(model: nn.Module, keep: list[str]) -> Any:
    MixedPrecision(model, keep_float32=keep)
    return torch.compile(model, backend="eager")


def in_a_compiled_function(model: nn.Module, keep: list[str]) -> Any:
    MixedPrecision(model, keep_float32=keep)
    return torch.compile(lambda x: model(x), backend="eager")


@pytest.mark.parametrize(
    "how",
    [
        compiled_in_place,
        compiled_in_place_afterwards,
        around_compiled,
        compiled_afterwards,
        in_a_compiled_function,
    ],
)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["torch's", "own"])
def test_compiled_code_computes_what_eager_code_does(
    kind: str, keep: bool, how: Callable[..., Any]
) -> None:
    def made() -> tuple[nn.Module, list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        return (model, ["0"]) if kind == "torch's" else (Block(), ["a"])

    torch._dynamo.reset()
    x = torch.randn(4, 8)
    model, names = made()
    float32 = model(x)
    MixedPrecision(model, keep_float32=names if keep else [])
    twin, _ = made()
    compiled = how(twin, names if keep else [])
    assert not torch.equal(model(x), float32)
    for _ in range(2):
        out = compiled(x)
        assert torch.equal(out, model(x))
    out.sum().backward()
    assert {p.grad.dtype for p in twin.parameters()} == {torch.float32}  # type: ignore[union-attr]


def test_compiled_afterwards_it_is_active_and_taken_back() -> None:
    torch._dynamo.reset()
    model, x = Block(), torch.randn(4, 8)
    expected = model(x)
    made = MixedPrecision(model)
    model.compile(backend="eager")
    assert made.active
    assert not torch.equal(model(x), expected)
    assert effective_dtypes(lambda: model(x).sum().backward(), asked=made).took_effect
    made.undo()
    assert not made.active
    assert torch.equal(model(x), expected)


def test_a_forward_that_was_replaced_afterwards_is_left_and_said() -> None:
    model = net()
    made = MixedPrecision(model)
    model.compile(backend="eager")
    mine = vars(model)["forward"] = type(model).forward.__get__(model)
    assert not made.active
    with pytest.warns(PrecisionWarning, match="was replaced after MixedPrecision"):
        made.undo()
    assert vars(model)["forward"] is mine


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_submodules_of_a_wrapped_model_are_known_by_their_name_in_it(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = wrap(net())
    for keep in ("3", next(n for n, _ in model.named_modules() if n.endswith(".3"))):
        made = MixedPrecision(model, keep_float32=keep)
        assert [name.rpartition(".")[2] for name in made.kept] == ["3"]
        assert next(iter(made.kept)) in dict(model.named_modules())
        made.undo()
    with pytest.raises(PrecisionError, match="no submodule 'head'"):
        MixedPrecision(model, keep_float32="head")


def test_around_one_module_there_is_one() -> None:
    model = net()
    made = MixedPrecision(model)
    with pytest.raises(PrecisionError, match="already, in bfloat16"):
        MixedPrecision(model, "float16")
    inner = MixedPrecision(model[3])
    inner.undo()
    made.undo()
    assert MixedPrecision(model, "float16").active


def test_tf32_is_of_a_whole_module() -> None:
    with pytest.raises(PrecisionError, match="TF32 is switched for all of a module"):
        MixedPrecision(net(), "tf32", keep_float32=["3"])


def test_float16_trains_with_the_scaler() -> None:
    model = net()
    MixedPrecision(model, "float16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = DynamicScaler("cpu", review_steps=5)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert scaler.skipped == 0


class TestDeclined:
    def test_weights_in_16_bits(self) -> None:
        model = net().bfloat16()
        with pytest.warns(PrecisionWarning, match="The module runs as before"):
            made = MixedPrecision(model)
        assert made.declined is not None
        assert made.declined.startswith("the weights are bfloat16, not all float32")
        assert not made.active
        assert model(X.bfloat16()).dtype is torch.bfloat16
        assert str(made).startswith("bfloat16 around Sequential: not used, the weights are")

    def test_complex_and_double_weights(self) -> None:
        for dtype in (torch.float64, torch.complex64):
            model = nn.Module()
            model.weight = nn.Parameter(torch.ones(2, dtype=dtype))
            with pytest.warns(PrecisionWarning, match=str(dtype).removeprefix("torch.")):
                MixedPrecision(model)

    def test_other_devices(self) -> None:
        with pytest.warns(PrecisionWarning, match="not tested on devices of type meta"):
            MixedPrecision(nn.Linear(2, 2, device="meta"))

    @pytest.mark.parametrize("dtype", ["tf32", "float8"])
    def test_what_a_cpu_has_not(self, dtype: str) -> None:
        model = net()
        before = model(X)
        with pytest.warns(PrecisionWarning, match="CUDA"):
            MixedPrecision(model, dtype)
        assert torch.equal(model(X), before)

    def test_a_dtype_that_is_none(self) -> None:
        with pytest.raises(PrecisionError, match="bfloat16, float16, tf32, float8"):
            MixedPrecision(net(), "int8")

    def test_a_submodule_that_is_none(self) -> None:
        with pytest.raises(PrecisionError, match="no submodule '9'"):
            MixedPrecision(net(), keep_float32=["9"])
