"""Outputs and gradients of compiled code whose memory the next run writes over, as torch's own CUDA graphs have it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from flopwise.errors import GraphWarning
from flopwise.kit.graph import compile_in_place, compile_regions


class Pool:
    """A backend whose outputs lie in memory that is used again: for each call of a step the same in every step.

    As in torch's trees of CUDA graphs, a step begins with the first forward after a backward.
    """

    def __init__(self) -> None:
        self.buffers: dict[Any, list[torch.Tensor]] = {}
        self.count, self.went_back = 0, True
        self.forwards = 0
        self._make = aot_autograd(
            fw_compiler=lambda graph, _: self._code(graph, False),
            bw_compiler=lambda graph, _: self._code(graph, True),
            inference_compiler=lambda graph, _: self._code(graph, False),
        )

    def __call__(self, graph: Any, example: Any, **_: Any) -> Any:
        return self._make(graph, example)

    def _code(self, graph: Any, backward: bool) -> Any:
        def run(args: list[Any]) -> list[Any]:
            if self.went_back and not backward:
                self.count = 0
            self.went_back = backward
            self.forwards += not backward
            self.count += 1
            results = graph(*args)
            tensors = [r.detach() for r in results if isinstance(r, torch.Tensor)]
            places = self.buffers.setdefault(
                (self.count, backward, id(graph)), [torch.empty_like(t) for t in tensors]
            )
            for place, tensor in zip(places, tensors, strict=True):
                place.data.copy_(tensor)
            given = iter(places)
            return [next(given).detach() if isinstance(r, torch.Tensor) else r for r in results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(x))


class Net(nn.Module):
    def __init__(self, saves: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.saves = saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return x


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(saves: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = Net(saves)
    return net, copy.deepcopy(net)


def batch(k: int, **options: Any) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(k), **options)


def graphs(make: Any, net: nn.Module, pool: Pool, mode: str | None = "reduce-overhead") -> Any:
    return make(net, backend=pool, mode=mode, measure=False)


def accumulated(net: nn.Module, steps: int = 4) -> tuple[list[Any], list[Any]]:
    """Returns the gradients over some steps, and the outputs, read at the end."""
    outputs = []
    for k in range(steps):
        outputs.append(net(batch(k)))
        outputs[-1].square().mean().backward()
    return [p.grad for p in net.parameters()], outputs


def test_the_backend_of_these_tests_writes_over_what_is_kept() -> None:
    net, twin = pair()
    graphs(compile_in_place, net, Pool(), mode=None)
    grads, outputs = accumulated(net)
    expected, right = accumulated(twin)
    assert not any(torch.allclose(a, b) for a, b in zip(grads, expected, strict=True))
    assert not torch.allclose(outputs[0], right[0])


@pytest.mark.parametrize("make", [compile_in_place, compile_regions])
def test_gradients_that_are_accumulated_and_outputs_that_are_kept(make: Any) -> None:
    net, twin = pair()
    handle = graphs(make, net, Pool())
    for found, expected in zip(accumulated(net), accumulated(twin), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert handle.report().reason is None


@pytest.mark.parametrize("make", [compile_in_place, compile_regions])
def test_without_gradients(make: Any) -> None:
    net, twin = pair()
    graphs(make, net, Pool())
    with torch.no_grad():
        found = [net(batch(k)) for k in range(3)]
        expected = [twin(batch(k)) for k in range(3)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_inputs_that_are_accumulated() -> None:
    net, twin = pair()
    graphs(compile_in_place, net, Pool())
    delta, other = torch.zeros(5, 8, requires_grad=True), torch.zeros(5, 8, requires_grad=True)
    for k in range(3):
        net(batch(k) + delta).square().mean().backward()
        twin(batch(k) + other).square().mean().backward()
    torch.testing.assert_close(delta.grad, other.grad)


def test_gradients_are_copied_once_and_only_if_they_outlive_their_step() -> None:
    net, _ = pair()
    graphs(compile_in_place, net, Pool())
    parameter = next(net.parameters())
    net(batch(0)).sum().backward()
    first = parameter.grad
    net(batch(1)).sum().backward()
    second = parameter.grad
    net(batch(2)).sum().backward()
    assert first is not second
    assert parameter.grad is second
    net.zero_grad(set_to_none=False)
    net(batch(3)).sum().backward()
    assert parameter.grad is second


class Written(nn.Module):
    """Writes to its input, as a ReLU in place does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.relu_())


class Writers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Written() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_an_input_with_a_gradient_that_is_written_to() -> None:
    torch.manual_seed(0)
    net = Writers()
    twin = copy.deepcopy(net)
    handle = graphs(compile_regions, net, Pool())
    for a, b in zip(accumulated(net)[0], accumulated(twin)[0], strict=True):
        torch.testing.assert_close(a, b)
    assert handle.report().reason is None


def test_two_forwards_before_a_backward() -> None:
    net, twin = pair()
    graphs(compile_in_place, net, Pool())
    for k in range(3):
        for model in (net, twin):
            (model(batch(k)) * model(batch(k + 10))).sum().backward()
            model.zero_grad()
            (model(batch(k)) * model(batch(k + 10))).sum().backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_checkpointed_blocks_run_eagerly_and_say_so() -> None:
    net, twin = pair(saves=True)
    pool = Pool()
    handle = graphs(compile_regions, net, pool)
    with pytest.warns(GraphWarning, match="compiled: it runs eagerly under activation checkpoint"):
        grads, _ = accumulated(net)
    for a, b in zip(grads, accumulated(twin)[0], strict=True):
        torch.testing.assert_close(a, b)
    assert pool.forwards == 0
    assert handle.report().reason is not None


def test_an_input_or_a_weight_that_is_handed_through_stays_itself() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y, x, y

    net = Through()
    graphs(compile_in_place, net, Pool())
    x = batch(0)
    y, same, again = net(x)
    assert same is x
    assert y is again


def test_an_output_that_cannot_be_built_anew_is_told() -> None:
    class Odd(list):  # type: ignore[type-arg]
        def __copy__(self) -> Any:
            raise TypeError("no copies")

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

    from flopwise.kit.graph.graph_memory import copied_out

    net = Gives()
    run = copied_out(net, lambda x: Odd([net.layer(x)]), set())
    with pytest.warns(GraphWarning, match="outputs that torch's CUDA graphs write over"):
        assert type(run(batch(0))) is Odd
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(batch(0))
