from __future__ import annotations

import gc
import os
import resource
import time
import weakref

import pytest
import torch

from flopwise.kit.input.shared_block import MOST_SLOTS, SharedBlock, Tokens


def in_child(work: object) -> int:
    child = os.fork()
    if child == 0:
        code = 77
        try:
            code = int(work())  # type: ignore[operator]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_processes_see_each_others_bytes_through_mappings_of_their_own() -> None:
    block = SharedBlock(8192)
    here = block.tensor(4096, 16)
    address = block.address

    def write() -> bool:
        block.tensor(4096, 16).fill_(7)
        return block.address != address  # a page-locked mapping would not be there after a fork

    assert in_child(write) == 1
    assert here.tolist() == [7] * 16


def test_a_tensor_outlives_the_block_that_is_closed() -> None:
    block = SharedBlock(4096)
    tensor = block.tensor(0, 8).fill_(3)
    block.close()
    block.close()
    del block
    gc.collect()
    assert tensor.sum() == 24


def test_a_fork_never_unmaps_what_it_inherited() -> None:
    block = SharedBlock(4096)
    old = weakref.ref(block.map())

    def look() -> bool:
        block.map()
        gc.collect()
        return old() is not None and old() is not block.map()

    assert in_child(look) == 1
    block.close()
    gc.collect()
    assert old() is None  # here it is given back


def test_nothing_of_it_has_a_name() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    block = SharedBlock(1 << 20)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not any("flopwise" in name for name in after - before)
    block.close()


def test_file_descriptors_come_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        block, tokens = SharedBlock(4096), Tokens(3)
        block.close()
        tokens.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_token_is_taken_once_by_however_many_processes() -> None:
    tokens = Tokens(100)
    taken = SharedBlock(4096)
    counts = taken.tensor(0, 100)

    def take() -> int:
        mine = taken.tensor(0, 100)
        n = 0
        while (slot := tokens.take(0.05)) is not None:
            mine[slot] += 1
            n += 1
        return n

    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(take())
        children.append(child)
    total = sum(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children)
    assert total == 100
    assert torch.equal(counts, torch.ones(100, dtype=torch.uint8))


def test_taking_waits_as_long_as_told_and_wakes_when_one_comes() -> None:
    tokens = Tokens(1)
    assert tokens.take() == 0
    begun = time.monotonic()
    assert tokens.take(0.05) is None
    assert 0.045 < time.monotonic() - begun < 1.0

    def put() -> int:
        time.sleep(0.05)
        tokens.put(9)
        return 0

    child = os.fork()
    if child == 0:
        os._exit(put())
    assert tokens.take(10.0) == 9
    os.waitpid(child, 0)


def test_the_most_slots_fit_into_the_pipe() -> None:
    tokens = Tokens(MOST_SLOTS)
    assert [tokens.take() for _ in range(MOST_SLOTS)] == list(range(MOST_SLOTS))
    assert tokens.take() is None


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_memory_that_is_refused_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        SharedBlock(4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pages_that_are_met_first_cost_few_faults_when_they_are_written() -> None:
    nbytes = 32 << 20
    block = SharedBlock(nbytes)
    block.tensor(0, nbytes).fill_(1)  # the pages are there, as page-locked ones are

    def faults_of_writing() -> bool:
        block.meet(0, nbytes)
        met = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block.meet(0, nbytes)
        block.tensor(0, nbytes).fill_(2)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - met < (nbytes >> 12) // 4

    assert in_child(faults_of_writing) == 1
    assert int(block.tensor(0, nbytes)[::4096].sum()) == 2 * (nbytes >> 12)  # and none was changed
