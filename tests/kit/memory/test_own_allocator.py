"""The allocator over memory of the host: its arithmetic is the same wherever memory is from."""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flopwise.kit.memory import own_allocator
from flopwise.kit.memory.own_allocator import AllocatorError, OwnAllocator, build, install

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)
KIB, ARENA = 1 << 10, 1 << 20


class Driver:
    """Gives out memory of the host up to a limit, aligned as cudaMalloc aligns."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.held, self.last_error = limit, 0, 0
        self.blocks: dict[int, tuple[Any, int]] = {}
        take = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
        give = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self.take, self.give = take(self._take), give(self._give)
        self.forget = ctypes.CFUNCTYPE(ctypes.c_int)(self._forget)

    def _take(self, to: Any, size: int) -> int:
        if self.held + size > self.limit:
            self.last_error = 2  # cudaErrorMemoryAllocation
            return 2
        buffer = ctypes.create_string_buffer(size + 256)
        at = (ctypes.addressof(buffer) + 255) // 256 * 256
        self.blocks[at] = (buffer, size)
        self.held += size
        to[0] = at
        return 0

    def _forget(self) -> int:
        seen, self.last_error = self.last_error, 0
        return seen

    def _give(self, at: int) -> int:
        self.held -= self.blocks.pop(at)[1]
        return 0


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("own"))


@pytest.fixture
def make(library: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes allocators, each in a copy of the library, for its state is global."""
    alive = []

    def made(driver: Driver, **kwargs: Any) -> OwnAllocator:
        alive.append(driver)
        twin = tmp_path / f"own{len(alive)}.so"
        shutil.copy(library, twin)
        at = [
            ctypes.cast(f, ctypes.c_void_p).value or 0
            for f in (driver.take, driver.give, driver.forget)
        ]
        kwargs.setdefault("least_arena_bytes", ARENA)
        return OwnAllocator(twin, *at, **kwargs)

    return made


class TestPieces:
    def test_sizes_are_multiples_of_256_and_so_are_addresses(self, make: Any) -> None:
        own = make(Driver())
        at = [own.alloc(n) for n in (1, 255, 256, 257)]
        assert all(a % 256 == 0 for a in at)
        assert [b - a for a, b in itertools.pairwise(at)] == [256, 256, 256]
        state = own.state()
        assert (state.requested_bytes, state.allocated_bytes) == (769, 1280)
        assert state.reserved_bytes == ARENA
        assert state.driver_allocations == 1

    def test_what_is_freed_is_given_out_again_on_its_stream_only(self, make: Any) -> None:
        own = make(Driver())
        at = own.alloc(4 * KIB, stream=1)
        own.free(at, 4 * KIB, stream=1)
        assert own.alloc(4 * KIB, stream=2) != at
        assert own.alloc(4 * KIB, stream=1) == at

    def test_free_neighbours_are_joined(self, make: Any) -> None:
        own = make(Driver())
        at = [own.alloc(256 * KIB) for _ in range(4)]
        for a in (at[1], at[3], at[2], at[0]):
            own.free(a, 256 * KIB)
        assert own.alloc(ARENA) == at[0]
        assert own.state().driver_allocations == 1

    def test_what_was_never_used_is_joined_too_and_the_whole_arena_serves_again(
        self, make: Any
    ) -> None:
        own = make(Driver())
        own.free(own.alloc(KIB, stream=1), KIB, stream=1)
        assert own.state().inactive_split_bytes == 0
        assert own.alloc(ARENA, stream=1) is not None
        assert own.state().driver_allocations == 1

    def test_split_is_what_is_free_beside_what_is_in_use(self, make: Any) -> None:
        own = make(Driver())
        at = own.alloc(256 * KIB)
        assert own.state().inactive_split_bytes == ARENA - 256 * KIB
        own.free(at, 256 * KIB)
        state = own.state()
        assert (state.inactive_split_bytes, state.reserved_bytes) == (0, ARENA)
        assert state.fragmentation_frac == 0

    def test_the_smallest_piece_that_is_large_enough_is_taken(self, make: Any) -> None:
        own = make(Driver())
        sizes = [64 * KIB, KIB, 16 * KIB, KIB, 32 * KIB, KIB]
        at = [own.alloc(n) for n in sizes]
        for i in (0, 2, 4):
            own.free(at[i], sizes[i])
        assert own.alloc(20 * KIB) == at[4]
        assert own.alloc(16 * KIB) == at[2]

    def test_nothing_is_asked_for_nothing(self, make: Any) -> None:
        own = make(Driver())
        assert own.alloc(0) is None
        assert own.state().out_of_memory == 0

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("pool_bytes", [0, 4 * ARENA])
    def test_no_two_pieces_overlap_and_none_is_lost(
        self, make: Any, seed: int, pool_bytes: int
    ) -> None:
        rng, driver = random.Random(seed), Driver()
        pool = ctypes.create_string_buffer(pool_bytes + 256)
        start = (ctypes.addressof(pool) + 255) // 256 * 256
        own = make(driver, pool_at=start if pool_bytes else 0, pool_bytes=pool_bytes)
        live: dict[int, tuple[int, int]] = {}
        for _ in range(3000):
            if live and rng.random() < 0.5:
                at = rng.choice(list(live))
                n, stream = live.pop(at)
                own.free(at, n, stream=stream)
                continue
            n, stream = int(2 ** rng.uniform(0, 19)), rng.randrange(2)
            at = own.alloc(n, stream=stream)
            assert at is not None
            assert at % 256 == 0
            live[at] = (n, stream)
        order = sorted(live)
        assert all(a + live[a][0] <= b for a, b in itertools.pairwise(order))
        spans = [(a, a + size) for a, (_, size) in driver.blocks.items()]
        spans += [(start, start + pool_bytes)] if pool_bytes else []
        assert all(any(a <= at and at + n <= b for a, b in spans) for at, (n, _) in live.items())
        state = own.state()
        assert state.requested_bytes == sum(n for n, _ in live.values())
        assert state.allocated_bytes == sum(-(-n // 256) * 256 for n, _ in live.values())
        assert state.reserved_bytes == driver.held + pool_bytes
        for at, (n, stream) in live.items():
            own.free(at, n, stream=stream)
        assert own.state().allocated_bytes == 0


class TestPool:
    def test_the_pool_is_used_before_the_driver_is_asked(self, make: Any) -> None:
        pool = ctypes.create_string_buffer(ARENA + 256)
        start = (ctypes.addressof(pool) + 255) // 256 * 256
        own = make(Driver(), pool_at=start, pool_bytes=ARENA)
        assert own.alloc(ARENA // 2) == start
        assert own.alloc(ARENA // 2) == start + ARENA // 2
        assert own.state().driver_allocations == 0
        assert own.alloc(256) is not None
        assert own.state().driver_allocations == 1


class TestOutOfMemory:
    def test_free_arenas_are_given_back_and_the_request_is_tried_again(self, make: Any) -> None:
        driver = Driver(limit=2 * ARENA)
        own = make(driver)
        at = own.alloc(ARENA)
        own.free(at, ARENA)
        assert own.alloc(2 * ARENA) is not None
        state = own.state()
        assert (state.retries, state.driver_frees, state.out_of_memory) == (1, 1, 0)
        assert driver.held == 2 * ARENA == state.reserved_bytes
        assert driver.last_error == 0  # else torch would take it for its next kernel's

    def test_a_smaller_arena_is_taken_where_a_whole_one_does_not_fit(self, make: Any) -> None:
        own = make(Driver(limit=ARENA // 2))
        assert own.alloc(KIB) is not None
        assert own.state().reserved_bytes == KIB

    def test_none_where_there_is_no_memory(self, make: Any) -> None:
        driver = Driver(limit=0)
        own = make(driver)
        assert own.alloc(KIB) is None
        assert driver.last_error == 0
        assert own.state().out_of_memory == 1


class Runtime:
    """Stands for the CUDA runtime: takes memory from a driver."""

    def __init__(self, driver: Driver, code: int = 0) -> None:
        set_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
        self.cudaSetDevice = set_device(lambda device: code)
        self.cudaMalloc, self.cudaFree = driver.take, driver.give
        self.cudaGetLastError = driver.forget


class TestInstall:
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda.memory, "CUDAPluggableAllocator", lambda *names: seen.update(names=names)
        )
        monkeypatch.setattr(
            torch.cuda.memory,
            "change_current_allocator",
            lambda allocator: seen.update(changed=True),
        )
        return seen

    @pytest.mark.parametrize("pool_bytes", [0, 2 * ARENA])
    def test_torch_gets_the_functions_and_the_allocator_the_pool(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any], pool_bytes: int
    ) -> None:
        driver = Driver()
        monkeypatch.setattr(own_allocator, "_runtime", lambda: Runtime(driver))
        own = install(tmp_path, pool_bytes)
        assert cuda["changed"]
        assert cuda["names"] == (str(own.library), "flopwise_alloc", "flopwise_free")
        assert driver.held == own.state().reserved_bytes == pool_bytes
        at = own.alloc(KIB)
        assert (at in driver.blocks) is True  # the beginning of the pool, or of a first arena
        assert own.state().driver_allocations == (0 if pool_bytes else 1)

    def test_a_pool_that_there_is_no_memory_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(own_allocator, "_runtime", lambda: Runtime(Driver(limit=KIB)))
        with pytest.raises(
            AllocatorError, match=r"no pool of 1048576 bytes on device 0 \(CUDA error 2"
        ):
            install(tmp_path, ARENA)
        assert cuda == {}

    def test_torch_that_has_allocated_already_keeps_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: dict[str, Any]
    ) -> None:
        def refuse(allocator: Any) -> None:
            raise RuntimeError("Can't swap an already initialized allocator\nmore")

        monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", refuse)
        monkeypatch.setattr(own_allocator, "_runtime", lambda: Runtime(Driver()))
        with pytest.raises(AllocatorError, match=r"keeps its allocator: Can't swap .* allocator$"):
            install(tmp_path)

    def test_without_cuda(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(AllocatorError, match="no CUDA device"):
            install(tmp_path)

    def test_without_the_runtime(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(own_allocator, "Path", lambda *a: tmp_path / "none")
        with pytest.raises(AllocatorError, match="the CUDA runtime is not found"):
            own_allocator._runtime()

    def test_without_a_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(AllocatorError, match="no C compiler"):
            build(tmp_path)
        monkeypatch.setenv("CC", "/bin/false")
        with pytest.raises(AllocatorError, match="/bin/false fails"):
            build(tmp_path)
        monkeypatch.setenv("CC", "/nowhere/cc")
        with pytest.raises(AllocatorError, match="/nowhere/cc cannot be run"):
            build(tmp_path)
