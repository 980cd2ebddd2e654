from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.fixes.candidates import parity_together
from flopwise.fixes.catalog import labelled_logits, padded_dimension
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.compile_model import CompileModel
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.padded_dimension import PaddedDimension
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.fixes.lazy_logits import LazyLogits
from flopwise.meter.replay import Snapshot

VOCABULARY, WIDTH, PLACES = 1030, 16, (4, 160)


@dataclass
class Output:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


class Masked(nn.Module):
    """A masked language model as those of transformers: tied head, loss and logits given."""

    def __init__(self, *, shift: bool = False, extra: float = 0.0, made: Any = Output) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.shift, self.extra, self.made = shift, extra, made

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0
    ) -> Any:
        hidden = self.body(self.embed(ids))
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            if self.shift:
                labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss()(logits.float().view(-1, VOCABULARY), labels.view(-1))
            if self.extra:
                loss = loss + self.extra * logits.square().mean()
        return self.made(loss=loss, logits=logits)


class LossAlone(Masked):
    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids, targets).loss


class Scaled(Masked):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        out = super().forward(ids, labels)
        return Output(out.loss, out.logits * 2)


def model(kind: Any = Masked, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(**more)


def batch(share: float = 0.15, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, PLACES, generator=generator)
    return {
        "ids": ids,
        "labels": torch.where(torch.rand(PLACES, generator=generator) < share, ids, -100),
    }


def scene(*roots: nn.Module, frac: float = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


def applied_to(net: Any, read: Any = None, share: float = 0.15) -> Any:
    """Returns the fix on a model that was called some times."""
    fix = LabelledLogits().apply(scene(net))
    for _ in range(20):
        if fix.ready():
            break
        out = net(**batch(share))
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
            (lambda: scene(nn.DataParallel(model())), "DataParallel"),
            (lambda: scene(model(), device=torch.device("mps")), "mps"),
            (lambda: scene(model(), frac=0.01), "1.0 %"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = LabelledLogits().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_hooks_that_would_see_the_difference(self) -> None:
        net = model()
        net.register_forward_hook(lambda *_: None)
        assert "forward hook" in LabelledLogits().check(scene(net)).reason  # type: ignore[union-attr]
        net = model()
        net.head.register_forward_hook(lambda *_: None)
        assert "no Linear layer" in LabelledLogits().check(scene(net)).reason  # type: ignore[union-attr]

    def test_not_a_masked_language_model(self) -> None:
        answer = LabelledLogits().check(scene(model()))
        assert answer == Eligible("the head is 98.5% of the products")

    @pytest.mark.parametrize(
        ("net", "share", "read", "reason"),
        [
            (model(), 0.15, lambda out: out.logits.argmax(-1), "reads the logits (aten.argmax"),
            (model(), 0.15, lambda out: out.logits.tolist(), "reads the logits (tolist)"),
            (model(), 1.0, None, "100% of the places have a label"),
            (model(Scaled), 0.15, None, "not what a Linear layer gives"),
            (model(extra=0.1), 0.15, None, "not the mean over the labels"),
        ],
    )
    def test_what_the_first_steps_show(
        self, net: Any, share: float, read: Any, reason: str
    ) -> None:
        fix = applied_to(net, read, share)
        parity = fix.verify(Snapshot(net, (), batch(share)))
        assert not parity.passed
        assert reason in parity.detail
        fix.enable()
        assert type(net(**batch()).logits) is torch.Tensor


class TestEffect:
    @pytest.mark.parametrize("more", [{}, {"shift": True}, {"made": dict}], ids=str)
    def test_the_product_is_smaller_and_everything_else_the_same(
        self, more: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        net = model(**more)
        fix = applied_to(net)
        parity = fix.verify(Snapshot(net, (), batch()))
        assert parity.passed, parity.detail
        net.eval()
        rows = []
        plain = F.linear
        monkeypatch.setattr(
            F, "linear", lambda x, w, b=None: rows.append(x.numel() // WIDTH) or plain(x, w, b)
        )
        for seed in range(3):
            fix.disable()
            before = net(**batch(seed=seed))
            wanted = grads(net, loss_of(before))
            fix.enable()
            rows.clear()
            after = net(**batch(seed=seed))
            assert rows == [640, 256]
            assert type(after) is type(before)
            torch.testing.assert_close(loss_of(after), loss_of(before))
            torch.testing.assert_close(grads(net, loss_of(after)), wanted)
        assert fix.settled()
        with torch.no_grad():
            assert type(part_of(net(**batch()), "logits")) is torch.Tensor
        assert fix.failure() is None

    def test_labels_by_position_and_calls_without_any(self) -> None:
        net = model().eval()
        given = batch()
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (given["ids"], given["labels"]))).passed
        plain = net(given["ids"], given["labels"]).loss
        fix.enable()
        torch.testing.assert_close(net(given["ids"], given["labels"]).loss, plain)
        assert isinstance(net(given["ids"], given["labels"]).logits, LazyLogits)
        for args, kwargs in (((given["ids"],), {}), ((), given), ((), {**given, "scale": 2.0})):
            out = net(*args, **kwargs)  # other arguments than what was learned from
            assert type(out.logits) is torch.Tensor
        assert fix.failure() is None

    def test_logits_that_are_read_later_are_right_and_end_it(self) -> None:
        net = model().eval()
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (), batch())).passed
        plain = net(**batch())
        wanted = grads(net, plain.loss + plain.logits.square().mean())
        fix.enable()
        net(**batch())
        out = net(**batch())
        torch.testing.assert_close(grads(net, out.loss + out.logits.square().mean()), wanted)
        assert torch.equal(out.logits, plain.logits)
        assert type(net(**batch()).logits) is torch.Tensor
        assert "reads the logits (aten.pow" in str(fix.failure())

    def test_more_labels_than_rows_take_more_rows(self) -> None:
        net = model().eval()
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (), batch())).passed
        for share in (0.15, 0.5, 1.0, 0.0, 0.1):
            fix.disable()
            plain = net(**batch(share)).loss
            fix.enable()
            torch.testing.assert_close(net(**batch(share)).loss, plain, equal_nan=True)

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
            assert fix.verify(snapshot).passed
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
        fix = LabelledLogits().apply(scene(net), first.setting)
        fix.enable()
        out = net(**batch())
        assert isinstance(out.logits, LazyLogits)
        torch.testing.assert_close(out.loss, plain)
        fix.undo()
        for setting in ({"head": "head"}, {**first.setting, "head": "body.0"}):
            fix = LabelledLogits().apply(scene(net), setting)
            fix.enable()
            assert fix.failure()
            assert type(net(**batch()).logits) is torch.Tensor

    def test_a_wrong_loss_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = model()
        fix = applied_to(net)
        right = labelled_logits._Applied.made
        monkeypatch.setattr(labelled_logits._Applied, "made", lambda *args: right(*args) * 1.01)
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
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

    def test_an_error_of_the_script_leaves_the_head_as_it_was(self) -> None:
        net = model()
        fix = applied_to(net)
        assert fix.verify(Snapshot(net, (), batch())).passed
        fix.enable()
        with pytest.raises(IndexError):
            net(**{**batch(), "ids": torch.full(PLACES, VOCABULARY)})
        assert fix.failure() is None
        fix.undo()
        assert type(net.head) is nn.Linear
        assert net(**batch()).logits.shape == (*PLACES, VOCABULARY)


def part_of(out: Any, name: str) -> Any:
    return out[name] if isinstance(out, dict) else getattr(out, name)


def loss_of(out: Any) -> torch.Tensor:
    return part_of(out, "loss")
