"""Attention within the sequences of a row on a CUDA device: its kernels against a mask, and models of transformers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.unpadded_batches import UnpaddedBatches
from flopwise.fixes.interface import Scene
from flopwise.fixes.unpadding.attention import Segments, attend, over, register, unregister
from flopwise.meter.replay import Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]

LENGTHS = [100, 7, 64, 1, 84]


def reference(qkv: list[torch.Tensor], causal: bool) -> torch.Tensor:
    q, k, v = (t.double() for t in qkv)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    member = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS)).to("cuda")
    allowed = member[:, None] == member[None]
    allowed = allowed.tril() if causal else allowed
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-4)]
)
def test_attention_and_its_gradients(
    dtype: torch.dtype, bound: float, kv_heads: int, causal: bool, compiled: bool
) -> None:
    torch.manual_seed(0)
    qkv = [
        torch.randn(1, h, sum(LENGTHS), 64, dtype=dtype, device="cuda", requires_grad=True)
        for h in (4, kv_heads, kv_heads)
    ]
    module = nn.Identity()
    module.is_causal = causal  # type: ignore[assignment]
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend(module, q, k, v, None)[0]

    call = torch.compile(run, fullgraph=True) if compiled else run
    with over(Segments(ends, 128, LENGTHS), SimpleNamespace(_attn_implementation="sdpa")):
        found = call(*qkv)
    expected = reference(qkv, causal)
    assert found.dtype == dtype
    assert float((found - expected).detach().norm() / expected.detach().norm()) < bound
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights.to(dtype)).sum(), qkv)
    theirs = torch.autograd.grad((expected * weights).sum(), qkv)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < 4 * bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_is_applied_and_goes_backward(dtype: torch.dtype) -> None:
    qkv = [
        torch.randn(1, 4, 256, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in "qkv"
    ]
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    with over(Segments(ends, 128, LENGTHS), SimpleNamespace(_attn_implementation="sdpa")):
        one, _ = attend(nn.Identity(), *qkv, None, dropout=0.5, is_causal=False)
        two, _ = attend(nn.Identity(), *qkv, None, dropout=0.5, is_causal=False)
    assert not torch.allclose(one, two)
    assert all(g.isfinite().all() for g in torch.autograd.grad(one.sum(), qkv))


class TestOfTransformers:
    def batch(self, causal: bool, seed: int = 1) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(8, 200, (16, 1), generator=generator)
        held = torch.arange(256) < lengths
        ids = torch.randint(3, 1000, held.shape, generator=generator) * held
        rate = 2.0 if causal else 0.15
        labelled = held & (torch.rand(held.shape, generator=generator) < rate)
        labels = ids.masked_fill(~labelled, -100)
        given = {"input_ids": ids, "attention_mask": held.long(), "labels": labels}
        return {name: t.to("cuda") for name, t in given.items()}

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_numbers_hold_and_no_step_waits(
        self, causal: bool, compiled: bool, waits_raise: Any
    ) -> None:
        transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
        small = {
            "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 512,
        }  # fmt: skip
        torch.manual_seed(0)
        if causal:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
        else:
            model = transformers.BertForMaskedLM(transformers.BertConfig(**small))
        model = model.to("cuda").train()
        scene = Scene(
            roots=(model,), device=torch.device("cuda"), compute_frac=0.9, findings={"D401": None}
        )
        cast, ours = Bf16Autocast().apply(scene), UnpaddedBatches().apply(scene)
        on = [cast, ours]
        cast.enable()
        snapshot = Snapshot(model, (), self.batch(causal))
        parity = ours.verify(snapshot)
        assert parity.passed, parity.detail
        assert ours.setting["mode"] == "packed"
        ours.enable()
        if compiled:
            late = CompileModel().apply(scene)
            parity = late.verify(snapshot)
            assert parity.passed, parity.detail
            late.enable()
            on.append(late)
        batches = [self.batch(causal, seed) for seed in range(4)]
        model(**batches[0])["loss"].backward()
        with nullcontext() if compiled else waits_raise():  # compiling may wait
            for given in batches:
                model(**given)["loss"].backward()
        assert ours.failure() is None
        ours.settled()
        assert "masks_read" not in ours.setting
        for applied in reversed(on):
            applied.undo()


def test_the_name_is_known_only_meanwhile() -> None:
    pytest.importorskip("transformers.modeling_utils", reason="needs transformers")
    register()
    unregister()
