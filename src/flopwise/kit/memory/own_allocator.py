"""An allocator of one's own for CUDA memory, in multiples of 256 bytes, with a pool handed on by pointer if one is wanted.

It exists to be measured against torch's, which rounds to 512 bytes. torch tells a pluggable allocator nothing of
`record_stream`, gives no statistics of it, and puts a null pointer to use where it finds no memory: so it is for one stream, and
for an experiment in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from flopwise.errors import FlopwiseError
from flopwise.kit.memory.allocator_counters import AllocatorState

#: cudaMalloc aligns to this at least. Source: CUDA C++ Programming Guide, "Device Memory Accesses".
GRANULE_BYTES = 256
#: Least bytes of an arena where there is no pool. Source: torch's own allocator takes 20 MiB for requests from 1 MiB on
#: (c10/cuda/CUDACachingAllocator.cpp, kLargeBuffer).
ARENA_BYTES = 20 << 20
SOURCE = Path(__file__).with_name("own_allocator.c")
_COUNTS = [
    "calls",
    "reused",
    "asked",
    "given",
    "peak_given",
    "taken",
    "peak_taken",
    "driver_allocations",
    "driver_frees",
    "retries",
    "failed",
    "peak_asked",
    "split",
]


class AllocatorError(FlopwiseError):
    """The allocator cannot be compiled or installed here."""


def build(folder: str | Path) -> Path:
    """Compiles the allocator into a shared library in the folder and returns its path.

    Raises:
        AllocatorError: there is no C compiler, or it fails.
    """
    compiler = os.environ.get("CC") or next(
        filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None
    )
    if not compiler:
        raise AllocatorError(
            "no C compiler (cc, gcc, clang) on the path: the own allocator is not tried"
        )
    library = Path(folder) / "own_allocator.so"
    words = [
        *shlex.split(compiler),
        "-O2",
        "-shared",
        "-fPIC",
        str(SOURCE),
        "-lpthread",
        "-o",
        str(library),
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise AllocatorError(f"{compiler} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise AllocatorError(f"{compiler} fails on the own allocator: {done.stderr.strip()[-300:]}")
    return library


class OwnAllocator:
    """The compiled library, connected to what takes memory from the driver."""

    def __init__(
        self,
        library: Path,
        malloc_at: int,
        free_at: int,
        forget_at: int = 0,
        *,
        least_arena_bytes: int = ARENA_BYTES,
        pool_at: int = 0,
        pool_bytes: int = 0,
        device: int = 0,
    ) -> None:
        self.library = library
        self._library = ctypes.CDLL(str(library))
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._library.flopwise_connect.argtypes = [
            pointer,
            pointer,
            pointer,
            size,
            pointer,
            size,
            ctypes.c_int,
        ]
        self._library.flopwise_alloc.argtypes = [size, ctypes.c_int, pointer]
        self._library.flopwise_alloc.restype = pointer
        self._library.flopwise_free.argtypes = [pointer, size, ctypes.c_int, pointer]
        self._library.flopwise_free.restype = None
        if not self._library.flopwise_connect(
            malloc_at, free_at, forget_at, least_arena_bytes, pool_at, pool_bytes, device
        ):
            raise AllocatorError(
                "the own allocator cannot be connected: no memory, or no functions of the driver"
            )

    def alloc(self, n_bytes: int, device: int = 0, stream: int = 0) -> int | None:
        """Returns the address of memory, None where there is none."""
        at: int | None = self._library.flopwise_alloc(n_bytes, device, stream)
        return at

    def free(self, at: int, n_bytes: int, device: int = 0, stream: int = 0) -> None:
        """Takes memory back, for the next request on this stream."""
        self._library.flopwise_free(at, n_bytes, device, stream)

    def state(self) -> AllocatorState:
        """Returns its counters, named as those of torch's allocator."""
        values = (ctypes.c_longlong * len(_COUNTS))()
        self._library.flopwise_counts(values)
        counts = dict(zip(_COUNTS, values, strict=True))
        return AllocatorState(
            allocated_bytes=counts["given"],
            reserved_bytes=counts["taken"],
            peak_allocated_bytes=counts["peak_given"],
            peak_reserved_bytes=counts["peak_taken"],
            inactive_split_bytes=counts["split"],
            retries=counts["retries"],
            out_of_memory=counts["failed"],
            driver_allocations=counts["driver_allocations"],
            driver_frees=counts["driver_frees"],
            requested_bytes=counts["asked"],
        )


def install(folder: str | Path, pool_bytes: int = 0, device: int = 0) -> OwnAllocator:
    """Makes the allocator torch's for CUDA in this process, before anything is allocated, and returns it.

    Args:
        pool_bytes: taken from the driver at once and handed on by pointer; beyond it arenas are taken. 0: no pool.

    Raises:
        AllocatorError: it cannot be compiled, the driver's functions are not found, or CUDA is in use already.
    """
    if not torch.cuda.is_available():
        raise AllocatorError("there is no CUDA device to allocate on")
    library = build(folder)
    cuda = _runtime()
    pool = ctypes.c_void_p()
    if pool_bytes:
        code = cuda.cudaSetDevice(device) or cuda.cudaMalloc(
            ctypes.byref(pool), ctypes.c_size_t(pool_bytes)
        )
        if code:
            raise AllocatorError(
                f"no pool of {pool_bytes} bytes on device {device} (CUDA error {code})"
            )
    own = OwnAllocator(
        library,
        _address(cuda.cudaMalloc),
        _address(cuda.cudaFree),
        _address(cuda.cudaGetLastError),
        pool_at=pool.value or 0,
        pool_bytes=pool_bytes,
        device=device,
    )
    try:
        torch.cuda.memory.change_current_allocator(
            torch.cuda.memory.CUDAPluggableAllocator(
                str(library), "flopwise_alloc", "flopwise_free"
            )
        )
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise AllocatorError(f"torch keeps its allocator: {message}") from None
    return own


def _runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    path = next((line.split(maxsplit=5)[-1] for line in lines if "libcudart" in line), None)
    if path is None:
        raise AllocatorError(
            "the CUDA runtime is not found in this process: the own allocator is not tried"
        )
    return ctypes.CDLL(path)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
