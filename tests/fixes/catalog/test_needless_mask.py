from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from flopwise.fixes.catalog import needless_mask
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.needless_mask import NeedlessMask, place_of
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.meter.replay import Snapshot

pytestmark = pytest.mark.timeout(200, method="thread")
WIDTH, HEADS, LENGTH = 16, 2, 6


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert "to" not in vars(torch.Tensor)


class Encoder(nn.Module):
    """One layer of fused attention, masked as encoders mask; it notes what it was called with."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.drop = nn.Linear(WIDTH, 3), nn.Dropout(dropout)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        h = self.embed(input_ids)
        b, t, c = h.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(h).split(c, 2))
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, t, c)
        logits = self.head(self.drop(y))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Watched(Encoder):
    """The same, and it keeps the masks that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.given.append(attention_mask)
        return super().forward(input_ids, attention_mask, labels)


class Lies(Encoder):
    """Takes the absence of a mask for something else."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        if attention_mask is None:
            attention_mask = (input_ids > 4).long()
        return super().forward(input_ids, attention_mask, labels)


class Needs(nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids


def made(kind: Any = Encoder, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(**more)


def ids() -> torch.Tensor:
    return torch.randint(0, 11, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def full() -> torch.Tensor:
    return torch.ones(3, LENGTH, dtype=torch.int64)


def padded() -> torch.Tensor:
    mask = full()
    mask[1, 4:] = 0
    return mask


def scene(*roots: nn.Module, frac: float | None = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


class TestCheck:
    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (lambda: scene(), "no root"),
            (lambda: scene(nn.Linear(2, 2)), "takes an attention_mask"),
            (lambda: scene(Needs()), "takes an attention_mask"),
            (lambda: scene(made(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(made(), frac=0.01), "1.0 %"),
            (lambda: scene(made(), findings={"L107": 0.1}), "no fused attention is given a mask"),
        ],
    )
    def test_declines_with_a_reason(self, given: Any, reason: str) -> None:
        answer = NeedlessMask().check(given())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_takes_a_model_whose_masks_were_found(self) -> None:
        assert NeedlessMask().check(scene(made(), findings={"L109": None})) == Eligible()

    def test_takes_any_that_has_the_argument_where_there_was_no_ledger(self) -> None:
        assert NeedlessMask().check(scene(made())) == Eligible()

    def test_the_place_of_the_argument(self) -> None:
        def keyword(ids: Any, *, attention_mask: Any = None) -> None: ...

        module = nn.Linear(2, 2)
        assert place_of(made()) == 1
        assert place_of(module) is None
        module.forward = keyword  # type: ignore[method-assign, assignment]
        assert place_of(module) == 2


class TestEffect:
    def test_a_full_mask_is_left_out_and_one_with_padding_stays(self) -> None:
        model = made(Watched)
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        for mask in (full(), padded(), full()):
            model(ids(), attention_mask=mask)
            model(ids(), mask, None)
        one, two, *_ = model.given[2:]
        assert [g is None for g in model.given] == [True, True, False, False, True, True]
        assert torch.equal(one, padded())
        assert torch.equal(two, padded())
        applied.disable()
        model(ids(), full())
        assert model.given[-1] is not None
        applied.undo()

    def test_on_a_device_only_what_was_seen_on_the_host(self) -> None:
        model = made(Watched).to("meta")
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        there = ids().to("meta")
        model(there, full().to("meta"))
        model(there, padded().to("meta"))
        model(there, torch.ones(3, LENGTH, dtype=torch.int64, device="meta"))
        assert [g is None for g in model.given] == [True, False, False]
        applied.undo()

    def test_other_masks_and_evaluations_are_untouched(self) -> None:
        model = made(Watched)
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        with torch.no_grad():
            model(ids(), full())
        assert model.given[-1] is not None
        four = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)
        with pytest.raises(
            RuntimeError
        ):  # a shape that this model does not take, passed on as it is
            model(ids(), four)
        assert model.given[-1] is four
        applied.undo()

    def test_results_are_those_without_a_mask(self) -> None:
        model = made()
        wanted = model(ids(), labels=ids() % 3)["loss"]
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        assert torch.equal(model(ids(), full(), labels=ids() % 3)["loss"], wanted)
        applied.undo()

    @pytest.mark.parametrize("mask", [full, padded])
    @pytest.mark.parametrize("kind", [Encoder, lambda: Encoder(dropout=0.5)])
    def test_the_numbers_stay_within_rounding(self, mask: Any, kind: Any) -> None:
        model = made(kind)
        kwargs = {"attention_mask": mask(), "labels": ids() % 3}
        applied = NeedlessMask().apply(scene(model))
        parity = applied.verify(Snapshot(model, (ids(),), kwargs))
        applied.undo()
        assert parity.passed, parity.detail
        assert "against float64" in parity.bound_source

    @pytest.mark.parametrize("mask", [full, padded])
    def test_a_model_to_which_no_mask_means_another_fails(self, mask: Any) -> None:
        model = made(Lies)
        applied = NeedlessMask().apply(scene(model))
        assert not applied.verify(Snapshot(model, (ids(), mask()))).passed
        applied.undo()

    def test_without_a_mask_there_is_nothing_to_do(self) -> None:
        model = made()
        applied = NeedlessMask().apply(scene(model))
        parity = applied.verify(Snapshot(model, (ids(),)))
        assert not parity.passed
        assert "without an attention_mask" in parity.detail
        applied.undo()

    def test_it_is_given_up_where_no_mask_can_be_left_out(self) -> None:
        model = made()
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        for _ in range(needless_mask.MOST_IN_VAIN):
            assert applied.failure() is None
            model(ids(), padded())
        assert "none of 16 masks" in (applied.failure() or "")
        applied.undo()

    def test_one_that_worked_is_not_given_up(self) -> None:
        model = made()
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        model(ids(), full())
        for _ in range(2 * needless_mask.MOST_IN_VAIN):
            model(ids(), padded())
        assert applied.failure() is None
        applied.undo()

    def test_compiled_calls_lose_their_mask_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._dynamo import lookup_backend

        from flopwise.fixes import compiling

        monkeypatch.setattr(compiling, "BACKEND", lookup_backend("aot_eager"))
        model = made()
        masks, compiled = NeedlessMask().apply(scene(model)), CompileModel().apply(scene(model))
        snapshot = Snapshot(model, (ids(),), {"attention_mask": full(), "labels": ids() % 3})
        assert masks.verify(snapshot).passed
        masks.enable()
        parity = compiled.verify(snapshot)
        assert parity.passed, parity.detail
        compiled.enable()
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        model(*snapshot.args, **snapshot.kwargs)["loss"].backward()
        # what was compiled for the comparison is what training runs
        assert torch._dynamo.utils.counters["frames"]["ok"] == frames
        compiled.undo()
        masks.undo()
        assert "_compiled_call_impl" not in vars(model)


class TestUndo:
    def test_nothing_is_left(self) -> None:
        model = made()
        before = torch.Tensor.to
        names, rng = [sorted(vars(m)) for m in model.modules()], torch.get_rng_state()
        state = copy.deepcopy(model.state_dict())
        applied = NeedlessMask().apply(scene(model))
        applied.verify(Snapshot(model, (ids(), full())))
        for _ in range(3):
            applied.enable()
            applied.disable()
        applied.enable()
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        applied.undo()
        for one in (model, *twins):
            assert [sorted(vars(m)) for m in one.modules()] == names
            assert all(
                torch.equal(a, b)
                for a, b in zip(state.values(), one.state_dict().values(), strict=True)
            )
        assert torch.equal(torch.get_rng_state(), rng)
        assert torch.Tensor.to is before

    def test_the_scripts_own_error_is_its_own(self) -> None:
        model = made()
        applied = NeedlessMask().apply(scene(model))
        applied.enable()
        with pytest.raises(IndexError):
            model(ids() + 100, full())
        assert applied.failure() is None
        applied.undo()


class TestTransformers:
    @pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
    def test_models_of_transformers(self, name: str) -> None:
        transformers = pytest.importorskip("transformers", reason="not installed")
        config = getattr(transformers, f"{name[:4] if name[0] == 'B' else 'Llama'}Config")(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=64,
            max_position_embeddings=16,
        )
        config.use_cache = False
        model = getattr(transformers, name)(config)
        found = NeedlessMask().check(scene(model, findings={"L107": 0.1}))
        assert isinstance(found, Eligible)
        applied = NeedlessMask().apply(scene(model))
        batch = torch.randint(1, 64, (2, 8))
        for mask in (
            torch.ones_like(batch),
            torch.ones_like(batch).index_fill(1, torch.tensor([7]), 0),
        ):
            kwargs = {"input_ids": batch, "attention_mask": mask, "labels": batch}
            parity = applied.verify(Snapshot(model, (), kwargs))
            assert parity.passed, parity.detail
        applied.undo()
