"""Utilisation: the numbers, and the refusals in place of impossible ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.flops.mfu import Demand, Reference, utilisation

# NVIDIA H200 SXM, dense: 1,979 and 3,958 TFLOP/s with sparsity, halved.
H200 = Reference(
    989.5e12,
    "bf16",
    "data sheet",
    "datasheet",
    {"bf16": 989.5e12, "fp16": 989.5e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp8": 1979e12},
    ceiling_flops_per_s=671e12,
)


def demand(
    flops: float,
    dtype: str = "bf16",
    causal: float | None = None,
    executed: float | None = None,
    **more: object,
) -> Demand:
    return Demand(
        {dtype: int(flops)},
        {dtype: int(flops if causal is None else causal)},
        {dtype: int(flops if executed is None else executed)},
        **{"coverage_frac": 1.0, "coverage_basis": "op time", **more},  # type: ignore[arg-type]
    )


class TestNumbers:
    def test_all_of_them(self) -> None:
        mfu = utilisation(demand(420e12, causal=400e12, executed=560e12), 1.0, H200)
        assert mfu.value == pytest.approx(420 / 989.5)  # 42.4 %, not the 21 % of a sparse peak
        assert mfu.value_causal == pytest.approx(400 / 989.5)
        assert mfu.dtype_weighted == pytest.approx(420 / 989.5)
        assert mfu.hfu == pytest.approx(560 / 989.5)
        assert mfu.achieved_flops_per_s == pytest.approx(420e12)
        assert mfu.of_measured_ceiling == pytest.approx(420 / 671)
        assert mfu.model_flops_per_step == 420 * 10**12
        assert mfu.model_flops_per_step_causal == 400 * 10**12
        assert mfu.hardware_flops_per_step == 560 * 10**12
        assert (mfu.peak_dtype, mfu.peak_source, mfu.peak_kind) == (
            "bf16",
            "data sheet",
            "datasheet",
        )
        assert mfu.reason is None

    def test_devices_share_the_step(self) -> None:
        mfu = utilisation(demand(8 * 420e12), 1.0, H200, devices=8)
        assert mfu.value == pytest.approx(420 / 989.5)
        assert mfu.achieved_flops_per_s == pytest.approx(420e12)

    def test_mixed_dtypes_are_weighted_by_what_each_can_do(self) -> None:
        flops = {"bf16": 300 * 10**12, "fp32": 30 * 10**12}
        mfu = utilisation(Demand(flops, flops, flops), 1.0, H200)
        assert mfu.value == pytest.approx(330 / 989.5)
        assert mfu.dtype_weighted == pytest.approx(300 / 989.5 + 30 / 66.9)
        assert mfu.flops_by_dtype == flops

    def test_fp8_may_pass_one_against_the_16_bit_peak(self) -> None:
        mfu = utilisation(demand(1200e12, "fp8"), 1.0, H200)
        assert mfu.value == pytest.approx(1200 / 989.5)
        assert mfu.dtype_weighted == pytest.approx(1200 / 1979)

    def test_a_missing_peak_of_one_dtype_leaves_the_weighted_figure_out(self) -> None:
        mfu = utilisation(demand(100e12, "fp64"), 1.0, H200)
        assert mfu.value == pytest.approx(100 / 989.5)
        assert mfu.dtype_weighted is None
        assert mfu.reason == "not weighted by dtype: no peak known for fp64"


class TestRefusals:
    def test_four_times_the_peak_names_the_largest_term(self) -> None:
        mfu = utilisation(
            demand(
                4 * 989.5e12,
                by_op={"aten::mm": 9 * 10**14, "aten::convolution_backward": 3 * 10**15},
            ),
            1.0,
            H200,
        )
        assert mfu.value is mfu.value_causal is mfu.dtype_weighted is mfu.hfu is None
        assert mfu.achieved_flops_per_s is None
        assert mfu.reason == (
            "MFU 4 is impossible: the count or the time is wrong, or the peak belongs to another device or dtype; "
            "largest term aten::convolution_backward (76.9 % of 3.90 PFLOP). Not reported"
        )

    def test_two_percent_over_within_the_timers_noise_is_refused_with_the_noise_named(self) -> None:
        mfu = utilisation(demand(1.02 * 989.5e12), 1.0, H200, ci95=(0.97, 1.03))
        assert mfu.value is None
        assert mfu.reason is not None
        assert mfu.reason.startswith("MFU 1.02 is impossible")
        assert "The timer's noise (± 3 %) could explain it: time more steps" in mfu.reason

    def test_two_percent_over_beyond_the_noise_does_not_blame_it(self) -> None:
        mfu = utilisation(demand(1.02 * 989.5e12), 1.0, H200, ci95=(0.999, 1.001))
        assert mfu.value is None
        assert mfu.reason is not None
        assert "noise" not in mfu.reason

    @pytest.mark.parametrize(
        ("name", "peak", "shown"),
        [
            ("H100 80GB HBM3", 989.5e12, True),
            ("A100-SXM4-80GB", 312e12, False),
            ("RTX 4090", 165.2e12, False),
        ],
    )
    def test_a_rate_above_the_peak_of_the_device_is_no_percentage(
        self, name: str, peak: float, shown: bool
    ) -> None:
        mfu = utilisation(
            demand(324e12), 1.0, Reference(peak, "bf16", name, "datasheet", {"bf16": peak})
        )
        if shown:
            assert mfu.value == pytest.approx(0.327, abs=0.001)
        else:
            assert mfu.value is None
            assert mfu.reason is not None
            assert "another device" in mfu.reason

    def test_an_unknown_device_gives_the_rate_and_no_percentage(self) -> None:
        mfu = utilisation(
            demand(324e12), 1.0, Reference(None, reason='no bf16 peak known for "Foo9000"')
        )
        assert mfu.value is None
        assert mfu.achieved_flops_per_s == pytest.approx(324e12)
        assert mfu.reason == 'no bf16 peak known for "Foo9000"; MFU is left out'

    def test_fp32_above_its_own_peak_is_impossible_though_below_the_reference(self) -> None:
        mfu = utilisation(demand(80e12, "fp32"), 1.0, H200)
        assert mfu.value is None
        assert mfu.reason is not None
        assert mfu.reason.startswith("MFU 1.2 is impossible")

    def test_recomputation_that_exceeds_the_peak_shows_that_the_count_is_wrong(self) -> None:
        mfu = utilisation(demand(900e12, executed=1200e12), 1.0, H200)
        assert mfu.value is None

    def test_long_sequences_may_exceed_one_by_convention_only(self) -> None:
        mfu = utilisation(demand(1100e12, causal=700e12, executed=1150e12), 1.0, H200)
        assert mfu.value is mfu.dtype_weighted is mfu.hfu is None
        assert mfu.value_causal == pytest.approx(700 / 989.5)
        assert mfu.reason is not None
        assert mfu.reason.startswith(
            "with attention counted full MFU would be 1.11, which is impossible"
        )

    @pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
    def test_no_time_no_number(self, step_s: float) -> None:
        mfu = utilisation(demand(1e12), step_s, H200)
        assert mfu.value is mfu.achieved_flops_per_s is None
        assert mfu.reason is not None
        assert "step time" in mfu.reason

    @pytest.mark.parametrize("flops", [-1, 0])
    def test_no_flops_no_number(self, flops: int) -> None:
        mfu = utilisation(demand(flops), 1.0, H200)
        assert mfu.value is mfu.model_flops_per_step is None
        assert mfu.reason is not None

    def test_no_devices_no_number(self) -> None:
        assert utilisation(demand(1e12), 1.0, H200, devices=0).value is None

    @pytest.mark.parametrize("peak", [0.0, -1.0, math.nan, math.inf])
    def test_no_peak_no_number(self, peak: float) -> None:
        assert utilisation(demand(1e12), 1.0, Reference(peak)).value is None


class TestCoverage:
    def test_below_98_percent_it_says_what_is_missing(self) -> None:
        mfu = utilisation(
            demand(420e12, coverage_frac=0.63, uncovered=("mylib::a (30 %)", "mylib::b (7 %)")),
            1.0,
            H200,
        )
        assert mfu.value == pytest.approx(420 / 989.5)
        assert mfu.reason == (
            "lower bound: coverage 63 % of op time; without a rule: mylib::a (30 %), mylib::b (7 %)"
        )

    def test_enough_is_not_worth_a_word(self) -> None:
        mfu = utilisation(demand(420e12, coverage_frac=0.985, uncovered=("mylib::a",)), 1.0, H200)
        assert mfu.reason is None

    def test_shares_of_bytes_never_excuse_an_unknown_op(self) -> None:
        mfu = utilisation(
            demand(
                420e12, coverage_frac=0.995, coverage_basis="bytes touched", uncovered=("mylib::a",)
            ),
            1.0,
            H200,
        )
        assert mfu.reason is not None
        assert "mylib::a" in mfu.reason


DTYPES = ("fp32", "bf16", "fp8")
counts = st.dictionaries(st.sampled_from(DTYPES), st.integers(0, 10**18))
rates = st.floats(1e12, 1e16)


@settings(max_examples=400, deadline=None)
@given(
    needed=counts,
    masked=st.floats(0, 1),
    repeated=st.floats(1, 3),
    step_s=st.floats(1e-3, 1e3) | st.floats(allow_nan=True, allow_infinity=True),
    peak=st.floats(1e12, 1e16) | st.none() | st.floats(allow_nan=True, allow_infinity=True),
    by_dtype=st.dictionaries(st.sampled_from(DTYPES), rates),
    devices=st.integers(-1, 64),
    ci95=st.none() | st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)),
)
def test_utilisation_above_what_is_possible_never_comes_out(
    needed: dict[str, int],
    masked: float,
    repeated: float,
    step_s: float,
    peak: float | None,
    by_dtype: dict[str, float],
    devices: int,
    ci95: tuple[float, float] | None,
) -> None:
    causal = {d: int(n * masked) for d, n in needed.items()}
    executed = {d: int(n * repeated) for d, n in needed.items()}
    mfu = utilisation(
        Demand(needed, causal, executed), step_s, Reference(peak, by_dtype=by_dtype), devices, ci95
    )
    ran = [d for d, n in executed.items() if n]
    limit = max([1.0, *(by_dtype[d] / peak for d in ran if d in by_dtype and peak)])
    for value in (mfu.value, mfu.value_causal, mfu.hfu):
        assert value is None or 0 <= value <= limit
    assert mfu.dtype_weighted is None or 0 <= mfu.dtype_weighted <= 1
    if mfu.value is None:
        assert mfu.reason
    else:
        assert mfu.value == sum(needed.values()) / (devices * step_s) / peak if peak else False
