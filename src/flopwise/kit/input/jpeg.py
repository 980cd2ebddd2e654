"""JPEG files cross the link as they are and are decoded on the device (nvJPEG through torchvision)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from flopwise.errors import InputError
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.notices import say_once

_decoding: dict[torch.device, Any] = {}  # a stream for each device


def decode_jpegs(files: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Returns the images, uint8 (3, H, W) each, decoded on the device; on the host where the device cannot.

    nvJPEG and libjpeg round differently: images differ by a few of 255 levels, so a model is to be trained and judged
    with the same decoder.

    Args:
        files: the bytes of one JPEG file each, uint8, on the host.

    Raises:
        InputError: torchvision is not installed.
    """
    try:
        io: Any = importlib.import_module("torchvision.io")
    except ImportError as error:
        raise InputError(
            "decoding JPEG files needs torchvision, which is not installed: pip install torchvision"
        ) from error
    where = torch.device(device)
    if where.type == "cuda":
        try:
            return _on_device(io, files, CudaSurface(where))
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            say_once(f"nvJPEG did not decode a batch ({said}): decoded on the host instead")
    return [io.decode_jpeg(file, mode=io.ImageReadMode.RGB).to(where) for file in files]


def _on_device(io: Any, files: Sequence[torch.Tensor], cuda: CudaSurface) -> list[torch.Tensor]:
    """Returns the images decoded by nvJPEG, ready for the current stream.

    torchvision's decoder writes on a stream of its own and does not wait for what is queued on the current one, while
    its images are given memory that belongs to the current one: memory that was freed and is still being read there
    would be written too early. So images get their memory from a stream on which nothing else runs, and it is
    used again only after the current stream is past its last use of them. torch hands its 32 streams of a priority out
    again and again: this one is of a priority that hardly anybody asks for, and what somebody may have queued on it is
    waited for. The decoder waits for its own work before it returns, so otherwise there is nothing to wait for.
    Source: pytorch/vision, csrc/io/image/cuda/decode_jpegs_cuda.cpp, `decode_images`; c10/cuda/CUDAStream.h.
    """
    if cuda.device not in _decoding:
        _decoding[cuda.device] = cuda.stream_apart()
    apart, current = _decoding[cuda.device], cuda.current_stream()
    apart.synchronize()
    with cuda.on(apart):
        images = list(io.decode_jpeg(list(files), mode=io.ImageReadMode.RGB, device=cuda.device))
    current.wait_stream(apart)
    for image in images:
        cuda.record(image, current)
    return images


class JpegBatch:
    """Encoded images of a batch. Where it is moved it becomes the decoded images: a Prefetcher calls `to` on its stream.

    Args:
        files: the bytes of each file, uint8.
    """

    def __init__(self, files: Sequence[torch.Tensor]) -> None:
        self.lengths = [file.numel() for file in files]
        # One tensor, so that a worker hands over one piece of shared memory.
        self.data = torch.cat([file.reshape(-1) for file in files])

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> list[torch.Tensor]:
        """Returns the images decoded on the device; the decoder reads the files on the host."""
        return decode_jpegs(self.data.split(self.lengths), device)


def collate_jpegs(samples: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns [JpegBatch, labels, ...] of samples (bytes of a file, label, ...): only bytes leave the worker.

    Raises:
        InputError: the samples are something else, or a file is empty.
    """
    if not samples or any(not isinstance(s, (list, tuple)) or not s for s in samples):
        raise InputError("collate_jpegs: samples of (bytes of a file, label, ...) are meant")
    if len({len(s) for s in samples}) > 1:
        raise InputError(
            f"collate_jpegs: samples have {', '.join(str(len(s)) for s in samples)} parts: all are to have as many"
        )
    first, *rest = zip(*samples, strict=True)
    files = [_bytes_of(file, k) for k, file in enumerate(first)]
    return [JpegBatch(files), *(default_collate(list(column)) for column in rest)]


def _bytes_of(file: Any, index: int) -> torch.Tensor:
    """Returns a file's bytes as a tensor."""
    if isinstance(file, torch.Tensor) and file.dtype == torch.uint8 and file.numel():
        return file
    if isinstance(file, (bytes, bytearray, memoryview)) and len(file):
        return torch.frombuffer(bytearray(file), dtype=torch.uint8)
    said = "it is empty" if hasattr(file, "__len__") and not len(file) else type(file).__name__
    raise InputError(
        f"collate_jpegs: file {index} of the batch: {said}; its bytes are meant, or a uint8 tensor"
    )
