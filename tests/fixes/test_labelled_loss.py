from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flopwise.fixes.labelled_loss import Count, Learned, Loss, labelled_rows, learn


@settings(max_examples=60, deadline=None)
@given(
    places=st.integers(1, 60),
    share=st.floats(0, 1),
    spare=st.integers(0, 9),
    smoothing=st.sampled_from([0.0, 0.1]),
    per_item=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_labelled_places_alone_give_the_same_loss_and_gradients(
    places: int, share: float, spare: int, smoothing: float, per_item: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(places, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.where(torch.rand(places) < share, torch.randint(0, 7, (places,)), -100)
    loss = Loss(label_smoothing=smoothing, per_item=per_item)
    count = Count(targets, -100).read()
    assert count == int((targets != -100).sum())
    few, every = (
        loss(lambda h: F.linear(h, weight), hidden, targets, rows)
        for rows in (count + spare, places)
    )
    plain = F.cross_entropy(
        F.linear(hidden, weight),
        targets,
        label_smoothing=smoothing,
        reduction="sum" if per_item else "mean",
    )
    torch.testing.assert_close(few, plain, equal_nan=True)
    torch.testing.assert_close(every, plain, equal_nan=True)
    if count:
        ours, theirs = (torch.autograd.grad(one, [hidden, weight]) for one in (few, plain))
        torch.testing.assert_close(ours, theirs)


def test_rows_are_in_order_and_filled_up() -> None:
    hidden = torch.arange(5.0)[:, None].requires_grad_()
    rows, targets = labelled_rows(hidden, torch.tensor([-1, 3, -1, 4, -1]), 4, -1)
    assert targets.tolist() == [3, 4, -1, -1]
    assert rows[:2, 0].tolist() == [1, 3]
    (grad,) = torch.autograd.grad(rows.sum(), hidden)
    assert grad[:, 0].tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("shift", [False, True])
def test_a_plan_tells_it_in_words(shift: bool) -> None:
    loss = Loss(shift, -1, 0.1, True, False, "bfloat16")
    assert Loss.of(loss.words()) == loss
    with pytest.raises(ValueError, match="upcast"):
        Loss.of({n: w for n, w in loss.words().items() if n != "upcast"})
    with pytest.raises(ValueError, match="perhaps"):
        Loss.of(loss.words() | {"shift": "perhaps"})


class TestLearn:
    """What is learned from one step of a head `layer`."""

    labels = torch.tensor([[1, -100, 2, 0], [-100, 3, 3, 1]])

    def learned(self, make: Any, items: Any = None) -> Any:
        torch.manual_seed(0)
        layer, other = nn.Linear(6, 5), nn.Linear(6, 5)
        hidden = torch.randn(2, 4, 6)

        def run() -> Any:
            logits = layer(hidden)
            loss, logits = make(logits)
            return SimpleNamespace(loss=loss, logits=logits)

        found = learn(run, [other, layer], self.labels, items)
        assert not layer._forward_hooks
        return found if isinstance(found, str) else (found.head is layer, found.loss)

    def flat(self, logits: torch.Tensor, **more: Any) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, 5), self.labels.view(-1), **more)

    def test_the_mean_over_labels(self) -> None:
        assert self.learned(lambda t: (self.flat(t), t)) == (True, Loss())
        assert self.learned(lambda t: (self.flat(t, label_smoothing=0.1), t)) == (
            True,
            Loss(label_smoothing=0.1),
        )
        criterion = nn.CrossEntropyLoss()
        assert self.learned(lambda t: (criterion(t.view(-1, 5), self.labels.view(-1)), t)) == (
            True,
            Loss(),
        )

    def test_labels_of_the_next_place(self) -> None:
        def padded(logits: torch.Tensor) -> Any:
            targets = F.pad(self.labels, (0, 1), value=-100)[..., 1:].contiguous()
            return F.cross_entropy(logits.view(-1, 5), targets.view(-1)), logits

        def cut(logits: torch.Tensor) -> Any:
            rows = logits[..., :-1, :].contiguous().view(-1, 5)
            return F.cross_entropy(rows, self.labels[..., 1:].reshape(-1)), logits

        assert self.learned(padded) == (True, Loss(shift=True))
        assert self.learned(cut) == (True, Loss(shift=True))

    def test_a_sum_over_a_number_of_the_script(self) -> None:
        found = self.learned(lambda t: (self.flat(t, reduction="sum") / 6, t), items=6)
        assert found == (True, Loss(per_item=True))
        assert self.learned(lambda t: (self.flat(t), t), items=6) == (True, Loss())  # not used

    def test_logits_in_16_bit_that_are_cast(self) -> None:
        layer = nn.Linear(6, 5).bfloat16()
        hidden = torch.randn(2, 4, 6).bfloat16()

        def run() -> Any:
            logits = layer(hidden)
            loss = F.cross_entropy(logits.float().view(-1, 5), self.labels.view(-1))
            return {"loss": loss, "logits": logits}

        assert learn(run, [layer], self.labels, None) == Learned(layer, Loss(upcast=True))

    @pytest.mark.parametrize(
        ("make", "items", "reason"),
        [
            (lambda s, t: (None, t), None, "no loss beside logits"),
            (lambda s, t: (s.flat(t), t * 2), None, "as it is"),
            (lambda s, t: (s.flat(t) + s.flat(t), t), None, "2 times"),
            (lambda s, t: (t.sum(), t), None, "0 times"),
            (lambda s, t: (s.flat(t) + 1, t), None, "not the mean"),
            (lambda s, t: (s.flat(t, reduction="sum"), t), None, "divided by"),
            (lambda s, t: (s.flat(t, weight=torch.ones(5)), t), None, "weights its classes"),
            (
                lambda s, t: (F.cross_entropy(t.view(-1, 5), s.labels.view(-1).flip(0)), t),
                None,
                "not the labels",
            ),
        ],
    )
    def test_what_is_not_understood(self, make: Any, items: Any, reason: str) -> None:
        assert reason in self.learned(lambda logits: make(self, logits), items)
