"""The loss in chunks: as torch makes it of all logits at once, gradients included, and with no logits that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flopwise.fixes import chunked_loss
from flopwise.fixes.chunked_loss import CHUNK_BYTES, LEAST_ROWS, chunk_rows, chunked, piece
from flopwise.fixes.labelled_loss import Loss

CLASSES, WIDTH = 77, 16


def inputs(places: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.to(dtype).requires_grad_()

    return [leaf(places, WIDTH), leaf(CLASSES, WIDTH), leaf(CLASSES) if bias else None]


def targets_of(places: int, ignored: float, ignore_index: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (places,), generator=generator)
    return targets.masked_fill(torch.rand(places, generator=generator) < ignored, ignore_index)


def plain(loss: Loss, hidden: Any, weight: Any, bias: Any, targets: torch.Tensor) -> torch.Tensor:
    return loss(lambda h: F.linear(h, weight, bias), hidden, targets, targets.shape[0])


def grads(loss: torch.Tensor, leaves: list[Any]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(1.7 * loss, [x for x in leaves if x is not None]))


@settings(max_examples=60, deadline=None)
@given(
    places=st.integers(1, 90),
    rows=st.integers(1, 90),
    pad=st.integers(0, 5),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    loss=st.builds(
        Loss,
        ignore_index=st.sampled_from([-100, 0, 5]),
        label_smoothing=st.sampled_from([0.0, 0.1]),
        upcast=st.just(False),
        per_item=st.booleans(),
    ),
    bias=st.booleans(),
)
def test_in_float64_it_is_the_plain_loss_and_has_its_gradients(
    places: int, rows: int, pad: int, ignored: float, loss: Loss, bias: bool
) -> None:
    leaves = inputs(places, torch.float64, bias)
    targets = targets_of(places, ignored, loss.ignore_index)
    was, chunked_loss._pad_of = chunked_loss._pad_of, lambda *_: pad
    try:
        ours = chunked(loss, *leaves, targets, rows)
    finally:
        chunked_loss._pad_of = was
    theirs = plain(loss, *leaves, targets)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    torch.testing.assert_close(grads(ours, leaves), grads(theirs, leaves), equal_nan=True)


@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("upcast", [True, False])
def test_its_error_is_no_larger_than_that_of_the_plain_form(way: str, upcast: bool) -> None:
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    leaves, targets = inputs(256, dtype, True), targets_of(256, 0.2, -100)
    loss = Loss(upcast=upcast)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = grads(plain(loss, *exact, targets), exact)

    def errors(made: Any) -> tuple[torch.dtype, list[float]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            result = made()
        pairs = zip(grads(result, leaves), wanted, strict=True)
        return result.dtype, [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    kind, ours = errors(lambda: chunked(loss, *leaves, targets, 64))
    plain_kind, theirs = errors(lambda: plain(loss, *leaves, targets))
    assert kind == plain_kind
    assert all(a <= 1.5 * b + 1e-12 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operator gives."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return made


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    leaves, targets = inputs(640, torch.float32, True), targets_of(640, 0.1, -100)
    found = []
    for make in (
        lambda: chunked(Loss(), *leaves, targets, 64),
        lambda: plain(Loss(), *leaves, targets),
    ):
        with Largest() as largest:
            make().backward()
        found.append(largest.most)
    assert found == [640 * WIDTH, 640 * CLASSES]
    assert 64 * CLASSES < 640 * WIDTH


def test_only_what_is_asked_for_has_a_gradient_and_the_loss_can_be_gone_back_through_twice() -> (
    None
):
    hidden, weight, bias = inputs(50, torch.float32, True)
    targets = targets_of(50, 0.1, -100)
    weight.requires_grad_(False)
    made = chunked(Loss(), hidden, weight, bias, targets, 16)
    made.backward(retain_graph=True)
    first = hidden.grad.clone()
    made.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)
    assert weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(chunked(Loss(), hidden, weight, bias, targets, 16), made)


def test_a_target_that_is_no_class_is_refused() -> None:
    leaves = inputs(20, torch.float32, False)
    with pytest.raises((IndexError, RuntimeError)):
        chunked(Loss(), *leaves, torch.full((20,), CLASSES), 16)


def test_compiled_it_is_the_same() -> None:
    leaves, targets = inputs(96, torch.float32, True), targets_of(96, 0.2, -100)
    by = torch.compile(piece, backend="aot_eager", dynamic=False)
    for loss in (Loss(), Loss(label_smoothing=0.1)):
        ours, theirs = chunked(loss, *leaves, targets, 32, by), plain(loss, *leaves, targets)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(grads(ours, leaves), grads(theirs, leaves))


@given(places=st.integers(1, 40_000), classes=st.integers(2, 300_000), cuda=st.booleans())
def test_chunks_are_small_and_alike_where_they_can_be(
    places: int, classes: int, cuda: bool
) -> None:
    device = "cuda" if cuda else "cpu"
    rows = chunk_rows(places, classes, device)
    assert 1 <= rows <= places
    assert rows <= LEAST_ROWS[device] or 4 * rows * classes <= CHUNK_BYTES[device]
    assert rows == places or rows >= min(LEAST_ROWS[device], places)


@pytest.mark.parametrize(
    ("places", "classes", "rows"), [(16384, 50257, 2048), (8192, 32000, 4096), (512, 50257, 512)]
)
def test_chunks_of_known_models_on_a_gpu(places: int, classes: int, rows: int) -> None:
    assert chunk_rows(places, classes, "cuda") == rows
