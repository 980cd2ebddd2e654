from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flopwise.fixes.lazy_logits import LazyLogits, later, watched


class Squares(torch.autograd.Function):
    """Called by the script past everything of Python's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


@pytest.fixture
def parts() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((2, 3, 8), (11, 8), (11,))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


READERS: dict[str, Any] = {
    "sum": lambda t: (t.float().softmax(-1) ** 2).sum(),
    "slice": lambda t: t[..., :-1, :].contiguous().view(-1, 11).logsumexp(0).sum(),
    "function": Squares.apply,
    "mixed": lambda t: (torch.ones(11, dtype=t.dtype) @ t.flatten(0, 1).t()).prod(),
    "loss": lambda t: F.cross_entropy(t.view(-1, 11), torch.arange(6)),
}


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_values_and_gradients_are_those_of_the_product(
    parts: Any, low: bool, bias: bool, reader: str
) -> None:
    hidden, weight, b = parts
    wanted = [hidden, weight, *([b] if bias else [])]
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        plain = F.linear(hidden * 2, weight, b if bias else None)
        lazy = later(hidden * 2, weight, b if bias else None)
    read = READERS[reader]
    assert lazy.source.reads == []
    torch.testing.assert_close(read(lazy), read(plain), rtol=0, atol=0)
    assert lazy.source.reads
    ours, theirs = (torch.autograd.grad(read(t), wanted) for t in (lazy, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if not low else 2e-2, atol=1e-6)


def test_shapes_casts_and_detaching_read_nothing(parts: Any) -> None:
    lazy = later(*parts)
    assert (lazy.shape, lazy.dtype, lazy.dim(), len(lazy)) == ((2, 3, 11), torch.float32, 3, 2)
    assert lazy.requires_grad
    assert lazy.is_contiguous()
    assert isinstance(lazy.bfloat16(), LazyLogits)
    assert isinstance(lazy.detach(), LazyLogits)
    assert lazy.detach().requires_grad is False
    assert lazy.source.reads == []
    assert torch.equal(lazy.double(), F.linear(*parts).double())
    assert lazy.source.reads


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist(),
        lambda t: t.numpy().tolist(),
        lambda t: copy.deepcopy(t).tolist(),
        lambda t: pickle.loads(pickle.dumps(t)).tolist(),
        lambda t: torch.utils.dlpack.from_dlpack(t).tolist(),
        lambda t: [[[v.item() for v in row] for row in one] for one in t],
        lambda t: repr(t),
        lambda t: f"{t[0, 0, 0]:.3f}",
    ],
)
def test_what_asks_for_memory_gets_it(parts: Any, read: Any) -> None:
    lazy, plain = later(*parts).detach(), F.linear(*parts).detach()
    assert read(lazy) == read(plain)
    assert lazy.source.reads


def test_logits_read_after_the_update_are_those_of_the_step(parts: Any) -> None:
    plain, lazy = F.linear(*parts), later(*parts)
    with torch.no_grad():
        parts[1].mul_(2)
    assert torch.equal(lazy.detach().clone(), plain)


def test_logits_that_are_there_tell_when_they_are_read(parts: Any) -> None:
    plain = F.linear(*parts)
    seen = watched(plain)
    assert seen.source.reads == []
    assert torch.equal(seen, plain)
    assert seen.source.reads == ["aten.equal.default"]
    assert torch.equal(
        torch.autograd.grad(seen.square().sum(), parts[0], retain_graph=True)[0],
        torch.autograd.grad(plain.square().sum(), parts[0])[0],
    )
