"""The input pipeline: batches on the device before the step asks for them.

`Prefetcher` moves batches on a stream of its own, `PinnedPool` and `collate_into` let workers collate into page-locked
shared memory, the consistency mode and `Watch` check batches on the device, `tune_loader` finds a loader's settings by
the time the device waits, and `decode_jpegs` with `RandomResizedCropBatch` does an image pipeline there.
"""

from __future__ import annotations

from flopwise.kit.input.barrier import Barrier
from flopwise.kit.input.collate import CollateInto, collate_into, slot_bytes_for
from flopwise.kit.input.crops import RandomResizedCropBatch
from flopwise.kit.input.findings import Inconsistency
from flopwise.kit.input.jpeg import JpegBatch, collate_jpegs, decode_jpegs
from flopwise.kit.input.loader_copy import LoaderChoice
from flopwise.kit.input.normalize import IMAGENET, Normalize
from flopwise.kit.input.packed import Packed, Unplaced
from flopwise.kit.input.pool import PinnedPool, PoolCounts
from flopwise.kit.input.prefetcher import Prefetcher
from flopwise.kit.input.registration import PinnedPlan, caching_allocator_bytes, plan_pinned
from flopwise.kit.input.trial import LoaderTrial
from flopwise.kit.input.tuner import Tuning, tune_loader
from flopwise.kit.input.watch import Watch

__all__ = [
    "IMAGENET",
    "Barrier",
    "CollateInto",
    "Inconsistency",
    "JpegBatch",
    "LoaderChoice",
    "LoaderTrial",
    "Normalize",
    "Packed",
    "PinnedPlan",
    "PinnedPool",
    "PoolCounts",
    "Prefetcher",
    "RandomResizedCropBatch",
    "Tuning",
    "Unplaced",
    "Watch",
    "caching_allocator_bytes",
    "collate_into",
    "collate_jpegs",
    "decode_jpegs",
    "plan_pinned",
    "slot_bytes_for",
    "tune_loader",
]
