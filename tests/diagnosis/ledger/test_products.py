"""Products and convolutions: their sizes, and whether tensor cores can read them as they lie."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ledger.products import padded, products

X, W = ([512, 768], "c10::BFloat16"), ([768, 1000], "c10::BFloat16")


@pytest.mark.parametrize(
    ("size", "suits"),
    [(50257, 50304), (30522, 30528), (1000, 1000), (77, 80), (2049, 2112), (3, 8)],
)
def test_the_next_size_that_suits(size: int, suits: int) -> None:
    assert padded(size) == suits


def test_rows_that_a_view_spreads_count_as_they_lie(job: Any, scene: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 100, X, W)
        job.op("aten::mm", 100, X, W, strides=[[2307, 1], [1, 768]])
        job.op("aten::mm", 100, ([1, 768], "float"), ([768, 1], "float"), kernel="gemv_tf32")

    whole, view, vector = products(scene(job.steps(3, body)))[:3]
    assert (whole.rows, whole.sizes, whole.alignment(), whole.odd) == (
        (768, 1000, 1000),
        (512, 1000, 768),
        16,
        [],
    )
    assert (view.rows, view.alignment(), view.odd) == ((2307, 768, 1000), 2, [])
    assert (vector.dtype, vector.rows, vector.alignment()) == ("tf32", (), 16)


def test_the_same_rows_are_aligned_to_less_in_a_narrower_dtype(job: Any, scene: Any) -> None:
    wide = ([512, 100], "float"), ([100, 1000], "float")
    (one, *_) = products(scene(job.steps(3, lambda: job.op("aten::mm", 100, *wide))))
    assert (one.alignment(), one.alignment(2), one.odd) == (16, 8, [])
    assert one.flops == 2 * 512 * 100 * 1000


def test_gradients_of_convolutions_have_channels_by_either_schema(job: Any, scene: Any) -> None:
    out, image, weight = (
        ([8, 100, 16, 16], "float"), ([8, 60, 16, 16], "float"), ([100, 60, 3, 3], "float"),
    )  # fmt: skip
    rest = ([0], [1, 1], [1, 1], [1, 1], "False", [0, 0], 1, "[True, True, False]")

    def body() -> None:
        job.op("aten::convolution_backward", 100, out, image, weight, *rest, backward=True)

    (one, *_) = products(scene(job.steps(3, body)))
    assert (one.family, one.sizes) == ("convolution", (100, 60))
