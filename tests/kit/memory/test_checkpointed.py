from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.memory.checkpointed import Checkpointed


def test_it_is_entered_once_a_call_while_the_block_is_computed_again() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    plain = torch.autograd.grad(block(x).sum(), x)[0]
    seen: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append("in")
        try:
            yield
        finally:
            seen.append("out")

    forward = Checkpointed(block)
    block.forward = forward  # type: ignore[method-assign]
    forward.around_again = around
    y = block(x)
    assert seen == []
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)
    assert seen == ["in", "out"]
    with torch.no_grad():
        block(x)
    forward.around_again = None
    block(x).sum().backward()
    assert seen == ["in", "out"]


class Own(nn.Module):
    """Keeps a mean by itself, in an object that is new each time, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        y = x * self.mean
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return F.batch_norm(y, torch.zeros(6), self.var, training=True)


@pytest.mark.parametrize(
    "block",
    [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU()),
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()),
        Own(),
    ],
    ids=["batch norm", "batch norm, a plain mean", "a power iteration", "a mean of its own"],
)
def test_buffers_and_gradients_are_those_of_one_forward(block: nn.Module) -> None:
    plain = copy.deepcopy(block)
    block.forward = Checkpointed(block)  # type: ignore[method-assign]
    x = torch.randn(8, 6)
    for _ in range(2):
        kept = dict(block.named_buffers())
        for net in (block, plain):
            loss = net(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for (name, a), b in zip(block.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b), name
            assert a is kept[name] or isinstance(block, Own), name
        for p, q in zip(block.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, debug: bool, early_stop: float) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * (2 if debug else 1) * early_stop


def test_names_that_checkpoint_has_too_are_the_blocks() -> None:
    block = Named()
    plain = copy.deepcopy(block)
    block.forward = Checkpointed(block)  # type: ignore[method-assign]
    x = torch.randn(2, 6)
    options = {"debug": True, "early_stop": 3.0}
    assert torch.equal(block(x, **options), plain(x, **options))
    assert torch.equal(block(x=x, **options), plain(x, **options))
    block(x=x, **options).sum().backward()
    plain(x, **options).sum().backward()
    assert torch.equal(block.linear.weight.grad, plain.linear.weight.grad)  # type: ignore[arg-type]


def test_what_tells_the_device_of_random_numbers_is_passed_by_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flopwise.kit.memory import checkpointed

    seen: list[tuple[Any, ...]] = []

    def checkpoint(run: Any, *given: Any, **options: Any) -> Any:
        seen.append(given)
        assert set(options) == {"use_reentrant", "preserve_rng_state"}
        return run(*given)

    monkeypatch.setattr(checkpointed, "checkpoint", checkpoint)
    block = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    Checkpointed(block)(input=x)
    assert seen == [(x,)]

    class Boxed(nn.Linear):
        def forward(self, box: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(box["x"])

    Checkpointed(Boxed(4, 4))({"x": x})
    Checkpointed(nn.Linear(4, 4, device="meta"))(torch.empty(2, 4, device="meta"))
    assert len(seen[2]) == 1
    assert isinstance(seen[1][1], torch.Tensor)
    assert seen[1][1].device == x.device
