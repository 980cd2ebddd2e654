"""The table: what is covered, what is zero, and that every op of torch's pointwise kind is on the list."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flopwise.flops.call import Call, Cost, Operand
from flopwise.flops.dtypes import Precision, executed, real_operations
from flopwise.flops.table import RULES, cost
from flopwise.flops.zero import is_view, is_zero


def test_no_op_has_a_formula_and_is_zero() -> None:
    assert [name for name in RULES if is_zero(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "aten::add_",
        "aten::native_layer_norm",
        "aten::_softmax_backward_data",
        "aten::embedding_dense_backward",
        "aten::_embedding_bag",
        "aten::view_copy",
        "aten::_to_copy",
        "aten::index_copy_",
        "aten::_foreach_addcdiv_",
        "aten::_foreach_copy_",
        "aten::mish_backward",
        "prims::mul",
        "prims::convert_element_type",
        "streams::record_event",
        "bitsandbytes::dequantize_4bit",
        "aten::_fused_adamw_",
        "aten::native_dropout",
        "c10d::allreduce_",
        "_c10d_functional::all_gather_into_tensor",
        "fsdp::all_gather_copy_in",
        "aten::_thnn_fused_lstm_cell",
    ],
)
def test_zero_flop_ops(name: str) -> None:
    assert is_zero(name)
    assert cost(Call(name)) == Cost.exactly(0)


@pytest.mark.parametrize(
    "name",
    [
        "mylib::fused_mlp",
        "triton::kernel",
        "aten::_linalg_svd",
        "aten::_sparse_addmm",
        "prims::svd",
        "prims::fft_c2c",
    ],
)
def test_anything_else_is_unknown(name: str) -> None:
    assert not is_zero(name)
    assert cost(Call(name, {"self": Operand((4, 4))})) is None


def test_primitives_of_torch_are_pointwise_or_named() -> None:
    import torch
    import torch._prims  # registers them
    from torch._inductor import (
        inductor_prims,  # registers more, which only inductor's own lowering calls
    )

    lowered = {op._schema.name for op in vars(inductor_prims).values() if hasattr(op, "_schema")}
    names = {n.split(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    ours = {n for n in names if n.startswith("prims::") and not is_zero(n)}
    tokens = {"prims::_make_token", "prims::_sink_tokens"}
    assert len(lowered) > 5
    assert ours - tokens - lowered <= {
        f"prims::{op}" for op in ("svd", "fft_c2c", "fft_c2r", "fft_r2c")
    }


def test_views_are_zero_and_run_no_kernel() -> None:
    assert all(
        is_view(f"aten::{op}") for op in ("view", "t", "transpose_", "detach", "empty_strided")
    )
    assert not any(is_view(f"aten::{op}") for op in ("clone", "copy_", "mm", "zeros"))


def test_ops_that_torch_calls_pointwise_or_reductions_are_on_the_list() -> None:
    import torch

    kinds = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
    missing = set()
    for name in {n.split(".")[0] for n in torch._C._dispatch_get_all_op_names()}:
        if not name.startswith("aten::"):
            continue
        packet = getattr(torch.ops.aten, name[6:], None)
        overloads = packet.overloads() if packet is not None else []
        if any(kinds & set(getattr(packet, o).tags) for o in overloads) and not is_zero(name):
            missing.add(name)
    assert missing == set()


def test_no_op_of_torchs_own_counter_is_missing() -> None:
    from torch._ops import HigherOrderOperator
    from torch.utils.flop_counter import flop_registry

    names = {
        f"higher_order::{op.name()}"
        if isinstance(op, HigherOrderOperator)
        else op._qualified_op_name
        for op in flop_registry
        if not hasattr(op, "run")  # Triton kernels that others registered
    }
    assert names - set(RULES) == set()


def test_names_of_rules_are_ops_that_exist() -> None:
    import torch
    import torch.nn.attention.varlen

    known = {n.split(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    gone = {n for n in RULES if n.split("::")[0] in ("aten", "torch_attn") and n not in known}
    # Spelled as in builds for other vendors or in older releases.
    old = {name for name in gone if "_convolution_backward_" in name}
    assert {name.split("_")[0] for name in old} == {"aten::cudnn", "aten::miopen", "aten::mkldnn"}
    assert gone - old <= {"aten::conv_tbc_backward"}


@pytest.mark.parametrize(
    ("dtype", "family", "expected"),
    [
        ("bfloat16", "matmul", "bf16"),
        ("float16", "convolution", "fp16"),
        ("float32", "matmul", "fp32"),
        ("float32", "convolution", "tf32"),
        ("float32", "linalg", "fp32"),
        ("complex64", "matmul", "fp32"),
        ("float64", "convolution", "fp64"),
        ("float8_e4m3fn", "matmul", "fp8"),
        ("float4_e2m1fn_x2", "matmul", "fp4"),
        ("int8", "matmul", "int8"),
        ("int64", "matmul", None),
    ],
)
def test_executed_dtype_under_torchs_defaults_on_a_gpu(
    dtype: str, family: str, expected: str | None
) -> None:
    assert executed(dtype, family, Precision(conv_tf32=True, rnn_tf32=True)) == expected


def test_complex_products_are_four_real_ones_and_transforms_are_counted_in_real_ones() -> None:
    assert real_operations("complex64", "matmul") == real_operations("complex128", "linalg") == 4
    assert real_operations("complex64", "fft") == real_operations("float32", "matmul") == 1


def test_matmul_tf32_is_a_setting_of_its_own() -> None:
    assert executed("float32", "matmul", Precision(matmul_tf32=True)) == "tf32"
    assert executed("float32", "convolution", Precision(matmul_tf32=True)) == "fp32"


def test_the_formulas_need_no_torch() -> None:
    code = "import sys, flopwise.flops.table, flopwise.flops.mfu; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
