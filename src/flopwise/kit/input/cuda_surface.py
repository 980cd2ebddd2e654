"""The few things of torch.cuda that the link to a device needs, in one place, so that their order can be tested."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class CudaSurface:
    """Streams, events and memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter_thread(self) -> None:
        """Makes the device this thread's current one, so that nothing of it lands on another."""
        torch.cuda.set_device(self.device)

    def new_stream(self) -> Any:
        """Returns a stream for copies. Its priority is the default: copies use the copy engines, not the SMs."""
        return torch.cuda.Stream(self.device)

    def stream_apart(self) -> Any:
        """Returns a stream of a pool of its own: torch maps a priority that the device lacks to the nearest it has."""
        return torch.cuda.Stream(self.device, priority=-3)

    def current_stream(self) -> Any:
        """Returns the stream on which this thread launches on the device."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context in which kernels and copies go to the stream, and memory comes from its pool."""
        return torch.cuda.stream(stream)

    def event(self, timing: bool = False) -> Any:
        """Returns an event; waiting for it on the host sleeps rather than spins."""
        return torch.cuda.Event(enable_timing=timing, blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether the copy engine may read the tensor in place."""
        return tensor.is_pinned()

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the tensor's memory from being reused before the stream is past this point, once it is freed."""
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def share_count(self, tensor: torch.Tensor) -> int:
        """Returns how many tensors and storages refer to the tensor's memory."""
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

    def pinned_words(self, count: int) -> torch.Tensor:
        """Returns page-locked room for so many int64."""
        return torch.empty(count, dtype=torch.int64, pin_memory=True, device="cpu")
