"""What one rank's trace comes down to before the ranks meet: small enough to be sent between processes and machines."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flopwise.records.job import Defect
from flopwise.records.ledger import LedgerRecord

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: What a rank did between two calls, in ns; each is a column of `Calls.before`.
PARTS = ("compute", "copy", "input", "sync", "launch", "device", "other")


@dataclass(frozen=True, eq=False)
class Calls:
    """The collectives and point-to-point calls of one rank in the order of their start on the device.

    Times are ns since 1970 where the trace says when it begins. All columns have one entry a call.
    """

    start_ns: Ints
    end_ns: Ints
    launched_ns: Ints
    stream: Ints
    op: list[str]  # "all_reduce"; by its metadata, else by the kernel's name
    nbytes: Ints  # -1: not recorded
    dtype: list[str]  # "" where not known
    group: list[str]
    group_size: Ints  # -1: not known
    members: list[tuple[int, ...]]  # of the group; () where not known
    sequence: Ints  # of the call in its group; -1: not recorded
    peer: Ints  # of point-to-point calls; -1: none
    kernel: list[str]
    labelled: Mask  # it has metadata
    exposed_ns: Ints  # of it, no compute ran
    #: Where compute ran meanwhile: all stretches of all calls one after the other, ns from the call's start, shape (m, 2); those of
    #: call i are [covered_from[i], covered_from[i + 1]), shape (n + 1,).
    covered: Ints
    covered_from: Ints
    step: Ints  # the number of the step that it lies in, -1: in none that counts
    backward_pass: Ints  # the number of the backward pass that launched it; -1: none did
    updates: Mask  # launched by an optimizer's step
    tensors: list[tuple[int, ...]]  # addresses of what it is given; () where the trace has none
    #: What this rank did from the end of the call before to the start of this one, shape (n, len(PARTS)), ns.
    before: Ints
    place: list[str]  # the user's line, "" where not known
    #: What it had done since its first work by the start of each call, and by its end, shape (n, 2, len(PARTS)), ns; empty: not known.
    done: Ints = field(default_factory=lambda: np.zeros((0, 2, len(PARTS)), np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def shared(self) -> Mask:
        """Which calls more than one rank takes part in: of a group of one there is nobody to wait for."""
        alone = np.fromiter((len(each) == 1 for each in self.members), bool, len(self))
        found: Mask = (self.group_size > 1) | ((self.group_size < 1) & ~alone)
        return found


def no_calls() -> Calls:
    """Returns a rank's calls where there are none."""
    none = np.zeros(0, np.int64)
    return Calls(
        none, none, none, none, [], none, [], [], none, [], none, none, [], np.zeros(0, bool), none,
        np.zeros((0, 2), np.int64), np.zeros(1, np.int64), none, none, np.zeros(0, bool), [],
        np.zeros((0, len(PARTS)), np.int64), [],
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RankSummary:
    """One rank: its ledger, its calls and what is wrong with its trace."""

    path: str
    rank: int | None
    world_size: int | None
    device: int | None
    device_name: str | None
    ledger: LedgerRecord | None
    reason: str | None  # why there is no ledger
    bounds_ns: Ints  # of the steps on the device that count, shape (n + 1,)
    calls: Calls
    defects: list[Defect]
    #: By the name of kernels and copies, but for collectives: how many a step, and their mean duration in ns.
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    events: int = 0
    sm_mhz: float | None = None
    notes: list[str] = field(default_factory=list)
    lines_ns: list[dict[str, float]] = field(
        default_factory=list
    )  # of each recorded step that counts: line -> ns
