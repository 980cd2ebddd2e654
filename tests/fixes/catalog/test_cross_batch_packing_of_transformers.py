"""Rows filled with sequences of several batches, on models of transformers itself, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.fixes.catalog.cross_batch_packing import CrossBatchPacking
from flopwise.fixes.catalog.unpadded_batches import UnpaddedBatches
from flopwise.fixes.interface import Scene
from flopwise.fixes.unpadding.attention import interface_problem
from flopwise.meter.replay import Snapshot

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.modeling_utils")
if interface_problem() is not None:
    pytest.skip("this transformers has no interface for attentions", allow_module_level=True)

VOCABULARY = 53
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}


def batch(number: int, rows: int = 6, width: int = 64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(4, 40, (rows, 1), generator=generator)
    held = torch.arange(width) < lengths
    ids = torch.randint(3, VOCABULARY, held.shape, generator=generator) * held
    labelled = held & (torch.rand(held.shape, generator=generator) < 0.5)
    labels = ids.masked_fill(~labelled, -100)
    return {"input_ids": ids, "attention_mask": held.long(), "labels": labels}


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        ("BertForMaskedLM", "BertConfig", SMALL),
        ("RobertaForMaskedLM", "RobertaConfig", {**SMALL, "pad_token_id": 0}),
        ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
        ("GPT2LMHeadModel", "GPT2Config", GPT),
    ],
)
def test_numbers_hold_and_rows_have_one_length(kind: str, config: str, more: Any) -> None:
    torch.manual_seed(0)
    settings = {"bos_token_id": 1, "eos_token_id": 2, **more}
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()
    if not getattr(model, "_supports_attention_backend", False):
        pytest.skip(f"the attention of {kind} cannot be replaced in {transformers.__version__}")
    scene = Scene(roots=(model,), compute_frac=0.9, findings={"D401": None})
    below = UnpaddedBatches().apply(scene)
    below.enable()
    fix: Any = CrossBatchPacking().apply(scene, {"row": "150", "sequences": "12", "width": "64"})
    parity = fix.verify(Snapshot(model, (), batch(0)))
    assert parity.passed, parity.detail
    widths: list[Any] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: widths.append(tuple(out.shape[:2]))
    )
    fix.enable()
    for number in range(8):
        outputs = model(**batch(number))
        outputs.loss.backward()
    assert set(widths) == {(1, 150)}
    assert isinstance(outputs, transformers.utils.ModelOutput)
    assert "loss" in outputs
    assert fix.failure() is None
    assert fix.tally.drawn - fix.tally.computed == fix.part.waiting.tokens
    logits = outputs.logits
    assert logits.shape == (6, 64, VOCABULARY)
    assert "the script reads logits" in str(fix.failure())
    handle.remove()
    fix.undo()
    below.undo()
    assert "_compiled_call_impl" not in vars(model)
