from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.memory.block_costs import block_costs, repeated_blocks

WIDTH, ROWS = 16, 8
ONE = WIDTH * ROWS * 4


class Block(nn.Module):
    """Keeps its input, the results of two exps, and not its output."""

    def __init__(self, exps: int = 2) -> None:
        super().__init__()
        self.linear, self.exps = nn.Linear(WIDTH, WIDTH), exps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for _ in range(self.exps):
            y = y.exp()
        return x + y * 0.5


class TestRepeatedBlocks:
    def test_children_of_a_class_in_a_container(self) -> None:
        model = nn.Sequential(
            nn.Embedding(4, 4), nn.ModuleList([Block(), Block()]), nn.Sequential(Block(), nn.ReLU())
        )
        assert list(repeated_blocks(model)) == ["1.0", "1.1"]

    def test_the_outermost(self) -> None:
        inner = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        assert list(repeated_blocks(nn.ModuleList(inner))) == ["0", "1"]

    def test_modules_without_parameters_are_none(self) -> None:
        assert repeated_blocks(nn.Sequential(nn.ReLU(), nn.ReLU())) == {}


class TestCosts:
    def test_what_is_kept_besides_inputs_outputs_and_parameters(self) -> None:
        model, x = nn.Sequential(Block(1), Block(3)), torch.randn(ROWS, WIDTH)
        costs = block_costs(model, lambda: model(x).sum().backward(), ["0", "1"])
        assert [(c.name, c.kind, c.kept_bytes, c.input_bytes, c.calls) for c in costs] == [
            ("0", "Block", ONE, 0, 1),
            ("1", "Block", 3 * ONE, 0, 1),
        ]
        assert all(c.forward_s > 0 for c in costs)
        assert [c.freed_bytes for c in costs] == [ONE, 3 * ONE]

    def test_an_input_that_only_a_checkpoint_would_keep_costs(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x + self.weight).exp() + 1  # x itself is not kept

        model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(ROWS, WIDTH)
        first, second = block_costs(model, lambda: model(x).sum().backward(), ["0", "1"])
        assert (first.kept_bytes, first.input_bytes, first.freed_bytes) == (ONE, ONE, 0)
        assert (second.kept_bytes, second.input_bytes) == (ONE, ONE)

    def test_a_result_that_is_kept_and_goes_out_is_not_freed_by_a_checkpoint(self) -> None:
        class Exp(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x).exp()  # type: ignore[no-any-return]

        model, x = nn.Sequential(Exp(), Exp()), torch.randn(ROWS, WIDTH)
        assert [
            c.kept_bytes for c in block_costs(model, lambda: model(x).sum().backward(), ["0", "1"])
        ] == [
            0,
            0,
        ]

    def test_blocks_are_in_the_order_of_their_calls_and_the_smallest_call_counts(self) -> None:
        blocks = nn.ModuleList([Block(), Block()])

        def step() -> None:
            for rows in (ROWS, 2 * ROWS):  # two micro-batches
                blocks[0](blocks[1](torch.randn(rows, WIDTH))).sum().backward()

        costs = block_costs(blocks, step, repeated_blocks(blocks))
        assert [c.name for c in costs] == ["1", "0"]
        assert [(c.calls, c.kept_bytes) for c in costs] == [(2, 2 * ONE)] * 2

    def test_weights_in_16_bits_are_autocasts_to_keep(self) -> None:
        model, x = nn.Sequential(Block(1), Block(1)), torch.randn(ROWS, WIDTH, requires_grad=True)

        def step(cache: bool = True) -> None:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                y = model(x)
            y.sum().backward()

        cast, exp = ONE // 2, ONE // 2  # x and the result of exp in 16 bits
        assert [c.kept_bytes for c in block_costs(model, step, ["0", "1"])] == [cast + exp] * 2
        weights = WIDTH * WIDTH * 2
        assert [c.cast_bytes for c in block_costs(model, step, ["0", "1"])] == [weights] * 2
        without = block_costs(model, lambda: step(cache=False), ["0", "1"])
        assert [c.kept_bytes for c in without] == [cast + exp + weights] * 2
        assert [c.cast_bytes for c in without] == [0, 0]

    def test_the_model_is_afterwards_what_it_was(self) -> None:
        model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(), Block())
        before = {k: v.clone() for k, v in model.state_dict().items()}
        gradient = model[0].linear.weight.grad = torch.ones(WIDTH, WIDTH)
        state = torch.get_rng_state()
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        block_costs(model, lambda: model(x).sum().backward(), ["0", "3"])
        assert torch.equal(torch.get_rng_state(), state)
        assert model[0].linear.weight.grad is gradient
        assert torch.equal(gradient, torch.ones(WIDTH, WIDTH))
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert not model[0]._forward_hooks
        assert not model[0]._forward_pre_hooks

    def test_names_that_are_none_and_blocks_that_are_not_called(self) -> None:
        model = nn.Sequential(Block(), Block())
        with pytest.raises(ValueError, match=r"no modules named \['7'\]"):
            block_costs(model, lambda: None, ["7"])
        with pytest.raises(ValueError, match=r"the step called none of the blocks \['0', '1'\]"):
            block_costs(model, lambda: None, ["0", "1"])
        with pytest.raises(ValueError, match="there are no repeated blocks: name some"):
            block_costs(nn.Linear(2, 2), lambda: None, [])


def test_blocks_that_are_held_in_two_places_are_found_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.again = nn.ModuleList([*self.first])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.first, *self.again):
                x = block(x).relu()
            return x

    model = Twice()
    assert list(repeated_blocks(model)) == ["first.0", "first.1"]
    x = torch.randn(2, 4)
    names = list(repeated_blocks(model))
    costs = block_costs(model, lambda: model(x).sum().backward(), names)
    assert [cost.calls for cost in costs] == [2, 2]
