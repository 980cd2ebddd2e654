"""A batch on its way from the loader to the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from flopwise.kit.input.findings import Stamp


@dataclass
class Counts:
    """How the bytes of plain tensors went to the device; a host copy is one by this process, after the worker's."""

    moved_bytes: int = 0
    host_copied_bytes: int = 0
    in_place_batches: int = 0  # read by the copy engine where they lay
    staged_batches: int = 0  # through the page-locked ring
    plain_batches: int = 0  # pageable, copied by the driver


@dataclass
class Times:
    """Where the time of reading ahead goes, seconds on the host; what is sent waits in one of the first three."""

    loader_s: float = 0.0  # for the loader's next batch
    copies_s: float = 0.0  # for copies: as many are queued as the ring holds
    steps_s: float = 0.0  # for steps: as many are queued as the ring holds
    loop_s: float = 0.0  # the loop's own, for a batch that was not sent yet


@dataclass
class Sent:
    """One batch: as it is handed to the loop, and what is needed to know that it is whole."""

    number: int  # of this pass over the loader
    batch: Any
    buffer: int = -1  # which of the ring, or slot of the pool
    step: int = -1  # of all batches handed over
    event: Any = None  # passes when it is on the device
    stamp: Stamp | None = None  # with consistency: what was sent
    header: torch.Tensor | None = None  # number, time and checksum as they came along
    raw: list[torch.Tensor] = field(default_factory=list)  # its tensors as they were sent
    parts: list[torch.Tensor] | None = None  # all that holds its memory, where that is known
    versions: list[int | None] = field(default_factory=list)

    def keep(self, raw: list[torch.Tensor], header: torch.Tensor | None) -> None:
        """Keeps what checks need."""
        self.raw, self.header = raw, header
        self.versions = [_version(tensor) for tensor in raw]

    def unchanged(self) -> bool:
        """Returns whether neither the loop nor a transform has written to the tensors through torch.

        Of tensors made in inference mode nobody knows: they count as written to.
        """
        return None not in self.versions and self.versions == [_version(t) for t in self.raw]


def _version(tensor: torch.Tensor) -> int | None:
    """Returns torch's count of writes; None for tensors made in inference mode, which have none."""
    return None if tensor.is_inference() else tensor._version
