"""How the time of one call divides; the parts sum to it whatever the rates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.peel import Peeled, padded_frac, peel
from flopwise.diagnosis.ledger.scale import Scale
from flopwise.flops.call import Call, Operand
from flopwise.flops.table import RULES
from flopwise.trace.table import Operands

#: A device on which a 1000-cube product (2 GFLOP) needs 2 us in bf16, 20 in TF32, 200 in FP32, 1 in FP8.
SCALE = Scale(
    1e15, "", {"bf16": 1e15, "tf32": 1e14, "fp32": 1e13, "fp8": 2e15}, bandwidth_bytes_per_s=1e12
)
CUBE = [[1000, 1000], [1000, 1000]]


def operands(dims: list[Any], dtype: str = "c10::BFloat16") -> Operands:
    types = [dtype] * len(dims)
    return Operands(json.dumps(dims).encode(), json.dumps(types).encode())


def divided(
    name: str = "aten::mm",
    dims: list[Any] = CUBE,
    dtype: str = "c10::BFloat16",
    kernels: list[str] | None = None,
    us: float = 300.0,
    scale: Scale = SCALE,
    least_us: float = 1.0,
    part: float = 1.0,
    padding: float = 0.0,
) -> Peeled:
    found = peel(
        name, operands(dims, dtype), kernels or ["gemm"], us * 1e3, scale, least_us * 1e3, part, padding
    )  # fmt: skip
    assert sum(found.lines.values()) == pytest.approx(us * 1e3)
    return found


def us(found: Peeled) -> dict[str, float]:
    return {line: round(ns / 1e3, 6) for line, ns in found.lines.items() if round(ns, 3)}


class TestProducts:
    def test_in_the_reference_dtype(self) -> None:
        found = divided()
        # 6 MB take 6 us at 1 TB/s, the FLOPs 2 us
        assert us(found) == {"ideal": 2, "gemm_bytes": 4, "gemm_excess": 294}
        assert found.flops == 2e9
        assert found.covered

    def test_fp32_and_tf32_by_the_kernels_name(self) -> None:
        slow = divided(dtype="float", kernels=["ampere_sgemm_128x64_nn"])
        assert us(slow) == {"ideal": 2, "precision": 198, "gemm_excess": 100}
        fast = divided(dtype="float", kernels=["sm80_xmma_gemm_f32f32_tf32f32_f32"])
        assert us(fast) == {"ideal": 2, "precision": 18, "gemm_excess": 280}

    def test_fp8_is_faster_than_the_reference(self) -> None:
        found = divided("aten::_scaled_mm", dtype="c10::Float8_e4m3fn", us=10)
        assert found.lines["ideal"] == 2_000
        assert found.lines["precision"] == -1_000

    def test_what_the_device_was_measured_to_reach(self) -> None:
        scale = Scale(1e15, "", {"bf16": 1e15}, {"bf16": 0.8})
        assert us(divided(scale=scale)) == {"ideal": 2, "hardware": 0.5, "gemm_excess": 297.5}

    def test_ceiling_and_clock_where_both_are_known(self) -> None:
        scale = Scale(1e15, "", {"bf16": 1e15}, {"bf16": 0.7}, eta={"bf16": 0.8}, phi=0.5)
        assert us(divided(scale=scale)) == {
            "ideal": 2, "ceiling": 0.5, "clock": 2.5, "gemm_excess": 295,
        }  # fmt: skip
        fp8 = divided("aten::_scaled_mm", dtype="c10::Float8_e4m3fn", scale=scale)
        assert "clock" not in fp8.lines  # its FLOPs a clock were not measured
        assert fp8.lines["hardware"] == 0

    def test_a_boosted_clock_is_negative(self) -> None:
        scale = Scale(1e15, "", {"bf16": 1e15}, eta={"bf16": 0.8}, phi=1.25)
        assert us(divided(scale=scale)) == {
            "ideal": 2, "ceiling": 0.5, "clock": -0.5, "gemm_excess": 298,
        }  # fmt: skip

    def test_complex_products_are_four_real_ones(self) -> None:
        found = divided(dtype="c10::complex<float>", kernels=["cgemm"], us=1000)
        assert found.flops == 8e9
        assert us(found)["precision"] == 792

    def test_faster_than_possible_is_shown_as_it_is(self) -> None:
        assert divided(us=1).lines["gemm_excess"] == -5_000

    def test_a_step_that_cuts_a_call_has_its_part(self) -> None:
        found = divided(us=30, part=0.25)
        assert us(found) == {"ideal": 0.5, "gemm_bytes": 1, "gemm_excess": 28.5}
        assert found.flops == 0.5e9

    def test_integers_have_no_flops(self) -> None:
        found = divided(dtype="long int", us=30)
        assert us(found) == {"memory_bound": 24, "memory_excess": 6}
        assert found.flops == 0

    def test_causal_attention_needs_half_and_counts_whole(self) -> None:
        q = [1, 1, 1000, 100]
        plain = operands([q, q, q, [], [], []])
        causal = plain._replace(concrete=b'["", "", "", "0.0", "True", "False"]')
        name = "aten::_scaled_dot_product_flash_attention"
        found = peel(name, causal, ["flash"], 1e5, SCALE, 1e3)
        assert found.flops == 4 * 1000 * 1000 * 100
        assert found.lines["ideal"] == pytest.approx(1e-6 * 4 * (1000 * 1001 / 2) * 100)

    def test_without_a_peak_nothing_is_split(self) -> None:
        found = divided(scale=Scale(float("inf"), "none"))
        assert us(found) == {"gemm_unsplit": 300}
        assert found.flops == 2e9


class TestPadding:
    def test_of_a_product(self) -> None:
        found = divided(padding=0.25)
        assert us(found) == {"padding": 75, "ideal": 1.5, "gemm_bytes": 3, "gemm_excess": 220.5}
        assert found.flops == 2e9  # as the step's MFU counts it

    def test_of_attention_all_pairs_with_a_padded_token(self) -> None:
        q = [1, 1, 1000, 100]
        found = divided("aten::_scaled_dot_product_flash_attention", [q, q, q], padding=0.25)
        assert us(found)["padding"] == pytest.approx(300 * (1 - 0.75**2))

    def test_of_packed_attention_its_share(self) -> None:
        rule = RULES["flash_attn::_flash_attn_varlen_forward"]
        ends = Operand((3,), "int32", (0, 2, 4))
        assert padded_frac(rule, Call("packed", {"cu_seqlens_q": ends}), 0.25) == 0.25
        assert padded_frac(rule, Call("dense", {}), 0.25) == 0.4375

    def test_of_elementwise_work(self) -> None:
        found = divided("aten::relu", [[1000, 1000]], "float", us=10, padding=0.25)
        assert us(found) == {"padding": 2.5, "memory_bound": 6, "memory_excess": 1.5}

    def test_where_nothing_is_split(self) -> None:
        unknown = Scale(float("inf"), "none")
        assert us(divided(padding=0.25, scale=unknown)) == {"padding": 75, "gemm_unsplit": 225}
        assert us(divided("aten::relu", us=4, padding=0.25, scale=unknown)) == {
            "padding": 1, "memory_unsplit": 3,
        }  # fmt: skip

    def test_a_wider_dtype_keeps_its_padding_in_16_bit(self) -> None:
        slow = divided(dtype="float", kernels=["sgemm"], us=300, padding=0.5)
        # 150 us on real tokens become a hundredth or 1 us / 0.68, or half of 6 us for 6 MB
        assert slow.in_16_bit_ns == pytest.approx(150e3 + 3e3)


class TestOthers:
    def test_the_time_of_the_bytes_and_the_rest(self) -> None:
        found = divided("aten::relu", [[1000, 1000]], "float", us=10)
        assert us(found) == {"memory_bound": 8, "memory_excess": 2}  # read and written: 8 MB
        assert (found.flops, found.covered) == (0, True)

    def test_no_more_than_the_time(self) -> None:
        assert us(divided("aten::relu", [[1000, 1000]], "float", us=5)) == {"memory_bound": 5}

    def test_no_less_than_the_smallest_kernel(self) -> None:
        found = divided("aten::relu", [[4]], "float", us=5, least_us=1.5)
        assert us(found) == {"memory_bound": 1.5, "memory_excess": 3.5}

    @pytest.mark.parametrize("scale", [SCALE, Scale(1e15, "")])
    def test_without_shapes_or_bandwidth_nothing_is_split(self, scale: Scale) -> None:
        dims: list[Any] = [] if scale.bandwidth_bytes_per_s else [[4]]
        found = peel("aten::relu", operands(dims), ["k"], 5e3, scale, 0)
        assert found.lines == {"memory_unsplit": 5e3}
        assert found.covered

    def test_a_kernel_that_inductor_wrote(self) -> None:
        assert divided("triton_poi_fused_add_0", [[4]], "float", us=5).covered

    @pytest.mark.parametrize(
        "name", ["my::op", "triton_tem_fused_mm_0", "unknown", "CompiledFunction"]
    )
    def test_an_operator_without_a_rule(self, name: str) -> None:
        found = divided(name, us=5)
        assert us(found) == {"unattributed": 5}
        assert not found.covered
        assert name in (found.note or "")

    @pytest.mark.parametrize(
        "dims", [[], [[1000, 1000]], [[], []], [[2**47, 2**47], [2**47, 2**47]]]
    )
    def test_a_product_whose_operands_are_not_there_or_absurd(self, dims: list[Any]) -> None:
        found = divided(dims=dims, us=5)
        assert us(found) == {"unattributed": 5}
        assert not found.covered

    def test_without_its_rule_exactly_its_time_is_unattributed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "unattributed" not in divided().lines
        monkeypatch.delitem(RULES, "aten::mm")
        assert us(divided()) == {"unattributed": 300}


rates = st.floats(1e9, 1e18)


@given(
    time_ns=st.floats(0, 1e12),
    reference=rates,
    peaks=st.dictionaries(st.sampled_from(["bf16", "fp32", "tf32", "fp8"]), rates),
    reached=st.dictionaries(st.sampled_from(["bf16", "fp32"]), st.floats(0.01, 1.5)),
    bandwidth=st.none() | st.floats(1e6, 1e16),
    sizes=st.tuples(*[st.integers(0, 5000)] * 3),
    name=st.sampled_from(["aten::mm", "aten::relu", "aten::sum", "my::op", "triton_poi_0"]),
    dtype=st.sampled_from(["float", "c10::BFloat16", "c10::Float8_e4m3fn", "long int"]),
    part=st.floats(0, 1),
    phi=st.none() | st.floats(0.1, 2),
    padding=st.floats(0, 1),
)
def test_the_lines_sum_to_the_time_for_any_rates(
    time_ns: float, reference: float, peaks: dict[str, float], reached: dict[str, float],
    bandwidth: float | None, sizes: tuple[int, int, int], name: str, dtype: str, part: float,
    phi: float | None, padding: float,
) -> None:  # fmt: skip
    m, k, n = sizes
    scale = Scale(reference, "", peaks, reached, bandwidth, {"bf16": 0.85}, phi)
    given = operands([[m, k], [k, n]], dtype)
    found = peel(name, given, ["gemm"], time_ns, scale, 1e3, part, padding)
    largest = max(abs(ns) for ns in found.lines.values())
    assert sum(found.lines.values()) == pytest.approx(time_ns, abs=1e-9 * largest + 1e-6)
