"""What NCCL says of its calls in NVTX ranges, and which kernel did which call."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.trace.chrome import Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.nsys import notes_of

PID, TID = 4711, 4712
THREAD, PROCESS = (1 << 48) + (PID << 24) + TID, (1 << 48) + (PID << 24)


REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture
def nccl(export: Any) -> Any:
    export.nccl()
    return export


def collectives(trace: Trace) -> list[Any]:
    events = trace.events.where(trace.events.of(Kind.KERNEL))
    return [events.collectives[i] if i >= 0 else None for i in events.collective.tolist()]


def test_a_kernel_gets_what_nccl_said_of_its_call(nccl: Any) -> None:
    e = nccl
    e.nccl_call("ncclAllReduce", 100, 200, 4096)
    e.call("cudaLaunchKernelExC_v11060", 150, 160, 1)
    e.kernel(REDUCE, 1000, 1100, 1)
    e.nccl_call("ncclAllGather", 300, 310, 512)  # in a group: launched when it ends
    e.range("ncclGroupEnd", 320, 400, domain=3)
    e.call("cudaLaunchKernelExC_v11060", 350, 360, 2)
    e.kernel(GATHER, 2000, 2100, 2)
    e.nccl_call("ncclSend", 500, 510, 64, peer=5)
    e.call("cudaLaunchKernelExC_v11060", 505, 506, 3)
    e.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 3000, 3100, 3)
    trace = e.read()
    reduce, gather, send = collectives(trace)
    assert (reduce.name, reduce.elements_in, reduce.elements_out, reduce.dtype) == ("allreduce", 2048, 2048, "BFloat16")  # fmt: skip
    assert (reduce.group, reduce.group_size) == ("0xabc", 8)
    assert (gather.name, gather.elements_in, gather.elements_out, gather.dtype) == ("all_gather", 512, 4096, "Byte")  # fmt: skip
    assert (send.name, send.peer, send.elements_in) == ("send", 5, 64)
    assert not any("NCCL" in note for note in notes_of(trace))


def test_a_group_of_equal_calls_in_one_kernel_is_their_sum(nccl: Any) -> None:
    e = nccl
    e.range("ncclGroupStart", 90, 95, domain=3)
    for i in range(3):
        e.range("ncclGroupStart", 100 + 20 * i, 101 + 20 * i, domain=3)
        e.nccl_call("ncclAllReduce", 102 + 20 * i, 105 + 20 * i, 1000)
        e.range("ncclGroupEnd", 110 + 20 * i, 111 + 20 * i, domain=3)  # within the other
    e.range("ncclGroupEnd", 200, 300, domain=3)
    e.call("cudaLaunchKernelExC_v11060", 250, 260, 1)
    e.kernel(REDUCE, 1000, 1100, 1)
    assert [one.elements_in for one in collectives(e.read())] == [1500]


def test_unlike_calls_in_one_kernel_are_left_open(nccl: Any) -> None:
    e = nccl
    e.nccl_call("ncclAllReduce", 100, 105, 1000)
    e.nccl_call("ncclAllGather", 110, 115, 1000)
    e.range("ncclGroupEnd", 200, 300, domain=3)
    e.call("cudaLaunchKernelExC_v11060", 250, 260, 1)
    e.kernel(REDUCE, 1000, 1100, 1)
    trace = e.read()
    assert collectives(trace) == [None]
    assert "1 of 1 NCCL kernels could not be matched with one call of NCCL" in notes_of(trace)


def test_calls_without_a_payload_have_no_size(nccl: Any) -> None:
    nccl.range("ncclAllReduce", 100, 200, domain=3, data=b"\xff" * 7)
    nccl.call("cudaLaunchKernelExC_v11060", 150, 160, 1)
    nccl.kernel(REDUCE, 1000, 1100, 1)
    trace = nccl.read()
    (found,) = collectives(trace)
    assert (found.name, found.elements_in, found.group) == ("allreduce", -1, "")
    assert any("no payload that can be read" in note for note in notes_of(trace))
