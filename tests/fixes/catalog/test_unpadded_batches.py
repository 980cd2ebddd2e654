"""Models of a small stand-in for transformers, with its conventions.

The stand-in: attention functions by the name in the configuration, masks made for names that are known, positions from
0 up, outputs that are dictionaries with attributes, a loss over labels that are not -100.
"""

from __future__ import annotations

import copy
import io
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.needless_mask import NeedlessMask
from flopwise.fixes.catalog.unpadded_batches import UnpaddedBatches
from flopwise.fixes.interface import Applied, Declined, Eligible, Facts, Scene
from flopwise.fixes.slot import COMPILED, Layers
from flopwise.meter.replay import Snapshot

VOCABULARY = 53
SENDING = ("to", "cuda")
ORIGINALS = {name: torch.Tensor.__dict__.get(name) for name in SENDING}


class Interface:
    _global_mapping: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register(cls, name: str, function: Any) -> None:
        cls._global_mapping[name] = function


def sdpa(module: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float = 0.0, **more: Any) -> Any:
    causal = mask is None and module.is_causal
    found = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
    return found.transpose(1, 2), None


class Pretrained(nn.Module):
    _supports_attention_backend = True


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if vars(self)[name] is not None:
                OrderedDict.__setitem__(self, name, vars(self)[name])

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Config:
    def __init__(self, **more: Any) -> None:
        self._attn_implementation = "sdpa"
        self.__dict__.update(more)


class Layer(nn.Module):
    def __init__(self, config: Config, causal: bool, dropout: float) -> None:
        super().__init__()
        self.config, self.is_causal, self.drop = config, causal, dropout
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)

    def forward(self, h: Any, mask: Any) -> Any:
        q, k, v = (t.view(*h.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        attend = Interface._global_mapping[self.config._attn_implementation]
        a, _ = attend(self, q, k, v, mask, dropout=self.drop if self.training else 0.0)
        return self.norm(h + self.dropout(self.out(a.reshape(h.shape))))


class TinyForMaskedLM(Pretrained):
    causal = False
    normalised = False

    def __init__(self, config: Config | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = config or Config()
        self.words, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.kinds = nn.Embedding(2, 16)
        self.layers = nn.ModuleList(Layer(self.config, self.causal, dropout) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)
        self.widths: list[tuple[int, ...]] = []

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        **more: Any,
    ) -> Any:
        self.widths.append(tuple(input_ids.shape))
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        h = self.words(input_ids) + self.places(position_ids)
        if token_type_ids is not None:
            h = h + self.kinds(token_type_ids)
        for layer in self.layers:
            h = layer(h, self.mask(attention_mask, input_ids.shape))
        logits = self.head(h - h.mean(1, keepdim=True) if self.normalised else h)
        loss = None if labels is None else self.loss(logits, labels)
        return Output(loss, logits) if more.get("return_dict", True) else (loss, logits)

    def mask(self, held: Any, shape: Any) -> Any:
        if self.config._attn_implementation != "sdpa":
            return None
        allowed = torch.ones(shape[0], 1, 1, shape[1]) if held is None else held[:, None, None]
        allowed = allowed.bool().expand(-1, -1, shape[1], -1)
        return allowed.tril() if self.causal else allowed

    def loss(self, logits: Any, labels: Any) -> Any:
        if self.causal:
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TinyForCausalLM(TinyForMaskedLM):
    causal = True


class LeakyForMaskedLM(TinyForMaskedLM):
    """Looks at more than its own sequence: a mean over the row."""

    normalised = True


class Pooled(nn.Module):
    """Not of transformers: attends by itself, classifies the mean of the tokens."""

    def __init__(self, own_loss: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 3)
        self.own_loss = own_loss
        self.widths: list[tuple[int, ...]] = []

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        self.widths.append(tuple(input_ids.shape))
        held = attention_mask[..., None]
        mean = (self.words(input_ids) * held).sum(1) / held.sum(1)
        logits = self.head(mean)
        return F.cross_entropy(logits, labels) if self.own_loss else logits


class Tagger(nn.Module):
    """Not of transformers, a loss elsewhere: logits for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.head(self.words(input_ids) * attention_mask[..., None])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    whole = types.ModuleType("transformers")
    whole.PreTrainedModel = Pretrained  # type: ignore[attr-defined]
    part = types.ModuleType("transformers.modeling_utils")
    part.AttentionInterface = Interface  # type: ignore[attr-defined]
    monkeypatch.setattr(Interface, "_global_mapping", {"sdpa": sdpa})
    monkeypatch.setitem(sys.modules, "transformers", whole)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", part)
    yield
    assert Interface._global_mapping == {"sdpa": sdpa}
    assert {name: torch.Tensor.__dict__.get(name) for name in SENDING} == ORIGINALS


def scene(*roots: nn.Module, **more: Any) -> Scene:
    given: dict[str, Any] = {"findings": {"D401": None}, "compute_frac": 0.9, "step_s": 1.0, **more}
    return Scene(roots=roots, **given)


def applied_to(model: nn.Module, **setting: str) -> Applied:
    return UnpaddedBatches().apply(scene(model), setting)


LENGTHS = (9, 30, 4, 21)


def batch(lengths: tuple[int, ...] = LENGTHS, width: int = 64, every: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths))
    held = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCABULARY, held.shape, generator=generator) * held
    labelled = held & (torch.rand(held.shape, generator=generator) < 1 / every)
    labels = ids.masked_fill(~labelled, -100)
    return {"input_ids": ids, "attention_mask": held.long(), "labels": labels}


def classes(lengths: tuple[int, ...] = LENGTHS, width: int = 128) -> dict[str, Any]:
    return {**batch(lengths, width), "labels": torch.arange(len(lengths)) % 3}


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(TinyForMaskedLM(), findings={}), "no padding was found"),
            (lambda: scene(TinyForMaskedLM(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(TinyForMaskedLM(), compute_frac=0.01), "1.0 %"),
            (lambda: scene(TinyForMaskedLM(), device=torch.device("mps")), "mps"),
            (lambda: scene(nn.DataParallel(TinyForMaskedLM())), "DataParallel"),
            (lambda: scene(nn.Linear(2, 2)), "takes no input_ids and no attention_mask"),
            (lambda: scene(), "no root"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = UnpaddedBatches().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    @pytest.mark.parametrize("code", ["L113", "D401"])
    def test_not_where_padding_was_found(self, code: str) -> None:
        answer = UnpaddedBatches().check(scene(TinyForMaskedLM(), findings={code: 0.5}))
        assert isinstance(answer, Eligible)

    def test_not_in_a_planned_run_which_measures_nothing_beforehand(self) -> None:
        planned = scene(TinyForMaskedLM(), findings={}, step_s=None)
        assert isinstance(UnpaddedBatches().check(planned), Eligible)

    @pytest.mark.parametrize(
        "change",
        [
            {"is_encoder_decoder": True},
            {"sliding_window": 8},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"output_attentions": True},
            {"output_router_logits": True},
            {"sub_configs": {"text_config": Config}},
            {"_attn_implementation": "flex_attention"},
        ],
    )
    def test_models_that_cannot_be_packed_are_cropped(self, change: dict[str, Any]) -> None:
        assert applied_to(TinyForMaskedLM(Config(**change))).setting["mode"] == "cropped"

    def test_so_are_those_that_recompute_or_are_looked_at(self) -> None:
        model = TinyForMaskedLM()
        model.layers[0].gradient_checkpointing = True  # type: ignore[assignment]
        assert applied_to(model).setting["mode"] == "cropped"
        model = TinyForMaskedLM()
        handle = model.layers[1].register_forward_hook(lambda *_: None)
        assert applied_to(model).setting["mode"] == "cropped"
        handle.remove()
        assert applied_to(model).setting["mode"] == "packed"

    def test_a_setting_that_is_none(self) -> None:
        with pytest.raises(ValueError, match="folded"):
            applied_to(TinyForMaskedLM(), mode="folded")


class TestPacked:
    @pytest.mark.parametrize("kind", [TinyForMaskedLM, TinyForCausalLM])
    def test_loss_and_gradients_hold_and_fewer_positions_are_computed(self, kind: Any) -> None:
        model = kind(dropout=0.1).train()
        applied = applied_to(model)
        parity = applied.verify(Snapshot(model, (), batch()))
        assert parity.passed, parity.detail
        assert parity.loss_rel is not None
        assert parity.loss_rel < 1e-6
        assert "dropout off" in parity.detail
        assert "were not compared" in parity.detail
        assert parity.output_rel is None
        model.widths.clear()
        applied.enable()
        model(**batch()).loss.backward()
        assert model.widths == [(1, 64)]
        assert applied.settled()
        assert applied.setting == {"mode": "packed", "positions": "64 of 256 for 64 tokens a call"}
        assert applied.failure() is None
        applied.undo()

    def test_logits_have_their_shape_and_zeros_where_there_is_no_token(self) -> None:
        model = TinyForMaskedLM()
        expected = model(**batch())
        applied = applied_to(model)
        applied.enable()
        found = model(**batch())
        applied.undo()
        held = batch()["attention_mask"].bool()
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits[held], expected.logits[held])
        assert found.logits.shape == expected.logits.shape
        assert found.logits[~held].count_nonzero() == 0

    def test_a_tuple_of_outputs_too(self) -> None:
        model = TinyForMaskedLM()
        loss, logits = model(**batch(), return_dict=False)
        applied = applied_to(model)
        applied.enable()
        ours, restored = model(**batch(), return_dict=False)
        applied.undo()
        torch.testing.assert_close(ours, loss)
        assert restored.shape == logits.shape

    def test_given_positions_and_kinds_of_tokens_go_along(self) -> None:
        model = TinyForMaskedLM()
        more = {
            "token_type_ids": (torch.arange(64)[None] > 5).long().expand(4, -1),
            "position_ids": torch.arange(64).flip(0)[None],
        }
        expected = model(**batch(), **more).loss
        applied = applied_to(model)
        applied.enable()
        torch.testing.assert_close(model(**batch(), **more).loss, expected)
        assert model.widths[-1] == (1, 64)
        applied.undo()

    def test_gaps_are_no_obstacle_without_a_causal_order(self) -> None:
        model = TinyForMaskedLM()
        given = batch()
        for row, at in ((0, 0), (1, 7), (3, 3)):
            given["attention_mask"][row, at] = 0
            given["labels"][row, at] = -100
        expected = model(**given).loss
        applied = applied_to(model)
        applied.enable()
        torch.testing.assert_close(model(**given).loss, expected)
        assert model.widths[-1] == (1, 64)
        applied.undo()

    def test_the_first_label_of_a_sequence_is_not_predicted_by_the_one_before(self) -> None:
        model = TinyForCausalLM()
        given = batch(every=1)
        assert (given["labels"][:, 0] != -100).all()
        expected = model(**given).loss
        applied = applied_to(model)
        applied.enable()
        torch.testing.assert_close(model(**given).loss, expected)
        applied.undo()

    def test_an_evaluation_is_left_alone(self) -> None:
        model = TinyForMaskedLM()
        applied = applied_to(model)
        applied.enable()
        with torch.no_grad():
            model(**batch())
        assert model.widths == [(4, 64)]
        applied.undo()

    def test_compiled_calls_have_few_lengths_and_always_a_filler(self) -> None:
        model = TinyForMaskedLM()
        applied = applied_to(model)
        applied.enable()
        compiled = Layers([model], COMPILED)
        compiled.on([lambda call: call])
        for lengths in ((64, 60, 3, 1), (60, 60, 3, 4), (10, 20, 30, 3)):
            model(**batch(lengths)).loss.backward()
        assert model.widths == [(1, 192), (1, 128), (1, 64)]
        compiled.off()
        applied.undo()

    def test_model_and_configuration_are_as_they_were(self) -> None:
        model = TinyForMaskedLM()
        before = (
            dict(vars(model)),
            type(model),
            list(model.state_dict()),
            vars(model.config).copy(),
        )
        generator = torch.get_rng_state()
        applied = applied_to(model)
        applied.verify(Snapshot(model, (), batch()))
        applied.enable()
        model(**batch()).loss.backward()
        copied = copy.deepcopy(model)
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        assert "_compiled_call_impl" not in vars(copied) or copied._compiled_call_impl is None
        applied.undo()
        assert (dict(vars(model)), type(model), list(model.state_dict())) == before[:3]
        assert vars(model.config) == before[3]
        assert torch.equal(torch.get_rng_state(), generator)

    def test_the_mask_is_not_read_from_the_device_where_the_host_knows_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flopwise.fixes.unpadding import parts

        model = TinyForMaskedLM()
        applied: Any = applied_to(model)
        looked = []
        true_look = parts.look
        monkeypatch.setattr(
            parts, "look", lambda m, labels: looked.append(m) or true_look(m, labels)
        )
        known = batch()
        monkeypatch.setattr(
            applied.copies,
            "of",
            lambda t: known["attention_mask"] if t.max() == 1 else known["labels"],
        )
        applied.enable()
        model(**batch())
        assert looked[0] is known["attention_mask"]
        assert applied.tally.read == 0
        monkeypatch.setattr(applied.copies, "of", lambda t: None)
        model(**batch())
        assert applied.tally.read == 1
        applied.undo()
        assert applied.setting["masks_read"] == "1 of 2 calls"


class TestCallsThatAreLeftAsTheyAre:
    def plain(self, model: Any, given: dict[str, Any], why: str) -> None:
        expected = model(**given)
        applied: Any = applied_to(model, mode="packed")
        applied.enable()
        for _ in range(8):
            found = model(**given)
        assert all(width == model.widths[0] for width in model.widths)
        assert why in str(applied.failure())
        assert torch.equal(found.logits, expected.logits)
        applied.undo()

    def test_labels_that_count_where_there_is_no_token(self) -> None:
        given = batch()
        given["labels"][2, 40] = 3
        self.plain(TinyForMaskedLM(), given, "have labels that count")

    @pytest.mark.parametrize("place", [(0, slice(0, 2)), (1, slice(3, 4))])
    def test_a_causal_model_padded_on_the_left_or_with_gaps(self, place: Any) -> None:
        given = batch()
        given["attention_mask"][place] = 0
        given["labels"][place] = -100
        self.plain(TinyForCausalLM(), given, "padded on the left")

    def test_masks_that_number_sequences(self) -> None:
        given = batch()
        given["attention_mask"][0, :4] = 2
        self.plain(TinyForMaskedLM(), given, "other numbers than 0 and 1")

    def test_a_sequence_without_a_token(self) -> None:
        given = batch((9, 30, 1, 21))
        given["attention_mask"][2] = 0
        given["labels"][2] = -100
        given["input_ids"][2] = 0
        expected = TinyForMaskedLM()(**given).loss
        assert torch.isfinite(expected)
        self.plain(TinyForMaskedLM(), given, "no token")

    def test_no_padding(self) -> None:
        self.plain(TinyForMaskedLM(), batch((64,) * 4), "256 of 256 positions hold a token")

    def test_no_mask_and_no_labels(self) -> None:
        given = batch()
        del given["attention_mask"]
        self.plain(TinyForMaskedLM(), given, "without an attention mask")
        given = batch()
        del given["labels"]
        self.plain(TinyForMaskedLM(), given, "outside of the model")

    def test_arguments_that_are_not_known(self) -> None:
        self.plain(TinyForMaskedLM(), {**batch(), "bias": torch.ones(4, 64)}, "bias")

    def test_one_odd_batch_among_others_is_no_failure(self) -> None:
        model = TinyForMaskedLM()
        applied = applied_to(model)
        applied.enable()
        for lengths in (LENGTHS, (64,) * 4, LENGTHS):
            model(**batch(lengths))
        assert model.widths == [(1, 64), (4, 64), (1, 64)]
        assert applied.failure() is None
        applied.undo()


class TestFailures:
    def test_what_the_packed_call_raises_is_not_the_script_s(self) -> None:
        class ForMaskedLM(TinyForMaskedLM):
            def forward(
                self, input_ids: Any, attention_mask: Any, labels: Any, position_ids: Any = None
            ) -> Any:
                if attention_mask is None:
                    raise ValueError("where is my mask")
                return super().forward(input_ids, attention_mask, None, position_ids, labels)

        class StrictForMaskedLM(ForMaskedLM):
            def forward(
                self,
                input_ids: Any,
                attention_mask: Any = None,
                labels: Any = None,
                position_ids: Any = None,
            ) -> Any:
                return super().forward(input_ids, attention_mask, labels, position_ids)

        model = StrictForMaskedLM()
        expected = model(**batch()).loss
        other = Layers([model], COMPILED)
        other.on([lambda call: call])
        applied = applied_to(model)
        applied.enable()
        assert torch.equal(model(**batch()).loss, expected)
        assert "where is my mask" in str(applied.failure())
        assert other.failure() is None  # the other fixes' layers stay
        assert torch.equal(model(**batch()).loss, expected)
        applied.enable()  # does nothing any more
        applied.undo()
        other.off()
        assert "_compiled_call_impl" not in vars(model)

    def test_the_script_s_own_errors_reach_it(self) -> None:
        model = TinyForMaskedLM()
        applied = applied_to(model)
        applied.enable()
        given = batch()
        given["input_ids"][0, 0] = VOCABULARY
        with pytest.raises(IndexError):
            model(**given)
        assert applied.failure() is None
        assert model.config._attn_implementation == "sdpa"
        applied.undo()

    def test_a_model_that_looks_beyond_its_sequences_is_cropped_instead(self) -> None:
        model = LeakyForMaskedLM()
        applied = applied_to(model)
        parity = applied.verify(Snapshot(model, (), batch(width=64)))
        assert not parity.passed  # a mean over the columns changes when they are cut, too
        assert parity.detail.startswith("packed: ")
        assert "cropped: " in parity.detail
        applied.undo()

    def test_a_snapshot_without_padding_shows_nothing(self) -> None:
        model = TinyForMaskedLM()
        parity = applied_to(model, mode="cropped").verify(Snapshot(model, (), batch((64,) * 4)))
        assert not parity.passed
        assert "no padding to leave out" in parity.detail


class TestCropped:
    def test_columns_without_a_token_are_cut(self) -> None:
        model = Pooled()
        applied = applied_to(model)
        assert applied.setting["mode"] == "cropped"
        parity = applied.verify(Snapshot(model, (), classes()))
        assert parity.passed, parity.detail
        model.widths.clear()
        applied.enable()
        model(**classes())
        model(**classes((100, 3)))
        assert model.widths == [(4, 64), (2, 128)]
        applied.undo()

    def test_outputs_without_positions_may_go_into_a_loss_elsewhere(self) -> None:
        model = Pooled(own_loss=False)
        applied = applied_to(model)
        assert applied.verify(Snapshot(model, (), classes())).passed
        applied.undo()

    def test_outputs_by_position_may_not(self) -> None:
        model = Tagger()
        given = {k: v for k, v in classes().items() if k != "labels"}
        applied = applied_to(model)
        parity = applied.verify(Snapshot(model, (), given))
        assert not parity.passed
        assert "computed outside" in parity.detail
        assert model(**given).shape == (4, 128, 3)
        applied.undo()

    def test_logits_beside_a_loss_have_their_width(self) -> None:
        model = TinyForMaskedLM()
        model.places = nn.Embedding(128, 16)
        given = batch(width=128)
        expected = model(**given)
        applied = applied_to(model, mode="cropped")
        applied.enable()
        found = model(**given)
        assert model.widths == [(4, 128), (4, 64)]
        torch.testing.assert_close(found.loss, expected.loss)
        assert found.logits.shape == expected.logits.shape
        applied.undo()


class TestWithOthers:
    @pytest.mark.parametrize("first", [0, 1])
    def test_under_autocast_in_any_order(self, first: int) -> None:
        model = TinyForMaskedLM()
        expected = model(**batch())
        ours, cast = applied_to(model), Bf16Autocast().apply(scene(model))
        assert cast.verify(Snapshot(model, (), batch())).passed
        pair = [ours, cast] if first == 0 else [cast, ours]
        for applied in pair:
            applied.enable()
        assert ours.verify(Snapshot(model, (), batch())).passed
        for applied in pair:
            applied.enable()
        found = model(**batch())
        assert type(found) is not Output  # the cast has not restored what nobody reads
        assert found.logits.dtype == torch.float32
        torch.testing.assert_close(found.loss, expected.loss, rtol=0.02, atol=0)
        for applied in pair:
            applied.undo()
        assert "_compiled_call_impl" not in vars(model)
        assert torch.equal(model(**batch()).loss, expected.loss)

    def test_logits_at_labelled_places_are_those_of_the_row(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = TinyForMaskedLM()
        model.head = nn.Linear(16, 1200)
        expected = model(**batch())
        ours, fewer = applied_to(model), LabelledLogits().apply(scene(model))
        kind: Any = type(fewer)
        made = kind.made
        rows: list[Any] = []
        for _ in range(6):
            model(**batch())  # it watches whether logits are read
        assert fewer.verify(Snapshot(model, (), batch())).passed
        assert ours.verify(Snapshot(model, (), batch())).passed
        monkeypatch.setattr(
            kind, "made", lambda self, *given: rows.append(given[2].shape) or made(self, *given)
        )
        for applied in (fewer, ours):
            applied.enable()
        model.widths.clear()
        found = model(**batch())
        found.loss.backward()
        assert model.widths == [(1, 64)]
        assert rows == [(64, 16)]  # the loss was made outside, of the row
        torch.testing.assert_close(found.loss, expected.loss)
        assert fewer.failure() is None
        assert ours.failure() is None
        held = batch()["attention_mask"].bool()
        torch.testing.assert_close(found.logits[held], expected.logits[held])
        for applied in (ours, fewer):
            applied.undo()
        assert "_compiled_call_impl" not in vars(model)

    def test_full_batches_go_without_their_mask_and_padded_ones_without_their_padding(self) -> None:
        model = TinyForMaskedLM()
        expected = [model(**batch(lengths)).loss for lengths in (LENGTHS, (64,) * 4)]
        fixes = [applied_to(model), NeedlessMask().apply(scene(model))]
        for applied in fixes:
            applied.enable()
        model.widths.clear()
        for lengths, loss in zip((LENGTHS, (64,) * 4), expected, strict=True):
            torch.testing.assert_close(model(**batch(lengths)).loss, loss)
        assert model.widths == [(1, 64), (4, 64)]
        assert [applied.failure() for applied in fixes] == [None, None]
        for applied in fixes:
            applied.undo()

    def test_what_others_leave_of_the_mask_is_not_looked_at(self) -> None:
        """A fix inside that takes masks out when they hide nothing gets none from a packed call."""
        model = TinyForMaskedLM()
        seen = []
        applied = applied_to(model)
        applied.enable()
        other = Layers([model], COMPILED)
        other.on([lambda call: lambda **given: seen.append(set(given)) or call(**given)])
        model(**batch())
        other.off()
        applied.undo()
        assert "attention_mask" not in seen[0]
