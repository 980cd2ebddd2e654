"""Arguments that make no sense are one clear error each, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flopwise.errors import InputError
from flopwise.kit.input import (
    Normalize,
    PinnedPool,
    Prefetcher,
    RandomResizedCropBatch,
    Watch,
    collate_into,
    slot_bytes_for,
    tune_loader,
)
from flopwise.kit.input.arguments import is_count, real, whole
from flopwise.kit.input.links import on_device

BATCHES = [torch.zeros(2)]


def made(**options: Any) -> Prefetcher:
    return Prefetcher(BATCHES, **{"device": "cpu", **options})


def tuned(**options: Any) -> Any:
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), 4)
    return tune_loader(
        loader, options.pop("step", lambda b: None), **{"device": "cpu", "budget_s": 1, **options}
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: made(depth="3"), "depth='3': at least one batch"),
        (lambda: made(depth=2.5), "depth=2.5"),
        (lambda: made(depth=True), "depth=True"),
        (lambda: made(depth=None), "depth=None"),
        (lambda: made(device="gpu"), "device='gpu' is none that torch knows"),
        (lambda: made(device=object()), "is none that torch knows"),
        (lambda: made(transform=3), "transform=3: a function is meant"),
        (lambda: made(pool=3), "pool=3: a PinnedPool is meant"),
        (lambda: made(normalize=(0.5, 0.5)), "one mean and one std"),
        (lambda: made(normalize=((0.5,), ("a",))), "one mean and one std"),
        (lambda: made(normalize=((0.5,), (1.0,), "fp16")), "floating dtype"),
        (lambda: Normalize((float("nan"),), (1.0,)), "one mean and one std"),
        (lambda: PinnedPool("1MB"), "slot_bytes='1MB': 1 to 4096 slots"),  # type: ignore[arg-type]
        (lambda: PinnedPool(100, 2.5), "slots=2.5: 1 to 4096 slots"),  # type: ignore[arg-type]
        (lambda: collate_into(None), "a PinnedPool is meant"),  # type: ignore[arg-type]
        (lambda: collate_into(PinnedPool(64, 1), 3), "collate_fn=3"),  # type: ignore[arg-type]
        (lambda: collate_into(PinnedPool(64, 1), wait_s=-1), "wait_s=-1: a number, 0 or more"),
        (lambda: slot_bytes_for(BATCHES, -2), "spare_frac=-2"),
        (lambda: Watch(torch.zeros(3, 4)), "a list of buffers"),  # type: ignore[arg-type]
        (lambda: Watch(None), "a list of buffers"),  # type: ignore[arg-type]
        (lambda: Watch(BATCHES * 3).wrote(7, 0), "no buffer 7, they are 0 to 2"),
        (lambda: Watch(BATCHES).reading(-1, 0), "no buffer -1"),
        (lambda: tuned(steps="a"), "steps='a'"),
        (lambda: tuned(max_workers=-1), "max_workers=-1"),
        (lambda: tuned(enough_frac=2), "enough_frac=2: a number, 0 to 1"),
        (lambda: tuned(device="gpu"), "device='gpu'"),
        (lambda: tuned(step=None), "step=None: a function"),
        (lambda: RandomResizedCropBatch((1, 2, 3)), r"size=\(1, 2, 3\)"),  # type: ignore[arg-type]
        (lambda: RandomResizedCropBatch(8, flip_p=2), "flip_p=2: a number, 0 to 1"),
        (lambda: RandomResizedCropBatch(8, scale=3), "positive ranges"),  # type: ignore[arg-type]
        (lambda: RandomResizedCropBatch(8, normalize=3), "a Normalize"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_named(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert whole("n", torch.tensor(3), 1, "") == 3
    assert real("x", 1, 0) == 1.0
    assert [is_count(n) for n in (0, 2, -1, True, 1.0)] == [True, True, False, False, False]
    with pytest.raises(InputError):
        real("x", float("nan"), 0)


def test_a_stream_is_one_of_the_device() -> None:
    class Stream:
        device = torch.device("cuda:1")

        def wait_event(self, event: Any) -> None: ...

    on_device("stream", Stream(), torch.device("cuda:1"))
    for stream in ("x", Stream()):
        with pytest.raises(InputError, match=r"a torch.cuda.Stream of cuda:0 is meant"):
            on_device("stream", stream, torch.device("cuda:0"))
