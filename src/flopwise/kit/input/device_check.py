"""The consistency mode on a device: headers and checksums computed there, read on the host a step late, never waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.kit.input.checksum import device_checksum
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.findings import Judge, Stamp

#: Checks that may be outstanding before the oldest is waited for; a step has two.
MOST_OUTSTANDING = 256


@dataclass
class _Outstanding:
    step: int
    buffer: int
    wanted: Stamp
    result: torch.Tensor  # page-locked: number, checksum
    event: Any
    after: bool  # the check after use


class DeviceCheck:
    """Checks each batch where the loop gets it and again after the loop used it."""

    def __init__(self, surface: CudaSurface, judge: Judge) -> None:
        self._cuda, self._judge = surface, judge
        self._outstanding: deque[_Outstanding] = deque()

    def header(self, stamp: Stamp) -> torch.Tensor:
        """Returns the batch's number, time and checksum on the device, copied behind its tensors."""
        host = self._cuda.pinned_words(3)
        host.copy_(torch.tensor([stamp.number, stamp.sent_ns, stamp.checksum]))
        return host.to(self._cuda.device, non_blocking=True)

    def arrived(self, step: int, sent: Any, consumer: Any) -> None:
        """Queues the check of a batch on the consumer's stream, which is the current one."""
        sent.step = step
        self._cuda.record(sent.header, consumer)
        for tensor in sent.raw:
            self._cuda.record(tensor, consumer)
        self._queue(step, sent, consumer, after=False)

    def after(self, sent: Any, consumer: Any) -> None:
        """Queues the check of a batch that was used."""
        self._queue(sent.step, sent, consumer, after=True)

    def _queue(self, step: int, sent: Any, consumer: Any, after: bool) -> None:
        if [t._version for t in sent.raw] != sent.versions:
            return  # the loop or a transform changed the batch itself
        checksum = device_checksum(sent.raw, self._cuda.device)
        found = torch.stack([sent.header[0], sent.header[2], checksum])
        result = self._cuda.pinned_words(3)
        result.copy_(found, non_blocking=True)
        event = self._cuda.event()
        event.record(consumer)
        self._outstanding.append(_Outstanding(step, sent.buffer, sent.stamp, result, event, after))

    def read(self, wait: bool = False) -> None:
        """Judges the checks whose results have come; all of them if told to wait.

        Raises:
            ConsistencyError: something is wrong and findings are to be errors.
        """
        while self._outstanding:
            oldest = self._outstanding[0]
            if not oldest.event.query():
                if not wait and len(self._outstanding) < MOST_OUTSTANDING:
                    break
                oldest.event.synchronize()
            self._outstanding.popleft()
            number, _, checksum = oldest.result.tolist()
            if oldest.after:
                self._judge.kept(oldest.step, oldest.buffer, oldest.wanted, checksum)
            else:
                self._judge.arrived(oldest.step, oldest.buffer, oldest.wanted, number, checksum)
        self._judge.raise_new()
