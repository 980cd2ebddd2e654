from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flopwise.fixes.catalog import padded_dimension
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.padded_dimension import PaddedDimension
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.fixes.replaced_linear import ReplacedLinear
from flopwise.meter.replay import Snapshot

VOCABULARY, WIDTH = 1009, 32


class Gpt(nn.Module):
    """A head that is tied to the embedding; the loss inside, and the logits outside if asked for."""

    def __init__(self, vocabulary: int = VOCABULARY, *, logits: bool = False, flat: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.logits, self.flat = logits, flat

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.head(self.body(self.embed(x)))
        if self.flat:
            logits = logits.view(-1).view(*x.shape, -1)  # fails where rows have gaps
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
        return {"loss": loss, "logits": logits} if self.logits else loss


def gpt(**more: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**more)


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, found: bool = True, frac: float = 0.9, **more: Any) -> Scene:
    return Scene(
        roots=roots, compute_frac=frac, findings={"L110": 0.3} if found else {"L107": 0.1}, **more
    )


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every layer for faster: what a CPU says of it is another matter."""
    monkeypatch.setattr(padded_dimension, "_slower_alone", lambda *_: None)


class Mine(nn.Linear):
    pass


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(gpt(), found=False), "no products of sizes"),
            (lambda: scene(), "no root"),
            (lambda: scene(gpt(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(nn.DataParallel(gpt())), "DataParallel"),
            (lambda: scene(gpt(), device=torch.device("mps")), "mps"),
            (lambda: scene(gpt(), frac=0.01), "1.0 %"),
            (lambda: scene(nn.Sequential(nn.Linear(64, 128))), "no Linear layer has an odd size"),
            (lambda: scene(nn.Sequential(nn.Linear(64, 10))), "0 (10x64): a round size would add"),
            (lambda: scene(nn.Sequential(Mine(64, 1009))), "Mine is a class of its own"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = PaddedDimension().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_vocabulary_of_odd_size(self) -> None:
        answer = PaddedDimension().check(scene(gpt()))
        assert answer == Eligible("1 layers: 1009 -> 1024")

    def test_layers_that_are_not_faster(self) -> None:
        model = gpt()
        applied = PaddedDimension().apply(scene(model))
        padded_dimension_trial = "not shown to be faster"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(padded_dimension, "_slower_alone", lambda *_: padded_dimension_trial)
            parity = applied.verify(Snapshot(model, (ids(), ids())))
        assert not parity.passed
        assert parity.detail == "no layer is faster padded: 1009 -> 1024: not shown to be faster"
        applied.enable()
        assert type(model.head) is nn.Linear


@pytest.mark.usefixtures("any_speed")
class TestEffect:
    def test_the_product_is_padded_and_nothing_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = gpt(logits=True)
        seen: list[tuple[int, ...]] = []
        plain = F.linear
        monkeypatch.setattr(
            F, "linear", lambda x, w, b=None: seen.append(tuple(w.shape)) or plain(x, w, b)
        )
        applied = PaddedDimension().apply(scene(model))
        assert applied.verify(Snapshot(model, (ids(), ids()))).passed
        assert applied.setting == {"head": "1024x32"}
        for on in (True, False, True):
            applied.enable() if on else applied.disable()
            seen.clear()
            out = model(ids(), ids())
            assert seen[-1] == ((1024 if on else 1009), WIDTH)
            assert out["logits"].shape == (2, 16, 1009)
            assert out["logits"].is_contiguous()
            assert list(model.state_dict()) == list(gpt().state_dict())
            assert model.state_dict()["head.weight"].shape == (1009, WIDTH)
            assert model.head.weight is model.embed.weight
            out["loss"].backward()
            assert model.embed.weight.grad is not None
            assert model.embed.weight.grad.shape == (1009, WIDTH)
        assert applied.settled()
        with torch.no_grad():
            model(ids(), ids())
        assert seen[-1] == (1009, WIDTH)

    def test_a_gap_where_the_logits_stay_inside(self) -> None:
        model = gpt()
        applied = PaddedDimension().apply(scene(model))
        strides = []
        model.head.register_forward_hook(lambda m, a, out: strides.append(out.stride()))
        parity = applied.verify(Snapshot(model, (ids(), ids())))
        assert parity.passed, parity.detail
        assert applied.setting == {"head": "1024x32 gap"}
        applied.enable()
        model(ids(), ids())
        assert strides[-1] == (16 * 1024, 1024, 1)

    def test_none_where_rows_must_touch(self) -> None:
        model = gpt(flat=True)
        applied = PaddedDimension().apply(scene(model))
        assert applied.verify(Snapshot(model, (ids(), ids()))).passed
        assert applied.setting == {"head": "1024x32"}
        applied.enable()
        model(ids(), ids()).backward()
        assert applied.failure() is None

    @pytest.mark.parametrize("gap", ["", " gap"])
    def test_training_follows_the_bare_one(self, gap: str) -> None:
        def run(toggle: bool) -> list[float]:
            model = gpt()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            applied = PaddedDimension().apply(scene(model), {"head": f"1024x32{gap}"})
            losses = []
            torch.manual_seed(3)
            for k in range(8):
                if toggle:
                    applied.enable() if (k // 2) % 2 else applied.disable()
                optimizer.zero_grad()
                loss = model(ids(), ids())
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            applied.undo()
            return losses

        assert run(True) == pytest.approx(run(False), rel=1e-5)

    def test_a_wrong_product_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = padded_dimension._product

        def wrong(one: Any, *, contiguous: bool) -> Any:
            product = right(one, contiguous=contiguous)
            return lambda x, w, b: product(x, w, b) * 1.01

        monkeypatch.setattr(padded_dimension, "_product", wrong)
        model = gpt()
        applied = PaddedDimension().apply(scene(model))
        assert not applied.verify(Snapshot(model, (ids(), ids()))).passed

    def test_under_autocast_and_compiled(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = gpt()
        here = scene(model)
        snapshot = Snapshot(model, (ids(), ids()))
        plain = model.eval()(ids(), ids()).item()
        applied = PaddedDimension().apply(here)
        low, fast = Bf16Autocast().apply(here), CompileModel().apply(here)
        low.enable()
        assert applied.verify(snapshot).passed
        applied.enable()
        fast.enable()
        for on in (True, False, True, False):
            applied.enable() if on else applied.disable()
            loss = model(ids(), ids())
            loss.backward()
            assert loss.item() == pytest.approx(plain, rel=1e-2)
        assert torch._dynamo.utils.counters["graph_break"] == {}
        compiled = torch._dynamo.utils.counters["frames"]["ok"]
        for on in (True, False):
            applied.enable() if on else applied.disable()
            model(ids(), ids())
        assert torch._dynamo.utils.counters["frames"]["ok"] == compiled, "compiled once for each"
        assert (fast.failure(), applied.failure()) == (None, None)
        for fix in (applied, fast, low):
            fix.undo()

    @settings(max_examples=20, deadline=None)
    @given(
        rows=st.integers(1, 300), columns=st.integers(1, 300), bias=st.booleans(), gap=st.booleans()
    )
    def test_any_sizes_give_the_same(self, rows: int, columns: int, bias: bool, gap: bool) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(columns, rows, bias=bias).double()
        target = (-(-rows // 8) * 8, -(-columns // 8) * 8)
        product = padded_dimension._product(
            padded_dimension.Candidate(layer, layer, target), contiguous=not gap
        )
        x = torch.randn(3, columns, dtype=torch.float64, requires_grad=True)
        ours, plain = product(x, layer.weight, layer.bias), layer(x)
        torch.testing.assert_close(ours, plain)
        wanted = [x, *layer.parameters()]
        weights = torch.randn_like(plain)
        torch.testing.assert_close(
            torch.autograd.grad(ours, wanted, weights), torch.autograd.grad(plain, wanted, weights)
        )


class TestChoice:
    def test_each_kind_of_layer_is_tried_once_the_largest_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 1009))
        tried = []

        def slower(one: Any, call: Any) -> str | None:
            tried.append((one.sizes, call.shape))
            return None if one.target[0] > 1000 else "slower"

        monkeypatch.setattr(padded_dimension, "_slower_alone", slower)
        applied = PaddedDimension().apply(scene(model))
        assert applied.verify(Snapshot(model, (torch.randn(4, 5, 100),))).passed
        assert tried == [("1024x112", (4, 5, 100)), ("112x112", (4, 5, 100))]
        assert applied.setting == {"2": "1024x112"}

    def test_a_layer_alone_is_timed_on_an_input_like_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flopwise.kit.memory import padding_trial

        seen = []

        def trial(layer: Any, target: Any, call: Any, contiguous: bool, rounds: int) -> Any:
            seen.append((type(layer), target, call.shape, call.autocast))
            return "not shown to be faster"

        monkeypatch.setattr(padding_trial, "trial", trial)
        model = gpt()
        applied = PaddedDimension().apply(scene(model))
        assert "not shown to be faster" in applied.verify(Snapshot(model, (ids(), ids()))).detail
        assert seen == [(nn.Linear, (1024, 32), (32, 32), None)]

    def test_the_trial_of_a_layer_runs(self) -> None:
        model = gpt()
        parity = PaddedDimension().apply(scene(model)).verify(Snapshot(model, (ids(), ids())))
        assert parity.passed or "no layer is faster padded: 1009 -> 1024" in parity.detail
        assert model.embed.weight.grad is None

    def test_a_plan_whose_layers_are_gone_does_nothing(self) -> None:
        model = gpt(vocabulary=1013)
        applied = PaddedDimension().apply(scene(model), {"head": "1088x32", "other": "64x64"})
        applied.enable()
        assert "not there" in str(applied.failure())
        assert type(model.head) is nn.Linear


@pytest.mark.usefixtures("any_speed")
class TestUndo:
    def test_nothing_is_left(self) -> None:
        model = gpt()
        names = [sorted(vars(m)) for m in model.modules()]
        kinds = [type(m) for m in model.modules()]
        hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
        state = copy.deepcopy(model.state_dict())
        rng = torch.get_rng_state()
        applied = PaddedDimension().apply(scene(model))
        applied.verify(Snapshot(model, (ids(), ids())))
        for _ in range(2):
            applied.enable()
            applied.enable()
            assert type(model.head) is ReplacedLinear
            applied.disable()
        applied.enable()
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        applied.undo()
        for one in (model, *twins):
            assert [type(m) for m in one.modules()] == kinds
            assert [sorted(vars(m)) for m in one.modules()] == names
            assert all(torch.equal(state[n], t) for n, t in one.state_dict().items())
        assert [
            (len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()
        ] == hooks
        assert torch.equal(torch.get_rng_state(), rng)

    def test_a_call_that_fails_padded_is_made_again_without(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = gpt().eval()
        plain = model(ids(), ids())
        applied = PaddedDimension().apply(scene(model))

        def fails(*_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(padded_dimension, "_product", lambda one, contiguous: fails)
        applied.enable()
        assert torch.equal(model(ids(), ids()), plain)
        assert "no memory" in str(applied.failure())
        assert type(model.head) is nn.Linear
        applied.enable()
        assert type(model.head) is nn.Linear

    def test_a_weight_of_another_size_is_not_padded(self) -> None:
        model = gpt()
        applied = PaddedDimension().apply(scene(model))
        applied.enable()
        model.embed = nn.Embedding(1013, WIDTH)
        model.head.weight = model.embed.weight
        assert model.head(torch.ones(2, WIDTH)).shape == (2, 1013)
