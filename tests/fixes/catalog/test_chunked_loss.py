from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.fixes import chunked_loss as chunks
from flopwise.fixes.candidates import parity_together
from flopwise.fixes.catalog import chunked_loss, padded_dimension
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.chunked_loss import ChunkedLoss
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.padded_dimension import PaddedDimension
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.fixes.lazy_logits import LazyLogits
from flopwise.meter import yardstick
from flopwise.meter.replay import Snapshot

VOCABULARY, WIDTH, PLACES = 1030, 16, (4, 160)


@dataclass
class Output:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Causal(nn.Module):
    """A causal language model as those of transformers: tied head, loss and logits given, a number of items taken."""

    def __init__(self, *, extra: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.head.weight = self.embed.weight
        self.extra = extra

    def forward(self, ids: Any, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        logits = self.head(self.body(self.embed(ids)))
        loss = None
        if labels is not None:
            targets = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
            reduction = "mean" if num_items_in_batch is None else "sum"
            flat = logits.float().view(-1, VOCABULARY)
            loss = F.cross_entropy(flat, targets, reduction=reduction)
            if num_items_in_batch is not None:
                loss = loss / num_items_in_batch
            if self.extra:
                loss = loss + self.extra * logits.square().mean()
        return Output(loss, logits)


class LossAlone(Causal):
    def forward(self, ids: Any, targets: Any) -> Any:  # type: ignore[override]
        return super().forward(ids, targets).loss


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 128)


def model(kind: Any = Causal, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(**more)


def batch(seed: int = 1, items: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, PLACES, generator=generator)
    more = {} if items is None else {"num_items_in_batch": items}
    return {"ids": ids, "labels": ids, **more}


def scene(*roots: nn.Module, frac: float = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


def applied_to(net: Any, given: dict[str, Any] | None = None, read: Any = None) -> Any:
    """Returns the fix on a model that was called some times."""
    fix = ChunkedLoss().apply(scene(net))
    for _ in range(20):
        if fix.ready():
            break
        out = net(**(given or batch()))
        if read is not None:
            read(out)
    assert fix.ready()
    return fix


def grads(net: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no root"),
            (lambda: scene(model(LossAlone)), "takes no labels"),
            (lambda: scene(model(), model()), "2 models"),
            (lambda: scene(model(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(model(), frac=0.01), "1.0 %"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = ChunkedLoss().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_causal_language_model(self) -> None:
        assert ChunkedLoss().check(scene(model())) == Eligible("the head is 98.5% of the products")
        assert LabelledLogits.code in ChunkedLoss.conflicts

    @pytest.mark.parametrize(
        ("net", "read", "reason"),
        [
            (model(), lambda out: out.logits.argmax(-1), "reads the logits (aten.argmax"),
            (model(extra=0.1), None, "not the mean over the labels"),
        ],
    )
    def test_what_the_first_steps_show(self, net: Any, read: Any, reason: str) -> None:
        fix = applied_to(net, read=read)
        parity = fix.verify(Snapshot(net, (), batch()))
        assert not parity.passed
        assert reason in parity.detail
        fix.enable()
        assert type(net(**batch()).logits) is torch.Tensor


class TestEffect:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("items", [None, 600, torch.tensor(600)], ids=str)
    def test_products_are_of_chunks_and_everything_else_is_the_same(
        self, items: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        net = model(bias=bias)
        given = batch(items=items)
        fix = applied_to(net, given)
        parity = fix.verify(Snapshot(net, (), given))
        assert parity.passed, parity.detail
        assert fix.setting["saves"] == "0.00211 GB of float32 logits: 128 of 640 places"
        net.eval()
        rows = []
        plain = F.linear
        monkeypatch.setattr(
            F, "linear", lambda x, w, b=None: rows.append(x.numel() // WIDTH) or plain(x, w, b)
        )
        for seed in range(3):
            fix.disable()
            before = net(**batch(seed, items))
            wanted = grads(net, before.loss)
            fix.enable()
            rows.clear()
            after = net(**batch(seed, items))
            assert rows == [640] + [128] * 5
            torch.testing.assert_close(after.loss, before.loss)
            torch.testing.assert_close(grads(net, after.loss), wanted)
            assert isinstance(after.logits, LazyLogits)
        assert fix.settled()
        with torch.no_grad():
            assert type(net(**batch()).logits) is torch.Tensor
        assert fix.failure() is None

    def test_logits_that_the_model_casts_before_it_gives_them(self) -> None:
        """As Accelerate has a model do in mixed precision: autocast within the forward, outputs in float32."""

        class Low(Causal):
            def forward(self, ids: Any, labels: Any = None, num_items_in_batch: Any = None) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    out = super().forward(ids, labels, num_items_in_batch)
                return Output(out.loss, out.logits.float())

        net = model(Low).eval()
        yardstick.ENTERED[net] = torch.bfloat16  # as the meter sees it in the first calls
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (), batch())).passed
        assert (fix.setting["gives"], fix.setting["autocast"]) == ("float32", "bfloat16")
        plain = net(**batch())
        wanted = grads(net, plain.loss)
        fix.enable()
        out = net(**batch())
        assert isinstance(out.logits, LazyLogits)
        assert out.logits.dtype == torch.float32
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-4, atol=0)
        torch.testing.assert_close(grads(net, out.loss), wanted, rtol=0.05, atol=1e-3)
        torch.testing.assert_close(out.logits + 0, plain.logits)

    def test_logits_that_are_read_later_are_right_and_end_it(self) -> None:
        net = model().eval()
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (), batch())).passed
        plain = net(**batch())
        wanted = grads(net, plain.loss + plain.logits.square().mean())
        fix.enable()
        out = net(**batch())
        torch.testing.assert_close(grads(net, out.loss + out.logits.square().mean()), wanted)
        assert type(net(**batch()).logits) is torch.Tensor
        assert "reads the logits (aten.pow" in str(fix.failure())

    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
    def test_with_autocast_padding_and_compiled(
        self, order: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(padded_dimension, "_slower_alone", lambda *_: None)
        net = model().eval()
        plain = net(**batch()).loss.item()
        here = scene(net, findings={"L110": 0.1})
        snapshot = Snapshot(net, (), batch())
        fixes = [applied_to(net), PaddedDimension().apply(here), Bf16Autocast().apply(here)]
        for fix in fixes:
            parity = fix.verify(snapshot)
            assert parity.passed, parity.detail
        fixes.append(CompileModel().apply(here))
        for k in order:
            fixes[k].enable()
        for off in (None, *order):  # each is taken out once
            if off is not None:
                fixes[off].disable()
            out = net(**batch())
            out.loss.backward()
            assert out.loss.item() == pytest.approx(plain, rel=2e-3)
            assert isinstance(out.logits, LazyLogits) == (off != 0)
            if off is not None:
                fixes[off].enable()
        assert [fix.failure() for fix in fixes] == [None] * 4
        for fix in fixes:
            fix.undo()
        assert "_compiled_call_impl" not in vars(net)
        assert type(net.head) is nn.Linear

    def test_a_comparison_of_several_fixes_is_not_taken_for_the_script(self) -> None:
        net = model()
        fix, low = applied_to(net), Bf16Autocast().apply(scene(net))
        snapshot = Snapshot(net, (), batch())
        assert fix.verify(snapshot).passed
        parity = parity_together([fix, low], snapshot)
        assert parity.passed, parity.detail
        for _ in range(3):
            assert isinstance(net(**batch()).logits, LazyLogits)
        assert fix.failure() is None

    def test_a_plan_needs_no_watching(self) -> None:
        net = model().eval()
        first = applied_to(net)
        first.verify(Snapshot(net, (), batch()))
        first.undo()
        plain = net(**batch()).loss
        fix = ChunkedLoss().apply(scene(net), first.setting)
        fix.enable()
        torch.testing.assert_close(net(**batch()).loss, plain)
        assert isinstance(net(**batch()).logits, LazyLogits)
        fix.undo()

    def test_a_wrong_loss_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = model()
        fix = applied_to(net)
        right = chunked_loss._Applied.made
        monkeypatch.setattr(chunked_loss._Applied, "made", lambda *args: right(*args) * 1.01)
        assert not fix.verify(Snapshot(net, (), batch())).passed


class TestUndo:
    def test_nothing_is_left(self) -> None:
        net = model()
        names = [sorted(vars(m)) for m in net.modules()]
        kinds = [type(m) for m in net.modules()]
        rng = torch.get_rng_state()
        fix = applied_to(net)
        torch.set_rng_state(rng)
        fix.verify(Snapshot(net, (), batch()))
        assert torch.equal(torch.get_rng_state(), rng)
        for _ in range(2):
            fix.enable()
            fix.enable()
            fix.disable()
        fix.enable()
        twins = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        fix.undo()
        for one in (net, *twins):
            assert [type(m) for m in one.modules()] == kinds
            assert [sorted(vars(m)) for m in one.modules()] == names

    def test_an_error_of_the_script_leaves_the_head_as_it_was(self) -> None:
        net = model()
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (), batch())).passed
        fix.enable()
        with pytest.raises(IndexError):
            net(**{**batch(), "labels": torch.full(PLACES, VOCABULARY)})
        assert fix.failure() is None
        fix.undo()
        assert type(net.head) is nn.Linear
