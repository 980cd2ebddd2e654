"""The dtype that an op really computes in, by the names of the table of accelerators: bf16, tf32, fp8, ..."""

from __future__ import annotations

from dataclasses import dataclass

_PEAKS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "int8",
    "complex128": "fp64",
    "complex64": "fp32",
    "complex32": "fp16",
}

# One complex multiply-add is four real ones.
COMPLEX_FACTOR = 4


@dataclass(frozen=True)
class Precision:
    """What the device does with 32-bit floats, as the settings stood when the op ran."""

    matmul_tf32: bool = False
    conv_tf32: bool = False
    rnn_tf32: bool = False
    attention_tf32: bool = (
        False  # the efficient kernel: TF32 tensor cores in three passes from compute 8.0 on
    )

    def uses_tf32(self, family: str) -> bool:
        """Returns whether 32-bit work of this family of ops runs on TF32 units."""
        return {
            "matmul": self.matmul_tf32,
            "convolution": self.conv_tf32,
            "recurrent": self.rnn_tf32,
            "attention": self.attention_tf32,
        }.get(family, False)


def executed(dtype: str, family: str, precision: Precision) -> str | None:
    """Returns the executed dtype for torch's dtype name, None for integers, whose operations are not FLOPs.

    Args:
        dtype: of the left operand, without "torch.": "bfloat16".
        family: of the op's rule: "matmul", "convolution", "recurrent", "attention", "linalg", "fft".
        precision: the TF32 settings; all off on a CPU.
    Source: CUDA semantics notes, "TensorFloat-32 (TF32) on Ampere (and later) devices"; efficient attention:
    pytorch/pytorch aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h
    (OpMultiplyAddFastF32 for float on compute capability 8.0 and later).
    """
    if dtype.startswith("float8"):
        return "fp8"
    if dtype.startswith("float4"):
        return "fp4"
    name = _PEAKS.get(dtype)
    return "tf32" if name == "fp32" and precision.uses_tf32(family) else name


def real_operations(dtype: str, family: str) -> int:
    """Returns how many real operations stand for one of this dtype in the formulas of a family.

    A complex multiply-add is four real ones; the formulas of Fourier transforms count real operations already.
    """
    return COMPLEX_FACTOR if dtype.startswith("complex") and family != "fft" else 1
