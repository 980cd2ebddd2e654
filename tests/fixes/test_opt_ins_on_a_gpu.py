"""Opt-ins on a CUDA device: rows with empty sequences at their end, copies of a loss on their way, tuned kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flopwise.fixes.catalog.late_loss_reads import LateLossReads
from flopwise.fixes.catalog.tuned_kernels import TunedKernels
from flopwise.fixes.interface import Eligible, Scene
from flopwise.fixes.unpadding.attention import Segments, attend, over
from flopwise.fixes.unpadding.groups import Row
from flopwise.meter.replay import Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]

LENGTHS = [100, 7, 64, 1, 84]  # 256 tokens
ROW = Row(384, 12, 128)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_rows_with_filler_and_empty_sequences(
    dtype: torch.dtype, bound: float, compiled: bool
) -> None:
    torch.manual_seed(0)
    qkv = [
        torch.randn(1, 4, ROW.length, 64, dtype=dtype, device="cuda", requires_grad=True)
        for _ in range(3)
    ]
    module = nn.Identity()
    module.is_causal = False  # type: ignore[assignment]
    parts = ROW.lengths(LENGTHS)
    ends = torch.tensor(ROW.ends(LENGTHS), dtype=torch.int32, device="cuda")
    ends = ends if compiled else ends[: len(parts) + 1]

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend(module, q, k, v, None)[0]

    call = torch.compile(run, fullgraph=True) if compiled else run
    with over(Segments(ends, ROW.width, parts), SimpleNamespace(_attn_implementation="sdpa")):
        found = call(*qkv)
    member = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts)).to("cuda")
    q, k, v = (t.double() for t in qkv)
    allowed = member[:, None] == member[None]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)
    assert float((found - expected).norm() / expected.norm()) < bound
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights.to(dtype)).sum(), qkv)
    theirs = torch.autograd.grad((expected * weights).sum(), qkv)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(a).all()
        assert float((a - b).norm() / b.norm()) < 4 * bound


def test_losses_arrive_one_step_late(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def train(model, optimizer, loader, shown):\n"
        "    for (batch,) in loader:\n"
        "        loss = model(batch.to('cuda', non_blocking=True)).mean()\n"
        "        optimizer.zero_grad()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        shown.append(loss.item())\n"
    )
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), space)
    model = nn.Linear(1, 1, bias=False).to("cuda")
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(torch.arange(1.0, 9.0)[:, None]), batch_size=1)
    scene = Scene(
        optimizers=(optimizer,), loaders=(loader,), device=torch.device("cuda"), step_s=1.0,
        findings={"D201": None},
    )  # fmt: skip
    assert isinstance(LateLossReads().check(scene), Eligible)
    applied = LateLossReads().apply(scene)
    shown: list[float] = []
    space["train"](model, optimizer, loader, shown)
    assert shown == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert applied.ready()
    assert applied.failure() is None
    applied.enable()
    for _ in range(2):
        shown.clear()
        space["train"](model, optimizer, loader, shown)
        assert shown == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
    applied.undo()
    assert "item" not in vars(torch.Tensor)


def test_tuned_kernels_hold_their_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to("cuda")
    scene = Scene(
        roots=(model,), device=torch.device("cuda"), step_s=0.1, compute_frac=0.9, time_left_s=500.0
    )
    answer = TunedKernels().check(scene)
    if not isinstance(answer, Eligible):
        pytest.skip(answer.reason)
    applied = TunedKernels().apply(scene)
    parity = applied.verify(Snapshot(model, (torch.randn(256, 512, device="cuda"),)))
    assert parity.passed, parity.detail
    applied.undo()
    assert "_compiled_call_impl" not in vars(model)
