"""Kernels that read page-locked memory where it lies, against a copy and a kernel; and whether files can go straight."""

from __future__ import annotations

import argparse
import glob
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch


class _Mapped:
    """Page-locked host memory as a CUDA array: under unified addressing its pointer is the device's, too."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": {torch.float32: "<f4", torch.uint8: "|u1"}[host.dtype],
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def mapped_view(host: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the device whose memory is the host's."""
    return torch.as_tensor(_Mapped(host), device="cuda")


def device_s(work: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of some work on the device, seconds; on a CPU the time it takes."""
    times = []
    for _ in range(repeats + 2):
        if torch.cuda.is_available():
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            work()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended) / 1e3)
        else:
            now = time.perf_counter()
            work()
            times.append(time.perf_counter() - now)
    return statistics.median(times[2:])


def reads(nbytes: int, repeats: int) -> dict[str, float]:
    """Returns what it takes to bring bytes over and normalise them: by copy and kernel, and by a kernel that reads over the link."""
    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    cuda = torch.cuda.is_available()
    host = host.pin_memory() if cuda else host
    there = torch.empty_like(host, device="cuda" if cuda else "cpu")
    out = torch.empty(nbytes, dtype=torch.float16, device=there.device)
    view = mapped_view(host) if cuda else host

    def copy() -> None:
        there.copy_(host, non_blocking=True)

    def copy_then_kernel() -> None:
        copy()
        torch.mul(there, 1 / 255, out=out)

    def kernel_over_link() -> None:
        torch.mul(view, 1 / 255, out=out)

    arms = {
        "copy": copy,
        "copy, then kernel": copy_then_kernel,
        "kernel over the link": kernel_over_link,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(3):  # interleaved
        for name, arm in arms.items():
            times[name].append(device_s(arm, repeats))
    kernel_over_link()
    reached = out.clone()
    copy_then_kernel()
    if not torch.equal(reached, out):
        raise RuntimeError("the kernel that reads over the link computed something else")
    return {name: statistics.median(values) for name, values in times.items()}


def beside_compute(nbytes: int, size: int, repeats: int) -> dict[str, float]:
    """Returns how long a matrix product takes alone, beside a copy, and beside a kernel that reads over the link."""
    host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    there, view = torch.empty_like(host, device="cuda"), mapped_view(host)
    out = torch.empty(nbytes, dtype=torch.float16, device="cuda")
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def beside(other: Callable[[], Any] | None) -> Callable[[], None]:
        def work() -> None:
            if other is not None:
                with torch.cuda.stream(side):
                    other()
            for _ in range(8):
                torch.mm(a, a)

        return work

    arms = {
        "alone": beside(None),
        "beside a copy": beside(lambda: there.copy_(host, non_blocking=True)),
        "beside a kernel over the link": beside(lambda: torch.mul(view, 1 / 255, out=out)),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(5):
        for name, arm in arms.items():
            times[name].append(device_s(arm, repeats))
            torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def storage() -> dict[str, Any]:
    """Returns whether GPUDirect Storage is there: its driver, and what torch answers when it is asked."""
    found: dict[str, Any] = {"driver": bool(glob.glob("/dev/nvidia-fs*"))}
    if not torch.cuda.is_available():
        return {**found, "answer": "there is no CUDA device"}
    try:
        with tempfile.NamedTemporaryFile() as file:
            source = torch.arange(1 << 20, device="cuda", dtype=torch.uint8)
            handle = torch.cuda.gds.GdsFile(file.name, 66)  # O_RDWR | O_CREAT
            handle.save_storage(source.untyped_storage())
            target = torch.zeros_like(source)
            handle.load_storage(target.untyped_storage())
            torch.cuda.synchronize()
            found["answer"] = "works" if torch.equal(source, target) else "other bytes came back"
    except Exception as error:
        found["answer"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def mapped(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures."""
    mebibytes = [1] if options.tiny else [1, 25, 100]
    repeats = 2 if options.tiny else 20
    figures: dict[str, Any] = {"reads_s": {}, "beside_s": {}, "storage": storage()}
    for size in mebibytes:
        figures["reads_s"][f"{size} MiB"] = reads(size << 20, repeats)
        print(size, figures["reads_s"][f"{size} MiB"], flush=True)
    if torch.cuda.is_available() and not options.tiny:
        figures["beside_s"] = beside_compute(100 << 20, 8192, 5)
    last = figures["reads_s"][f"{mebibytes[-1]} MiB"]
    figures["summary"] = {
        "kernel_over_link_to_copy": last["kernel over the link"] / last["copy, then kernel"],
        "beside_s": figures["beside_s"],
        "storage": figures["storage"],
    }
    return figures
