"""One block of memory that worker processes share, and the slots in it that are free.

The memory has no name (memfd): nothing is left behind, and the size of /dev/shm does not limit it. Free slots are
tokens in a pipe: taking one is one read, giving it back one write, and a process that dies holds no lock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time
import weakref
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

_TOKEN = struct.Struct("<H")
#: What the pipe holds. Source: pipe(7): 65,536 bytes, and a write of up to PIPE_BUF (4,096) is atomic.
MOST_SLOTS = 4096
#: What the kernel maps around a page that is read first; one that is written first is mapped alone, so that 400 MB cost
#: a hundred thousand faults. Source: Linux mm/memory.c, fault_around_bytes.
_FAULT_AROUND = 65536

#: poll takes milliseconds as a C int.
_LONGEST_POLL_S = 3600.0

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []


def kept_after_fork(memory: mmap.mmap) -> mmap.mmap:
    """Returns the mapping, which a forked child will never unmap.

    Page-locked pages are not inherited (the driver marks them MADV_DONTFORK), so in a child the addresses of such a
    mapping may soon belong to something else; the child's copy of the object must not give them back.
    """
    _mapped.add(memory)
    return memory


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))


def missing_system_part() -> str:
    """Returns what this system lacks for memory shared without a name; "" where nothing is missing."""
    if not hasattr(os, "memfd_create"):
        return "memory without a name (memfd_create) is there on Linux only"
    return ""


class SharedBlock:
    """Bytes that every process maps that gets this object, by fork or by pickle."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = os.memfd_create("flopwise-batches", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, nbytes)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, nbytes)  # refused now, not by SIGBUS later
            except OSError:
                self._close()
                raise
        self._map: mmap.mmap | None = None
        self._mapped_by = -1
        self._met: set[int] = set()

    def map(self) -> mmap.mmap:
        """Returns this process's own mapping; after a fork a new one, since page-locked pages may not be inherited."""
        if self._map is None or self._mapped_by != os.getpid():
            self._map = kept_after_fork(mmap.mmap(self._fd, self.nbytes, mmap.MAP_SHARED))
            self._mapped_by = os.getpid()
            self._met = set()
        return self._map

    def window(self, offset: int, nbytes: int) -> Any:
        """Returns a weakly referable buffer on a part; tensors made of it keep it alive."""
        return (ctypes.c_uint8 * nbytes).from_buffer(self.map(), offset)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns a part as bytes (uint8); it keeps the mapping alive."""
        return torch.frombuffer(self.window(offset, nbytes), dtype=torch.uint8)

    def meet(self, offset: int, nbytes: int) -> None:
        """Maps the pages of a part into this process, the first time it is asked to, faster than writing to them would."""
        self.map()
        if offset not in self._met:
            self._met.add(offset)
            self.tensor(offset, nbytes)[::_FAULT_AROUND].sum()

    @property
    def address(self) -> int:
        """Returns where this process sees the block."""
        return ctypes.addressof(ctypes.c_uint8.from_buffer(self.map()))

    def close(self) -> None:
        """Closes the file; mappings live on as long as something refers to them."""
        self._map = None
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        return {"nbytes": self.nbytes, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.nbytes = state["nbytes"]
        self._fd = state["fd"].detach()
        self._close = weakref.finalize(self, os.close, self._fd)
        self._map, self._mapped_by, self._met = None, -1, set()


class Tokens:
    """The free ones of `count` slots, for any number of processes; no lock, so a process may die at any time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._read: Connection
        self._write: Connection
        self._read, self._write = Pipe(duplex=False)
        os.set_blocking(self._read.fileno(), False)
        self.put(*range(count))

    def take(self, timeout_s: float = 0.0) -> int | None:
        """Returns a free slot, waited for at most so long; None if there is none."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                read = os.read(self._read.fileno(), _TOKEN.size)
                return int(_TOKEN.unpack(read)[0])
            except BlockingIOError:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return None
                poll = select.poll()
                poll.register(self._read.fileno(), select.POLLIN)
                poll.poll(min(left_s, _LONGEST_POLL_S) * 1e3)

    def put(self, *slots: int) -> None:
        """Makes these slots free."""
        os.write(self._write.fileno(), b"".join(_TOKEN.pack(s) for s in slots))

    def close(self) -> None:
        """Closes this process's ends."""
        self._read.close()
        self._write.close()
