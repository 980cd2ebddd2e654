from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.meter.kept import kept_module, kept_rng
from flopwise.meter.replay import (
    Replay,
    Snapshot,
    distance,
    error_words,
    find_loss,
    quieten,
)

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Output:
    loss: Any
    logits: Any = None


ONE = torch.ones((), requires_grad=True)


class TestLoss:
    @pytest.mark.parametrize(
        "tree",
        [
            ONE,
            (ONE, torch.ones(3)),
            (torch.ones(3), ONE, None),
            {"loss": ONE},
            Output(ONE),
            Output(ONE.reshape(1)),
        ],
    )
    def test_a_loss_is_found(self, tree: Any) -> None:
        assert float(find_loss(tree).detach()) == 1.0

    @pytest.mark.parametrize(
        "tree",
        [
            torch.ones(3, requires_grad=True),
            torch.ones(()),
            {"logits": ONE},
            Output(None, ONE),
            None,
            "x",
            (),
            (ONE, ONE),
            torch.ones(1, 1, requires_grad=True),
        ],
    )
    def test_and_not_invented(self, tree: Any) -> None:
        assert find_loss(tree) is None


class TestDistance:
    def test_is_relative_over_all_tensors_together(self) -> None:
        old = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
        new = [torch.tensor([3.0]), torch.tensor([0.0, 4.5])]
        rel, cosine = distance(new, old)
        assert rel == pytest.approx(0.1)
        assert cosine == pytest.approx((9 + 18) / (5 * (9 + 20.25) ** 0.5))

    def test_a_missing_gradient_counts_as_zeros(self) -> None:
        one = torch.tensor([1.0])
        assert distance([None, one], [one, one])[0] == pytest.approx(0.5**0.5)
        assert distance([None], [None]) == (0.0, 1.0)

    def test_from_nothing_is_infinite_and_nan_stays(self) -> None:
        assert distance([torch.ones(1)], [torch.zeros(1)])[0] == float("inf")
        assert distance([torch.zeros(1)], [torch.zeros(1)]) == (0.0, 1.0)
        assert distance([torch.tensor([float("nan")])], [torch.ones(1)])[0] != 0


class TestReplay:
    def test_a_copy_in_float64_agrees_and_random_noise_of_weights_shows(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        snapshot = Snapshot(net, (torch.randn(3, 5),))
        with kept_module(net) as state, kept_rng() as rng:
            replay = Replay(snapshot, state, rng)
            plain, wide = replay.run(), replay.run_copy(torch.float64)
            shaken = replay.run_copy(torch.float64, noise=2.0**-8)
        assert wide.grads[0].dtype == torch.float64
        assert 0 < distance(plain.grads, wide.grads)[0] < 1e-6
        assert 1e-4 < distance(shaken.grads, wide.grads)[0] < 2e-2
        assert torch.get_default_dtype() == torch.float32

    def test_tied_weights_get_one_gradient(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
                self.head.weight = self.table.weight

            def forward(self, i: torch.Tensor) -> torch.Tensor:
                return self.head(self.table(i))

        torch.manual_seed(0)
        net = Tied()
        with kept_module(net) as state, kept_rng() as rng:
            replay = Replay(Snapshot(net, (torch.tensor([1, 2]),)), state, rng)
            plain, wide = replay.run(), replay.run_copy(torch.float64)
        assert len(plain.grads) == 1
        assert distance(plain.grads, wide.grads)[0] < 1e-6

    def test_drawing_random_numbers_is_seen_and_dropout_can_be_quietened(self) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        with kept_module(net) as state, kept_rng() as rng:
            replay = Replay(Snapshot(net, (torch.ones(2, 4),)), state, rng)
            assert replay.run().drew
            replay.prepare.append(quieten)
            replay.rewind()
            assert not replay.run().drew
        assert net[1].p == 0.5

    def test_a_module_that_gives_nothing_to_differentiate_is_an_error(self) -> None:
        net = nn.Linear(2, 2)
        net.forward = lambda x: x
        with (
            kept_module(net) as state,
            kept_rng() as rng,
            pytest.raises(ValueError, match="no output"),
        ):
            Replay(Snapshot(net, (torch.ones(1, 2),)), state, rng).run()


def test_error_words_end_at_the_first_empty_line() -> None:
    assert error_words(ValueError("a\nb\n\nc")) == "ValueError: a b"
    assert error_words(KeyError()) == "KeyError"
