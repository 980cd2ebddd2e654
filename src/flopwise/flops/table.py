"""The one table of formulas by op name, for the live run, for traces and for planning.

An op is covered if it has a rule here or stands on the list of `flops.zero`; anything else is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flopwise.flops import attention, convolution, linalg, matmul, recurrent
from flopwise.flops.call import Call, Cost
from flopwise.flops.zero import is_zero

Formula = Callable[[Call], Cost]


@dataclass(frozen=True)
class Rule:
    """A formula with what its caller must know."""

    formula: Formula
    family: str  # "matmul" | "convolution" | "recurrent" | "attention" | "linalg" | "fft"
    operand: tuple[str, ...]  # the tensor whose dtype the product runs in, by its possible names
    values: tuple[str, ...] = ()  # small integer tensors whose contents the formula reads
    wanted: bool = (
        False  # a backward op without a mask: autograd knows which gradients are asked for
    )


_CUMULATIVE = tuple(
    f"{name}_{side}"
    for name in ("cum_seq", "cu_seqlens", "cu_seq", "seqstart")
    for side in ("q", "k")
)


def _rules(
    formula: Formula,
    family: str,
    operand: str,
    names: str,
    values: tuple[str, ...] = (),
    wanted: bool = False,
) -> dict[str, Rule]:
    rule = Rule(formula, family, tuple(operand.split()), values, wanted)
    return {name if "::" in name else f"aten::{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_rules(matmul.mm, "matmul", "self", "mm _int_mm _scaled_mm _scaled_mm_v2"),
    **_rules(matmul.addmm, "matmul", "mat1", "addmm _addmm_activation"),
    **_rules(matmul.bmm, "matmul", "self", "bmm"),
    **_rules(matmul.baddbmm, "matmul", "batch1", "baddbmm addbmm"),
    **_rules(matmul.matvec, "matmul", "mat self", "mv addmv"),
    **_rules(matmul.dot, "matmul", "self", "dot vdot"),
    **_rules(matmul.matmul, "matmul", "self", "matmul linalg_matmul"),
    **_rules(matmul.linear, "matmul", "input self", "linear mkldnn_linear"),
    **_rules(matmul.linear_backward, "matmul", "self", "linear_backward mkldnn_linear_backward"),
    **_rules(matmul.linear, "matmul", "X", "mkldnn::_linear_pointwise"),
    **_rules(
        matmul.packed_linear,
        "matmul",
        "self input",
        "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _mixed_dtypes_linear "
        "_weight_int4pack_mm_with_scales_and_zeros",
    ),
    **_rules(
        matmul.linear_cross_entropy,
        "matmul",
        "input",
        "torch_nn::_linear_cross_entropy_batch_chunked "
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    ),
    **_rules(
        matmul.grouped_mm,
        "matmul",
        "self",
        "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2",
        values=("offs",),
    ),
    **_rules(matmul.affine_grid, "matmul", "theta", "affine_grid_generator"),
    **_rules(matmul.trilinear, "matmul", "i1", "_trilinear"),
    **_rules(matmul.euclidean_dist, "matmul", "x1", "_euclidean_dist"),
    **_rules(matmul.cdist, "matmul", "x1", "_cdist_forward"),
    **_rules(
        convolution.convolution,
        "convolution",
        "input self",
        "convolution _convolution convolution_overrideable conv1d conv2d conv3d _convolution_mode "
        "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution mkldnn_convolution "
        "cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu "
        "miopen_convolution miopen_convolution_transpose miopen_convolution_relu "
        "miopen_convolution_add_relu miopen_depthwise_convolution _mps_convolution "
        "_slow_conv2d_forward thnn_conv2d slow_conv3d slow_conv3d_forward slow_conv_dilated2d "
        "slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d _conv_depthwise2d "
        "conv_depthwise3d _nnpack_spatial_convolution torchvision::deform_conv2d",
    ),
    **_rules(
        convolution.convolution_backward,
        "convolution",
        "grad_output",
        "convolution_backward convolution_backward_overrideable _slow_conv2d_backward",
    ),
    **_rules(
        convolution.input_gradient,
        "convolution",
        "grad_output",
        "cudnn_convolution_backward_input miopen_convolution_backward_input "
        "mkldnn_convolution_backward_input",
    ),
    **_rules(
        convolution.weight_gradient,
        "convolution",
        "grad_output",
        "cudnn_convolution_backward_weight miopen_convolution_backward_weight "
        "mkldnn_convolution_backward_weights",
    ),
    **_rules(convolution.conv_tbc, "convolution", "self", "conv_tbc"),
    **_rules(
        convolution.conv_tbc_backward, "convolution", "self", "conv_tbc_backward", wanted=True
    ),
    **_rules(recurrent.fused, "recurrent", "input", "_cudnn_rnn miopen_rnn"),
    **_rules(
        recurrent.fused_backward, "recurrent", "input", "_cudnn_rnn_backward miopen_rnn_backward"
    ),
    **_rules(recurrent.layer, "recurrent", "input", "mkldnn_rnn_layer"),
    **_rules(
        recurrent.layer_backward, "recurrent", "input", "mkldnn_rnn_layer_backward", wanted=True
    ),
    **_rules(
        attention.sdpa,
        "attention",
        "query",
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention "
        "_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps",
    ),
    **_rules(
        attention.sdpa_backward,
        "attention",
        "query",
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_fused_attention_overrideable_backward",
        wanted=True,
    ),
    **_rules(
        attention.flash,
        "attention",
        "query q",
        "_flash_attention_forward _flash_attention_forward_no_dropout_inplace "
        "_efficient_attention_forward torch_attn::_varlen_attn torch_attn::_varlen_attn_out "
        "flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward "
        "flash_attn_3::_flash_attn_forward flash_attn_3::fwd "
        "xformers_flash::flash_fwd xformers_flash3::flash_fwd "
        "xformers::efficient_attention_forward_cutlass xformers::efficient_attention_forward_ck",
        values=_CUMULATIVE,
    ),
    **_rules(
        attention.flash_backward,
        "attention",
        "query q",
        "_flash_attention_backward _efficient_attention_backward torch_attn::_varlen_attn_backward "
        "flash_attn::_flash_attn_backward flash_attn::_flash_attn_varlen_backward "
        "flash_attn_3::_flash_attn_backward flash_attn_3::bwd "
        "xformers_flash::flash_bwd xformers_flash3::flash_bwd "
        "xformers::efficient_attention_backward_cutlass xformers::efficient_attention_backward_ck",
        values=_CUMULATIVE,
        wanted=True,
    ),
    **_rules(attention.cudnn, "attention", "query", "_cudnn_attention_forward", values=_CUMULATIVE),
    **_rules(
        attention.cudnn_backward,
        "attention",
        "query",
        "_cudnn_attention_backward",
        values=_CUMULATIVE,
        wanted=True,
    ),
    **_rules(
        attention.flex,
        "attention",
        "query",
        "higher_order::flex_attention",
        values=("kv_num_blocks", "full_kv_num_blocks"),
    ),
    **_rules(
        attention.flex_backward,
        "attention",
        "query",
        "higher_order::flex_attention_backward",
        values=("kv_num_blocks", "full_kv_num_blocks"),
    ),
    **_rules(attention.encoder_layer, "matmul", "src", "_transformer_encoder_layer_fwd"),
    **_rules(attention.multi_head, "matmul", "query", "_native_multi_head_attention"),
    **_rules(linalg.cholesky, "linalg", "self A", "linalg_cholesky_ex cholesky"),
    **_rules(linalg.inverse, "linalg", "self A", "linalg_inv_ex"),
    **_rules(linalg.inverse_factored, "linalg", "self", "cholesky_inverse"),
    **_rules(
        linalg.factor,
        "linalg",
        "self A",
        "linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet",
    ),
    **_rules(linalg.solve, "linalg", "self A", "_linalg_solve_ex"),
    **_rules(linalg.solve_factored, "linalg", "LU self", "linalg_lu_solve cholesky_solve"),
    **_rules(
        linalg.solve_triangular, "linalg", "A self", "linalg_solve_triangular triangular_solve"
    ),
    **_rules(linalg.qr, "linalg", "A self input", "linalg_qr geqrf linalg_householder_product"),
    **_rules(linalg.fft, "fft", "self", "_fft_c2c _fft_r2c _fft_c2r"),
}


def rule_of(name: str) -> Rule | None:
    """Returns the rule of an op by `namespace::op`; `addmm_`, in place, has that of `addmm`."""
    return RULES.get(name) or RULES.get(name.rstrip("_"))


def cost(call: Call) -> Cost | None:
    """Returns the FLOPs of a call, zeros for an op of the zero-FLOP list, None for an op that is not covered.

    Ops without a rule, shapes that do not fit the rule and missing contents all come back as None: unknown.
    """
    rule = rule_of(call.name)
    if rule is None:
        return Cost.exactly(0) if is_zero(call.name) else None
    try:
        return rule.formula(call)
    except (LookupError, ValueError, TypeError, ArithmeticError):
        return None
