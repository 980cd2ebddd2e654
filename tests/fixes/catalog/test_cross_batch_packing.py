"""Rows filled with sequences of several batches, on a small stand-in for a model of transformers."""

from __future__ import annotations

import copy
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F

from flopwise.fixes import compiling
from flopwise.fixes.catalog import compile_model
from flopwise.fixes.catalog.cross_batch_packing import (
    WATCHED_CALLS,
    CrossBatchPacking,
    row_for,
)
from flopwise.fixes.catalog.unpadded_batches import UnpaddedBatches
from flopwise.fixes.interface import Applied, Declined, Eligible, Facts, Scene
from flopwise.fixes.unpadding.padding import Padding
from flopwise.meter.found import frames_compiled
from flopwise.meter.replay import Snapshot

VOCABULARY = 997
WIDTH = 64


class Interface:
    _global_mapping: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register(cls, name: str, function: Any) -> None:
        cls._global_mapping[name] = function


def sdpa(module: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float = 0.0, **more: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, dropout).transpose(1, 2), None


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
    return_dict = True

    def __init__(self) -> None:
        self._attn_implementation = "sdpa"


class TinyForMaskedLM(Pretrained):
    is_causal = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.drop = Config(), dropout
        self.words, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(WIDTH, 16)
        self.qkv, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16, VOCABULARY)
        self.rows: list[Any] = []

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None,
        position_ids: Any = None, labels: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        self.rows.append(input_ids.detach().clone())
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        h = self.words(input_ids) + self.places(position_ids)
        q, k, v = (t.view(*h.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        attend = Interface._global_mapping[self.config._attn_implementation]
        dropout = self.drop if self.training else 0.0
        a, _ = attend(self, q, k, v, self.mask(attention_mask, input_ids.shape), dropout=dropout)
        logits = self.head(self.norm(h + self.dropout(a.reshape(h.shape))))
        loss = None if labels is None else self.loss(logits, labels)
        return Output(loss, logits) if more.get("return_dict", True) else (loss, logits)

    def mask(self, held: Any, shape: Any) -> Any:
        if self.config._attn_implementation != "sdpa":
            return None
        allowed = held[:, None, None].bool().expand(-1, -1, shape[1], -1)
        return allowed.tril() if self.is_causal else allowed

    def loss(self, logits: Any, labels: Any) -> Any:
        if self.is_causal:
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TinyForCausalLM(TinyForMaskedLM):
    is_causal = True


class SummedForMaskedLM(TinyForMaskedLM):
    """Its loss is no mean over labels: two halves of a batch have half of it each."""

    def loss(self, logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    whole = types.ModuleType("transformers")
    whole.PreTrainedModel = Pretrained  # type: ignore[attr-defined]
    part = types.ModuleType("transformers.modeling_utils")
    part.AttentionInterface = Interface  # type: ignore[attr-defined]
    monkeypatch.setattr(Interface, "_global_mapping", {"sdpa": sdpa})
    monkeypatch.setitem(sys.modules, "transformers", whole)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", part)
    before = {name: torch.Tensor.__dict__.get(name) for name in ("to", "cuda")}
    yield
    assert Interface._global_mapping == {"sdpa": sdpa}
    assert {name: torch.Tensor.__dict__.get(name) for name in ("to", "cuda")} == before


def scene(*roots: nn.Module, **more: Any) -> Scene:
    given: dict[str, Any] = {"findings": {"D401": None}, "compute_frac": 0.9, "step_s": 1.0, **more}
    return Scene(roots=roots, **given)


def batch(lengths: tuple[int, ...], number: int = 0) -> dict[str, Any]:
    """Sequences whose first token tells nothing, and whose other tokens are drawn."""
    generator = torch.Generator().manual_seed(1000 * number + sum(lengths))
    held = torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCABULARY, held.shape, generator=generator) * held
    labels = ids.masked_fill(~(held & (torch.rand(held.shape, generator=generator) < 0.6)), -100)
    return {"input_ids": ids, "attention_mask": held.long(), "labels": labels}


def batches(n: int, seed: int = 0, rows: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 40, (n, rows), generator=generator).tolist()
    return [batch(tuple(row), number) for number, row in enumerate(lengths)]


ROW = {"row": "192", "sequences": "12", "width": "64"}


class Both:
    """unpadded-batches, on, and packing across batches beside it."""

    def __init__(self, model: nn.Module, setting: dict[str, str] | None = None) -> None:
        self.below: Applied = UnpaddedBatches().apply(scene(model))
        self.below.enable()
        self.fix: Any = CrossBatchPacking().apply(scene(model), ROW if setting is None else setting)

    def __enter__(self) -> Any:
        return self.fix

    def __exit__(self, *_: object) -> None:
        self.fix.undo()
        self.below.undo()


def sequences_of(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[held.bool()].tolist()) for row, held in zip(ids, mask, strict=True)]


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(TinyForMaskedLM(), findings={}), "no padding was found"),
            (lambda: scene(TinyForMaskedLM(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(TinyForMaskedLM(), TinyForMaskedLM()), "2 models are trained"),
            (lambda: scene(nn.Linear(2, 2)), "is not a model of transformers"),
            (lambda: scene(TinyForMaskedLM(), device=torch.device("mps")), "mps"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = CrossBatchPacking().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_where_padding_was_found_or_a_plan_says_so(self) -> None:
        assert isinstance(CrossBatchPacking().check(scene(TinyForMaskedLM())), Eligible)
        planned = scene(TinyForMaskedLM(), findings={}, step_s=None)
        assert isinstance(CrossBatchPacking().check(planned), Eligible)

    def test_without_what_computes_its_rows(self) -> None:
        model = TinyForMaskedLM()
        applied = CrossBatchPacking().apply(scene(model), ROW)
        assert "unpadded-batches is not on" in str(applied.failure())
        applied.enable()
        assert "_compiled_call_impl" not in vars(model)
        applied.undo()

    @pytest.mark.parametrize(
        "change", [{"row": "0"}, {"row": "1e3"}, {"width": ""}, {"row": "32"}, {"sequences": "-1"}]
    )
    def test_a_setting_that_is_no_row(self, change: dict[str, str]) -> None:
        with pytest.raises(ValueError, match="row"):
            CrossBatchPacking().apply(scene(TinyForMaskedLM()), {**ROW, **change})


class TestTraining:
    @pytest.mark.parametrize("kind", [TinyForMaskedLM, TinyForCausalLM])
    def test_rows_have_one_length_and_every_sequence_is_computed_once(self, kind: Any) -> None:
        model = kind().train()
        given = batches(24)
        with Both(model, {**ROW, "row": "140"}) as fix:
            fix.enable()
            model.rows.clear()
            for one in given:
                model(**one).loss.backward()
            assert {tuple(row.shape) for row in model.rows} == {(1, 140)}
            drawn = [
                s for one in given for s in sequences_of(one["input_ids"], one["attention_mask"])
            ]
            waiting = fix.part.waiting
            assert 0 < waiting.sequences < 12
            tokens = sum(map(len, drawn))
            assert fix.tally.computed == tokens - waiting.tokens == fix.tally.drawn - waiting.tokens
            text = [f" {' '.join(map(str, row[0].tolist()))} " for row in model.rows]
            times = [sum(t.count(f" {' '.join(map(str, one))} ") for t in text) for one in drawn]
            assert set(times) == {0, 1}
            assert times.count(0) == waiting.sequences
            fix.settled()
            assert fix.failure() is None
            assert fix.setting["waiting"].endswith("sequences at most")

    def test_the_loss_and_its_gradient_are_those_of_the_sequences_of_the_row(self) -> None:
        model = TinyForMaskedLM().train()
        one, two = batch((30, 20, 34, 40)), batch((38, 30, 33), 1)  # 124 and 101 tokens
        plain = copy.deepcopy(model)
        with Both(model, {**ROW, "row": "128"}) as fix:
            fix.enable()
            first, second = model(**one).loss, model(**two).loss
            torch.testing.assert_close(first, plain(**one).loss)
            torch.testing.assert_close(second, plain(**two).loss)
        model = TinyForMaskedLM().train()
        with Both(model, {**ROW, "row": "64"}) as fix:
            fix.enable()
            loss = model(**one).loss  # (30, 20) are taken, (34, 40) wait
            loss.backward()
            alone = {name: t[:2] for name, t in one.items()}
            expected = plain(**alone).loss
            expected.backward()
            torch.testing.assert_close(loss, expected)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            assert fix.part.waiting.sequences == 2

    def test_logits_that_are_read_are_those_of_the_scripts_batch_and_end_it(self) -> None:
        model = TinyForMaskedLM().train()
        one = batch((30, 20, 34, 40))
        expected = copy.deepcopy(model)(**one).logits
        with Both(model, {**ROW, "row": "64"}) as fix:
            fix.enable()
            outputs = model(**one)
            assert type(outputs).__name__ == "Output"
            assert isinstance(outputs, Output)
            assert list(outputs) == ["loss", "logits"]
            assert fix.failure() is None
            torch.testing.assert_close(outputs.logits, expected)
            assert outputs["logits"].requires_grad
            assert type(outputs) is Output
            assert fix.failure() == (
                "the script reads logits: they were computed again, for the sequences of its own batch"
            )
            model(**one)
            assert model.rows[-1].shape == (1, 128)  # unpadded as ever

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"num_items_in_batch": 7}, "num_items_in_batch"),
            ({"return_dict": False}, "tuple"),
            ({"inputs_embeds": torch.zeros(1)}, "inputs_embeds may depend on positions"),
            ({"position_ids": torch.arange(WIDTH)[None]}, "position_ids is not one for each"),
            ({"labels": None}, "without ids, an attention mask or labels"),
        ],
    )
    def test_calls_that_are_left_as_they_are(self, change: dict[str, Any], reason: str) -> None:
        model = TinyForMaskedLM().train()
        with Both(model) as fix:
            fix.enable()
            for one in batches(8):
                model(**{**one, **change})
            assert fix.part.waiting.sequences == 0
            assert "none of 8 calls" in str(fix.failure())
            assert reason in str(fix.failure())

    def test_padding_in_front_is_left_as_it_is(self) -> None:
        model = TinyForMaskedLM().train()
        with Both(model) as fix:
            fix.enable()
            one = {name: t.flip(1) for name, t in batch((30, 20)).items()}
            model(**one)
            assert fix.tally.groups == 0
            assert fix.part.waiting.sequences == 0

    def test_evaluations_are_left_as_they_are(self) -> None:
        model = TinyForMaskedLM().train()
        with Both(model) as fix:
            fix.enable()
            with torch.no_grad():
                model(**batch((30, 20)))
            model.eval()
            model(**batch((30, 20)))
            assert fix.tally.groups == 0

    def test_what_raises_is_made_again_with_its_own_batch(self) -> None:
        model = TinyForMaskedLM().train()
        one = batch((30, 20, 34, 40))
        expected = copy.deepcopy(model)(**one).loss
        with Both(model) as fix:
            fix.enable()
            fix.part.waiting.exchange = None  # not callable
            torch.testing.assert_close(model(**one).loss, expected)
            assert "was made again with its own" in str(fix.failure())

    def test_rows_grow_where_too_few_tokens_fit(self) -> None:
        model = TinyForMaskedLM().train()
        with Both(model, {**ROW, "row": "64"}) as fix:
            fix.enable()
            for one in batches(40):
                model(**one)
            assert int(fix.setting["row"]) > 64
            model.rows.clear()
            for one in batches(200, seed=1):
                model(**one)
            assert (
                "more and more tokens" in str(fix.failure())
                or len({row.shape for row in model.rows[-9:]}) == 1
            )

    def test_sequences_wait_while_it_is_off_and_nothing_is_left_behind(self) -> None:
        model = TinyForMaskedLM().train()
        before = {name: value for name, value in vars(model).items() if name != "rows"}
        state = {name: t.clone() for name, t in model.state_dict().items()}
        with Both(model, {**ROW, "row": "64"}) as fix:
            fix.enable()
            model(**batch((30, 20, 34, 40)))
            fix.disable()
            model(**batch((30, 20)))
            assert model.rows[-1].shape == (1, 64)
            assert fix.part.waiting.sequences == 2
            fix.enable()
            model(**batch((10,)))
            assert fix.part.waiting.sequences == 1  # (34, 10) were taken, 40 waits
        after = {name: value for name, value in vars(model).items() if name != "rows"}
        assert after == before
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        copy.deepcopy(model)


class TestChoosing:
    def test_a_row_is_chosen_from_what_was_watched(self) -> None:
        model = TinyForMaskedLM().train()
        with Both(model, {}) as fix:
            assert not fix.ready()
            for one in batches(WATCHED_CALLS):
                model(**one)
            assert fix.tally.groups == 0
            assert fix.ready()
            assert fix.setting == {"row": "192", "sequences": "12", "width": "64"}
            parity = fix.verify(Snapshot(model, (), batches(1)[0]))
            assert parity.passed, parity.detail
            assert "groups of one batch's sequences" in parity.detail

    @given(st.lists(st.lists(st.integers(1, 64), min_size=4, max_size=4), min_size=2, max_size=40))
    def test_a_row_is_never_shorter_than_a_batch_on_average(self, seen: list[list[int]]) -> None:
        padded = [Padding(4, 64, tuple(one), 64, True, True, True) for one in seen]
        row = row_for(padded)
        assert row.length >= sum(map(sum, seen)) / len(seen)
        assert row.length % 64 == 0
        assert row.length >= row.width == 64


class TestNumbers:
    @pytest.mark.parametrize("kind", [TinyForMaskedLM, TinyForCausalLM])
    def test_hold(self, kind: Any) -> None:
        model = kind(dropout=0.1).train()
        with Both(model) as fix:
            parity = fix.verify(Snapshot(model, (), batch((9, 30, 4, 21, 17, 33))))
            assert parity.passed, parity.detail
            assert "dropout off" in parity.detail
            assert fix.part.waiting.sequences == 0

    def test_of_a_loss_that_is_no_mean_over_labels_do_not(self) -> None:
        model = SummedForMaskedLM().train()
        with Both(model) as fix:
            parity = fix.verify(Snapshot(model, (), batch((9, 30, 4, 21, 17, 33))))
            assert not parity.passed

    def test_a_batch_of_one_sequence_shows_nothing(self) -> None:
        model = TinyForMaskedLM().train()
        with Both(model) as fix:
            parity = fix.verify(Snapshot(model, (), batch((30,))))
            assert not parity.passed
            assert "not made of groups" in parity.detail

    def test_any_order_of_switching(self) -> None:
        model = TinyForMaskedLM().train()
        both = Both(model)
        both.fix.enable()
        both.below.disable()
        one = batch((9, 30))
        expected = copy.deepcopy(model)(**one).loss
        torch.testing.assert_close(model(**one).loss, expected)
        assert "unpadded-batches is not on" in str(both.fix.failure())
        both.below.undo()
        both.fix.undo()
        assert "_compiled_call_impl" not in vars(model)


def test_a_planned_row_is_there_at_once() -> None:
    model = TinyForMaskedLM().train()
    with Both(model) as fix:
        assert fix.ready()
        fix.enable()
        model(**batch((30, 20, 9, 40)))
        assert model.rows[-1].shape == (1, 192)


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_code_for_full_rows_is_made_ready_and_no_step_compiles(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiling, "BACKEND", lookup_backend("aot_eager"))
        monkeypatch.setattr(compile_model, "compiler_problem", lambda device: None)
        model = TinyForMaskedLM().train()
        model.rows = _Uncounted()  # type: ignore[assignment]
        both = Both(model, {**ROW, "row": "140"})
        snapshot = Snapshot(model, (), batches(1)[0])
        compiled: Any = compile_model.CompileModel().apply(scene(model))
        assert compiled.verify(snapshot).passed
        compiled.enable()
        parity = both.fix.verify(snapshot)
        assert parity.passed, parity.detail
        both.fix.enable()
        expected = copy.deepcopy(model)
        before = frames_compiled()
        for number, one in enumerate(batches(20)):
            loss = model(**one).loss
            if number == 0:  # all of the first batch fits into a row of 140
                torch.testing.assert_close(loss, expected(**one).loss)
        assert frames_compiled() == before
        assert not compiled._parts[0]._odd
        assert compiled.failure() is None
        assert both.fix.failure() is None
        compiled.undo()
        both.__exit__()

    def test_what_cannot_be_compiled_is_not_held_against_the_compiler(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiling, "BACKEND", lookup_backend("aot_eager"))
        model = TinyForMaskedLM().train()
        model.rows = _Uncounted()  # type: ignore[assignment]
        both = Both(model, {**ROW, "row": "140"})
        snapshot = Snapshot(model, (), batches(1)[0])
        compiled: Any = compile_model.CompileModel().apply(scene(model))
        assert compiled.verify(snapshot).passed
        compiled.enable()
        monkeypatch.setattr(
            type(compiled), "rehearse", lambda self, _: self.fail("too slow") or "too slow"
        )
        parity = both.fix.verify(snapshot)
        assert not parity.passed
        assert "no code for its rows: too slow" in parity.detail
        assert compiled.failure() is None
        compiled.undo()
        both.__exit__()


class _Uncounted(list):  # type: ignore[type-arg]
    """Keeps nothing: what is compiled must not change with it."""

    def append(self, _: Any) -> None:
        return None
