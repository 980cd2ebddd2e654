"""The raw row of one interval from step to step, and the accumulators that fill it."""

from __future__ import annotations

from typing import Any, NamedTuple

# What happened inside an interval, as bits.
EVALUATION = 1  # a trained module ran without gradient, or was switched to eval
SAVE = 2  # torch.save was called
EPOCH = 4  # a loader was started
COUNTED = 8  # FLOPs were counted, or a first record was written: our own doing
COMPILED = 16  # Dynamo compiled something
TIMED = 32  # the meter held this interval for a steady one when it ended
SKIPPED = 64  # a GradScaler skipped the update


class Row(NamedTuple):
    """One interval. Host times in ns of time.perf_counter_ns."""

    end_ns: int
    flags: int
    data_ns: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    own_ns: int
    pause_ns: int
    micro_batches: int
    samples: int | None
    tokens: int | None
    real_tokens: int | None
    shape: str
    data_dry: bool | None
    event: Any  # flopwise.meter.clock.Stamp of the end, or None on a CPU
    found_inf: Any  # the scaler's flag tensor of a fused optimizer, read after the measurement


class Brief(NamedTuple):
    """One interval of which only the end was taken: a short step between two that are looked at closely."""

    end_ns: int
    flags: int
    found_inf: Any


class Interval:
    """What has happened since the last step ended."""

    __slots__ = (
        "backward_ns",
        "backwards",
        "calls",
        "data_dry",
        "data_ns",
        "flags",
        "forward_from_ns",
        "forward_ns",
        "found_inf",
        "loader_samples",
        "loader_tokens",
        "optimizer_ns",
        "own_ns",
        "pause_ns",
        "real_known",
        "real_tokens",
        "root_calls",
        "root_samples",
        "root_tokens",
        "shapes",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts a new interval."""
        self.flags = 0
        self.data_ns = self.forward_ns = self.backward_ns = self.optimizer_ns = 0
        self.own_ns = self.pause_ns = 0
        self.calls = 0  # of our hooks
        self.backwards = 0
        self.forward_from_ns = 0  # 0: no forward is under way
        self.loader_samples = self.loader_tokens = self.real_tokens = 0
        self.root_samples = self.root_tokens = 0
        self.root_calls = 0  # of the root that was called first
        self.real_known = True  # every batch has shown its real tokens
        self.shapes: list[str] = []
        self.data_dry: bool | None = None
        self.found_inf: Any = None

    def shape(self) -> str:
        """Returns the signature of the interval's inputs: one shape, or the different ones joined."""
        shapes = self.shapes
        if not shapes:
            return ""
        return shapes[0] if len(shapes) == 1 else " + ".join(sorted(shapes)[:4])
