from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.kit.memory.alignment import cure, is_odd, needed_multiple, round_up


class TestCure:
    @pytest.mark.parametrize(
        ("size", "dtype", "to"),
        [
            (50257, "bfloat16", 50304),  # GPT-2's vocabulary
            (30522, "bfloat16", 30528),  # BERT's
            (33, "bfloat16", 40),  # 64 would double it
            (65, "bfloat16", 72),
            (127, "float32", 128),
            (130, "float32", 144),
        ],
    )
    def test_is_the_roundest_that_adds_little(self, size: int, dtype: str, to: int) -> None:
        assert cure(size, 64, dtype, 0.25) == to

    def test_of_three_channels_is_asked_for_by_a_large_share_only(self) -> None:
        assert cure(3, 64, "bfloat16", 0.125) is None
        assert cure(3, 64, "bfloat16", 2.0) == 8
        assert cure(3, 64, "float32", 2.0) == 4

    def test_a_small_multiple_never_falls_short_of_what_the_dtype_needs(self) -> None:
        assert cure(50257, 2, "bfloat16", 1) == 50264

    @given(
        st.integers(1, 10**6),
        st.sampled_from([1, 8, 64, 256]),
        st.sampled_from(["bfloat16", "float32", "float64", "int8"]),
        st.floats(0, 3),
    )
    def test_holds_what_it_says(self, size: int, multiple: int, dtype: str, most: float) -> None:
        to = cure(size, multiple, dtype, most)
        if to is not None:
            assert not is_odd(to, dtype)
            assert 0 <= to - size <= most * size


def test_unknown_dtypes_ask_for_nothing() -> None:
    assert needed_multiple("complex64") == 1
    assert not is_odd(7, "complex64")


def test_round_up() -> None:
    assert [round_up(n, 8) for n in (1, 8, 9)] == [8, 8, 16]
