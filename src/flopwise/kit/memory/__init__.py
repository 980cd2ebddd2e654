"""Memory: where it goes, what the allocator makes of it, and tensors whose layout costs time."""

from flopwise.kit.memory.allocator_counters import AllocatorState, allocator_state
from flopwise.kit.memory.allocator_settings import (
    CANDIDATES,
    compare_settings,
    environment,
    own_settings,
)
from flopwise.kit.memory.arguments import ArgumentError
from flopwise.kit.memory.audit import Audit, Misaligned, audit_alignment
from flopwise.kit.memory.channels_last import ChannelsLast, choose_channels_last
from flopwise.kit.memory.checkpointing import Checkpointing, checkpoint_blocks
from flopwise.kit.memory.conv_search import SearchChoice, choose_cudnn_benchmark, watch_shapes
from flopwise.kit.memory.copied_pages import CopiedObjects, PackedStrings, copied_objects
from flopwise.kit.memory.emptied_cache import EmptyCacheCost, empty_cache_cost, held_back
from flopwise.kit.memory.history import HistoryWatch, KeptHistory
from flopwise.kit.memory.padding import PaddedLayer, Padding, pad_dimensions
from flopwise.kit.memory.pinned import PinnedPlan, pinned_plan
from flopwise.kit.memory.settings_comparison import SettingsComparison, SettingsError
from flopwise.kit.memory.snapshot import (
    Fragmentation,
    SnapshotError,
    fragmentation,
    fragmentation_now,
    read_snapshot,
)
from flopwise.kit.memory.timeline import Moment, Timeline, memory_timeline

__all__ = [
    "CANDIDATES",
    "AllocatorState",
    "ArgumentError",
    "Audit",
    "ChannelsLast",
    "Checkpointing",
    "CopiedObjects",
    "EmptyCacheCost",
    "Fragmentation",
    "HistoryWatch",
    "KeptHistory",
    "Misaligned",
    "Moment",
    "PackedStrings",
    "PaddedLayer",
    "Padding",
    "PinnedPlan",
    "SearchChoice",
    "SettingsComparison",
    "SettingsError",
    "SnapshotError",
    "Timeline",
    "allocator_state",
    "audit_alignment",
    "checkpoint_blocks",
    "choose_channels_last",
    "choose_cudnn_benchmark",
    "compare_settings",
    "copied_objects",
    "empty_cache_cost",
    "environment",
    "fragmentation",
    "fragmentation_now",
    "held_back",
    "memory_timeline",
    "own_settings",
    "pad_dimensions",
    "pinned_plan",
    "read_snapshot",
    "watch_shapes",
]
