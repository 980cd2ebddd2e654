"""Writes src/flopwise/flops/schemas.json: the argument names of every op with a formula, as torch declares them.

    python tools/op_schemas.py [--check]

A trace lists an op's operands by position; the formulas read them by name, and reading a trace needs no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.attention.varlen  # registers its ops
from torch._C import _jit_get_all_schemas

from flopwise.flops.table import RULES

TARGET = Path(__file__).resolve().parents[1] / "src" / "flopwise" / "flops" / "schemas.json"

_GRADIENT_SIZES = "padding stride dilation groups"
_CK = "max_seqlen_q dropout_p compute_logsumexp custom_mask_type scale seqlen_k window_size"
#: Ops of packages that are not installed here, and of torch before 1.11, as their own sources declare them.
#: Sources: Dao-AILab/flash-attention@0251105a flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
#: hopper/flash_api.cpp; facebookresearch/xformers@a64b1393 xformers/ops/fmha/flash.py and flash3.py, and before 3d947a67
#: xformers/csrc/attention/attention.cpp; pytorch/pytorch v1.10.0 aten/src/ATen/native/native_functions.yaml.
ELSEWHERE = {
    "flash_attn::_flash_attn_forward": (
        "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax"
    ),
    "flash_attn::_flash_attn_backward": (
        "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left window_size_right softcap "
        "alibi_slopes deterministic rng_state"
    ),
    "flash_attn::_flash_attn_varlen_forward": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes return_softmax block_table leftpad_k seqused_k zero_tensors num_splits"
    ),
    "flash_attn::_flash_attn_varlen_backward": (
        "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size_left window_size_right softcap alibi_slopes deterministic rng_state zero_tensors"
    ),
    "flash_attn_3::_flash_attn_forward": (
        "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k "
        "page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale causal "
        "window_size_left window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
        "sm_margin"
    ),
    "flash_attn_3::fwd": (
        "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k "
        "page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale "
        "is_causal window_size_left window_size_right attention_chunk softcap is_rotary_interleaved scheduler_metadata num_splits "
        "pack_gqa sm_margin"
    ),
    "flash_attn_3::_flash_attn_backward": (
        "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale "
        "is_causal window_size_left window_size_right softcap deterministic sm_margin"
    ),
    "flash_attn_3::bwd": (
        "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k softmax_scale "
        "is_causal window_size_left window_size_right softcap deterministic sm_margin"
    ),
    "xformers_flash::flash_fwd": (
        "query key value cu_seqlens_q cu_seqlens_k seqused_k max_seqlen_q max_seqlen_k p softmax_scale is_causal window_left "
        "window_right return_softmax block_tables"
    ),
    "xformers_flash::flash_bwd": (
        "grads_share_storage grad query key value out lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k p softmax_scale "
        "is_causal window_left window_right rng_state"
    ),
    "xformers_flash3::flash_fwd": (
        "query key value cu_seqlens_q cu_seqlens_k seqused_k leftpad_k max_seqlen_q max_seqlen_k p softmax_scale is_causal "
        "descale_q descale_k descale_v block_table use_kvsplit window_left window_right"
    ),
    "xformers_flash3::flash_bwd": (
        "grads_share_storage dout query key value out softmax_lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "softmax_scale is_causal window_left window_right"
    ),
    "xformers::efficient_attention_forward_cutlass": (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type compute_log_sumexp "
        "scale seqlen_k window_size"
    ),
    "xformers::efficient_attention_backward_cutlass": (
        "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k logsumexp dropout_p philox_seed "
        "philox_offset custom_mask_type bias_requires_grad scale num_splits_key window_size"
    ),
    "xformers::efficient_attention_forward_ck": f"query key value attn_bias seqstart_q seqstart_k {_CK}",
    "xformers::efficient_attention_backward_ck": (
        "grad_out query key value attn_bias seqstart_q seqstart_k max_seqlen_q max_seqlen_k seqlen_k logsumexp output dropout_p "
        "rng_seed rng_offset custom_mask_type scale window_size"
    ),
    **{
        f"aten::{library}_convolution_backward_{what}": (
            f"{'self_size' if what == 'input' else 'weight_size'} grad_output "
            f"{'weight' if what == 'input' else 'self'} {_GRADIENT_SIZES}"
        )
        for library, sides in (
            ("cudnn", ("input", "weight")),
            ("miopen", ("input", "weight")),
            ("mkldnn", ("input", "weights")),
        )
        for what in sides
    },
}


def schemas() -> dict[str, list[str]]:
    """Returns the argument names of each op with a rule; of several overloads those of the first declared."""
    found: dict[str, list[str]] = {}
    for schema in _jit_get_all_schemas():
        if schema.name in RULES and (schema.name not in found or not schema.overload_name):
            found[schema.name] = [argument.name for argument in schema.arguments]
    for name, arguments in ELSEWHERE.items():
        found[name] = arguments.split()  # whatever stands in for the package here
    return dict(sorted(found.items()))


def main() -> int:
    """Writes the file, or says whether it is what this torch declares."""
    text = json.dumps(schemas(), indent=0) + "\n"
    if "--check" in sys.argv:
        same = TARGET.read_text("utf-8") == text
        print("up to date" if same else f"differs from torch {torch.__version__}")
        return 0 if same else 1
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
