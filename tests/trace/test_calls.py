"""An operator's operands and result, read from a trace, and the FLOPs and bytes that follow. Shapes are as torch writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.flops.call import Operand
from flopwise.flops.table import RULES
from flopwise.trace.calls import (
    Tensor,
    arguments,
    call_of,
    cost_of,
    operand_bytes,
    schemas,
    tensors,
)
from flopwise.trace.table import Operands


def recorded(*found: Any, dtype: str = "float", strides: Any = None) -> Operands:
    """Returns operands as a trace has them: lists are shapes, text is a plain value, None is not there."""
    dims = [one if isinstance(one, list) else [] for one in found]
    types = [dtype if isinstance(one, list) else "" if one is None else "Scalar" for one in found]
    concrete = [one if isinstance(one, str) else "" for one in found]
    return Operands(*(json.dumps(part).encode() for part in (dims, types, strides or [], concrete)))


X, W, B = [2, 4, 8, 8], [6, 4, 3, 3], [6]
ONE, NONE = "[1, 1]", "[0, 0]"


@pytest.mark.parametrize(
    ("name", "operands", "flops", "result"),
    [
        ("aten::mm", [[4, 5], [5, 6]], 2 * 4 * 5 * 6, (4, 6)),
        ("aten::mm", [[4, 5], [5, 6], [4, 6]], 240, (4, 6)),  # out=
        ("aten::addmm", [[6], [4, 5], [5, 6], "1", "1"], 240, (4, 6)),
        ("aten::addmm", [[6], [4, 5], [5, 6], "1", "1", [4, 6]], 240, (4, 6)),  # out=
        ("aten::addmm_", [[4, 6], [4, 5], [5, 6], "1", "1"], 240, (4, 6)),
        ("aten::bmm", [[2, 4, 5], [2, 5, 6]], 480, (2, 4, 6)),
        ("aten::baddbmm", [[2, 4, 6], [2, 4, 5], [2, 5, 6], "1", "1"], 480, (2, 4, 6)),
        ("aten::addmv", [[4], [4, 5], [5], "1", "1"], 40, None),
        ("aten::linear", [[3, 4, 5], [6, 5], [6]], 2 * 12 * 5 * 6, None),
        # one output element is 2 * 4 * 9 FLOPs; (8 - 3) // 1 + 1 = 6 a side
        ("aten::convolution", [X, W, B, ONE, NONE, ONE, "False", NONE, "1"], 31_104, (2, 6, 6, 6)),
        # stride 2, padding 1: (8 + 2 - 3) // 2 + 1 = 4 a side; two groups: 2 * 2 * 9 each
        (
            "aten::convolution",
            [X, [6, 2, 3, 3], B, "[2, 2]", ONE, ONE, "False", NONE, "2"],
            2 * 6 * 16 * 2 * 2 * 9,
            (2, 6, 4, 4),
        ),
        # dilation 2, padding 2: (8 + 4 - 5) // 1 + 1 = 8 a side; another order of arguments
        (
            "aten::mkldnn_convolution",
            [X, W, B, "[2, 2]", ONE, "[2, 2]", "1"],
            2 * 6 * 64 * 2 * 4 * 9,
            (2, 6, 8, 8),
        ),
        (
            "aten::cudnn_convolution",
            [X, W, ONE, "[2, 2]", ONE, "1", "False", "False", "True"],
            2 * 6 * 16 * 2 * 4 * 9,
            (2, 6, 4, 4),
        ),
        (
            "aten::miopen_convolution",
            [X, W, None, NONE, ONE, ONE, "1", "False", "False"],
            31_104,
            (2, 6, 6, 6),
        ),
        # one number for all sides, as in one dimension
        (
            "aten::convolution",
            [[2, 4, 8], [6, 4, 3], None, "[1]", "[0]", "[1]", "False", "[0]", "1"],
            2 * 6 * 6 * 2 * 4 * 3,
            (2, 6, 6),
        ),
        # transposed: each element of the input meets 6 * 9 of the filter
        (
            "aten::convolution",
            [X, [4, 6, 3, 3], B, ONE, NONE, ONE, "True", NONE, "1"],
            2 * (2 * 4 * 64) * 6 * 9,
            None,
        ),
        (
            "aten::cudnn_convolution_transpose",
            [X, [4, 6, 3, 3], NONE, NONE, ONE, ONE, "1", "False", "False", "True"],
            2 * (2 * 4 * 64) * 6 * 9,
            None,
        ),
        # both gradients, and that of the weight alone
        (
            "aten::convolution_backward",
            [[2, 6, 6, 6], X, W, "[6]", ONE, NONE, ONE, "False", NONE, "1", "[True, True, True]"],
            2 * 31_104,
            None,
        ),
        (
            "aten::convolution_backward",
            [[2, 6, 6, 6], X, W, "[6]", ONE, NONE, ONE, "False", NONE, "1", "[False, True, True]"],
            31_104,
            None,
        ),
    ],
)  # fmt: skip
def test_products_and_convolutions(
    name: str, operands: list[Any], flops: int, result: tuple[int, ...] | None
) -> None:
    call = call_of(name, recorded(*operands))
    assert cost_of(call).needed == flops
    assert (call.outs[0].shape if call.outs else None) == result


#: 2 sequences of 128, 4 heads of 64: (batch, time, heads, depth), each pair of a query and a key 256 FLOPs forward
HEADS = [2, 128, 4, 64]
QKV = [HEADS, HEADS, HEADS]
LSE = [2, 4, 128]
CAUSAL = 128 * 129 // 2
BAND = CAUSAL - 95 * 96 // 2  # a window of 32 keys before each query
FULL, TRIANGLE, WINDOW = (256 * 2 * 4 * n for n in (128 * 128, CAUSAL, BAND))
NO = None
FA3 = [*QKV, *[NO] * 9, "128", "128", *[NO] * 9, "0.125"]  # up to the scale


@pytest.mark.parametrize(
    ("name", "operands", "full", "seen"),
    [
        ("flash_attn::_flash_attn_forward", [*QKV, "0.0", "0.1", "False", "-1", "-1", "0.0", NO, "False"], FULL, FULL),
        ("flash_attn::_flash_attn_forward", [*QKV, "0.0", "0.1", "True", "-1", "-1", "0.0", NO, "False"], FULL, TRIANGLE),
        ("flash_attn::_flash_attn_forward", [*QKV, "0.0", "0.1", "True", "32", "0", "0.0", NO, "False"], FULL, WINDOW),
        # FlashAttention's `dq`, `dk`, `dv` lie between the statistics and the dropout
        (
            "flash_attn::_flash_attn_backward",
            [HEADS, *QKV, HEADS, LSE, *QKV, "0.0", "0.1", "True", "32", "0", "0.0", NO, "False", NO],
            2 * FULL, 2 * WINDOW,
        ),
        ("flash_attn_3::fwd", [*FA3, "True", "-1", "-1", "0", "0.0", "False", NO, "1", NO, "0"], FULL, TRIANGLE),
        ("flash_attn_3::_flash_attn_forward", [*FA3, "True", "32", "0", "0", "0.0", "True", NO, "1", NO, "0"], FULL, WINDOW),
        (
            "flash_attn_3::bwd",
            [HEADS, *QKV, HEADS, LSE, *[NO] * 7, "128", "128", "0.1", "True", "32", "0", "0.0", "False", "0"],
            2 * FULL, 2 * WINDOW,
        ),
        (
            "flash_attn_3::_flash_attn_backward",
            [HEADS, *QKV, HEADS, LSE, *[NO] * 4, "128", "128", *QKV, "0.1", "True", "-1", "-1", "0.0", "False", "0"],
            2 * FULL, 2 * TRIANGLE,
        ),
        ("xformers_flash::flash_fwd", [*QKV, NO, NO, NO, "128", "128", "0.0", "0.1", "True", "32", "0", "False", NO], FULL, WINDOW),
        (
            "xformers_flash::flash_bwd",
            ["False", HEADS, *QKV, HEADS, LSE, NO, NO, "128", "128", "0.0", "0.1", "True", "-1", "-1", [2]],
            2 * FULL, 2 * TRIANGLE,
        ),
        (
            "xformers_flash3::flash_fwd",
            [*QKV, *[NO] * 4, "128", "128", "0.0", "0.1", "True", *[NO] * 4, "False", "32", "0"],
            FULL, WINDOW,
        ),
        (
            "xformers_flash3::flash_bwd",
            ["False", HEADS, *QKV, HEADS, LSE, NO, NO, "128", "128", "0.1", "False", "-1", "-1"],
            2 * FULL, 2 * FULL,
        ),
        # a mask of kind 1 is causal from the top left
        (
            "xformers::efficient_attention_forward_cutlass",
            [*QKV, NO, NO, NO, "128", "128", "0.0", "1", "True", "0.1", NO, NO],
            FULL, TRIANGLE,
        ),
        (
            "xformers::efficient_attention_backward_cutlass",
            [HEADS, *QKV, NO, HEADS, NO, NO, "128", "128", LSE, "0.0", [1], [1], "1", "False", "0.1", NO, NO],
            2 * FULL, 2 * TRIANGLE,
        ),
        (
            "xformers::efficient_attention_forward_ck",
            [*QKV, NO, NO, NO, "128", "0.0", "True", "1", "0.1", NO, NO],
            FULL, TRIANGLE,
        ),
        (
            "xformers::efficient_attention_backward_ck",
            [HEADS, *QKV, NO, NO, NO, "128", "128", NO, LSE, HEADS, "0.0", "1", "0", "0", "0.1", NO],
            2 * FULL, 2 * FULL,
        ),
        (
            "aten::_cudnn_attention_forward",
            [[2, 4, 128, 64]] * 3 + [NO, NO, NO, "128", "128", "True", "0.0", "True", "False", "0.1"],
            FULL, TRIANGLE,
        ),
        (
            "aten::_cudnn_attention_backward",
            [[2, 4, 128, 64]] * 5 + [LSE, [1], [1], NO, NO, NO, "128", "128", "0.0", "True", "0.1"],
            2 * FULL, 2 * TRIANGLE,
        ),
    ],
)  # fmt: skip
def test_attention_of_packages(name: str, operands: list[Any], full: int, seen: int) -> None:
    cost = cost_of(call_of(name, recorded(*operands, dtype="c10::BFloat16")))
    assert (cost.needed, cost.needed_causal) == (full, seen)


def test_packed_sequences_whose_lengths_a_trace_does_not_show() -> None:
    """As `flash_attn_3::fwd` is recorded with 128 sequences in 16384 tokens: their lengths are contents."""
    tokens = [16384, 6, 128]
    operands = recorded(
        *[tokens] * 3, *[None] * 4, [128], [128], *[None] * 3, "2048", "2048", *[None] * 9, "0.1", "True", "128", "0", "0",
        "0.0", "True", None, "1", None, "0", dtype="c10::BFloat16",
    )  # fmt: skip
    with pytest.raises(LookupError, match="lengths of the packed sequences are not visible"):
        cost_of(call_of("flash_attn_3::fwd", operands))


def test_another_version_of_a_packages_op_is_not_read_by_the_positions_of_this_one() -> None:
    with pytest.raises(LookupError, match="recorded with 3 arguments where 34 are known: another"):
        call_of("flash_attn_3::fwd", recorded(HEADS, HEADS, HEADS))


@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_gradients_of_a_convolution_as_ops_of_their_own(library: str) -> None:
    """As torch 1.10 recorded them: y = (2, 6, 6, 6) is what a filter of (6, 4, 3, 3) makes of (2, 4, 8, 8)."""
    y, rest = [2, 6, 6, 6], [NONE, ONE, ONE, "1"]
    name = f"aten::{library}_convolution_backward"
    to_input = call_of(f"{name}_input", recorded("[2, 4, 8, 8]", y, W, *rest))
    assert cost_of(to_input).needed == 31_104
    to_weight = call_of(f"{name}_weight", recorded("[6, 4, 3, 3]", y, X, *rest))
    assert cost_of(to_weight).needed == 31_104
    unseen = call_of(f"{name}_weight", recorded(None, y, X, *rest))
    with pytest.raises(LookupError, match="sizes of the weight are not visible"):
        cost_of(unseen)


def test_same_padding_where_it_was_recorded() -> None:
    call = call_of("aten::_convolution_mode", recorded(X, W, B, ONE, "same", "[2, 2]", "1"))
    assert call.outs[0].shape == (2, 6, 8, 8)
    call = call_of("aten::_convolution_mode", recorded(X, W, B, ONE, "valid", "[2, 2]", "1"))
    assert call.outs[0].shape == (2, 6, 4, 4)


def test_attention_reads_whether_it_is_causal() -> None:
    q = [2, 3, 128, 64]
    name = "aten::_scaled_dot_product_flash_attention"
    full = cost_of(call_of(name, recorded(q, q, q, "0.", "False", "False")))
    causal = cost_of(call_of(name, recorded(q, q, q, "0.", "True", "False")))
    assert full.needed == full.needed_causal == causal.needed == 2 * 2 * 6 * 128 * 128 * 64
    assert causal.needed_causal == 2 * 2 * 6 * (128 * 129 // 2) * 64


@pytest.mark.parametrize(
    ("name", "operands", "said"),
    [
        ("my::op", recorded([4, 5], [5, 6]), "no formula"),
        ("aten::mm", Operands(), "shapes not recorded"),
        ("aten::mm", recorded([4, 5], None), "no tensor"),
        ("aten::mm", recorded([4, 5], [5, 6], dtype="unheard of"), "no tensor"),
        (
            "aten::convolution",
            recorded(X, W, B, None, None, None, None, None, None),
            "not recorded",
        ),
    ],
)
def test_what_is_not_there_is_said(name: str, operands: Operands, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        cost_of(call_of(name, operands))


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("aten::mm", Operands(b"{", b"[]")),
        ("aten::mm", Operands(b'{"a": 1}', b"[]")),
        ("aten::mm", Operands(b"[" * 100_000, b"[]")),
        ("aten::mm", Operands(b"\xff\xfe", b"[]")),
        ("aten::mm", recorded([], [5, 6])),
        ("aten::mm", recorded([2**47] * 2, [2**47] * 2)),
        ("aten::convolution", recorded(X, W, B, NONE, NONE, ONE, "False", NONE, "1")),  # stride 0
        ("aten::convolution", recorded(X, [6, 4, 9, 9], B, ONE, NONE, ONE, "False", NONE, "1")),
        ("aten::convolution", recorded(X, [6], B, ONE, NONE, ONE, "False", NONE, "1")),
        ("aten::convolution", recorded(X, W, B, "[Infinity, 1]", NONE, ONE, "False", NONE, "1")),
        ("aten::convolution", recorded(X, W, B, "[NaN, 1]", NONE, ONE, "False", NONE, "1")),
    ],
)
def test_operands_that_make_no_sense_are_one_kind_of_error(name: str, operands: Operands) -> None:
    with pytest.raises((LookupError, ValueError)):
        cost_of(call_of(name, operands))
    moved = operand_bytes(name, operands)
    assert moved is None or moved < 2**50


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
sizes = st.lists(st.integers(-2, 5) | st.integers(2**40, 2**49), max_size=4)
kinds = st.sampled_from(["float", "c10::BFloat16", "Scalar", "", "ScalarList"])
values = st.sampled_from(["", "True", "[1, 1]", "[0, 0]", "[]", "-3", "1e400", "[1e400]", "x"])


@given(
    st.sampled_from(sorted(set(RULES) & set(schemas()))),
    st.tuples(
        st.lists(sizes | junk, max_size=9),
        st.lists(kinds | junk, max_size=9),
        st.lists(sizes | junk, max_size=4),
        st.lists(values | junk, max_size=9),
    ),
)
def test_anything_recorded_is_a_cost_or_one_kind_of_error(name: str, parts: Any) -> None:
    operands = Operands(*(json.dumps(part).encode() for part in parts))
    moved = operand_bytes(name, operands)
    assert moved is None or 0 <= moved < 2**50
    try:
        cost = cost_of(call_of(name, operands))
    except (LookupError, ValueError):
        return
    assert 0 <= cost.needed < 10**21


def test_arguments_are_tensors_plain_values_or_nothing() -> None:
    found = arguments(recorded([2, 3], "2", "[1, 2]", "True", "0.5", None, "mean"))
    assert found == (Tensor(Operand((2, 3)), None), 2, (1, 2), True, 0.5, None, "mean")
    assert [t.operand.shape for t in tensors(recorded([2, 3], "2", [4]))] == [(2, 3), (4,)]


class TestBytes:
    def test_operands_and_the_result_each_once(self) -> None:
        assert operand_bytes("aten::mm", recorded([4, 5], [5, 6])) == 4 * (20 + 30 + 24)
        half = recorded([4, 5], [5, 6], dtype="c10::BFloat16")
        assert operand_bytes("aten::mm", half) == 2 * (20 + 30 + 24)
        assert operand_bytes("aten::relu", recorded([4, 5])) == 4 * 40

    def test_a_result_that_is_an_operand_is_no_further_one(self) -> None:
        assert operand_bytes("aten::add_", recorded([4, 5], [4, 5], "1")) == 4 * 40

    def test_the_result_of_pointwise_work_is_as_large_as_its_operands_together(self) -> None:
        assert operand_bytes("aten::add", recorded([4, 1], [5], "1")) == 4 * (4 + 5 + 20)

    def test_an_expanded_operand_is_read_from_one_place(self) -> None:
        strides = [[0, 1], [5, 1], []]
        assert operand_bytes("aten::mul", recorded([4, 5], [4, 5], strides=strides)) == 4 * (
            5 + 20 + 20
        )

    def test_of_other_operators_the_operands_alone(self) -> None:
        assert operand_bytes("aten::sum", recorded([4, 5], "False")) == 80

    def test_not_known(self) -> None:
        assert operand_bytes("aten::_foreach_add_", Operands()) is None
        assert operand_bytes("aten::_foreach_add_", recorded("1")) is None
        assert operand_bytes("aten::relu", recorded([2**40, 2**12])) is None
