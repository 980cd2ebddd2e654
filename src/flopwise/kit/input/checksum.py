"""A checksum that host and device compute alike: the integer sum of a batch's bytes, eight to a word, modulo 2^64."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flopwise.kit.input.layout import dense_stride

_MODULUS = 1 << 64
#: Weighs one tensor against the next, so that exchanging two of them shows. Source: any odd number does; this is prime.
_WEIGHT = 1_000_003
#: Words of a page (4 KiB). Pages are weighed by 1, 3, 5, ..., so that a batch half of whose pages are another's shows
#: also where the plain sum of the halves happens to be the same.
_PAGE_WORDS = 512


def host_checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the checksum of these tensors as a signed 64-bit number; waits for the device if they lie on one."""
    total = 0
    for tensor in tensors:
        words, tail = _bytes(tensor)
        if words is not None:
            total = total * _WEIGHT + int(_weighed(words).item())
        if tail is not None:
            total += int(tail.sum(dtype=torch.int64).item())
    total %= _MODULUS
    return total - _MODULUS if total >= _MODULUS >> 1 else total


def device_checksum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the same as a tensor of one int64, computed on the device's current stream without waiting for it."""
    total: torch.Tensor | None = None  # as few kernels as may be: small batches have little else
    for tensor in tensors:
        words, tail = _bytes(tensor)
        if words is not None:
            weighed = _weighed(words)
            total = weighed if total is None else total * _WEIGHT + weighed
        if tail is not None:
            last = tail.sum(dtype=torch.int64)
            total = last if total is None else total + last
    return total if total is not None else torch.zeros((), dtype=torch.int64, device=device)


def _weighed(words: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the words, each page's weighed by its place."""
    pages = words.numel() // _PAGE_WORDS
    if not pages:
        return words.sum()
    sums = words[: pages * _PAGE_WORDS].view(pages, _PAGE_WORDS).sum(1)
    total = (sums * torch.arange(1, 2 * pages, 2, device=words.device)).sum()
    rest = words[pages * _PAGE_WORDS :]
    return total + (2 * pages + 1) * rest.sum() if rest.numel() else total


def _bytes(tensor: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns a tensor's elements as 64-bit words, and what is left as bytes; None for what is empty.

    Of a tensor with holes or repeated elements (a slice, an expanded one) those of its dense copy, as it is on the
    device.
    """
    count = tensor.numel()
    if count == 0:
        return None, None
    dense = tensor.detach()
    if dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
    if tuple(dense.stride()) != dense_stride(dense):
        dense = dense.clone()
    flat = dense.as_strided((count,), (1,), dense.storage_offset()).view(torch.uint8)
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64) if whole else None
    return words, flat[whole:] if whole < flat.numel() else None
