"""Which kernels communicate, by their names."""

from __future__ import annotations

import pytest

from flopwise.trace.families import communicates


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "void deep_ep::internode::dispatch<false>()",
        "one_shot_all_reduce_kernel",
        "void vllm::cross_device_reduce_1stage<__half, 8>()",
        "nvshmem_barrier_all_kernel",
    ],
)
def test_communicates(name: str) -> None:
    assert communicates(name)


@pytest.mark.parametrize(
    "name",
    ["sm90_xmma_gemm_bf16bf16", "void at::native::reduce_kernel<512, 1>", "symm_mem_memset", ""],
)
def test_computes(name: str) -> None:
    assert not communicates(name)
