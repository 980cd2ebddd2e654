"""Products without an operator share what was counted and no operator has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.counted import Counted
from flopwise.diagnosis.ledger.peel import Peeled
from flopwise.diagnosis.ledger.pool import Pool, share
from flopwise.diagnosis.ledger.scale import Scale

#: 1 GFLOP takes 1 us in bf16, 1.25 as it is reached; 10 us in TF32, 100 in FP32.
SCALE = Scale(1e15, "", {"bf16": 1e15, "tf32": 1e14, "fp32": 1e13}, {"bf16": 0.8})
G = 1e9


def pool(us: float, dtype: str | None = None, **mapped: float) -> Pool:
    found = Pool()
    if us:
        found.add([3], us * 1e3, dtype)
    for name, flops in mapped.items():
        found.map(Peeled({}, flops=flops, dtype=name, flops_causal=flops))
    return found


def divided(of: Pool, counted: Counted | None, scale: Scale = SCALE, **more: Any) -> Any:
    found = share(of, counted, scale, more.get("padding", 0.0), more.get("seen", False))
    assert sum(found.peeled.lines.values()) == pytest.approx(of.time_ns)
    return found


def us(found: Any) -> dict[str, float]:
    return {line: round(ns / 1e3, 6) for line, ns in found.peeled.lines.items() if round(ns, 3)}


class TestShare:
    def test_all_that_was_counted(self) -> None:
        found = divided(pool(30), Counted({"bf16": 12 * G}, {"bf16": 10 * G}))
        assert us(found) == {"ideal": 10, "hardware": 2.5, "gemm_excess": 17.5}
        assert (found.peeled.flops, found.peeled.covered) == (12 * G, True)  # attention in full
        assert any("how many bytes they move is not known" in text for text in found.remarks)

    def test_less_what_operators_have(self) -> None:
        found = divided(pool(30, bf16=6 * G), Counted({"bf16": 12 * G}, {"bf16": 10 * G}))
        assert us(found) == {"ideal": 4, "hardware": 1, "gemm_excess": 25}
        assert found.peeled.flops == 6 * G

    def test_dtypes_apart(self) -> None:
        counted = {"bf16": 10 * G, "tf32": 1 * G}
        found = divided(pool(30), Counted(counted, counted))
        assert us(found) == {"ideal": 11, "precision": 9, "hardware": 2.5, "gemm_excess": 7.5}

    def test_ceiling_and_clock(self) -> None:
        scale = Scale(1e15, "", {"bf16": 1e15}, eta={"bf16": 0.8}, phi=0.5)
        found = divided(pool(30), Counted({"bf16": 10 * G}, {"bf16": 10 * G}), scale)
        assert us(found) == {"ideal": 10, "ceiling": 2.5, "clock": 12.5, "gemm_excess": 5}

    def test_faster_than_possible_is_shown_as_it_is(self) -> None:
        found = divided(pool(5), Counted({"bf16": 10 * G}, {"bf16": 10 * G}))
        assert us(found)["gemm_excess"] == -7.5

    def test_on_a_device_whose_rates_are_not_known(self) -> None:
        found = divided(pool(5), Counted({"bf16": G}, {"bf16": G}), Scale(float("inf"), "none"))
        assert us(found) == {"gemm_unsplit": 5}
        assert (found.peeled.flops, found.peeled.covered) == (G, True)

    def test_padding_of_what_is_no_recomputation(self) -> None:
        counted = Counted({"bf16": 8 * G}, {"bf16": 8 * G}, {"bf16": 12 * G})
        found = divided(pool(45), counted, padding=0.25)
        assert us(found) == {
            "recompute": 5, "padding": 10, "ideal": 6, "hardware": 1.5, "gemm_excess": 22.5,
        }  # fmt: skip


class TestUnknown:
    def test_without_a_count(self) -> None:
        found = divided(pool(30), None)
        assert us(found) == {"unattributed": 30}
        assert not found.peeled.covered
        assert "FLOPs are not known" in found.peeled.note

    def test_nothing_left_of_the_count(self) -> None:
        found = divided(pool(30, bf16=10 * G), Counted({"bf16": 10 * G}, {"bf16": 10 * G}))
        assert us(found) == {"unattributed": 30}
        assert found.remarks == ()

    def test_operators_that_exceed_the_count_are_said(self) -> None:
        counted = Counted({"bf16": 10 * G}, {"bf16": 10 * G})
        assert divided(pool(30, bf16=10.19 * G), counted).remarks == ()
        found = divided(pool(30, bf16=10.3 * G), counted)
        assert "1.03 times the FLOPs counted in the live run" in found.remarks[0]
        assert us(found) == {"unattributed": 30}

    def test_operators_that_fall_short_where_nothing_else_multiplies(self) -> None:
        found = divided(pool(0, bf16=9 * G), Counted({"bf16": 10 * G}, {"bf16": 10 * G}))
        assert "90.0% of the FLOPs counted" in found.remarks[0]
        assert divided(pool(0), None).peeled.note is None


class TestRecompute:
    COUNTED = Counted({"bf16": 8 * G}, {"bf16": 8 * G}, {"bf16": 12 * G}, "as a test says")

    def test_at_what_the_device_reaches(self) -> None:
        found = divided(pool(45), self.COUNTED)
        assert us(found) == {"recompute": 5, "ideal": 8, "hardware": 2, "gemm_excess": 30}
        assert found.peeled.flops == 8 * G
        assert any("recompute" in text and "as a test says" in text for text in found.remarks)

    def test_not_where_the_trace_shows_what_ran_again(self) -> None:
        assert "recompute" not in divided(pool(45), self.COUNTED, seen=True).peeled.lines


class TestIn16Bit:
    def test_of_kernels_whose_names_tell_a_wider_dtype(self) -> None:
        counted = {"fp32": G}
        # 1 GFLOP in 16 bit takes 1 / 0.68 us at least; a tenth of 200 us is more, of 2 us less
        assert divided(pool(200, "tf32"), Counted({"tf32": G}, {"tf32": G})).in_16_bit == {
            "tf32": 0.1
        }
        slow = divided(pool(20, "fp32"), Counted(counted, counted))
        assert slow.in_16_bit == {"fp32": pytest.approx(1 / 0.68 / 20)}
        assert divided(pool(20), Counted(counted, counted)).in_16_bit == {}
        assert divided(pool(20, "bf16"), Counted({"bf16": G}, {"bf16": G})).in_16_bit == {}


flops = st.dictionaries(st.sampled_from(["bf16", "tf32", "fp8"]), st.floats(0, 1e16), max_size=3)


@given(
    time_ns=st.floats(0, 1e12), needed=flops, executed=flops, mapped=flops, padding=st.floats(0, 1), seen=st.booleans(),
    phi=st.none() | st.floats(0.1, 2), reference=st.floats(1e9, 1e18),
)  # fmt: skip
def test_the_lines_sum_to_the_time(
    time_ns: float, needed: Any, executed: Any, mapped: Any, padding: float, seen: bool, phi: float | None, reference: float
) -> None:  # fmt: skip
    scale = Scale(reference, "", {"bf16": 1e15}, {"bf16": 0.8}, None, {"bf16": 0.9}, phi)
    of = Pool()
    of.add([1], time_ns, "bf16")
    for dtype, n in mapped.items():
        of.map(Peeled({}, flops=n, dtype=dtype, flops_causal=n))
    found = share(of, Counted(needed, needed, executed), scale, padding, seen)
    largest = max(abs(ns) for ns in found.peeled.lines.values())
    assert sum(found.peeled.lines.values()) == pytest.approx(time_ns, abs=1e-9 * largest + 1e-6)
