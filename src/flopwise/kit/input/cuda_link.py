"""The way of a batch to a CUDA device: on a stream of its own, fenced by events, beside the computing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.device_check import DeviceCheck
from flopwise.kit.input.device_ring import DeviceRing
from flopwise.kit.input.findings import Judge, Stamp
from flopwise.kit.input.layout import is_plain
from flopwise.kit.input.leaves import Opaque, leaves_of, moved_by_itself, wrapped
from flopwise.kit.input.pool import Packed, PinnedPool
from flopwise.kit.input.staging import Stage
from flopwise.kit.nested import map_tensors, tensors_in


@dataclass
class Counts:
    """How the bytes of plain tensors went to the device; a host copy is one by this process, after the worker's."""

    moved_bytes: int = 0
    host_copied_bytes: int = 0
    in_place_batches: int = 0  # read by the copy engine where they lay
    staged_batches: int = 0  # through the page-locked ring
    plain_batches: int = 0  # pageable, copied by the driver


@dataclass
class Sent:
    """A batch on its way: `event` passes when it is on the device."""

    number: int
    batch: Any
    buffer: int
    event: Any = None
    host: Any = None  # what the copy engine reads; kept until the event has passed
    stamp: Stamp | None = None
    header: torch.Tensor | None = None
    raw: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the raw tensors, as they were sent
    stage: Stage | None = None
    step: int = -1


class CudaLink:
    """Sends batches on a copy stream and hands them to the stream on which the loop computes.

    Two fences a buffer. On the way out: the consumer's stream waits for the copy's event. On the way back: page-locked
    memory is written again only after its copy's event, and device memory only after the consumer's stream is past its
    last use: by `record_stream` where each batch has memory of its own, by an event where buffers are owned (`reuse`).
    """

    def __init__(
        self,
        surface: CudaSurface,
        depth: int,
        pool: PinnedPool | None,
        changes: list[Callable[[Any], Any]],
        judge: Judge | None,
        *,
        reuse: bool = False,
        consumer: Any = None,
        break_fence: bool = False,
    ) -> None:
        self.counts = Counts()
        self._cuda = surface
        self._copy = surface.new_stream()
        self._pool, self._changes, self._judge = pool, changes, judge
        self._consumer = consumer
        self._break_fence = break_fence
        self._stages = [Stage(k) for k in range(depth + 1)]
        self._ring = DeviceRing(surface, depth + 2, break_fence) if reuse else None
        self._check = DeviceCheck(surface, judge) if judge is not None else None
        self._in_flight: deque[tuple[Any, Any]] = deque()  # event, host memory until it passes
        self._last_consumer: Any = None
        self._used: Sent | None = None

    # ------------------------------------------------------------------ where batches are read

    def send(self, item: Any, number: int) -> Sent:
        """Returns the batch on its way; the copy is queued, not done."""
        self._retire()
        buffer = item.slot if isinstance(item, Packed) else number % len(self._stages)
        known = item.checksum if isinstance(item, Packed) else None
        batch = self._pool.unpack(item) if self._pool is not None else item
        sent = Sent(number, wrapped(batch), buffer)
        if any(t.device == self._cuda.device for t in tensors_in(batch)):
            self._copy.wait_stream(self._cuda.current_stream())  # the loader made them on it
        with self._cuda.on(self._copy):
            self._move(sent, known)
            for change in self._changes:
                sent.batch = change(sent.batch)
            sent.event = self._cuda.event()
            sent.event.record(self._copy)
        if sent.stage is not None:
            sent.stage.event, sent.stage = sent.event, None
        self._in_flight.append((sent.event, sent.host))
        sent.host = None
        return sent

    def _move(self, sent: Sent, known: int | None) -> None:
        batch = sent.batch
        plain = [t for t in tensors_in(batch) if is_plain(t)]
        if self._judge is not None:
            checksum = host_checksum(plain) if known is None else known
            sent.stamp = Stamp(sent.number, time.time_ns(), checksum)
            self._judge.sent(sent.stamp)
        sources = self._sources(sent, plain)
        targets = self._targets(sent.number, sources)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        self.counts.moved_bytes += sum(t.nbytes for t in plain)
        if sent.stamp is not None and self._check is not None:
            sent.header = self._check.header(sent.stamp)
            sent.raw, sent.versions = targets, [t._version for t in targets]
        ready = iter(targets)
        moved = map_tensors(batch, lambda t: next(ready) if is_plain(t) else self._other(t, sent))
        sent.batch = map_tensors(moved, lambda leaf: self._opaque(leaf, sent), Opaque)

    def _sources(self, sent: Sent, plain: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what the copy engine reads: the tensors where they lie, or page-locked copies."""
        if not plain:
            return plain
        if all(t.numel() == 0 or self._cuda.is_pinned(t) for t in plain):
            sent.host = plain
            self.counts.in_place_batches += 1
            return plain
        stage = self._stages[sent.number % len(self._stages)]
        if not self._break_fence:
            stage.wait()
        copies = stage.write(plain)
        if copies is None:
            self.counts.plain_batches += 1
            return plain  # the driver copies them before the call returns: safe, and slow
        sent.host, sent.stage = copies, stage
        sent.buffer = stage.index
        self.counts.staged_batches += 1
        self.counts.host_copied_bytes += sum(t.nbytes for t in plain)
        return copies

    def _targets(self, number: int, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._ring is not None:
            return self._ring.targets(number, sources, self._copy)
        return [torch.empty_like(s, device=self._cuda.device) for s in sources]

    def _other(self, tensor: torch.Tensor, sent: Sent) -> torch.Tensor:
        """Returns a tensor that is not just bytes, moved by its own `to`."""
        if tensor.device == self._cuda.device:
            return tensor
        sent.host = (sent.host, tensor)
        return tensor.to(self._cuda.device, non_blocking=True)

    def _opaque(self, leaf: Opaque, sent: Sent) -> Any:
        source, moved = moved_by_itself(leaf.value, self._cuda.device)
        sent.host = (sent.host, source)
        return moved

    def _retire(self) -> None:
        """Drops host memory that the copy engine has read, oldest first; never more than the ring is kept."""
        while self._in_flight:
            event, _ = self._in_flight[0]
            if not event.query():
                if len(self._in_flight) < len(self._stages):
                    return
                event.synchronize()
            self._in_flight.popleft()

    # ------------------------------------------------------------------ where the loop runs

    def hand_over(self, sent: Sent, step: int) -> Any:
        """Returns the batch for this step, ordered before whatever the loop launches on its stream next."""
        consumer = self._consumer if self._consumer is not None else self._cuda.current_stream()
        self._release(consumer)
        if not (self._break_fence and self._ring is None):
            consumer.wait_event(sent.event)
        if self._ring is None:
            for tensor in leaves_of(sent.batch):
                self._cuda.record(tensor, consumer)
        if self._check is not None and sent.stamp is not None:
            with self._cuda.on(consumer):
                self._check.arrived(step, sent, consumer)
            self._check.read()
        self._used, self._last_consumer = sent, consumer
        batch, sent.batch = sent.batch, None
        return batch

    def _release(self, consumer: Any) -> None:
        """Marks on the consumer's stream that the batches before are done with."""
        used = self._used
        if used is None:
            return
        if self._check is not None and used.stamp is not None:
            with self._cuda.on(consumer):
                self._check.after(used, consumer)
        if self._ring is not None:
            self._ring.release(used.number, consumer)
        used.raw = []

    def finish(self, step: int) -> None:
        """Ends an epoch: the last batch is checked, and every outstanding check is read."""
        if self._last_consumer is not None:
            self._release(self._last_consumer)
        self._used = None
        if self._check is not None:
            self._check.read(wait=True)

    def mark(self) -> Any:
        """Returns a point on the consumer's stream, with its time."""
        consumer = self._consumer if self._consumer is not None else self._cuda.current_stream()
        event = self._cuda.event(timing=True)
        event.record(consumer)
        return event

    def span_s(self, start: Any, end: Any) -> float:
        """Returns the time between two points on the device, seconds; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def enter_thread(self) -> None:
        """Makes the device the reading thread's current one."""
        self._cuda.enter_thread()

    def streams(self) -> list[Any]:
        """Returns the streams that batches go through: the copies' and the consumer's."""
        consumer = self._last_consumer if self._last_consumer is not None else self._consumer
        if consumer is None:
            consumer = self._cuda.current_stream()
        return [self._copy, consumer]

    def drop(self, sent: Sent) -> None:
        """Forgets a batch that nobody will use, once its copy is over."""
        if sent.event is not None:
            sent.event.synchronize()
        sent.batch, sent.raw = None, []

    def close(self) -> None:
        """Waits for the copies and gives page-locked memory back."""
        self._copy.synchronize()
        self._in_flight.clear()
        for stage in self._stages:
            stage.release()
        self._used = None
