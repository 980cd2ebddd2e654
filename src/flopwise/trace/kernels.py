"""What a kernel does, as far as its name tells: for kernels whose operator is not in the trace.

A replayed CUDA graph, or a compiled region whose operators were not recorded, leaves names alone. A name says whether a kernel
multiplies (and often in which dtype), moves and transforms elements, or updates parameters; it never says how many FLOPs it has.
"""

from __future__ import annotations

import re
from enum import Enum


class Role(Enum):
    """What the name of a kernel tells."""

    PRODUCT = "product"  # matrix products, convolutions, attention, with their helper kernels
    ZERO = (
        "zero"  # no FLOPs by convention: elementwise, reductions, norms, copies, look-ups, sorting
    )
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"


#: What inductor generates, and its templates for products among that.
#: Source: pytorch/pytorch torch/_inductor/codegen/triton.py and select_algorithm.py (`triton_{category}_...`, `triton_tem_...`).
_GENERATED = re.compile(r"triton_(?:poi|red|per|for|spl|mix)_")
_TEMPLATE = re.compile(r"triton_(?:tem|mm|bmm|addmm|baddbmm|mixed_mm|convolution|flex)")

#: Sources: `multi_tensor_apply_kernel` is what torch._foreach_* and fused optimizers launch (pytorch/pytorch
#: aten/src/ATen/native/cuda/MultiTensorApply.cuh) and what NVIDIA/apex does (csrc/multi_tensor_apply.cuh); single fused kernels are
#: named after their optimizer (bitsandbytes-foundation/bitsandbytes csrc/kernels.cu, deepspeedai/DeepSpeed csrc/adam).
_OPTIMIZER = re.compile(
    r"multi_tensor_apply|kOptimizer\w*bit|k(?:Precondition)?Optimizer"
    r"|(?:fused|cuda|multi_tensor)_?(?:adamw?|sgd|lamb|lion|adagrad|novograd)",
    re.IGNORECASE,
)

#: Kernels of torch itself that multiply: depthwise convolutions and attention; everything else in `at::native` does not.
#: Source: pytorch/pytorch aten/src/ATen/native/cuda (DepthwiseConv2d.cu, DepthwiseConv3d.cu, int4mm.cu, ForeachReduceOp.cu, ...).
_TORCH = re.compile(r"(?:void )?at::(?:native|cuda)::")
_TORCH_PRODUCT = re.compile(
    r"conv_depthwise|DepthwiseConv|tinygemm|attention_kernel|fmha|flash", re.IGNORECASE
)

_PRODUCT = re.compile(
    "|".join(
        (
            # cuBLAS, cuBLASLt, CUTLASS, rocBLAS and hipBLASLt (Tensile's Cijk_), composable kernels
            r"(?<!fb)gemm|nvjet_|gemv|splitKreduce|cublas|cutlass|Cijk_|epilogue::impl::globalKernel",
            # cuDNN and MIOpen: convolutions with the layouts that they change, by engine
            r"xmma_|_scudnn_|winograd|implicit_convolve|convolve|fprop|wgrad|dgrad|cudnn_generated.*(?:conv|matmul)",
            r"nchwTo|nhwcTo|nhwcAddPadding|cudnn::cnn|cask_cudnn|miopen|naive_conv|conv(?:olution)?[23]?d?_?(?:fwd|bwd|forward|backward|depthwise|direct)",
            # attention: FlashAttention 1 to 3, cutlass and cuDNN, xformers, Triton's
            r"fmha|flash_(?:fwd|bwd|attn)|flash::|FlashAttn|sdpa|MemEffAttention|attention_kernel",
            r"cudnn::fusion::(?:compute_dot_do_o|convert_dq)|_attn_(?:fwd|bwd)",
        )
    ),
    re.IGNORECASE,
)

_ZERO = re.compile(
    "|".join(
        (
            r"^Mem(?:cpy|set)|elementwise|reduce_kernel|softmax|layer_?norm|rms_?norm|batch_?norm|group_?norm|bn_[fb]w|dropout",
            r"\bcub::|thrust::|rocprim|RadixSort|CatArray|index_(?:select|put|add)|embedding_(?:backward|bag)|nll_?loss|ClassNLL|cross_entropy",
            # look-ups in tables and their gradients: rows that are read and summed. Source: pytorch/FBGEMM fbgemm_gpu/codegen
            r"split_embedding|permute_(?:pooled|indices|2D|1D)|bounds_check_indices|recat_copy|linearize_index",
        )
    ),
    re.IGNORECASE,
)


def role_of(kernel: str) -> Role:
    """Returns what the name of a kernel says that it does."""
    if _GENERATED.match(kernel):
        return Role.ZERO
    if _TEMPLATE.match(kernel):
        return Role.PRODUCT
    own = _own(kernel)
    if _OPTIMIZER.search(own):
        return Role.OPTIMIZER
    if _TORCH.match(kernel):
        return Role.PRODUCT if _TORCH_PRODUCT.search(own) else Role.ZERO
    if _PRODUCT.search(kernel):
        return Role.PRODUCT
    return Role.ZERO if _ZERO.search(own) else Role.UNKNOWN


#: How the names of kernels spell the dtype that they multiply in, the first that fits. cuBLAS and cuDNN: `s` and `h` before the
#: instruction's shape are the accumulator; `s1688` without another dtype is the TF32 instruction of compute capability 8.0.
_DTYPES = tuple(
    (dtype, re.compile(pattern, re.IGNORECASE))
    for dtype, pattern in (
        ("fp8", r"e4m3|e5m2|fp8|float_e\dm\d|f8f8"),
        ("int8", r"imma|i8816|i16832|s8s8|_igemm"),
        ("bf16", r"bf16|bfloat16|[_b]bf?16gemm|bhgemm"),
        (
            "fp16",
            r"fp16|hgemm|half_t|__half|f16f16|_h884|_h1688|_h16816|s884gemm|_f16_s\d+gemm|hmma",
        ),
        ("tf32", r"tf32|s1688"),
        ("fp64", r"dgemm|f64f64|d884|_f64_"),
        ("fp32", r"sgemm|f32f32_f32f32|scudnn|ffma|_f32_simt|volta_s\w*gemm"),
    )
)
#: cuBLAS from 12.6 on: `nvjet_sm90_tst_...`, letters for A and B, for the computation, for C and D. NVIDIA documents none of it; bf16
#: jobs run `tst` and `tss`, fp16 jobs `hsh`, FP8 jobs `qqtst` (e4m3) and `qrtst` (e5m2 by e4m3).
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]+)_")
_NVJET_DTYPES = {"t": "bf16", "h": "fp16", "q": "fp8", "r": "fp8"}
#: Names whose dtype says nothing of the products: helpers, and cuDNN's attention, which calls bf16 `f16`, too.
_NO_DTYPE = re.compile(r"splitKreduce|sdpa|cudnn::fusion|globalKernel|nchwTo|nhwcTo", re.IGNORECASE)


def dtype_of(kernel: str) -> str | None:
    """Returns the dtype that a product's kernel multiplies in, by the names of the table of accelerators; None: not told."""
    found = _NVJET.search(kernel)
    if found is not None:
        return _NVJET_DTYPES.get(found[1][0])
    if _NO_DTYPE.search(kernel):
        return None
    return next((dtype for dtype, pattern in _DTYPES if pattern.search(kernel)), None)


def is_operator(name: str) -> bool:
    """Whether a recorded name is that of one operator, not of a region of many: a compiled graph, a node of autograd.

    Operators are named `namespace::op`; inductor records the kernels that it generates by their own names.
    """
    if name.startswith(("autograd::", "torch::autograd::", "torch::jit::")):
        return False
    return "::" in name or is_generated(name)


def is_generated(name: str) -> bool:
    """Whether inductor wrote a kernel of this name: elementwise work and reductions, no products."""
    return _GENERATED.match(name) is not None


def _own(kernel: str) -> str:
    """Returns a kernel's name without its arguments and those of its template, whose types may name anything."""
    return re.split(r"[<(]", kernel.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
