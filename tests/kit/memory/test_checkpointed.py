from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
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
