from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from flopwise.kit.memory.padded_layers import PADDED, dimensions, switch_off, switch_on

LAYERS = [
    (nn.Linear(13, 21), (24, 16), (2, 5, 13)),
    (nn.Linear(13, 21, bias=False), (24, 13), (13,)),
    (nn.Linear(16, 21), (24, 16), (0, 16)),
    (nn.Conv1d(3, 5, 3, padding=1), (8, 8), (2, 3, 9)),
    (nn.Conv2d(3, 5, 3, stride=2, padding="valid"), (8, 4), (2, 3, 9, 9)),
    (nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect", bias=False), (8, 4), (2, 3, 9, 9)),
    (nn.Conv2d(3, 5, 3, dilation=2), (8, 3), (3, 9, 9)),
    (nn.Conv3d(3, 5, 2), (8, 8), (2, 3, 4, 4, 4)),
    (nn.ConvTranspose1d(3, 5, 3, stride=2), (8, 4), (2, 3, 9)),
    (nn.ConvTranspose2d(3, 5, 3, 2, 1, output_padding=1, bias=False), (8, 8), (2, 3, 5, 5)),
    (nn.ConvTranspose2d(3, 5, 3, dilation=2), (5, 8), (3, 5, 5)),
    (nn.ConvTranspose3d(3, 5, 2), (8, 3), (2, 3, 4, 4, 4)),
]


@pytest.mark.parametrize(("layer", "to", "shape"), LAYERS, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_padded_layer_gives_what_the_plain_one_gives(
    layer: nn.Module, to: tuple[int, int], shape: tuple[int, ...], contiguous: bool
) -> None:
    layer = copy.deepcopy(layer).double()
    x = torch.randn(shape, dtype=torch.double, requires_grad=True)
    plain = layer(x)
    weights = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weights).sum(), [x, *layer.parameters()])
    kind, parameters = type(layer), list(layer.parameters())
    switch_on(layer, *to, contiguous)
    padded = layer(x)
    assert isinstance(layer, kind)
    assert type(layer) is not kind
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    if contiguous and x.numel():
        assert padded.stride() == plain.stride()
    found = torch.autograd.grad((padded * weights).sum(), [x, *layer.parameters()])
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    switch_off(layer)
    assert type(layer) is kind
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("kind", PADDED)
def test_an_input_of_a_wrong_size_is_refused_still(kind: type[nn.Module]) -> None:
    layer = kind(13, 21, *([3] if kind is not nn.Linear else []))
    dims = 0 if kind is nn.Linear else int(kind.__name__[-2])
    switch_on(layer, 24, 16, True)
    for wrong in (12, 15, 16):
        with pytest.raises(RuntimeError):
            layer(torch.randn(2, wrong, *(9,) * dims))


def test_the_output_size_of_a_transposed_convolution_is_asked_for_as_ever() -> None:
    layer, x = nn.ConvTranspose2d(3, 5, 3, stride=2), torch.randn(2, 3, 5, 5)
    plain = layer(x, output_size=[12, 12])
    switch_on(layer, 8, 4, True)
    torch.testing.assert_close(layer(x, output_size=[12, 12]), plain)
    layer.__class__ = type("Wrapped", (type(layer),), {})
    switch_off(layer)
    assert torch.equal(layer(x, output_size=[12, 12]), plain)


def test_channels_last_stays_channels_last() -> None:
    layer = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    plain = layer(x)
    switch_on(layer, 8, 4, True)
    padded = layer(x)
    assert padded.stride() == plain.stride()
    assert padded.is_contiguous(memory_format=torch.channels_last)


def test_under_autocast_it_computes_and_gives_what_the_plain_layer_does() -> None:
    layer, x = nn.Linear(13, 21), torch.randn(4, 13)
    with torch.autocast("cpu", torch.bfloat16):
        plain = layer(x)
        switch_on(layer, 24, 16, True)
        padded = layer(x)
    assert padded.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(padded, plain)
    padded.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    double, y = nn.Linear(13, 21).double(), x.double()
    with torch.autocast("cpu", torch.bfloat16):  # autocast leaves double alone
        plain = double(y)
        switch_on(double, 24, 16, True)
        assert double(y).dtype == plain.dtype == torch.float64


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_results_may_be_written_to(contiguous: bool, rows: int) -> None:
    layer, x = nn.Linear(13, 21), torch.randn(rows, 13)
    layer(x).mul(2).sum().backward()
    expected = layer.weight.grad
    layer.weight.grad = None
    switch_on(layer, 24, 16, contiguous)
    layer(x).mul_(2).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_gradients_of_each_sample_and_of_gradients() -> None:
    layer, x = nn.Linear(13, 21).double(), torch.randn(4, 13, dtype=torch.double)

    def each() -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: layer(row).square().sum()))(x)

    plain = each()
    switch_on(layer, 24, 16, True)
    torch.testing.assert_close(each(), plain)
    assert torch.autograd.gradgradcheck(layer, x.requires_grad_())


def test_a_copy_and_a_pickle_are_padded_too() -> None:
    layer, x = nn.Linear(13, 21), torch.randn(4, 13)
    switch_on(layer, 24, 16, True)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert torch.equal(twin(x), layer(x))


def test_a_class_that_someone_changed_since_computes_plainly_after_the_undo() -> None:
    layer, x = nn.Linear(13, 21), torch.randn(4, 13)
    plain = layer(x)
    switch_on(layer, 24, 16, True)
    layer.__class__ = type("Wrapped", (type(layer),), {})
    switch_off(layer)
    assert type(layer).__name__ == "Wrapped"
    assert torch.equal(layer(x), plain)
    conv = nn.Conv2d(3, 5, 3)
    image = torch.randn(1, 3, 5, 5)
    plain = conv(image)
    switch_on(conv, 8, 4, True)
    conv.__class__ = type("Wrapped", (type(conv),), {})
    switch_off(conv)
    assert torch.equal(conv(image), plain)


@pytest.mark.parametrize("contiguous", [True, False])
def test_compiled_it_gives_the_same(contiguous: bool) -> None:
    layer, x = nn.Linear(13, 21), torch.randn(4, 13)
    plain = layer(x)
    switch_on(layer, 24, 16, contiguous)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    torch.testing.assert_close(y, plain)
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (21, 13)


@pytest.mark.parametrize("kind", PADDED)
def test_a_weight_of_another_size_computes_as_it_is(kind: type[nn.Module]) -> None:
    sizes = [3] if kind is not nn.Linear else []
    layer, other = kind(13, 21, *sizes), kind(13, 25, *sizes)
    switch_on(layer, 24, 16, True)
    layer.weight, layer.bias = other.weight, other.bias
    dims = 0 if kind is nn.Linear else int(kind.__name__[-2])
    x = torch.randn(2, 13, *[7] * dims)
    assert torch.equal(layer(x), other(x))


def test_a_head_that_says_fewer_rows_than_its_tied_weight_has_gives_all_of_them() -> None:
    head, embedding = nn.Linear(32, 501, bias=False), nn.Embedding(509, 32)
    head.weight = embedding.weight
    x = torch.randn(4, 32)
    plain = head(x)
    assert dimensions(head) == (509, 32)
    switch_on(head, 512, 32, True)
    assert head(x).shape == plain.shape
    torch.testing.assert_close(head(x), plain)


def test_a_computed_weight_is_computed_once_a_call() -> None:
    layer, calls = nn.Linear(13, 21), []

    class Seen(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return weight * 2

    switch_on(layer, 24, 16, True)
    nn.utils.parametrize.register_parametrization(layer, "weight", Seen())
    calls.clear()
    layer(torch.randn(2, 13))
    assert calls == [1]


def test_autocast_leaves_complex_numbers_as_they_are() -> None:
    layer = nn.Linear(13, 21, dtype=torch.complex64)
    x = torch.randn(4, 13, dtype=torch.complex64)
    with torch.autocast("cpu", torch.bfloat16):
        plain = layer(x)
        switch_on(layer, 24, 16, True)
        torch.testing.assert_close(layer(x), plain)


def test_on_no_device_shapes_are_right() -> None:
    layer = nn.Linear(13, 21, device="meta")
    switch_on(layer, 24, 16, True)
    assert layer(torch.empty(4, 13, device="meta")).shape == (4, 21)


@pytest.mark.parametrize("kind", [nn.Conv3d, nn.ConvTranspose3d])
def test_channels_that_lie_innermost_lie_so_in_three_dimensions_too(kind: type[nn.Module]) -> None:
    layer, x = kind(3, 5, 3), torch.randn(2, 3, 5, 6, 7)
    layer, x = (
        layer.to(memory_format=torch.channels_last_3d),
        x.contiguous(memory_format=torch.channels_last_3d),
    )
    plain = layer(x)
    switch_on(layer, 8, 8, True)
    assert layer(x).stride() == plain.stride()
    torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_result_may_be_written_in_place(contiguous: bool) -> None:
    plain = nn.Linear(8, 5)
    padded = copy.deepcopy(plain)
    switch_on(padded, 8, 8, contiguous)
    x = torch.randn(3, 8)
    results = []
    for layer in (plain, padded):
        y = layer(x)
        y.mul_(2)
        y[0, 0] = 1.0
        y.square().sum().backward()
        results.append((y.detach(), layer.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("contiguous", [True, False])
def test_exported_vectorised_and_differentiated_twice_it_gives_the_same(contiguous: bool) -> None:
    plain = nn.Linear(8, 5)
    padded = copy.deepcopy(plain)
    switch_on(padded, 8, 8, contiguous)
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.export.export(padded, (x,)).module()(x), plain(x))
    torch.testing.assert_close(torch.vmap(padded)(x), plain(x))
    torch.testing.assert_close(
        torch.func.jvp(padded, (x,), (torch.ones_like(x),))[1],
        torch.func.jvp(plain, (x,), (torch.ones_like(x),))[1],
    )
    twice = [
        torch.autograd.functional.hessian(lambda x, f=f: f(x).pow(3).sum(), x)
        for f in (plain, padded)
    ]
    torch.testing.assert_close(*twice)
