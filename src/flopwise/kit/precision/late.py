"""What the scaler knows late: numbers of each step stay on the device and are read when the copy has arrived.

Each update writes one row: the largest magnitude of scaled gradients (inf or NaN in a skipped step, 0 in one that
was not looked at) and the scale. On a CUDA device rows are copied to page-locked memory every few updates, and an event says when they are there;
nothing waits. On a CPU they are read at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Review:
    """One revision of the scale, as it was read later."""

    update: int  # how many updates there had been
    amax: float  # largest magnitude of unscaled gradients in the updates looked at; 0 if all were skipped
    scale: float  # chosen
    # Of gradient entries, in float16 at the scale before the review; NaN: not looked at (several devices, a CUDA graph).
    subnormal_frac: float
    lost_frac: float  # that would round to zero
    zero_frac: float  # that are zero already

    def __str__(self) -> str:
        said = f"update {self.update}: max |grad| {self.amax:.3g}, scale {self.scale:g}"
        if math.isnan(self.subnormal_frac):
            return said
        return (
            f"{said}; of the gradients "
            f"{self.subnormal_frac:.2%} are subnormal in float16, {self.lost_frac:.2%} would be lost, "
            f"{self.zero_frac:.2%} are zero"
        )


#: Updates that the share of skipped ones is taken over.
RECENT = 100


@dataclass
class Known:
    """What has been read so far."""

    updates: int = 0
    skipped: int = 0
    in_a_row: int = 0  # skipped ones up to the last that was read
    scale: float | None = None  # that the last step that was read was made with
    amax: float | None = (
        None  # of the last step that was read; not finite if it was skipped, 0 if nobody looked
    )
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))  # whether skipped
    reviews: deque[Review] = field(default_factory=lambda: deque(maxlen=100))


#: Updates between two late reads on a CUDA device.
READ_EVERY = 10


class Late:
    """Rows of numbers on the device, and what of them has arrived on the host.

    Args:
        rows: that are kept.
        read_every: updates between two reads on a CUDA device; on a CPU each is read at once.
    """

    def __init__(self, rows: int, device: torch.device, read_every: int = READ_EVERY) -> None:
        self.ring = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        self._cells = [list(row.unbind()) for row in self.ring.unbind()]
        self.written = 0  # rows ever
        self._read = 0  # rows asked for
        self._every = min(read_every, rows) if device.type == "cuda" else 1
        self._pending: deque[tuple[torch.Tensor, Any, Any]] = deque()
        self.known = Known()

    def resume(self, rows: list[list[float]], updates: int, skipped: int) -> None:
        """Goes on from a checkpoint: the rows of its ring in their order, and its counts."""
        kept = rows[: len(self.ring)]
        if kept and (len(kept) == len(self.ring) or len(kept) == updates):
            self.ring[: len(kept)].copy_(torch.tensor(kept))
            self.written = self._read = updates
        self.known.updates, self.known.skipped = updates, skipped

    @property
    def row(self) -> int:
        """The row of `ring` that is written next."""
        return self.written % len(self.ring)

    def wrote(self) -> None:
        """Counts a row that was written to `ring` by someone else."""
        self.written += 1

    def write(self, amaxes: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        """Writes the row of an update: the largest scaled gradient, and the scale that it was made with."""
        cells = self._cells[self.row]
        amax = amaxes[0] if len(amaxes) == 1 else torch.stack(list(amaxes)).amax()
        torch._foreach_copy_(cells, [amax, scale])
        self.wrote()

    def recent(self) -> torch.Tensor:
        """Returns the rows since the ring was full last, [rows, 2], on the device."""
        return self.ring.narrow(0, 0, min(self.written, len(self.ring)))

    def ask(self, force: bool = False) -> None:
        """Starts the copy of rows that have not been asked for, if enough have gathered."""
        due = self.written - self._read
        if due and (force or due >= self._every):
            first, end = self._read % len(self.ring), (self.written - 1) % len(self.ring) + 1
            slices = [(first, end)] if first < end else [(first, len(self.ring)), (0, end)]
            for start, stop in slices:
                self._pending.append((*_copied(self.ring.narrow(0, start, stop - start)), None))
            self._read = self.written

    def ask_review(self, update: int, numbers: torch.Tensor) -> None:
        """Starts the copy of a review's numbers: amax, scale and three shares."""
        self._pending.append((*_copied(numbers), update))

    def arrived(self, wait: bool = False) -> list[Review]:
        """Takes in what has arrived, in order; returns the reviews among it.

        Args:
            wait: for everything that was asked for.
        """
        reviews = []
        while self._pending:
            host, event, update = self._pending[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._pending.popleft()
            if update is None:
                for amax, scale in host.tolist():
                    self._take(amax, scale)
            else:
                reviews.append(Review(update, *host.tolist()))
        self.known.reviews.extend(reviews)
        return reviews

    def _take(self, scaled: float, scale: float) -> None:
        known = self.known
        known.updates += 1
        amax = scaled / scale
        known.amax, known.scale = amax, scale
        known.recent.append(not math.isfinite(amax))
        if math.isfinite(amax):
            known.in_a_row = 0
        else:
            known.skipped += 1
            known.in_a_row += 1


def _copied(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Returns a copy on the host and the event of its arrival, None where it is there already."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return host, event
