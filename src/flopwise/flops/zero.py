"""Ops that do zero FLOPs by convention: they cost time and bytes, never model FLOPs.

An op without a formula is covered only if it stands here; anything else is unknown and said to be.
Source: PaLM, arXiv:2204.02311, appendix B, and torch.utils.flop_counter: products and convolutions only.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Views, bookkeeping and uninitialised memory: no kernel runs.
VIEWS = _words("""
    _assert_tensor_metadata _autocast_to_full_precision _autocast_to_reduced_precision _conj _dimI
    _dimV _efficientzerotensor _fused_sdp_choice _fw_primal _has_same_storage_numel _indices
    _make_dual _neg_view _nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen
    _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx _nested_get_values
    _nested_view_from_buffer _nested_view_from_jagged _nnz _reshape_alias _resize_output
    _sparse_broadcast_to _unpack_dual _unsafe_view _values _version adjoint alias as_strided
    broadcast_to ccol_indices chunk col_indices conj crow_indices dense_dim detach diagonal dsplit
    empty empty_like empty_permuted empty_strided expand expand_as hsplit imag indices
    is_coalesced is_pinned is_same_size is_set_to lift lift_fresh linalg_diagonal mH mT matrix_H
    moveaxis movedim narrow new_empty new_empty_strided numpy_T permute positive
    q_per_channel_axis q_scale q_zero_point qscheme real record_stream reshape_as resize resize_as
    resolve_conj resolve_neg row_indices select set set_data slice slice_inverse sparse_dim split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold
    unsafe_split unsafe_split_with_sizes unsqueeze values view view_as view_as_complex
    view_as_real vsplit
""")

# Pointwise work, forward and backward, comparisons and fills.
POINTWISE = _words("""
    __ilshift __irshift __ixor __lshift __rshift __xor _add_relu _conj_physical
    _nested_sum_backward _prelu_kernel _prelu_kernel_backward _sparse_sum_backward
    _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
    _thnn_fused_lstm_cell_backward_impl abs acos acosh add addcdiv addcmul addr allclose angle
    asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone complex
    conj_physical copysign cos cosh deg2rad digamma div elu elu_backward eq equal erf erfc erfinv
    exp exp2 expm1 fill float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu
    gelu_backward gt hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward hardswish
    hardswish_backward hardtanh hardtanh_backward heaviside hypot i0 igamma igammac isfinite isinf
    isnan isneginf isposinf lcm ldexp le leaky_relu leaky_relu_backward lerp lgamma log log10
    log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit logit_backward lt masked_fill max maximum min minimum
    mish mish_backward mul mvlgamma nan_to_num native_dropout_backward ne neg new_full new_ones new_zeros
    nextafter polar polygamma pow rad2deg reciprocal relu relu6 remainder round rrelu rsqrt rsub
    selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus
    softplus_backward softshrink softshrink_backward special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_entr special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
    special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 special_xlog1py special_zeta sqrt square sub tan tanh
    tanh_backward threshold threshold_backward true_divide trunc where xlogy zero
""")

# Reductions.
REDUCTIONS = _words("""
    all amax amin aminmax any argmax argmin count_nonzero linalg__powsum linalg_vector_norm
    logsumexp max mean min nansum norm prod std std_mean sum var var_mean
""")

# Norms, softmax, losses, distances computed element by element.
NORMS_LOSSES = _words("""
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    _cdist_backward _ctc_loss _ctc_loss_backward _cudnn_ctc_loss _fused_rms_norm
    _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _logcumsumexp _masked_softmax
    _masked_softmax_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _nested_tensor_softmax_with_shape _pdist_backward
    _pdist_forward _safe_softmax _softmax _softmax_backward_data _sparse_log_softmax
    _sparse_log_softmax_backward_data _sparse_softmax _sparse_softmax_backward_data
    _use_cudnn_ctc_loss _use_miopen_ctc_loss _weight_norm_interface
    _weight_norm_interface_backward batch_norm_backward batch_norm_backward_elemt
    batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    cudnn_batch_norm cudnn_batch_norm_backward dist embedding_renorm huber_loss
    huber_loss_backward log_softmax logcumsumexp miopen_batch_norm miopen_batch_norm_backward
    miopen_ctc_loss mse_loss mse_loss_backward multi_margin_loss multi_margin_loss_backward
    multilabel_margin_loss_backward multilabel_margin_loss_forward native_batch_norm
    native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward native_norm nll_loss2d_backward nll_loss2d_forward
    nll_loss_backward nll_loss_forward quantized_batch_norm renorm smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softmax
""")

# Pooling, resampling, padding, rearranging of pixels and of ragged rows.
POOL_RESAMPLE = _words("""
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _empty_affine_quantized _empty_per_channel_affine_quantized
    _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_channel_affine_backward
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _grid_sampler_2d_cpu_fallback
    _grid_sampler_2d_cpu_fallback_backward _jagged_to_padded_dense_forward _nested_from_padded
    _nested_from_padded_and_nested_example _nested_from_padded_tensor _pack_padded_sequence
    _padded_dense_to_jagged_forward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa
    _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
    _upsample_nearest_exact3d_backward adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
    adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool1d avg_pool2d
    avg_pool2d_backward avg_pool3d avg_pool3d_backward channel_shuffle native_channel_shuffle col2im constant_pad_nd
    cudnn_affine_grid_generator cudnn_affine_grid_generator_backward cudnn_grid_sampler
    cudnn_grid_sampler_backward fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask flip fractional_max_pool2d
    fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward glu
    glu_backward glu_backward_jvp glu_jvp grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
    grid_sampler_3d_backward im2col max_pool2d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    max_unpool2d max_unpool3d mkldnn_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d_backward
    mkldnn_max_pool2d mkldnn_max_pool2d_backward mkldnn_max_pool3d mkldnn_max_pool3d_backward
    pixel_shuffle pixel_unshuffle quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward roll
    rot90 to_padded_tensor unfold_backward upsample_bicubic2d upsample_bicubic2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward
    upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d
    upsample_trilinear3d_backward
""")

# Look-ups, gathers and scatters, sorting, scans, concatenation.
INDEX = _words("""
    _chunk_cat _cummax_helper _cummin_helper _embedding_bag _embedding_bag_backward
    _embedding_bag_dense_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward _histogramdd_bin_edges _histogramdd_from_bin_cts
    _histogramdd_from_bin_tensors _index_put_impl _masked_scale
    _nested_compute_contiguous_strides_offsets _nested_select_backward _segment_reduce_backward
    _spdiags _stack _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate as_strided_scatter bincount block_diag bucketize cat
    cummax cummin cumprod cumsum diag_embed diagonal_backward diagonal_scatter embedding
    embedding_dense_backward gather histc histogram index index_add index_copy index_fill
    index_put index_reduce index_select isin kthvalue masked_scatter masked_scatter_backward
    masked_select median mode nanmedian nonzero nonzero_static put repeat repeat_interleave
    scatter scatter_add scatter_reduce searchsorted segment_reduce select_backward select_scatter
    slice_backward slice_scatter sort stack take topk trace tril tril_indices triu triu_indices
    unique_consecutive unique_dim unique_dim_consecutive
""")

# Random numbers and dropout.
RANDOM = _words("""
    _cudnn_init_dropout_state _dirichlet_grad _fill_mem_eff_dropout_mask _fused_dropout
    _philox_key_fold_in _philox_key_split _philox_normal _philox_uniform _sample_dirichlet
    _standard_gamma _standard_gamma_grad bernoulli binomial cauchy exponential geometric
    log_normal multinomial native_dropout normal normal_functional poisson rand rand_like randint
    randint_like randn randn_like random randperm rrelu_with_noise rrelu_with_noise_backward
    rrelu_with_noise_functional uniform
""")

# Fused optimizers and gradient scaling (`_foreach_*` is on the list by its prefix).
OPTIMIZER = _words("""
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad _fused_adam
    _fused_adamw _fused_sgd
""")

# Copies, casts, constants, sparse and quantised layouts, checks.
LAYOUT = _words("""
    _aminmax _assert_async _assert_scalar _coalesce _coalesced _convert_indices_from_coo_to_csr
    _convert_indices_from_csr_to_coo _copy_from _copy_from_and_resize _cudnn_rnn_flatten_weight
    _functional_assert_async _functional_assert_scalar _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _fused_moving_avg_obs_fq_helper
    _fused_moving_avg_obs_fq_helper_functional _is_all_true _is_any_true _lazy_clone
    _linalg_check_errors _local_scalar_dense _make_dep_token _make_per_channel_quantized_tensor
    _make_per_tensor_quantized_tensor _mkldnn_reshape _mkldnn_transpose _nested_tensor_from_mask
    _nested_tensor_from_mask_left_aligned _nested_tensor_from_tensor_list _nested_tensor_size
    _nested_tensor_storage_offsets _nested_tensor_strides _new_zeros_with_same_feature_meta
    _pin_memory _print _reshape_copy _sparse_broadcast_to _sparse_compressed_tensor_with_dims
    _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _sparse_csr_prod
    _sparse_csr_sum _sparse_mask_projection _sparse_sum _to_copy _to_dense _to_sparse
    _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _transform_bias_rescale_qkv
    _validate_compressed_sparse_indices arange bartlett_window blackman_window coalesce contiguous
    copy copy_sparse_to_sparse dequantize empty_quantized eye fft_fftfreq fft_rfftfreq flatten
    full full_like hamming_window hann_window hash_tensor int_repr kaiser_window linalg_cross
    linspace logspace lu_unpack mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight ones ones_like
    pin_memory q_per_channel_scales q_per_channel_zero_points quantize_per_channel
    quantize_per_tensor quantize_per_tensor_dynamic range ravel reshape resize_as_sparse
    scalar_tensor sparse_compressed_tensor sparse_coo_tensor sparse_mask sparse_resize
    sparse_resize_and_clear sym_constrain_range sym_constrain_range_for_size to to_mkldnn zeros
    zeros_like
""")

# The primitives that torch's own decompositions run eagerly (forward-mode gradients); none multiplies matrices, but
# Fourier transforms and singular values are left out here.
PRIMS = _words("""
    abs acos acosh add amax amin as_strided as_strided_scatter asin asinh atan atan2 atanh bessel_i0
    bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and bitwise_not bitwise_or
    bitwise_xor broadcast_in_dim cat cbrt ceil clone collapse collapse_view conj conj_physical
    convert_element_type copy_strided copy_to cos cosh device_put digamma div empty empty_permuted
    empty_strided eq erf erf_inv erfc erfcx exp exp2 expm1 fill floor fmax fmin fmod frexp full
    full_like gcd ge gt hypot igamma igammac imag iota isfinite item le lgamma log log10 log1p log2
    lt maximum maximum_value minimum minimum_value mul ndtri ne neg nextafter normal pow prod real
    reciprocal remainder reshape resize rev round rsqrt scalar_tensor shift_left
    shift_right_arithmetic sign signbit sin sinh spherical_bessel_j0 split_dim sqrt squeeze sub sum
    tan tanh transpose trunc uniform var view_of view_of_dtype where xor_sum zeta
""")

# Collectives and their glue, streams, profiler marks, properties: no arithmetic of the model.
NAMESPACES = _words("""
    c10d _c10d_functional c10d_functional _c10d_functional_autograd device_mesh fsdp prim profiler
    streams
""")

OTHERS = _words("""
    torchvision::nms torchvision::roi_align torchvision::_roi_align_backward torchvision::roi_pool
    torchvision::_roi_pool_backward torchvision::ps_roi_align torchvision::_ps_roi_align_backward
    torchvision::ps_roi_pool torchvision::_ps_roi_pool_backward
    ao::offload ao::reload
    bitsandbytes::quantize_4bit bitsandbytes::dequantize_4bit bitsandbytes::quantize_blockwise
    bitsandbytes::dequantize_blockwise bitsandbytes::int8_vectorwise_quant
    bitsandbytes::int8_vectorwise_dequant bitsandbytes::int8_double_quant
    bitsandbytes::int8_mm_dequant bitsandbytes::optimizer_update_32bit
    bitsandbytes::optimizer_update_8bit_blockwise
""")

_ATEN = POINTWISE | REDUCTIONS | NORMS_LOSSES | POOL_RESAMPLE | INDEX | RANDOM | OPTIMIZER | LAYOUT


def is_view(name: str) -> bool:
    """Returns whether the op only makes a view, reads a property or reserves memory: no kernel runs."""
    space, _, op = name.partition("::")
    return space == "prim" or (space == "aten" and op.rstrip("_") in VIEWS)


def is_zero(name: str) -> bool:
    """Returns whether the op, `namespace::op` without its overload, does zero FLOPs by convention."""
    space, _, op = name.partition("::")
    if space == "prims":
        return op in PRIMS
    if space != "aten":
        return space in NAMESPACES or name in OTHERS
    op = op.rstrip("_")
    if op.startswith("_foreach_"):
        return True
    if op.endswith("_copy"):
        op = op if op in _ATEN else op.removesuffix("_copy")
    return op in _ATEN or op in VIEWS
