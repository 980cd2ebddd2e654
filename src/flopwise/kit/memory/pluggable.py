"""An allocator of one's own for CUDA memory, compiled here: sizes in multiples of 256 bytes, freed blocks kept by size.

It exists to be measured. torch's own allocator rounds to 512 bytes and knows streams; this one keeps freed blocks only for
the stream that they were made for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from flopwise.errors import FlopwiseError

#: cudaMalloc aligns to this at least. Source: CUDA C++ Programming Guide, "Device Memory Accesses".
GRANULE_BYTES = 256

_SOURCE = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/types.h>

/* Freed blocks, by rounded size and stream: lists in a table of chains. */
typedef struct Block { void *at; size_t size; int device; void *stream; struct Block *next; } Block;
#define CHAINS 4096
static Block *chains[CHAINS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long counts[4]; /* asked, reused, bytes asked, bytes given */
typedef int (*Malloc)(void **, size_t);
typedef int (*Free)(void *);
static Malloc take;
static Free give;

static size_t rounded(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }
static unsigned chain(size_t size) { return (unsigned)((size / GRANULE * 2654435761u) % CHAINS); }

/* Where cudaMalloc and cudaFree are; torch has loaded the runtime before this is called. */
int flopwise_connect(void *malloc_at, void *free_at) {
    take = (Malloc)malloc_at;
    give = (Free)free_at;
    return take && give;
}

void *flopwise_alloc(ssize_t size, int device, void *stream) {
    size_t want = rounded((size_t)size);
    if (!want) return NULL;
    pthread_mutex_lock(&lock);
    counts[0]++; counts[2] += size; counts[3] += want;
    for (Block **at = &chains[chain(want)]; *at; at = &(*at)->next) {
        Block *b = *at;
        if (b->size == want && b->device == device && b->stream == stream) {
            void *found = b->at;
            *at = b->next;
            counts[1]++;
            pthread_mutex_unlock(&lock);
            free(b);
            return found;
        }
    }
    pthread_mutex_unlock(&lock);
    void *fresh = NULL;
    if (!take || take(&fresh, want)) return NULL;
    return fresh;
}

void flopwise_free(void *at, ssize_t size, int device, void *stream) {
    if (!at) return;
    Block *b = malloc(sizeof *b);
    if (!b) { if (give) give(at); return; }
    b->at = at; b->size = rounded((size_t)size); b->device = device; b->stream = stream;
    pthread_mutex_lock(&lock);
    Block **head = &chains[chain(b->size)];
    b->next = *head;
    *head = b;
    pthread_mutex_unlock(&lock);
}

void flopwise_counts(long long *to) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4; i++) to[i] = counts[i];
    pthread_mutex_unlock(&lock);
}
"""


class CompileError(FlopwiseError):
    """The small allocator could not be compiled."""


def build(folder: str | Path) -> Path:
    """Compiles the allocator into a shared library in the folder and returns its path.

    Its functions `flopwise_alloc` and `flopwise_free` have the signatures that `torch.cuda.memory.CUDAPluggableAllocator`
    asks for; `flopwise_connect` is told first where cudaMalloc and cudaFree are.

    Raises:
        CompileError: there is no C compiler, or it fails.
    """
    compiler = (
        os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    )
    if not compiler:
        raise CompileError(
            "no C compiler (cc, gcc, clang) on the path: the pluggable allocator is left out"
        )
    source, library = Path(folder) / "pluggable.c", Path(folder) / "pluggable.so"
    source.write_text(_SOURCE)
    words = [compiler, "-O2", "-shared", "-fPIC", f"-DGRANULE={GRANULE_BYTES}", str(source)]
    done = subprocess.run([*words, "-lpthread", "-o", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{compiler} fails on the pluggable allocator: {done.stderr[-300:]}")
    return library
