"""What a device could do, by its name."""

from __future__ import annotations

import dataclasses

import pytest

from flopwise.diagnosis.ledger.scale import Scale, runs_on_tf32, scale_of
from flopwise.hardware.accelerators import parse_peak
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling

#: An H200 under its power limit: a burst at 0.8 of the peak, sustained less at a lower clock, but more a clock.
CEILINGS = CeilingsRecord(
    schema="", flopwise="", created="2026-11-30T10:00:00Z", device_type="cuda", device_name="NVIDIA H200", torch="2.11",
    cuda=None, driver=None, threads=0, cores=0, wall_s=30.0,
    gemm=[
        GemmCeiling("bf16", 791.6e12, "8192x8192x8192 nt", 671e12, 1440.0),
        GemmCeiling("fp32", 53.6e12, "4096x4096x4096 nn"),
    ],
    copy_bytes_per_s=None, copy_size_bytes=None, dispatch_s=None, launch_s=None, link=None, sm_max_mhz=1980.0,
)  # fmt: skip


def test_a_known_device() -> None:
    scale, reason = scale_of("NVIDIA H200", None)
    assert scale is not None
    assert scale.reference_flops_per_s == 989.5e12
    assert scale.rate("fp32") == 67e12
    assert scale.rate("fp8") == 1979e12
    assert scale.bandwidth_bytes_per_s == 4.8e12
    assert scale.reached("bf16") == scale.reached("fp16") == 794.5 / 989.5
    assert scale.reached("fp8") == 1453.4 / 1979
    assert scale.reached("fp32") == 1.0  # nobody measured
    assert (scale.phi, scale.eta) == (None, {})
    assert scale.notes == (
        "ceilings: bf16 794.5, fp8 1453.4 TFLOP/s, the best matrix products by stas00/ml-engineering@744d01e "
        "compute/accelerator/README.md, MAMF",
    )
    assert "h200-sxm" in reason


@pytest.mark.parametrize(
    ("name", "memory", "said"),
    [
        (None, None, "does not name"),
        ("", None, "does not name"),
        ("NVIDIA X100", None, "NVIDIA X100"),
        ("NVIDIA H200", 80 * 10**9, "another variant"),
        ("NVIDIA H200 MIG 1g.18gb", None, "MIG"),
    ],
)
def test_no_scale_without_a_row_that_fits(name: str | None, memory: int | None, said: str) -> None:
    scale, reason = scale_of(name, memory)
    assert scale is None
    assert said in reason


def test_a_dtype_without_a_figure_has_that_of_the_next_wider_one() -> None:
    scale = Scale(100.0, "", {"bf16": 100.0, "fp32": 10.0})
    assert scale.rate("fp8") == scale.rate("fp16") == 100.0
    assert scale.rate("tf32") == 10.0
    assert scale.rate("fp64") == 100.0  # the reference: at least no slower than it is


@pytest.mark.parametrize(
    ("kernel", "tf32"),
    [
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16", True),
        ("ampere_sgemm_128x64_nn", False),
        ("cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4", True),
        ("sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_cublas", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", False),
    ],
)
def test_tf32_by_the_kernels_name(kernel: str, tf32: bool) -> None:
    assert runs_on_tf32([kernel]) is tf32
    assert runs_on_tf32(["other", kernel]) is tf32


class TestMeasuredHere:
    def test_of_the_peak_where_the_clock_of_the_steps_is_not_known(self) -> None:
        scale, _ = scale_of("NVIDIA H200", None, ceilings=CEILINGS)
        assert scale is not None
        assert scale.limits("bf16") == (pytest.approx(0.8), None)
        assert scale.limits("fp16") == scale.limits("bf16")
        assert scale.limits("fp32") == (pytest.approx(0.8), None)
        assert scale.limits("fp8") == (pytest.approx(1453.4 / 1979), None)  # not measured here
        assert [note.partition(", the best")[0] for note in scale.notes] == [
            "ceilings: measured on this device on 2026-11-30",
            "ceilings: fp8 1453.4 TFLOP/s",
        ]

    def test_a_clock_and_by_the_clock(self) -> None:
        scale, _ = scale_of("NVIDIA H200", None, ceilings=CEILINGS, sm_mhz=1464.0)
        assert scale is not None
        eta, phi = scale.limits("bf16")
        # sustained: 671e12 FLOPs in 1440e6 clocks; the sheet: 989.5e12 in 1830e6. A burst at 1980 MHz at most did fewer a clock
        assert eta == pytest.approx(671 / 1440 / (989.5 / 1830))
        assert phi == pytest.approx(0.8)
        # both at the same clock: the product is what the device does at that clock
        assert 989.5e12 * eta * phi == pytest.approx(671e12 / 1440 * 1464)
        assert scale.limits("fp8")[1] is None  # one line where a dtype was not measured
        eta, phi = scale.limits("fp32")  # only a burst: at the highest clock at most
        assert eta == pytest.approx(53.6 / 1980 / (67 / 1830))

    def test_products_of_zeros_tell_best_what_a_clock_does(self) -> None:
        zeros = [
            dataclasses.replace(gemm, flops_per_clock=466_000.0) if gemm.dtype == "bf16" else gemm
            for gemm in CEILINGS.gemm
        ]
        ceilings = dataclasses.replace(CEILINGS, gemm=zeros)
        scale, _ = scale_of("NVIDIA H200", None, ceilings=ceilings, sm_mhz=1464.0)
        assert scale is not None
        assert scale.limits("bf16")[0] == pytest.approx(466_000 * 1830e6 / 989.5e12)
        assert scale.limits("fp32")[0] == pytest.approx(53.6 / 1980 / (67 / 1830))  # as before

    @pytest.mark.parametrize(
        ("zeros", "burst", "taken"),
        [
            (450_000.0, 791.6e12, 450_000),  # the reading was 3.5 % too low
            (279_000.0, 791.6e12, 671e12 / 1440e6),  # at a clock that is locked at 1200 MHz
            (466_000.0, 940e12, 940e12 / 1980e6),  # zeros were disturbed: no burst does more
            (-466_000.0, 791.6e12, 671e12 / 1440e6),
            (0.0, 791.6e12, 671e12 / 1440e6),
        ],
    )
    def test_zeros_that_fall_behind_did_not_run_at_the_highest_clock(
        self, zeros: float, burst: float, taken: float
    ) -> None:
        gemm = GemmCeiling("bf16", burst, "", 671e12, 1440.0, flops_per_clock=zeros)
        ceilings = dataclasses.replace(CEILINGS, gemm=[gemm])
        scale, _ = scale_of("NVIDIA H200", None, ceilings=ceilings, sm_mhz=1464.0)
        assert scale is not None
        assert scale.limits("bf16")[0] == pytest.approx(taken * 1830e6 / 989.5e12)

    def test_a_boosted_clock_is_above_the_sheets(self) -> None:
        scale, _ = scale_of("NVIDIA H200", None, ceilings=CEILINGS, sm_mhz=1980.0, boost_mhz=1.0)
        assert scale is not None
        assert scale.phi == pytest.approx(1980 / 1830)  # the table's own clock first

    def test_the_clock_alone_splits_nothing(self) -> None:
        scale, _ = scale_of("NVIDIA H200", None, sm_mhz=1500.0)
        assert scale is not None
        assert scale.limits("bf16") == (pytest.approx(794.5 / 989.5), None)

    def test_a_device_whose_row_has_no_clock(self) -> None:
        given = dataclasses.replace(CEILINGS, device_name="NVIDIA B200")
        scale, _ = scale_of("NVIDIA B200", None, ceilings=given, sm_mhz=1500.0)
        assert scale is not None
        assert scale.limits("bf16")[1] is None
        scale, _ = scale_of("NVIDIA B200", None, ceilings=given, sm_mhz=1500.0, boost_mhz=2000.0)
        assert scale is not None
        assert scale.limits("bf16")[1] == 0.75

    def test_another_devices_are_left_aside(self) -> None:
        other = dataclasses.replace(CEILINGS, device_name="NVIDIA H100 PCIe")
        scale, _ = scale_of("NVIDIA H200", None, ceilings=other, sm_mhz=1500.0)
        assert scale is not None
        assert scale.limits("bf16") == (pytest.approx(794.5 / 989.5), None)
        assert "those of another device, NVIDIA H100 PCIe" in scale.notes[0]


def test_nobody_measured_and_it_is_said() -> None:
    scale, _ = scale_of("Tesla T4", None)
    assert scale is not None
    assert scale.limits("fp16") == (1.0, None)
    assert scale.notes == (
        "what the device reaches of its peak was not measured: it is taken as all of it",
    )


class TestGivenPeak:
    def test_of_a_device_that_the_table_does_not_have(self) -> None:
        scale, _ = scale_of("NVIDIA X100", None, peak=parse_peak("500T"))
        assert scale is not None
        assert scale.reference_flops_per_s == scale.rate("bf16") == scale.rate("fp32") == 500e12
        assert scale.bandwidth_bytes_per_s is None
        assert scale.source == "given: --peak 500T"
        assert "all dtypes without a peak of their own" in scale.notes[0]
        assert "bandwidth is not known" in scale.notes[1]

    def test_of_no_name_at_all(self) -> None:
        scale, _ = scale_of(None, None, peak=parse_peak("bf16=500T"))
        assert scale is not None
        assert scale.reference_flops_per_s == 500e12

    def test_it_replaces_that_of_a_known_device_and_leaves_its_other_dtypes(self) -> None:
        scale, _ = scale_of("NVIDIA H200", None, peak=parse_peak("800T"))
        assert scale is not None
        assert scale.reference_flops_per_s == scale.rate("fp16") == 800e12
        assert scale.rate("fp32") == 67e12
        assert scale.reached("bf16") == pytest.approx(794.5 / 800)
        assert len(scale.notes) == 1
