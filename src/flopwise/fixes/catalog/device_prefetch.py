"""FW109 device-prefetch: the next batches go to the device on a stream of their own, while the step computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flopwise.fixes.ahead import Ahead, Link
from flopwise.fixes.batches import LAYERS
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, unless_failed
from flopwise.fixes.moves import Move, Moves
from flopwise.meter.parity import compare_batches
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

#: Batches that are sent before the script asks for them.
DEPTH = 2
#: Moves that take less than this share of a step could not be shown to matter, in a step an eighth as long either.
LEAST_FRAC = 0.0025
#: Pinned memory goes to the device at most so fast. Source: PCI Express 5.0, 16 lanes: 63 GB/s before packet headers.
LINK_BYTES_PER_S = 63e9
#: Steps after a switch until the ring is full and its first batch used.
SETTLING_BATCHES = DEPTH + 1
#: Device memory that is left alone.
SPARE_BYTES = 256 << 20


class DevicePrefetch(Fix):
    """Batches on the device before the step asks for them.

    What it does:
    Watches which tensors of a loader's batches the script moves to the device whole, then sends the next batches there
    ahead of use, on streams of their own, through page-locked memory. The script still gets its host batches; its own
    `.to(device)` or `.cuda()` of such a tensor returns the copy that is there. Batches are taken early only where
    worker processes have loaded them already, and their workers are given new work when they would have been, so
    nothing is drawn or loaded earlier than before. Without workers a batch is sent as soon as it is loaded.

    Why it helps:
    A plain `.to(device)` is in the way three times: the host waits until the copy is made, the device idles while it
    is, and a copy from pageable memory waits for everything that was queued before. Sent ahead, it runs beside the
    step's kernels.

    When it declines:
    Training is not on a CUDA device (without one, loader-workers is the cure); no DataLoader was seen; the script was
    not seen to move tensors of its batches whole and undisguised (cast on the way, or views of them); the moves take
    too little of a step; free device memory would not hold the batches in flight. Tensors that require gradients,
    are sparse, quantised or of a subclass go the script's own way.

    What can change:
    Nothing in the numbers: the copies are equal to the bit. A tensor that was written to since it was sent, or whose
    memory was given away (`.numpy()`, `data_ptr()`), is copied by the script's own call, as is a second move of the
    same tensor. `.to(device)` of such a batch no longer waits for kernels queued before it, so the host runs ahead by
    up to three steps. The device holds up to four batches more. While it is there, `torch.Tensor.to`, `cuda`, `numpy`
    and what else gives a tensor's memory away are wrapped.
    """

    code = "FW109"
    name = "device-prefetch"
    causes = ("exposed-copy", "input-wait", "pageable-copy")
    findings = ("L105", "D206", "L101")
    numerics = "identical"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether there are loaders and a CUDA device; what the moves cost is seen once it is applied."""
        if not scene.loaders:
            return Declined("no DataLoader was seen to feed the training")
        if scene.device.type != "cuda":
            return Declined(
                f"training runs on {scene.device.type}: there is no device to send batches to"
            )
        return Eligible("what the script's own moves take is looked at first")

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every training loader, switched off, watching what the script moves."""
        device = scene.device
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        scene = replace(scene, device=device)
        return _Applied(scene, CudaWay(device, DEPTH), planned=setting is not None)


class _Applied(Applied):
    def __init__(self, scene: Scene, link: Link, *, planned: bool = False) -> None:
        self.setting = {"depth": str(DEPTH)}
        self._scene, self._link, self._planned = scene, link, planned
        self._moves = Moves(scene.device)
        self._layer = Ahead(list(scene.loaders), self._moves, link, DEPTH)
        self._judged = False
        self._moves.install()
        LAYERS.put(self._layer)

    def enable(self) -> None:
        self._judge()
        self._layer.switch(True)

    def disable(self) -> None:
        self._layer.switch(False)

    def undo(self) -> None:
        LAYERS.remove(self._layer)
        self._layer.close()
        self._moves.remove()

    def ready(self) -> bool:
        return self._layer.watch.over

    def settled(self) -> bool:
        if self._layer.on:
            return self._layer.handed >= SETTLING_BATCHES
        return not self._layer.unserved()

    def failure(self) -> str | None:
        self._judge()
        return self._layer.failure

    def verify(self, snapshot: Snapshot | None = None) -> Parity:
        """Compares what arrives on the device with what a plain move brings there. Needs no snapshot of a forward."""
        self._judge()
        sample = self._layer.watch.sample
        if self._layer.failure is not None or self._layer.watch.places is None:
            return compare_batches([], [self._layer.failure])
        old, new = [], []
        try:
            kinds = [sample]
            if self._scene.device.type == "cuda":
                kinds.append([t.pin_memory() for t in sample])
            for tensors in kinds:
                sent = self._link.send(tensors)
                copies = self._link.hand_over(sent)
                for tensor, copy in zip(tensors, copies, strict=True):
                    self._link.meet(sent, copy, Move(self._scene.device, None, True, None))
                    plain = tensor.to(self._scene.device)
                    if plain.stride() != copy.stride() or plain.dtype != copy.dtype:
                        return compare_batches([], ["strides of a copy"])
                    old.append(tensor)
                    new.append(copy.cpu())
        except RuntimeError as error:
            return compare_batches([], [str(error)])
        return unless_failed(compare_batches(old, new), self)

    def _judge(self) -> None:
        """Says, once the watch is over, why nothing is to be sent, if so."""
        layer, watch = self._layer, self._layer.watch
        if self._judged or not watch.over or layer.failure is not None:
            return
        self._judged = True
        if watch.places is None:
            layer.failure = (
                "the script was not seen to move the tensors of its batches to the device whole"
            )
        else:
            layer.failure = self._cost_problem() or self._memory_problem()
        if layer.failure is not None:
            layer.switch(False)

    def _cost_problem(self) -> str | None:
        watch, step_s = self._layer.watch, self._scene.step_s
        if self._planned or not step_s:
            return None
        batch_s = max(watch.host_s, watch.nbytes / LINK_BYTES_PER_S) / watch.batches
        share = batch_s * self._scene.batches_per_step / step_s
        if share >= LEAST_FRAC:
            return None
        return f"moving batches to the device takes only {100 * share:.2f} % of a step"

    def _memory_problem(self) -> str | None:
        """Returns why the device would not hold what is in flight; with less room, less is sent ahead."""
        free = self._free_bytes()
        if free is None:
            return None
        batch_bytes = sum(t.nbytes for t in self._layer.watch.sample)
        for depth in range(DEPTH, 0, -1):
            needed = (2 * depth + 2) * batch_bytes + SPARE_BYTES
            if needed <= free:
                self._layer.depth = depth
                self.setting["depth"] = str(depth)
                return None
        return f"the device has {free >> 20} MiB free, batches in flight need {needed >> 20} MiB"

    def _free_bytes(self) -> int | None:
        if self._scene.device.type != "cuda":
            return None
        return int(torch.cuda.mem_get_info(self._scene.device)[0])


class CudaWay:
    """The kit's link to a CUDA device, for copies that the script asks for later, on whichever stream it likes."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device, self._depth = device, depth
        self._link: Any = None  # begun with the first batch
        self._cuda: Any = None
        self._sent = 0

    def send(self, tensors: list[torch.Tensor]) -> _OnItsWay:
        """Returns the tensors' copies on their way; the host does not wait for them."""
        if self._link is None:
            from flopwise.kit.input.cuda_link import CudaLink
            from flopwise.kit.input.cuda_surface import CudaSurface

            self._cuda = CudaSurface(self._device)
            self._link = CudaLink(self._cuda, self._depth, None, [], None)
        pinned = any(self._cuda.is_pinned(t) for t in tensors)
        with torch.inference_mode(False), torch.no_grad():
            sent = self._link.send(tensors, self._sent)
        self._sent += 1
        return _OnItsWay(sent, pinned)

    def hand_over(self, sent: _OnItsWay) -> list[torch.Tensor]:
        """Returns the copies; what the current stream is given next comes after them."""
        sent.stream = self._cuda.current_stream()
        return list(self._link.hand_over(sent.sent, sent.sent.number))

    def meet(self, sent: _OnItsWay, copy: torch.Tensor, move: Move) -> None:
        """Orders a copy before its use on the stream of now; waits for it only where its source may be written next."""
        now = self._cuda.current_stream()
        event = sent.sent.event
        if now != sent.stream:
            now.wait_event(event)
            self._cuda.record(copy, now)
        if move.waits and sent.pinned and not event.query():
            event.synchronize()

    def drop(self, sent: _OnItsWay) -> None:
        """Waits for what was sent, and gives it up."""
        self._link.drop(sent.sent)

    def close(self) -> None:
        """Waits for the copies and gives page-locked memory back."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


class _OnItsWay:
    __slots__ = ("pinned", "sent", "stream")

    def __init__(self, sent: Any, pinned: bool) -> None:
        self.sent, self.pinned = sent, pinned  # read from the script's own memory
        self.stream: Any = None
