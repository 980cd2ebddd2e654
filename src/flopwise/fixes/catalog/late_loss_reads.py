"""FW119 late-loss-reads: the loss that the script shows is the one of the step before."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import IterableDataset

from flopwise.fixes.batches import LAYERS, SEEN, Layer, Source
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, unless_failed
from flopwise.fixes.late_reads.reading import Place, Reads
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

#: Steps in which is looked for places that read the loss.
WATCHED_STEPS = 6
#: Reads in successive steps that make a place one that reads every step.
IN_A_ROW = 3


class LateLossReads(Fix):
    """The loss that the script shows is the one of the step before.

    What it does:
    `loss.item()`, `float(loss)` and a format of a loss wait until the device has computed it, and the device then waits
    for the host to launch the next step. Where the script only shows the value or sums it up, such a read is answered
    with the value that the same place read one step before, which has long arrived; the value of now is copied to
    pinned memory meanwhile. The first read, the first after a gap and the one in the last batch of each epoch are
    exact.

    Why it helps:
    The host is never behind the device: it launches the next step while this one is computed.

    When it declines:
    No read of a value was found in the run; the device is not a CUDA device; Python is older than 3.11; several
    optimizers train; batches do not come from a DataLoader with a length, so that the last one of an epoch is not
    known. A read stays exact where the tensor is no result of the differentiable part of the step (a
    gradient's norm, a loss that was detached), the line is not the script's own, the place is read several times a
    step or not in every step (every hundredth, say), or the source shows any use but print, format, log calls, progress bars,
    trackers, `+=`, `append`, `update` and reading these in such calls: a comparison, a condition, a return, an attribute,
    a call of any other function.

    What can change:
    Nothing of the training: no number on the device is touched. What is shown in a step is the loss of the step before: at
    one place, the values of an epoch of n steps are those of steps 1, 1, 2, ..., n - 2, n. A sum over the epoch has the
    first loss twice and lacks the last but one. A loss that is not finite shows one step later. Of an epoch that is
    left by `break` the last value is not exact. Calls are followed by their names only: a `log` of the script's own that
    ends the training at some loss would do so a step later.
    """

    code = "FW119"
    name = "late-loss-reads"
    causes = ("host-read",)
    findings = ("D201",)
    numerics = "identical"
    opt_in = True
    changes = (
        "what the script shows of its loss, not the training: values are those of the step before, except in the first step "
        "and in the last of each epoch"
    )

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether reads may be late."""
        reason = _problem(scene)
        return Declined(reason) if reason else Eligible("places that read the loss are looked for")

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off; places are looked for in the next steps."""
        return _Applied(scene.optimizers[0], scene.device.type)


class _Applied(Applied):
    def __init__(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self.setting = {}
        self._optimizer = weakref.ref(optimizer)
        self._steps = 0
        self._end = _EndOfEpoch()
        self._reason: str | None = None
        self._ready = False
        self.reads = Reads(kind, lambda: self._steps, lambda: self._end.is_last)
        self._handle: Any = None
        self._watch()

    def _watch(self) -> None:
        if self._handle is None:
            self._handle = torch_optimizer.register_optimizer_step_post_hook(self._stepped)
            LAYERS.put(self._end)
        self.reads.install()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._steps += optimizer is self._optimizer()

    def enable(self) -> None:
        if self.failure() is None:
            self._ready = True
            self._watch()
            self.reads.late = True

    def disable(self) -> None:
        self.reads.late = False
        self.reads.uninstall()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            LAYERS.remove(self._end)

    def undo(self) -> None:
        self.disable()

    def ready(self) -> bool:
        """Whether enough steps were seen to tell which places read the loss in every step."""
        if not self._ready and self._steps >= WATCHED_STEPS:
            self._ready = True
            self._conclude()
            self.disable()
        return self._ready

    def _conclude(self) -> None:
        good = [p for p in self.reads.places.values() if _reads_every_step(p)]
        if good:
            self.setting["places"] = ", ".join(sorted({p.where for p in good}))
        if not good:
            self._reason = self._reason or self._why_none()
        elif self._end.problem is not None:
            self._reason = self._end.problem

    def _why_none(self) -> str:
        """Returns why there is no place that may be late."""
        places = list(self.reads.places.values())
        if not places:
            return "no line of the script was seen to read its loss"
        said = [
            f"{p.where}: {p.problem or 'not read in every step'}"
            for p in sorted(places, key=lambda p: -p.seen)
        ]
        return "; ".join(said[:3])

    def settled(self) -> bool:
        return not self.reads.late or self.reads.answered > 0

    def failure(self) -> str | None:
        return self._reason

    def verify(self, snapshot: Snapshot) -> Parity:
        """Nothing of the training is touched."""
        self.disable()
        detail = (
            "no number on the device is touched; what the script shows is that of the step before"
        )
        parity = Parity(
            "identical", True, None, None, None, 0.0, 1.0, 0.0, "by construction", detail
        )
        return unless_failed(parity, self)


def _reads_every_step(place: Place) -> bool:
    return place.problem is None and place.in_a_row >= IN_A_ROW


class _EndOfEpoch(Layer):
    """Sees batches handed out, and tells the last of an epoch."""

    rank = SEEN

    def __init__(self) -> None:
        self.is_last = False
        self.problem: str | None = "no batch was seen to come from a DataLoader"

    def take(self, iterator: Any, inner: Source) -> Any:
        batch = inner.take()
        try:
            self.is_last = iterator._num_yielded + 1 >= len(iterator)
            self.problem = None
        except (TypeError, AttributeError, NotImplementedError):
            self.is_last = False
            self.problem = "the length of an epoch is not known"
        return batch

    def ready(self, iterator: Any, inner: Source) -> bool:
        return inner.ready()

    def unserved(self) -> list[Any]:
        return []


def _problem(scene: Scene) -> str | None:
    """Returns why no read may be late, or None."""
    planned = scene.step_s is None  # its cause was measured when the plan was made
    if not planned and "D201" not in scene.findings:
        return "no read of a value was found in the run"
    if scene.device.type != "cuda":
        return "a read waits for a CUDA device only"
    if sys.version_info < (3, 11):
        return "this Python does not tell where in a line a value is read"
    if len(scene.optimizers) != 1:
        return f"{len(scene.optimizers)} optimizers train, not one"
    if any(isinstance(loader.dataset, IterableDataset) for loader in scene.loaders):
        return "the length of an epoch is not known"
    return None
