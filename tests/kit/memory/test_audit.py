from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.memory.audit import audit_alignment
from flopwise.kit.memory.padding import pad_dimensions


class Lm(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def test_the_head_is_found_with_its_share_of_the_flops_and_its_cure() -> None:
    model, x = Lm(1001), torch.randn(128, 64)
    found = audit_alignment(model, lambda: model(x))
    assert len(found.findings) == 1
    head = found.findings[0]
    assert (head.module, head.op, head.operand, head.shape) == ("head", "mm", "result", (128, 1001))
    assert head.defect.cure == "columns 1001 -> 1024"
    assert (head.calls, head.flops) == (1, 2 * 128 * 64 * 1001)
    assert found.flops == 2 * 128 * 64 * (1001 + 64)
    assert found.share(head) == pytest.approx(1001 / 1065)
    assert head.where is not None
    assert Path(head.where.rpartition(":")[0]).name == Path(__file__).name
    assert str(found).startswith(" 94.0% of FLOPs  head  mm result [128, 1001] float32 at ")


def test_backward_products_are_seen_too_and_nothing_is_left_behind() -> None:
    model, x = Lm(1001), torch.randn(128, 64)
    found = audit_alignment(model, lambda: model(x).square().mean().backward())
    assert [(f.module, f.operand, f.shape, f.defect.cure) for f in found.worst()] == [
        ("head", "result", (128, 1001), "columns 1001 -> 1024"),
        ("backward", "self", (1001, 128), "rows 1001 -> 1024"),
        ("backward", "self", (128, 1001), "columns 1001 -> 1024"),
    ]
    assert found.flops == 2 * 128 * 64 * (3 * 1001 + 2 * 64)
    assert all(p.grad is None for p in model.parameters())
    assert not model.head._forward_pre_hooks
    assert not model.head._forward_hooks


def test_what_is_padded_is_found_no_more() -> None:
    model, x = Lm(1001), torch.randn(128, 64)
    pad_dimensions(model, dtype=torch.bfloat16)

    def step() -> None:
        F.cross_entropy(model(x), torch.zeros(128, dtype=torch.long)).backward()

    found = audit_alignment(model, step)
    assert str(found) == "every operand is aligned"


def test_convolutions_and_their_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Conv2d(10, 10, 3, groups=10))
    x = torch.randn(2, 3, 9, 9)
    found = audit_alignment(model, lambda: model(x))
    assert {(f.module, f.operand, f.defect.cure) for f in found.worst()} == {
        ("0", "input", "channels 3 -> 4"),
        ("0", "result", "channels 10 -> 12"),
    }


def test_attention_heads_of_an_odd_width() -> None:
    q = torch.randn(1, 2, 16, 30)
    found = audit_alignment(nn.Identity(), lambda: F.scaled_dot_product_attention(q, q, q))
    assert {f.defect.cure for f in found.worst()} == {"columns 30 -> 32"}


def test_an_added_bias_is_no_operand() -> None:
    x, w, bias = torch.randn(8, 8), torch.randn(8, 8), torch.randn(65)[1:].view(8, 8)
    assert audit_alignment(nn.Identity(), lambda: torch.addmm(bias, x, w)).findings == []


def test_an_error_of_the_step_comes_through_and_hooks_are_gone() -> None:
    model = Lm(1001)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        audit_alignment(model, lambda: model(torch.randn(8, 65)))
    assert not model.head._forward_pre_hooks


def test_equal_findings_are_one_with_their_calls() -> None:
    model, x = Lm(1001), torch.randn(128, 64)

    def step() -> None:
        for _ in range(3):
            model(x)

    assert [f.calls for f in audit_alignment(model, step).findings] == [3]


def test_where_no_product_was_seen_none_is_called_aligned() -> None:
    layer = nn.Linear(4, 4)
    assert str(audit_alignment(layer, lambda: None)).startswith("no product was seen: what is")
    assert (
        str(audit_alignment(layer, lambda: layer(torch.ones(4, 4)))) == "every operand is aligned"
    )
