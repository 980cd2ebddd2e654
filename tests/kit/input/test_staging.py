from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.errors import FlopwiseWarning
from flopwise.kit.input import staging
from flopwise.kit.input.staging import Stage


@pytest.mark.usefixtures("page_locking")
def test_copies_lie_aligned_in_one_block_that_is_used_again() -> None:
    stage = Stage(0)
    tensors = [torch.arange(5.0), torch.ones(3, dtype=torch.uint8), torch.zeros(0)]
    first = stage.write(tensors)
    assert first is not None
    assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True))
    assert [t.data_ptr() % 256 for t in first[:2]] == [0, 0]
    assert first[1].data_ptr() - first[0].data_ptr() == 256
    second = stage.write([torch.ones(5)])
    assert second is not None
    assert second[0].data_ptr() == first[0].data_ptr()


@pytest.mark.usefixtures("page_locking")
def test_it_grows_for_a_larger_batch_after_the_copy_of_the_old_one_is_over(surface: Any) -> None:
    stage = Stage(0)
    stage.write([torch.ones(4)])
    old = stage._registration
    stage.event = surface.event()
    large = stage.write([torch.ones(4000)])
    assert large is not None
    assert surface.log == [("host", "waits for", "event 0")]
    assert old.released == 1  # type: ignore[union-attr]
    assert large[0].sum() == 4000


@pytest.mark.usefixtures("page_locking")
def test_waiting_is_for_the_last_copy_and_once(surface: Any) -> None:
    stage = Stage(0)
    stage.wait()
    stage.event = surface.event()
    stage.wait()
    stage.wait()
    assert surface.log == [("host", "waits for", "event 0")]


class Refused:
    locked, error = False, "cudaHostRegister of 1 MiB: out of memory (2); ulimit -l is 64 KiB"

    def __init__(self, *_: Any) -> None: ...

    def release(self) -> None: ...


def test_where_registration_is_refused_torch_is_asked_and_then_the_plain_way_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "Registration", Refused)
    real = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        assert pin_memory
        return real(*size, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        assert Stage(0).write([torch.ones(3)]) is not None

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.warns(
            FlopwiseWarning,
            match=r"ulimit -l is 64 KiB; CUDA error: out of memory\): batches are copied the plain way",
        ):
            assert Stage(0).write([torch.ones(3)]) is None
        assert Stage(1).write([torch.ones(3)]) is None  # and says it once


def test_memory_that_is_exhausted_leads_to_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("flopwise.kit.input.staging.mmap.mmap", refuse)
    with pytest.warns(FlopwiseWarning, match="Cannot allocate memory"):
        assert Stage(0).write([torch.ones(3)]) is None
