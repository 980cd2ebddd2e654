"""cuDNN's search for the fastest algorithm: on where image sizes repeat and it pays, off where they keep changing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from flopwise.kit.memory.arguments import need_module, need_step, need_whole
from flopwise.kit.memory.interleaved import Ratio, compare, synchronize
from flopwise.kit.memory.undisturbed import device_of, undisturbed, without_gradients
from flopwise.units import duration

#: Share of the later steps that may bring a new shape before shapes are called varying: the last, smaller batch of an
#: epoch is one in many. Our choice.
MOST_NEW_FRAC = 0.1
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_T = TypeVar("_T")


@dataclass
class ShapeWatch:
    """The shapes that a model's convolutions got, step by step."""

    shapes: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)  # by the layer's name
    first_s: list[float] = field(default_factory=list)  # steps in which some layer got a new shape
    again_s: list[float] = field(default_factory=list)  # the others

    @property
    def distinct(self) -> int:
        """Returns the most shapes that one layer got."""
        return max(map(len, self.shapes.values()), default=0)

    @property
    def varying(self) -> bool:
        """Returns whether new shapes keep coming after the first step."""
        later = len(self.first_s) + len(self.again_s) - 1
        return len(self.first_s) - 1 > MOST_NEW_FRAC * max(1, later)


@dataclass(frozen=True)
class SearchChoice:
    """What `torch.backends.cudnn.benchmark` is set to, and why."""

    on: bool
    reason: str
    watched: ShapeWatch
    measured: Ratio | None = None  # time of the step with the search's choices over that without
    search_s: float | None = None  # the first step with it
    first_peak_bytes: int | None = None  # the search tries algorithms with scratch memory
    peak_bytes: int | None = None  # of the steps after it

    def __str__(self) -> str:
        """Returns the choice in words."""
        text = f"cudnn.benchmark {'on' if self.on else 'off'}: {self.reason}"
        if self.search_s is not None:
            text += f"; the search took {duration(self.search_s)} in the first step"
        if self.first_peak_bytes is not None and self.peak_bytes is not None:
            text += (
                f", with a peak of {self.first_peak_bytes / 2**30:.2f} GiB for scratch memory of what it tried "
                f"({self.peak_bytes / 2**30:.2f} GiB afterwards)"
            )
        return text


def watch_shapes(module: nn.Module, step: Callable[[], object], steps: int) -> ShapeWatch:
    """Runs the step some times and returns the shapes that convolutions got and the times of the steps."""
    result, device = ShapeWatch(), device_of(module)
    new = [False]
    hooks = []
    for name, layer in module.named_modules():
        if isinstance(layer, _CONVOLUTIONS):
            shapes = result.shapes[name] = set()

            def note(_: Any, args: Any, shapes: set[tuple[int, ...]] = shapes) -> None:
                if (
                    args
                    and isinstance(args[0], torch.Tensor)
                    and tuple(args[0].shape) not in shapes
                ):
                    shapes.add(tuple(args[0].shape))
                    new[0] = True

            hooks.append(layer.register_forward_pre_hook(note))
    try:
        for _ in range(steps):
            new[0] = False
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            (result.first_s if new[0] else result.again_s).append(time.perf_counter() - start)
    finally:
        for hook in hooks:
            hook.remove()
    return result


def choose_cudnn_benchmark(
    module: nn.Module, step: Callable[[], object], *, steps: int = 20, rounds: int = 7
) -> SearchChoice:
    """Sets `torch.backends.cudnn.benchmark` by what the step's shapes and times say, and returns the choice.

    Off where new shapes keep coming, each of which would be searched for; on where they repeat and the step is shown to be
    faster with it. Call it before the model has run: what a thread has chosen for a shape once, it keeps.

    Source: aten/src/ATen/native/cudnn/Conv_v8.cpp keeps one cache of plans a thread, for both settings. So each setting is
    measured in a thread of its own, which runs its backward passes too.

    Args:
        step: forward and backward on the next batch, with autocast inside if it is used; gradients, buffers and random
            numbers are put back.
        steps: to watch, at first.
    """
    need_module("choose_cudnn_benchmark", module)
    need_step("choose_cudnn_benchmark", step)
    need_whole("choose_cudnn_benchmark", "steps", steps, least=2)
    need_whole("choose_cudnn_benchmark", "rounds", rounds)
    before = torch.backends.cudnn.benchmark
    device = device_of(module)
    run = without_gradients(module, step)
    try:
        with undisturbed(module), _Settings(device) as settings:
            watched = settings.off(lambda: watch_shapes(module, run, steps))
            choice = _choose(watched, run, settings, device, rounds, before)
    except BaseException:
        torch.backends.cudnn.benchmark = before
        raise
    torch.backends.cudnn.benchmark = choice.on if device.type == "cuda" else before
    return choice


class _Settings:
    """Two threads, each with cuDNN's choices of its own: with the search and without."""

    def __init__(self, device: torch.device) -> None:
        def start() -> None:
            torch.autograd.set_multithreading_enabled(False)
            if device.type == "cuda":
                torch.cuda.set_device(device)

        self._threads = {on: ThreadPoolExecutor(1, initializer=start) for on in (False, True)}

    def __enter__(self) -> _Settings:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def off(self, call: Callable[[], _T]) -> _T:
        """Returns what a call gives without the search."""
        return self._run(False, call)

    def on(self, call: Callable[[], _T]) -> _T:
        """Returns what a call gives with the search."""
        return self._run(True, call)

    def _run(self, on: bool, call: Callable[[], _T]) -> _T:
        torch.backends.cudnn.benchmark = on
        return self._threads[on].submit(call).result()


def _choose(
    watched: ShapeWatch,
    step: Callable[[], object],
    settings: _Settings,
    device: torch.device,
    rounds: int,
    before: bool,
) -> SearchChoice:
    n = len(watched.first_s) + len(watched.again_s)
    if not watched.distinct:
        why = "the step runs no convolution layer: left as it is"
        return SearchChoice(before, why, watched)
    seen = f"{watched.distinct} distinct shapes of one layer in {n} steps"
    if watched.varying:
        slow = f", first uses took {duration(median(watched.first_s))} (median)"
        again = f", others {duration(median(watched.again_s))}" if watched.again_s else ""
        why = (
            f"{seen}{slow}{again}: each would be searched for; bring sizes into a few buckets first"
        )
        return SearchChoice(False, why, watched)
    if device.type != "cuda":
        why = f"{seen}; there is no cuDNN on a {device.type}: left as it is"
        return SearchChoice(before, why, watched)
    search_s, first_peak = settings.on(lambda: _timed_step(step, device))
    _, peak = settings.on(lambda: _timed_step(step, device))
    ratio = compare(lambda: settings.off(step), lambda: settings.on(step), device, rounds=rounds)
    verdict = f"{seen}, {'faster' if ratio.faster else 'not shown to be faster'} with it: {ratio}"
    return SearchChoice(ratio.faster, verdict, watched, ratio, search_s, first_peak, peak)


def _timed_step(step: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Returns the time of one step, and the peak of reserved memory."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start, torch.cuda.max_memory_reserved(device)
