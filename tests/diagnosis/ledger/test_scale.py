"""What a device could do, by its name."""

from __future__ import annotations

import pytest

from flopwise.diagnosis.ledger.scale import Scale, runs_on_tf32, scale_of


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
