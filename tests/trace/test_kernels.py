"""Roles and dtypes by the names of kernels: names as profilers recorded them, shortened where they end."""

from __future__ import annotations

import pytest

from flopwise.trace.kernels import Role, dtype_of, is_generated, is_operator, role_of

#: Names from traces, by what launched them: A100, V100, H100 and H200, torch 1.10 to 2.11.
PRODUCTS = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "bf16",
    "nvjet_tst_128x160_64x5_2x4_v_bz_NTT": "bf16",
    "nvjet_hsh_256x128_64x4_2x1_v_bz_TNN": "fp16",
    "nvjet_qqtst_192x192_128x4_1x2_h_bz_coopB_TNN": "fp8",
    "nvjet_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT": "fp8",
    "nvjet_rqsss_144x128_128x6_1x2_h_bz_coopA_algo2_TNN": "fp8",
    "nvjet_sm90_ssss_64x64": None,  # letters that nobody has seen with a job of a known dtype
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas": "fp32",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas": "tf32",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_execute_kernel__5x_cublas": "bf16",
    "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas": "fp16",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(cutlass_80_simt_sgemm_128x256_8x4_nt_align1::Params)": "fp32",
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x4_nt_align1>(cutlass_80_tensorop_s1688gemm_64x64_32x4_nt_align1::Params)": "tf32",
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn_align1>(cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn_align1::Params)": "bf16",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align2>(x)": "bf16",
    "ampere_sgemm_128x128_tn": "fp32",
    "volta_sgemm_32x32_sliced1x4_tn": "fp32",
    "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_relu_f2f_stages_64x6_tn": "fp16",
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn": "fp16",
    "volta_h884gemm_64x64_ldg8_nn": "fp16",
    "volta_dgemm_64x64_nn": "fp64",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>": None,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false, float, __nv_bfloat16>(x)": None,
    "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKParams<float>, float const*)": None,
    "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long, float*, cublasLtEpilogue_t)": None,
    "Cijk_Ailk_Bjlk_SB_MT128x128x16_SE_1LDSB0": None,
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_execute": "bf16",
    "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc": "tf32",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, false, true>(int, int, int, float const*)": "fp32",
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": "fp32",
    "volta_scudnn_128x64_relu_interior_nn_v1": "fp32",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x64_64x4_nhwc_align8>(x)": "bf16",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)0>(x)": None,
    "void nhwcAddPaddingKernel<__nv_bfloat16, __nv_bfloat16, float, true, (cudnnKernelDataType_t)0>(int, int, int)": "bf16",
    "cask_cudnn::computeOffsetsKernel(cask_cudnn::ComputeOffsetsParams)": None,
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::BFloat16, int>(x)": "bf16",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0": None,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*, void*)": None,
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>(x)": "bf16",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<cutlass::bfloat16_t>>>(x)": "bf16",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t, cutlass::arch::Sm80>::Params)": "fp16",
    "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)": None,
    "triton_tem_fused_addmm_relu_3": None,
    "triton_tem_fused_flex_attention_0": None,
}
ZERO = [
    "triton_poi_fused_gelu_view_9",
    "triton_per_fused__to_copy_add_native_layer_norm_backward_view_9",
    "triton_red_fused__log_softmax_prepare_softmax_online_18",
    "triton_per_fused__flash_attn_backward__unsafe_view_mul_sigmoid_sigmoid_backward_sum_view_10",  # what is fused, not what it does
    "triton_poi_fused_addmm_gelu_0",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, x)",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, x> > >(x)",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, x>(float*)",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*, int)",
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(x)>(x)",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)",
    "void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*, float*, float*, long*)",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1, true>(cudnnTensorStruct)",
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800, false, long>(int*)",
    "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::AgentScanPolicy<128, 15, int>>(x)",
    "void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__parallel_for::ParallelForAgent<x>>(x)",
    "Memcpy DtoD (Device -> Device)",
    "Memset (Unknown)",
    "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float, float, float, 5ul>(x)",
    "void fbgemm_gpu::permute_indices_weights_kernel<false, int, decltype(nullptr)>(int, int, int const*)",  # fbgemm multiplies nothing
]
OPTIMIZER = [
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>>(x)",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float, float>(int)",
    "void kOptimizer32bit2State<float, 0>(float*, float*)",
    "void cuda_adamw_kernel<float>(float*)",
]
UNKNOWN = [
    "XXT_kernel", "ba_plus_cAA_kernel", "", "my_kernel",
    "void at::to_dense_representation_kernel<float>(long, long, long const*)",
    "void (anonymous namespace)::mine<float>(elementwise_params)",  # its arguments say nothing of it
    "triton_matmul_kernel", "triton_rope",  # a user's own
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "dtype"), PRODUCTS.items())
def test_products_and_their_dtypes(kernel: str, dtype: str | None) -> None:
    assert role_of(kernel) is Role.PRODUCT
    assert dtype_of(kernel) == dtype


@pytest.mark.parametrize(
    ("kernel", "role"),
    [
        *((kernel, Role.ZERO) for kernel in ZERO),
        *((kernel, Role.OPTIMIZER) for kernel in OPTIMIZER),
        *((kernel, Role.UNKNOWN) for kernel in UNKNOWN),
    ],
)
def test_what_does_not_multiply(kernel: str, role: Role) -> None:
    assert role_of(kernel) is role


@pytest.mark.parametrize(
    ("name", "single"),
    [
        ("aten::mm", True),
        ("flash_attn_3::fwd", True),
        ("triton_poi_fused_add_0", True),
        ("triton_tem_fused_mm_0", False),  # its FLOPs are not in its shapes: its kernel tells that it multiplies
        ("CompiledFunction", False),
        ("CompiledFunctionBackward", False),
        ("Torch-Compiled Region: 0/0", False),
        ("## Call CompiledFxGraph fabc ##", False),
        ("AddmmBackward0", False),
        ("autograd::engine::evaluate_function: AddmmBackward0", False),
        ("torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>", False),
        ("torch::jit::fused", False),
        ("XXT_kernel_0", False),
        ("", False),
    ],
)  # fmt: skip
def test_one_operator_or_a_region_of_many(name: str, single: bool) -> None:
    assert is_operator(name) is single


def test_generated_kernels() -> None:
    assert is_generated("triton_red_fused_sum_3")
    assert not is_generated("triton_tem_fused_mm_0")
    assert not is_generated("my_triton_poi_kernel")
