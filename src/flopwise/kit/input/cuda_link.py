"""The way of a batch to a CUDA device: on a stream of its own, fenced by events, beside the computing."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.device_check import DeviceCheck
from flopwise.kit.input.device_ring import DeviceRing
from flopwise.kit.input.findings import Judge, Stamp
from flopwise.kit.input.layout import dense_stride, is_plain
from flopwise.kit.input.leaves import Opaque, leaves_of, moved_by_itself, only_plain, wrapped
from flopwise.kit.input.packed import HEADER_WORDS, Packed
from flopwise.kit.input.pool import PinnedPool
from flopwise.kit.input.sent import Counts, Sent, Times
from flopwise.kit.input.staging import Stage
from flopwise.kit.nested import map_tensors, tensors_in

#: Streams that batches go on in turn.
COPY_STREAMS = 2


class CudaLink:
    """Sends batches on streams of its own and hands them to the stream on which the loop computes.

    Batches go on two streams in turn: while one is between a copy and the event behind it, the copy engine has the
    other's. What changes batches (transforms, normalising) keeps to one, where it runs in order.

    Two fences a buffer. On the way out: the consumer's stream waits for the copy's event. On the way back: page-locked
    memory is written again only after its copy's event, and device memory only after the consumer's stream is past its
    last use: by `record_stream` where each batch has memory of its own, by waiting for that stream where buffers are
    owned (`reuse`).
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
        times: Times | None = None,
        streams: int = COPY_STREAMS,
    ) -> None:
        self.counts = Counts()
        self._times = times if times is not None else Times()
        self._cuda = surface
        self._copies = [surface.new_stream() for _ in range(1 if changes else streams)]
        self._pool, self._changes, self._judge = pool, changes, judge
        self._consumer = consumer
        self._break_fence = break_fence
        self._stages = [Stage(k) for k in range(depth + 1)]
        self._ring = DeviceRing(surface, depth + 2, break_fence) if reuse else None
        self._check = DeviceCheck(surface, judge) if judge is not None else None
        self._in_flight: deque[tuple[Any, Any]] = deque()  # event, host memory until it passes
        self._in_use: deque[Any] = deque()  # events after which batches handed over are done with
        self._used: Sent | None = None  # what the loop was handed last
        self._used_on: Any = None
        self._consumers: list[Any] = []  # every stream that batches were handed to
        # Where the link is dropped and not closed: no page is unlocked that is still being read.
        weakref.finalize(self, _let_finish, self._copies).atexit = False

    # ------------------------------------------------------------------ where batches are read

    def send(self, item: Any, number: int) -> Sent:
        """Returns the batch on its way; the copy is queued, not done."""
        self._retire()
        batch = self._pool.unpack(item) if self._pool is not None else item
        packed = item if isinstance(item, Packed) else None
        plain = only_plain(batch)
        sent = Sent(
            number, batch if plain is not None else wrapped(batch), number % len(self._stages)
        )
        copy = self._stream_of(number)
        if any(t.device == self._cuda.device for t in plain or leaves_of(batch)):
            copy.wait_stream(self._cuda.current_stream())  # the loader made them on it
        with self._cuda.on(copy):
            stage, host = self._move(sent, packed, plain, copy)
            for change in self._changes:
                sent.batch, sent.parts = change(sent.batch), None
            sent.event = self._cuda.event()
            sent.event.record(copy)
        if stage is not None:
            stage.event = sent.event
        self._in_flight.append((sent.event, host))
        return sent

    def _stream_of(self, number: int) -> Any:
        """Returns the stream that a batch goes on: in turn, and owned buffers keep to theirs."""
        place = number % len(self._ring) if self._ring is not None else number
        return self._copies[place % len(self._copies)]

    def _move(
        self, sent: Sent, packed: Packed | None, only: list[torch.Tensor] | None, copy: Any
    ) -> tuple[Stage | None, list[Any]]:
        """Queues the copies; returns the block of the staging ring that they read, and what must stay until then.

        `only` are the batch's tensors where it is nothing else.
        """
        batch, host = sent.batch, list[Any]()
        plain = only if only is not None else [t for t in tensors_in(batch) if is_plain(t)]
        in_place = (packed is not None and packed.page_locked) or all(
            t.numel() == 0 or self._is_read_in_place(t) for t in plain
        )
        if packed is not None:
            sent.buffer = packed.slot
        header = self._header(sent, plain, packed, in_place) if self._judge is not None else []
        sources, stage = [*header, *plain], None
        if plain and not in_place:
            sources, stage = self._staged(sent, sources)
        self.counts.in_place_batches += bool(plain) and in_place
        targets = self._targets(sent.number, sources, copy)
        for target, source in zip(targets, sources, strict=True):
            self._cuda.copy(target, source)
        host.append(sources)
        if header:
            sent.keep(targets[1:], targets[0])
        ready = iter(targets[len(header) :])
        self.counts.moved_bytes += sum(t.nbytes for t in plain)
        if only is not None:
            sent.batch = map_tensors(batch, lambda _: next(ready))
            sent.parts = targets[len(header) :]
            return stage, host
        moved = map_tensors(batch, lambda t: next(ready) if is_plain(t) else self._other(t, host))
        sent.batch = map_tensors(moved, lambda leaf: self._opaque(leaf, host), Opaque)
        return stage, host

    def _is_read_in_place(self, tensor: torch.Tensor) -> bool:
        return self._cuda.is_pinned(tensor) and tensor.stride() == dense_stride(tensor)

    def _header(
        self, sent: Sent, plain: list[torch.Tensor], packed: Packed | None, in_place: bool
    ) -> list[torch.Tensor]:
        """Returns the batch's header, which takes the same way as its tensors: from the slot, or beside them."""
        known = packed.checksum if packed is not None else None
        checksum = host_checksum(plain) if known is None else known
        sent.stamp = Stamp(sent.number, time.time_ns(), checksum)
        if packed is not None:
            header = packed.header()
        elif in_place:
            header = self._cuda.pinned_words(HEADER_WORDS)
        else:
            header = torch.empty(HEADER_WORDS, dtype=torch.int64, device="cpu")
        header.copy_(sent.stamp.words())
        assert self._judge is not None
        self._judge.sent(sent.stamp)
        return [header]

    def _staged(
        self, sent: Sent, sources: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Stage | None]:
        """Returns page-locked copies and the block they lie in; the tensors themselves where there is none."""
        stage = self._stages[sent.number % len(self._stages)]
        if not self._break_fence:
            stage.wait()
        copies = stage.write(sources)
        if copies is None:
            self.counts.plain_batches += 1
            return sources, None  # the driver copies them before the call returns: safe, and slow
        self.counts.staged_batches += 1
        self.counts.host_copied_bytes += sum(t.nbytes for t in sources)
        return copies, stage

    def _targets(self, number: int, sources: list[torch.Tensor], copy: Any) -> list[torch.Tensor]:
        if self._ring is not None:
            return self._ring.targets(number, sources, copy, self._consumers)
        return [torch.empty_like(s, device=self._cuda.device) for s in sources]

    def _other(self, tensor: torch.Tensor, host: list[Any]) -> torch.Tensor:
        """Returns a tensor that is not just bytes, moved by its own `to`."""
        if tensor.device == self._cuda.device:
            return tensor
        host.append(tensor)
        return tensor.to(self._cuda.device, non_blocking=True)

    def _opaque(self, leaf: Opaque, host: list[Any]) -> Any:
        source, moved = moved_by_itself(leaf.value, self._cuda.device)
        host.append(source)
        return moved

    def _retire(self) -> None:
        """Drops host memory that the copy engine has read, oldest first; never more than the ring is kept.

        Also waits for the device where the loop has queued more steps than the ring is long: their batches are freed
        and still in use, and reading on would take new device memory for every step that the host is ahead.
        """
        begun = time.perf_counter()
        while len(self._in_use) > len(self._stages):
            self._in_use.popleft().synchronize()
        after = time.perf_counter()
        self._times.steps_s += after - begun
        self._let_go()
        self._times.copies_s += time.perf_counter() - after

    def _let_go(self) -> None:
        """Drops host memory that was read; waits for the oldest copy where as many are queued as the ring holds."""
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
        consumer = self._consumer_now()
        self.leave()
        if not (self._break_fence and self._ring is None):
            consumer.wait_event(sent.event)
        parts, sent.parts = sent.parts, None
        for tensor in leaves_of(sent.batch) if parts is None else parts:
            self._cuda.record(tensor, consumer)
        if self._check is not None:
            sent.step = step
            with self._cuda.on(consumer):
                self._check.arrived(sent, consumer)
            self._check.read()
        self._used, self._used_on = sent, consumer
        if consumer not in self._consumers:
            self._consumers.append(consumer)
        batch, sent.batch = sent.batch, None
        return batch

    def _consumer_now(self) -> Any:
        return self._consumer if self._consumer is not None else self._cuda.current_stream()

    def leave(self) -> None:
        """Marks that the loop has queued everything that uses the batch it was handed last."""
        used, on = self._used, self._used_on
        if used is None:
            return
        if self._check is not None:
            with self._cuda.on(on):
                self._check.after(used, on)
        if self._ring is None:
            over = self._cuda.event()
            over.record(on)
            self._in_use.append(over)  # the reading thread waits for what is in there
        self._used = None

    def finish(self) -> None:
        """Ends an epoch: the last batch is checked, and every outstanding check is read."""
        self.leave()
        if self._check is not None:
            self._check.read(wait=True)

    def mark(self) -> Any:
        """Returns a point on the consumer's stream, with its time."""
        event = self._cuda.event(timing=True)
        event.record(self._consumer_now())
        return event

    def span_s(self, start: Any, end: Any) -> float:
        """Returns the time between two points on the device, seconds; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def enter_thread(self) -> None:
        """Makes the device the reading thread's current one."""
        self._cuda.enter_thread()

    def streams(self) -> list[Any]:
        """Returns the streams that batches go through: those of copies and the consumer's."""
        consumer = self._used_on if self._used_on is not None else self._consumer_now()
        return [*self._copies, consumer]

    def drop(self, sent: Sent) -> None:
        """Forgets a batch that nobody will use, once its copy is over."""
        if sent.event is not None:
            sent.event.synchronize()
        sent.batch, sent.parts, sent.raw = None, None, []

    def close(self) -> None:
        """Waits for the copies and gives page-locked memory back."""
        for copy in self._copies:
            copy.synchronize()
        self._in_flight.clear()
        self._in_use.clear()
        for stage in self._stages:
            stage.release()
        self._used = None


def _let_finish(streams: list[Any]) -> None:
    for stream in streams:
        with suppress(RuntimeError):  # of work that failed, or a driver that shuts down
            stream.synchronize()
