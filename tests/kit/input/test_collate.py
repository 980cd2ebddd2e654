from __future__ import annotations

import copy
import threading
import time
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from flopwise.errors import FlopwiseWarning
from flopwise.kit.input import PinnedPool, collate_into, slot_bytes_for
from flopwise.kit.input.packed import NOT_REBUILT, Packed, Unplaced
from flopwise.kit.nested import tensors_in

Point = namedtuple("Point", "x y")

SAMPLES: dict[str, list[Any]] = {
    "tensors": [torch.ones(3), torch.zeros(3)],
    "numbers": [(1, 2.5, True), (2, 3.5, False)],
    "mappings": [{"a": torch.ones(2), "b": [1, "s"]}, {"a": torch.zeros(2), "b": [2, "t"]}],
    "named": [Point(torch.ones(1), 1), Point(torch.zeros(1), 2)],
    "bytes": [b"a", b"bc"],
    "scalars": [torch.tensor(1.0), torch.tensor(2.0)],
    "empty": [torch.zeros(0), torch.zeros(0)],
    "transposed": [torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t()],
    "half": [torch.ones(2, dtype=torch.bfloat16)] * 2,
}


def same(a: Any, b: Any) -> None:
    assert repr(a) == repr(b)
    for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        if x.layout is torch.strided:
            assert x.stride() == y.stride()
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", SAMPLES)
def test_it_collates_as_torch_does(name: str) -> None:
    pool = PinnedPool(4096, 2)
    packed = collate_into(pool)(SAMPLES[name])
    assert isinstance(packed, Packed)
    same(pool.unpack(packed), default_collate(SAMPLES[name]))


@pytest.mark.filterwarnings("ignore:.*numpy.*:UserWarning")
def test_arrays_are_collated_too() -> None:
    numpy = pytest.importorskip("numpy")
    samples = [numpy.arange(4, dtype="float32"), numpy.ones(4, dtype="float32")]
    pool = PinnedPool(4096, 2)
    same(pool.unpack(collate_into(pool)(samples)), default_collate(samples))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.sampled_from([torch.float32, torch.uint8, torch.int64, torch.float64, torch.bool]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_a_slot_of_the_size_said_holds_the_batch_and_every_tensor_is_aligned(
    forms: Any, count: int
) -> None:
    samples = [[torch.full(shape, k + 1).to(dtype) for shape, dtype in forms] for k in range(count)]
    wanted = default_collate(samples)
    pool = PinnedPool(slot_bytes_for(wanted), 1)
    packed = collate_into(pool, wait_s=0.0)(samples)
    assert isinstance(packed, Packed)
    got = pool.unpack(packed)
    same(got, wanted)
    assert all(t.data_ptr() % 256 == 0 for t in tensors_in(got) if t.numel())
    del got, packed
    pool.close()


def test_a_batch_of_a_type_that_cannot_be_rebuilt_takes_the_ordinary_way() -> None:
    class Fixed(tuple):  # type: ignore[type-arg]
        def __new__(cls) -> Any:
            return super().__new__(cls, [torch.ones(1)])

    pool = PinnedPool(4096, 1)
    unplaced = collate_into(pool, lambda samples: Fixed())([1])
    assert isinstance(unplaced, Unplaced)
    assert unplaced.reason == NOT_REBUILT
    with pytest.warns(FlopwiseWarning, match="ordinary path: a .*Fixed cannot be built again"):
        assert type(pool.unpack(unplaced)) is Fixed
    assert pool.take(0) == 0  # the slot came back


def test_spare_room_is_a_share() -> None:
    assert slot_bytes_for([torch.ones(256)]) == 1024
    assert slot_bytes_for([torch.ones(256)], spare_frac=0.5) == 1536
    assert slot_bytes_for("nothing") == 1


def test_samples_of_unlike_shapes_are_the_error_that_torch_gives() -> None:
    pool = PinnedPool(4096, 1)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate_into(pool)([torch.ones(2), torch.ones(3)])
    assert isinstance(collate_into(pool)([torch.ones(2)]), Packed)  # the slot came back


def test_a_loop_that_keeps_its_batches_is_made_to_wait_once_not_every_time() -> None:
    pool = PinnedPool(64, 1)
    into = collate_into(pool, wait_s=0.2)
    kept = into([torch.ones(2)])
    begun = time.monotonic()
    assert all(isinstance(into([torch.ones(2)]), Unplaced) for _ in range(10))
    assert 0.2 <= time.monotonic() - begun < 1.0
    del kept
    assert isinstance(into([torch.ones(2)]), Packed)


def test_what_workers_waited_for_slots_is_kept() -> None:
    pool = PinnedPool(64, 1)
    into = collate_into(pool, wait_s=5.0)
    kept = [pool.unpack(into([torch.ones(2)]))]
    assert pool.counts.slot_wait_s < 0.05
    dropping = threading.Timer(0.1, kept.clear)
    dropping.start()
    pool.unpack(into([torch.ones(2)]))
    dropping.join()
    assert 0.05 < pool.counts.slot_wait_s < 4


def test_a_slot_may_be_waited_for_without_an_end() -> None:
    pool = PinnedPool(4096, 1)
    collate = collate_into(pool, wait_s=float("inf"))
    held = [collate([torch.ones(2)])]
    threading.Timer(0.2, held.clear).start()
    assert isinstance(collate([torch.ones(2)]), Packed)


def test_nested_tensors_are_not_placed() -> None:
    with warnings.catch_warnings():  # strided nested tensors are a prototype, says torch
        warnings.simplefilter("ignore")
        nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
    pool = PinnedPool(4096, 2)
    batch = pool.unpack(collate_into(pool, lambda samples: samples[0])([nested]))
    assert batch is nested
    assert slot_bytes_for(nested) == 1


def test_a_copy_of_a_loader_collates_into_the_same_pool() -> None:
    collate = collate_into(PinnedPool(4096, 2))
    assert copy.deepcopy(collate).pool is collate.pool
    assert copy.copy(collate.pool) is collate.pool
