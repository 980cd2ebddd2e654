"""The pool with real worker processes; on a CPU it saves the copy into torch's own shared memory."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flopwise.errors import FlopwiseWarning, InputError
from flopwise.kit.input import PinnedPool, Prefetcher, collate_into, slot_bytes_for
from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.packed import NO_SLOT, TOO_LARGE, Packed, Unplaced
from flopwise.kit.nested import tensors_in

no_page_lock = pytest.mark.skipif(
    torch.cuda.is_available(), reason="is about machines without CUDA"
)


class Numbers(Dataset[Any]):
    """Item i: numbers that tell i, in several types."""

    def __init__(self, n: int = 24, long_at: int = -1, dies_at: int = -1) -> None:
        self.n, self.long_at, self.dies_at = n, long_at, dies_at

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        width = 500 if i // 2 == self.long_at else 5
        return {
            "x": torch.full((width,), float(i)),
            "pair": (i, torch.tensor([i], dtype=torch.uint8)),
            "name": f"n{i}",
        }


def plain(dataset: Any, **options: Any) -> list[Any]:
    return list(DataLoader(dataset, batch_size=2, **options))


def consume(batches: Any) -> None:
    for _ in batches:
        time.sleep(0.01)


def same(a: Any, b: Any) -> bool:
    left, right = list(tensors_in(a)), list(tensors_in(b))
    return len(left) == len(right) and all(
        x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)
        for x, y in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_those_of_the_plain_loader(context: str, persistent: bool) -> None:
    if persistent and context != "fork":
        pytest.skip("starting is what differs between the ways; once each is enough")
    pool = PinnedPool(4096, 12)
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=2,
        collate_fn=collate_into(pool),
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    wanted = plain(Numbers())
    for _ in range(2 if context == "fork" else 1):
        got = 0
        for batch, expected in zip(loader, wanted, strict=True):
            unpacked = pool.unpack(batch)
            assert same(unpacked, expected)
            assert unpacked["name"] == expected["name"]
            assert all(t.data_ptr() % 256 == 0 for t in tensors_in(unpacked))
            got += 1
        assert got == 12
    assert pool.counts.fallbacks == {}
    del batch, unpacked, loader
    gc.collect()
    assert pool.held == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="needs madvise")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_forked_after_the_pages_were_locked_map_them_anew(context: str) -> None:
    """The CUDA driver keeps page-locked memory out of forks: a hole is left, which a child's own mappings may fill."""
    pool = PinnedPool(1 << 16, 12)
    pool._block.map().madvise(mmap.MADV_DONTFORK)  # what cudaHostRegister does
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=2,
        collate_fn=collate_into(pool),
        multiprocessing_context=context,
    )
    for _ in range(3 if context == "fork" else 1):
        assert all(same(pool.unpack(a), b) for a, b in zip(loader, plain(Numbers()), strict=True))
    assert pool.counts.fallbacks == {}


def test_without_workers_it_collates_in_place_too() -> None:
    pool = PinnedPool(4096, 4)
    loader = DataLoader(Numbers(), batch_size=2, collate_fn=collate_into(pool))
    for packed, expected in zip(loader, plain(Numbers()), strict=True):
        assert same(pool.unpack(packed), expected)


def test_a_collate_function_of_ones_own_is_run_once_and_copied_into_the_slot() -> None:
    calls: list[int] = []

    def padded(samples: list[Any]) -> Any:
        calls.append(len(samples))
        return [torch.nn.utils.rnn.pad_sequence(samples), torch.ones(2, 2).to_sparse(), "text"]

    pool = PinnedPool(64, 2)
    into = collate_into(pool, padded)
    placed = pool.unpack(into([torch.ones(2), torch.ones(3)]))
    assert torch.equal(placed[0], torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]))
    assert placed[1].is_sparse
    assert placed[2] == "text"
    large = into([torch.ones(2), torch.ones(30)])
    assert isinstance(large, Unplaced)
    assert large.reason == TOO_LARGE
    assert calls == [2, 2]


def test_a_batch_larger_than_a_slot_takes_the_ordinary_path_and_is_counted() -> None:
    pool = PinnedPool(slot_bytes_for(plain(Numbers())[0]), 12)
    dataset = Numbers(long_at=3)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=collate_into(pool))
    with pytest.warns(FlopwiseWarning, match=r"ordinary path: it needs \d+ bytes, a slot has \d+"):
        got = [pool.unpack(b) for b in loader]
    assert all(same(a, b) for a, b in zip(got, plain(dataset), strict=True))
    assert pool.counts.fallbacks == {TOO_LARGE: 1}
    assert pool.counts.placed == 11


def test_a_loop_that_keeps_every_batch_runs_out_of_slots_and_still_gets_them_all() -> None:
    pool = PinnedPool(4096, 3)
    loader = DataLoader(
        Numbers(), batch_size=2, num_workers=1, collate_fn=collate_into(pool, wait_s=0.01)
    )
    with pytest.warns(
        FlopwiseWarning, match="none of the pool's 3 slots became free within 0.01 s"
    ):
        kept = [pool.unpack(b) for b in loader]
    assert all(same(a, b) for a, b in zip(kept, plain(Numbers()), strict=True))
    assert pool.counts.fallbacks == {NO_SLOT: 9}
    kept.clear()
    assert pool.held == 0


def test_a_view_of_a_batch_keeps_its_slot() -> None:
    pool = PinnedPool(4096, 1)
    into = collate_into(pool, wait_s=0.0)
    view = pool.unpack(into([Numbers()[4], Numbers()[5]]))["x"][1, 2:]
    assert isinstance(into([Numbers()[6], Numbers()[7]]), Unplaced)
    assert view.tolist() == [5.0, 5.0, 5.0]
    del view
    assert pool.unpack(into([Numbers()[6], Numbers()[7]]))["x"][0, 0] == 6


def test_slots_of_an_abandoned_epoch_come_back() -> None:
    pool = PinnedPool(4096, 8)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, collate_fn=collate_into(pool))
    for _ in range(6):
        iterator = iter(loader)
        pool.unpack(next(iterator))
        del iterator  # batches in its queues are lost with the workers that made them
        gc.collect()
        pool.reclaim()
    assert pool.counts.reclaimed > 0
    assert sum(pool._tokens.take() is not None for _ in range(20)) == 8


@pytest.mark.usefixtures("workers_looked_after")
def test_a_worker_that_dies_is_an_error_and_its_slot_is_not_lost() -> None:
    pool = PinnedPool(4096, 8)
    collate = collate_into(pool)
    loader = DataLoader(Numbers(dies_at=9), batch_size=2, num_workers=2, collate_fn=collate)
    batches = Prefetcher(loader, "cpu")
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        consume(batches)
    batches.loader = DataLoader(Numbers(), batch_size=2, num_workers=2, collate_fn=collate)
    assert all(same(a, b) for a, b in zip(batches, plain(Numbers()), strict=True))
    assert pool.counts.fallbacks == {}


def test_a_slot_that_was_taken_back_is_an_error_not_another_batch() -> None:
    pool = PinnedPool(4096, 2)
    slot = pool.take(0)
    assert slot is not None
    late = Packed(pool._name, slot, 1, {}, 0, None)
    pool._table.filling(slot)
    with pytest.raises(InputError, match=r"slot \d of the pool was taken back"):
        late.claim()
    with pytest.raises(InputError, match="does not have, or has closed"):
        Packed("gone", 0, 1, {}, 0, None).claim()


def test_what_crosses_to_the_parent_is_small_and_says_the_checksum() -> None:
    pool = PinnedPool(1 << 20, 2, checksums=True)
    packed = collate_into(pool)([torch.rand(1000, 10), torch.rand(1000, 10)])
    assert len(pickle.dumps({**packed.__getstate__()})) < 500
    assert packed.used_bytes == 2 * 1000 * 10 * 4
    assert packed.checksum == host_checksum([pool.unpack(packed)])


def test_an_error_in_collating_gives_the_slot_back() -> None:
    pool = PinnedPool(4096, 1)
    into = collate_into(pool)
    with pytest.raises(RuntimeError, match="equal size"):
        into([torch.ones(2), torch.ones(3)])
    assert pool.take(0) == 0


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 4), (10, 0), (10, 5000)])
def test_sizes_that_make_no_sense_are_refused(slot_bytes: int, slots: int) -> None:
    with pytest.raises(InputError, match="are meant"):
        PinnedPool(slot_bytes, slots)


def test_too_large_a_pool_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match=r"do not fit into memory, of which \d+ MiB are free"):
        PinnedPool(1 << 44, 16)


def test_a_system_without_nameless_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(InputError, match="Linux only"):
        PinnedPool(100, 2)


@no_page_lock
def test_without_cuda_the_memory_is_shared_only() -> None:
    pool = PinnedPool(100, 2)
    assert not pool.page_locked
    assert pool.refusal == "there is no CUDA device"


def test_a_refused_registration_is_said_and_the_pool_still_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flopwise.kit.input import pool as module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flopwise.kit.input.registration._register", lambda *_: "out of memory (2)")
    with pytest.warns(FlopwiseWarning, match=r"shared, but not page-locked \(out of memory"):
        pool = module.PinnedPool(4096, 2)
    packed = collate_into(pool)([Numbers()[0], Numbers()[1]])
    assert same(pool.unpack(packed), plain(Numbers())[0])


def test_closing_lets_batches_live_on() -> None:
    pool = PinnedPool(4096, 2)
    batch = pool.unpack(collate_into(pool)([torch.ones(3), torch.ones(3)]))
    pool.close()
    assert batch.sum() == 6
    del batch


def test_a_pool_that_is_dropped_gives_everything_back() -> None:
    def files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = files()
    for _ in range(3):
        pool = PinnedPool(4096, 4)
        batch = pool.unpack(collate_into(pool)([torch.ones(3)]))
        del pool
        assert batch.sum() == 3
    del batch
    assert files() == before


def test_a_pool_that_was_closed_is_named_before_a_worker_is_started() -> None:
    pool = PinnedPool(4096, 4)
    batches = Prefetcher(DataLoader(Numbers(), collate_fn=collate_into(pool)), "cpu")
    pool.close()
    with pytest.raises(InputError, match="collates into is closed: make another"):
        iter(batches)
