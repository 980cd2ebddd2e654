"""Attention against brute force and against closed forms from the literature."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.flops.attention import BOTTOM_RIGHT, TOP_LEFT, visible_pairs
from flopwise.flops.call import Call, Cost, Operand
from flopwise.flops.table import cost

sizes = st.integers(0, 12)
windows = st.integers(-1, 6)


@given(sizes, sizes, st.sampled_from([None, TOP_LEFT, BOTTOM_RIGHT]), windows, windows)
def test_visible_pairs_are_those_one_would_count(
    t_q: int, t_k: int, corner: str | None, left: int, right: int
) -> None:
    shift = 0 if corner == TOP_LEFT else t_k - t_q
    ahead = 0 if corner else right
    seen = sum(
        (ahead < 0 or j <= i + shift + ahead) and (left < 0 or j >= i + shift - left)
        for i in range(t_q)
        for j in range(t_k)
    )
    assert visible_pairs(t_q, t_k, corner, left, right) == seen


def attention(
    name: str,
    q: tuple[int, ...],
    kv: tuple[int, ...],
    d_v: int | None = None,
    **args: object,
) -> Cost:
    tensors = {
        "query": Operand(q, "bfloat16"),
        "key": Operand(kv, "bfloat16"),
        "value": Operand((*kv[:-1], d_v or kv[-1]), "bfloat16"),
    }
    found = cost(Call(f"aten::{name}", {**tensors, **args}))
    assert found is not None
    return found


SDPA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@pytest.mark.parametrize("name", SDPA)
def test_forward_and_backward_of_each_backend(name: str) -> None:
    q = (2, 8, 64, 32)
    forward = 4 * 2 * 8 * 64 * 64 * 32
    assert attention(name, q, q) == Cost(forward, forward, forward)
    causal = 4 * 2 * 8 * (64 * 65 // 2) * 32
    assert attention(name, q, q, is_causal=True) == Cost(forward, causal, forward)
    back = attention(f"{name}_backward", q, q, is_causal=True)
    assert back == Cost(2 * forward, 2 * causal, 5 * forward // 2)


@pytest.mark.parametrize(
    ("wanted", "products"),
    # dV = P' dO; dP = dO V'; dQ = dS K; dK = dS' Q: dP is needed for the latter two.
    [
        ((True, True, True), 4),
        ((True, False, False), 2),
        ((False, False, True), 1),
        ((False, True, True), 3),
        ((False, False, False), 0),
    ],
)
@pytest.mark.parametrize("mask", ["wanted", "grad_input_mask"])
def test_gradients_that_nobody_asks_for_are_executed_and_not_needed(
    wanted: tuple[bool, ...], products: int, mask: str
) -> None:
    q, one = (2, 8, 64, 32), 2 * 2 * 8 * 64 * 64 * 32
    given: dict[str, Any] = {mask: (*wanted, True) if mask == "grad_input_mask" else wanted}
    back = attention(f"{SDPA[2]}_backward", q, q, **given)
    assert (back.needed, back.executed) == (products * one, 5 * one)


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_cudnn_attention_forward"])
@pytest.mark.parametrize("part", ["seqused_k", "block_table", "page_table", "seqlen_k"])
def test_keys_of_which_a_part_is_used_are_not_counted_whole(name: str, part: str) -> None:
    q = Operand((1, 8, 2, 16))
    call = Call(f"aten::{name}", {"query": q, "key": q, "value": q, part: Operand((1,), "int32")})
    assert cost(call) is None


def test_grouped_queries_count_a_plane_a_query_head() -> None:
    assert attention(SDPA[0], (1, 8, 16, 4), (1, 2, 16, 4)).needed == 4 * 8 * 16 * 16 * 4


def test_other_lengths_and_depths_of_keys_and_values() -> None:
    got = attention(SDPA[2], (1, 2, 10, 8), (1, 2, 30, 8), d_v=24)
    assert got.needed == 2 * 2 * 10 * 30 * (8 + 24)
    back = attention(SDPA[2] + "_backward", (1, 2, 10, 8), (1, 2, 30, 8), d_v=24)
    assert back.needed == 2 * got.needed
    assert back.executed == 2 * got.needed + 2 * 2 * 10 * 30 * 8


def test_causal_starts_top_left_in_torch_and_bottom_right_in_flash_attention() -> None:
    assert attention(SDPA[2], (1, 1, 2, 4), (1, 1, 5, 4), is_causal=True).needed_causal == 16 * 3
    got = attention("_flash_attention_forward", (1, 2, 1, 4), (1, 5, 1, 4), is_causal=True)
    assert got.needed_causal == 16 * (4 + 5)


def test_kernels_below_sdpa_have_time_before_heads() -> None:
    got = attention("_flash_attention_forward", (2, 64, 8, 32), (2, 64, 8, 32))
    assert got.needed == 4 * 2 * 8 * 64 * 64 * 32
    got = attention(
        "_efficient_attention_forward", (2, 64, 8, 32), (2, 64, 8, 32), custom_mask_type=1
    )
    assert got.needed_causal == 4 * 2 * 8 * (64 * 65 // 2) * 32


def test_sliding_window_is_capped() -> None:
    got = attention(
        "_flash_attention_forward",
        (1, 100, 1, 4),
        (1, 100, 1, 4),
        is_causal=True,
        window_size_left=9,
        window_size_right=0,
    )
    assert got.needed_causal == 16 * (sum(range(1, 10)) + 91 * 10)
    assert got.needed == 16 * 100 * 100


def packed(name: str, ends: tuple[int, ...] | None, **args: object) -> Cost | None:
    tokens = Operand((20, 2, 16), "bfloat16")
    lengths = Operand((4,), "int32", ends)
    call = Call(
        name,
        {
            "query": tokens,
            "key": tokens,
            "value": tokens,
            "cum_seq_q": lengths,
            "cum_seq_k": lengths,
            **args,
        },
    )
    return cost(call)


def test_packed_sequences_are_the_sum_of_their_squares() -> None:
    squares, causal = 9 + 25 + 144, 6 + 15 + 78
    got = packed("aten::_flash_attention_forward", (0, 3, 8, 20), is_causal=True)
    assert got == Cost(4 * 2 * 16 * squares, 4 * 2 * 16 * causal, 4 * 2 * 16 * squares)
    back = packed("aten::_flash_attention_backward", (0, 3, 8, 20), is_causal=True)
    assert back == Cost(8 * 2 * 16 * squares, 8 * 2 * 16 * causal, 10 * 2 * 16 * squares)


def test_packed_sequences_of_unknown_lengths_are_unknown() -> None:
    assert packed("aten::_flash_attention_forward", None) is None


def test_a_mask_tensor_is_said() -> None:
    mask = Operand((1, 1, 64, 64), "bool")
    got = attention(SDPA[1], (1, 2, 64, 8), (1, 2, 64, 8), attn_mask=mask)
    assert got.needed == got.needed_causal
    assert got.note is not None
    assert "mask tensor" in got.note


class TestFlex:
    def flex(self, blocks: Operand | None, **args: object) -> Cost:
        q = Operand((2, 4, 256, 32))
        found = cost(
            Call(
                "higher_order::flex_attention",
                {"query": q, "key": q, "value": q, "kv_num_blocks": blocks, **args},
            )
        )
        assert found is not None
        return found

    def test_without_a_mask_it_is_4_b_h_s_s_d(self) -> None:
        assert self.flex(None) == Cost.exactly(4 * 2 * 4 * 256 * 256 * 32)

    def test_kept_blocks_shared_by_batch_and_heads(self) -> None:
        partial, full = Operand((1, 1, 2), "int32", (1, 1)), Operand((1, 1, 2), "int32", (0, 1))
        got = self.flex(partial, full_kv_num_blocks=full, block_q=128, block_kv=128)
        assert got.needed == 4 * 2 * 4 * 256 * 256 * 32
        assert got.needed_causal == 4 * 2 * 4 * (3 * 128 * 128) * 32
        assert got.note == "flex_attention: block sparse"

    def test_one_block_is_no_mask(self) -> None:
        huge = 1 << 30
        got = self.flex(Operand((1, 1, 1), "int32"), block_q=huge, block_kv=huge)
        assert got == Cost.exactly(4 * 2 * 4 * 256 * 256 * 32)

    def test_blocks_nobody_read_are_counted_full_and_said(self) -> None:
        got = self.flex(Operand((1, 1, 2), "int32"))
        assert got.needed == got.needed_causal
        assert got.note is not None
