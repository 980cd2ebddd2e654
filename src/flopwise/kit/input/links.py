"""Which way batches go: to a CUDA device on a stream of their own, anywhere else the plain way, read ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flopwise.errors import InputError
from flopwise.kit.input.collate import CollateInto
from flopwise.kit.input.jpeg import JpegBatch
from flopwise.kit.input.leaves import Opaque, moved_by_itself, wrapped
from flopwise.kit.input.normalize import Normalize
from flopwise.kit.input.notices import say_once
from flopwise.kit.input.pool import PinnedPool
from flopwise.kit.nested import map_tensors


def device_of(device: torch.device | str | None) -> torch.device:
    """Returns where batches go; the CUDA device if there is one, else the CPU, unless something else is asked for.

    Raises:
        InputError: torch knows no such device, or a CUDA device is asked for that is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise InputError(f"device={device!r} is none that torch knows: {said}") from error
    if chosen.type not in ("cpu", "cuda"):
        say_once(
            f"batches have a stream of their own on CUDA only; to {chosen} they go the plain way, read ahead"
        )
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device={device}: torch sees no CUDA device here")
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        count = torch.cuda.device_count()
        if chosen.index >= count:
            raise InputError(f"device={device}: torch sees {count} CUDA devices, from cuda:0")
    return chosen


def on_device(name: str, stream: Any, device: torch.device) -> None:
    """Refuses what is no stream of the device.

    Raises:
        InputError: it is something else, or a stream of another device.
    """
    if getattr(stream, "device", None) != device or not hasattr(stream, "wait_event"):
        raise InputError(f"{name}={stream!r}: a torch.cuda.Stream of {device} is meant")


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Returns what moves a batch the plain way; on the CPU only encoded images are touched."""
    if device.type == "cpu":
        return lambda batch: map_tensors(batch, lambda files: files.to(device), JpegBatch)

    def move(batch: Any) -> Any:
        moved = map_tensors(wrapped(batch), lambda t: t.to(device))
        return map_tensors(moved, lambda leaf: moved_by_itself(leaf.value, device)[1], Opaque)

    return move


def pool_of(loader: Any) -> PinnedPool | None:
    """Returns the pool that a loader's workers collate into, None where they do not.

    Raises:
        InputError: the loader's samples are batches already, which stacking would take apart.
    """
    collate_fn = getattr(loader, "collate_fn", None)
    if not isinstance(collate_fn, CollateInto):
        return None
    whole = getattr(loader, "batch_size", 1) is None and loader.batch_sampler is None
    if whole and collate_fn.collate_fn is None:
        raise InputError(
            "the loader has batch_size=None, so each sample is a batch and is not to be stacked with others: "
            "collate_into(pool, torch.utils.data.default_convert) is meant"
        )
    return collate_fn.pool


def changes_of(
    normalize: Normalize | None, transform: Callable[[Any], Any] | None
) -> list[Callable[[Any], Any]]:
    """Returns what is done to a batch once it is moved, in order."""
    return [change for change in (normalize, transform) if change is not None]
