"""One setting of a loader tried out: how long the device waited, and how surely."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.kit.input.loader_copy import LoaderChoice
from flopwise.kit.input.prefetcher import Prefetcher
from flopwise.kit.nested import tensors_in

#: Waiting comes in periods (a slow batch in every k-th), so steps are not independent: means of this many blocks are.
#: Source: the method of non-overlapping batch means (Schmeiser, Operations Research 30, 1982: 10 to 30 batches).
_BLOCKS = 10
#: A trial of fewer steps says nothing of its interval.
LEAST_STEPS = 2 * _BLOCKS
#: Student's t for 9 degrees of freedom, two-sided 95 %.
_T9 = 2.262

#: Steps before anything else, which may be slow.
_FIRST_STEPS = 2
#: A loader of very short epochs is begun again so often and no more.
_MOST_EPOCHS = 1000


@dataclass(frozen=True)
class LoaderTrial:
    """What one setting did. `wait_frac` is the share of the time in which the device waited, low..high its 95 % interval."""

    choice: LoaderChoice
    steps: int
    step_s: float
    wait_s: float  # a step
    wait_frac: float
    low_frac: float
    high_frac: float
    note: str = ""

    def row(self) -> str:
        """Returns the trial as a line of the table."""
        c = self.choice
        return (
            f"{c.num_workers:>7} {c.prefetch_factor or '-':>8} {'yes' if c.pin_memory else 'no':>6} {c.depth:>5} "
            f"{self.step_s * 1e3:>9.2f} {self.wait_s * 1e3:>9.2f} {self.wait_frac:>6.1%} "
            f"{self.low_frac:>6.1%} -{self.high_frac:>6.1%} {self.steps:>6}  {self.note}"
        ).rstrip()


HEAD = "workers prefetch pinned depth   step ms   wait ms   wait  95 % interval  steps"


class TrialRun:
    """Runs a step on a loader's batches and takes the time that the device waits for each."""

    def __init__(
        self,
        loader: Any,
        choice: LoaderChoice,
        device: torch.device | str | None,
        step: Callable[[Any], Any],
    ) -> None:
        self._loader, self._choice, self._device, self._step = loader, choice, device, step
        self.batch_bytes = 0  # of the first batch

    def measure(self, steps: int, end: float) -> LoaderTrial | None:
        """Returns what so many steps gave, or those until `end` (monotonic, seconds); None where there is no batch."""
        choice = self._choice
        batches = Prefetcher(self._loader, self._device, choice.depth, measure_wait=True)
        ready = choice.num_workers * (choice.prefetch_factor or 0) + choice.depth + 2
        steps = max(steps, 2 * choice.num_workers)  # those that begin together end together
        times: list[float | None] = []  # None: a batch that is not counted
        try:
            for step_s in self._steps(batches, ready):
                times.append(step_s)
                counted = len(times) - times.count(None)
                if counted >= steps or (counted >= LEAST_STEPS and time.monotonic() > end):
                    break
            rest_s = _drained(batches.device)
            waits = batches.waits_s()
        finally:
            batches.close()
        pairs = [(w, t) for w, t in zip(waits, times, strict=True) if t is not None]
        if not pairs:
            return None
        return trial_of(choice, [w for w, _ in pairs], [t for _, t in pairs], rest_s)

    def _steps(self, batches: Prefetcher, ready: int) -> Iterator[float | None]:
        """Yields the length of each step, seconds; None for batches that are not counted.

        The first steps may take seconds (they compile, allocate), in which the queue fills. What may be queued then is
        taken without the step: with it, workers that are hardly slower than the step would look fast for as long as the
        queue lasts. Then each worker's next batch gets the steps into their pace. An epoch shorter than that is begun
        again; its first step, which pays for the start, is not counted.
        """
        seen, queued = 0, range(_FIRST_STEPS + 1, _FIRST_STEPS + ready + 1)
        uncounted = queued.stop - 1 + max(1, self._choice.num_workers)
        for _ in range(_MOST_EPOCHS):
            count = 0
            began = time.perf_counter()
            for batch in batches:
                self.batch_bytes = self.batch_bytes or sum(t.nbytes for t in tensors_in(batch))
                seen, count = seen + 1, count + 1
                if seen not in queued:
                    self._step(batch)
                ended = time.perf_counter()
                yield ended - began if count > 1 and seen > uncounted else None
                began = ended
            if count < 2:
                return
            queued, uncounted = range(0), 0


def _drained(device: torch.device) -> float:
    """Returns how long the device was still busy with steps that the host was through with, seconds."""
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def trial_of(
    choice: LoaderChoice, waits: list[float], times: list[float], rest_s: float
) -> LoaderTrial:
    """Returns the trial of these waits and steps, seconds each; `rest_s` is what the device still did after the last."""
    step_s, wait_s = (sum(times) + rest_s) / len(times), statistics.fmean(waits)
    frac = min(1.0, wait_s / step_s) if step_s else 0.0
    size = len(waits) // _BLOCKS
    if size < 1:
        return LoaderTrial(choice, len(waits), step_s, wait_s, frac, 0.0, 1.0, "too few steps")
    means = [statistics.fmean(waits[k * size : (k + 1) * size]) for k in range(_BLOCKS)]
    half = _T9 * statistics.stdev(means) / _BLOCKS**0.5 / step_s
    return LoaderTrial(
        choice, len(waits), step_s, wait_s, frac, max(0.0, frac - half), min(1.0, frac + half)
    )
