/* CUDA memory in multiples of 256 bytes: arenas from cudaMalloc, or one handed on by pointer, cut into pieces.

   Pieces of an arena form a list in the order of their addresses. A free one may be split, and is joined with free neighbours.
   A piece that was freed on a stream is given out again on that stream only: the device may still be working on it. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

#define GRANULE 256
#define CHAINS 8192

typedef struct Piece {
    char *at;
    size_t size;
    void *stream;   /* on which it was freed; of memory that was never used: ANY */
    int device, used, borrowed;
    struct Piece *before, *after;  /* neighbours in the arena */
    struct Piece *free_before, *free_after;
    struct Piece *chain;
} Piece;
typedef int (*Malloc)(void **, size_t);
typedef int (*Free)(void *);
typedef int (*Forget)(void);
enum { CALLS, REUSED, ASKED, GIVEN, PEAK_GIVEN, TAKEN, PEAK_TAKEN, DRIVER_ALLOCS, DRIVER_FREES, RETRIES, FAILED, PEAK_ASKED, SPLIT, COUNTS };

static char any;
#define ANY ((void *)&any)
static Piece *chains[CHAINS], *free_first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long counts[COUNTS];
static size_t arena_bytes;
static Malloc take;
static Free give;
static Forget forget;  /* the runtime's last error, which torch would take for one of its kernels' */

static unsigned chain_of(void *at) { return (unsigned)(((uintptr_t)at / GRANULE * 2654435761u) % CHAINS); }

static void link_free(Piece *p) {
    p->used = 0;
    p->free_before = NULL;
    p->free_after = free_first;
    if (free_first) free_first->free_before = p;
    free_first = p;
}

static void unlink_free(Piece *p) {
    if (p->free_before) p->free_before->free_after = p->free_after; else free_first = p->free_after;
    if (p->free_after) p->free_after->free_before = p->free_before;
}

static Piece *new_arena(char *at, size_t size, int device, int borrowed) {
    Piece *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->at = at; p->size = size; p->device = device; p->stream = ANY; p->borrowed = borrowed;
    link_free(p);
    counts[TAKEN] += size;
    if (counts[TAKEN] > counts[PEAK_TAKEN]) counts[PEAK_TAKEN] = counts[TAKEN];
    return p;
}

static void split(Piece *p, size_t want) {
    if (p->size == want) return;
    Piece *rest = calloc(1, sizeof *rest);
    if (!rest) return;
    *rest = *p;
    rest->at = p->at + want; rest->size = p->size - want;
    rest->before = p; rest->after = p->after;
    if (p->after) p->after->before = rest;
    p->after = rest; p->size = want;
    link_free(rest);
}

/* Joins a free piece with the one behind it, if that is free too, and of the same stream or never used. */
static void join(Piece *p) {
    Piece *q = p->after;
    if (!q || q->used || p->used) return;
    if (q->stream != p->stream && q->stream != ANY && p->stream != ANY) return;
    unlink_free(q);
    if (p->stream == ANY) p->stream = q->stream;
    p->size += q->size; p->after = q->after;
    if (q->after) q->after->before = p;
    free(q);
}

/* The smallest piece of the stream's own that is large enough; where it has none, one that was never used. */
static Piece *best(size_t want, int device, void *stream) {
    Piece *own = NULL, *unused = NULL;
    for (Piece *p = free_first; p; p = p->free_after) {
        if (p->size < want || p->device != device) continue;
        if (p->stream == stream && (!own || p->size < own->size)) {
            own = p;
            if (p->size == want) break;
        }
        if (p->stream == ANY && (!unused || p->size < unused->size)) unused = p;
    }
    return own ? own : unused;
}

static int give_back_free_arenas(void) {
    int n = 0;
    for (Piece *p = free_first, *next; p; p = next) {
        next = p->free_after;
        if (p->before || p->after || p->borrowed) continue;
        unlink_free(p);
        give(p->at);
        counts[DRIVER_FREES]++; counts[TAKEN] -= p->size;
        free(p);
        n++;
    }
    return n;
}

static Piece *from_driver(size_t want, int device) {
    size_t size = want > arena_bytes ? want : arena_bytes;
    void *at = NULL;
    if (!take) return NULL;
    if (take(&at, size)) {
        if (forget) forget();
        counts[RETRIES]++;
        give_back_free_arenas();
        size = want;
        if (take(&at, size)) {
            if (forget) forget();
            return NULL;
        }
    }
    counts[DRIVER_ALLOCS]++;
    return new_arena(at, size, device, 0);
}

/* Tells where cudaMalloc, cudaFree and cudaGetLastError are, the least bytes of an arena, and the pool, if there is one. */
int flopwise_connect(void *malloc_at, void *free_at, void *forget_at, size_t least_arena, void *pool, size_t pool_bytes, int device) {
    take = (Malloc)malloc_at;
    give = (Free)free_at;
    forget = (Forget)forget_at;
    arena_bytes = least_arena;
    if (pool && !new_arena(pool, pool_bytes / GRANULE * GRANULE, device, 1)) return 0;
    return take && give;
}

void *flopwise_alloc(ssize_t size, int device, void *stream) {
    size_t want = ((size_t)size + GRANULE - 1) / GRANULE * GRANULE;
    if (!want) return NULL;
    pthread_mutex_lock(&lock);
    counts[CALLS]++;
    Piece *p = best(want, device, stream);
    if (p) counts[REUSED]++;
    else p = from_driver(want, device);
    if (!p) {
        counts[FAILED]++;
        pthread_mutex_unlock(&lock);
        return NULL;
    }
    unlink_free(p);
    p->used = 1;
    split(p, want);
    p->chain = chains[chain_of(p->at)];
    chains[chain_of(p->at)] = p;
    counts[ASKED] += size; counts[GIVEN] += p->size;
    if (counts[ASKED] > counts[PEAK_ASKED]) counts[PEAK_ASKED] = counts[ASKED];
    if (counts[GIVEN] > counts[PEAK_GIVEN]) counts[PEAK_GIVEN] = counts[GIVEN];
    pthread_mutex_unlock(&lock);
    return p->at;
}

void flopwise_free(void *at, ssize_t size, int device, void *stream) {
    (void)device;
    if (!at) return;
    pthread_mutex_lock(&lock);
    Piece **link = &chains[chain_of(at)];
    while (*link && (*link)->at != at) link = &(*link)->chain;
    Piece *p = *link;
    if (p) {
        *link = p->chain;
        counts[ASKED] -= size; counts[GIVEN] -= p->size;
        p->stream = stream;
        link_free(p);
        join(p);
        if (p->before) join(p->before);
    }
    pthread_mutex_unlock(&lock);
}

void flopwise_counts(long long *to) {
    pthread_mutex_lock(&lock);
    counts[SPLIT] = 0;
    for (Piece *p = free_first; p; p = p->free_after)
        if (p->before || p->after) counts[SPLIT] += p->size;
    for (int i = 0; i < COUNTS; i++) to[i] = counts[i];
    pthread_mutex_unlock(&lock);
}
