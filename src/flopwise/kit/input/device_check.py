"""The consistency mode on a device: headers and checksums computed there, read on the host a step late, never waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.kit.input.checksum import device_checksum
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.findings import Judge, Stamp
from flopwise.kit.input.sent import Sent

#: Checks that may be outstanding before the oldest is waited for; a step has two.
MOST_OUTSTANDING = 256


@dataclass
class _Outstanding:
    step: int
    buffer: int
    wanted: Stamp
    result: torch.Tensor  # page-locked: the header, and the checksum computed
    event: Any
    after: bool  # the check after use


class DeviceCheck:
    """Checks each batch where the loop gets it and again after the loop used it."""

    def __init__(self, surface: CudaSurface, judge: Judge) -> None:
        self._cuda, self._judge = surface, judge
        self._outstanding: deque[_Outstanding] = deque()

    def arrived(self, sent: Sent, consumer: Any) -> None:
        """Queues the check of a batch on the consumer's stream, which is the current one."""
        for tensor in (sent.header, *sent.raw):
            if tensor is not None:
                self._cuda.record(tensor, consumer)
        self._queue(sent, consumer, after=False)

    def after(self, sent: Sent, consumer: Any) -> None:
        """Queues the check of a batch that was used."""
        self._queue(sent, consumer, after=True)

    def _queue(self, sent: Sent, consumer: Any, after: bool) -> None:
        if sent.header is None or sent.stamp is None or not sent.unchanged():
            return  # the loop or a transform changed the batch itself
        checksum = device_checksum(sent.raw, self._cuda.device)
        found = torch.cat([sent.header, checksum.view(1)])
        result = self._cuda.pinned_words(4)
        result.copy_(found, non_blocking=True)
        event = self._cuda.event()
        event.record(consumer)
        self._outstanding.append(
            _Outstanding(sent.step, sent.buffer, sent.stamp, result, event, after)
        )

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
            *header, checksum = oldest.result.tolist()
            judge = self._judge.kept if oldest.after else self._judge.arrived
            judge(oldest.step, oldest.buffer, oldest.wanted, Stamp(*header), checksum)
        self._judge.raise_new()
