"""Unpadded batches on models of transformers itself, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.fixes.catalog.unpadded_batches import UnpaddedBatches
from flopwise.fixes.interface import Applied, Scene
from flopwise.fixes.unpadding.attention import NAME, interface_problem
from flopwise.meter.replay import Snapshot

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.modeling_utils")
if interface_problem() is not None:
    pytest.skip("this transformers has no interface for attentions", allow_module_level=True)

VOCABULARY = 53


def applied_to(model: torch.nn.Module) -> Applied:
    return UnpaddedBatches().apply(Scene(roots=(model,), compute_frac=0.9, findings={"D401": None}))


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    held = torch.arange(64) < torch.tensor([9, 30, 4, 21])[:, None]
    ids = torch.randint(3, VOCABULARY, held.shape, generator=generator) * held
    labelled = held & (torch.rand(held.shape, generator=generator) < 1 / 3)
    return {
        "input_ids": ids,
        "attention_mask": held.long(),
        "labels": ids.masked_fill(~labelled, -100),
    }


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        ("BertForMaskedLM", "BertConfig", SMALL),
        ("RobertaForMaskedLM", "RobertaConfig", {**SMALL, "pad_token_id": 0}),
        ("BertForTokenClassification", "BertConfig", {**SMALL, "num_labels": VOCABULARY}),
        ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
        (
            "GPT2LMHeadModel",
            "GPT2Config",
            {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4},
        ),
    ],
)
def test_numbers_hold(kind: str, config: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    settings = {"bos_token_id": 1, "eos_token_id": 2, **more}
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()
    if not getattr(model, "_supports_attention_backend", False):
        pytest.skip(f"the attention of {kind} cannot be replaced in {transformers.__version__}")
    applied = applied_to(model)
    assert applied.setting["mode"] == "packed"
    parity = applied.verify(Snapshot(model, (), batch()))
    assert parity.passed, parity.detail
    assert applied.setting["mode"] == "packed"
    applied.enable()
    found = model(**batch())
    found["loss"].backward()
    assert found.logits.shape == (4, 64, VOCABULARY)
    assert isinstance(found, transformers.utils.ModelOutput)
    assert applied.failure() is None
    applied.undo()
    assert NAME not in transformers.modeling_utils.AttentionInterface._global_mapping
    assert model.config._attn_implementation == "sdpa"


def test_windows_are_left_alone() -> None:
    more = {**SMALL, "num_key_value_heads": 2, "sliding_window": 8}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**more))
    assert applied_to(model).setting["mode"] == "cropped"
