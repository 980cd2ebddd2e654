"""Counts the FLOPs of one training step, from its real ops, from a CUDA graph's capture or from fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from flopwise.errors import AttachError
from flopwise.meter import count_stack
from flopwise.meter.count_fake import count_fake
from flopwise.meter.count_mode import CaptureMode, OpCounter
from flopwise.meter.count_roles import BACKWARD, FORWARD, Roles
from flopwise.meter.count_tally import merged
from flopwise.records.rank import FlopCount

__all__ = ["CaptureCounter", "StepCounter", "combine", "count_fake"]


class StepCounter:
    """Counts the ops of one real step: forward, backward, optimizer; same kernels, same random numbers, same bits.

    Code that torch.compile would run compiled runs eagerly while it counts, so a compiled model rather wants
    `count_fake`. Kernels that Python or C++ launches past torch's dispatcher are not seen (Triton's are noticed).
    """

    _method = "eager step"

    def __init__(
        self,
        shape: str,
        time_ops: bool = True,
        observer: Callable[[str, Any, Any, Any], None] | None = None,
    ) -> None:
        self._shape = shape
        self._timed = time_ops
        self._observer = observer  # told the name, arguments and result of every op
        self._mode: OpCounter | None = None
        self._roles = Roles()
        self._stance: object = None

    def start(self) -> None:
        """Begins to count the ops of this thread, and of the backward passes that it starts.

        Raises:
            AttachError: already counting; inside compiled code; or a hook that this leans on is missing.
        """
        if self._mode is not None:
            raise AttachError("this counter is already counting a step: stop it first")
        stance, mode = self._prepare()
        try:
            self._roles.install()
            count_stack.insert(mode)
        except BaseException:
            self._roles.remove()
            count_stack.restore(stance)
            raise
        mode.launches.install()
        mode.observer = self._observer
        self._stance, self._mode = stance, mode

    def stop(self) -> FlopCount:
        """Returns the FLOPs of the ops since `start`, and leaves everything as it was.

        Raises:
            AttachError: not counting; the mode was taken off by others; or the ops seen cannot have been a step.
        """
        mode, problem = self._detach()
        if mode is None:
            raise AttachError("this counter is not counting")
        if problem is not None:
            raise problem
        mode.tally.samples += mode.launches.samples
        mode.tally.notes.update(_blind_spots())
        count = mode.tally.count(self._shape, self._method)
        self._check(mode)
        return count

    def abandon(self) -> None:
        """Leaves a count that is under way. Never raises."""
        self._detach()

    def _prepare(self) -> tuple[object, OpCounter]:
        """Returns the undo of what keeps compiled code away from the mode, and the mode."""
        return count_stack.force_eager(), OpCounter(self._roles, self._timed)

    def _detach(self) -> tuple[OpCounter | None, AttachError | None]:
        mode, self._mode = self._mode, None
        if mode is None:
            return None, None
        mode.active = False  # should it still stand on some stack, it only passes ops on
        problem: AttachError | None = None
        for undo in (
            mode.launches.remove,
            lambda: count_stack.remove(mode),
            self._roles.remove,
            lambda: count_stack.restore(self._stance),
        ):
            try:
                undo()
            except AttachError as error:
                problem = error
            except Exception as error:
                problem = AttachError(
                    f"the counter could not be taken off cleanly ({type(error).__name__}: {error})"
                )
        self._stance = None
        return mode, problem

    def _check(self, mode: OpCounter) -> None:
        """Refuses a count that misses the forward pass: half a number is a wrong number."""
        devices = mode.tally.devices
        forward = devices.get(FORWARD, set()) | mode.tally.unknown_on
        if devices.get(BACKWARD, set()) - forward:
            raise AttachError(
                "a backward pass was seen but not its forward pass, which ran on another thread (nn.DataParallel), "
                "in compiled code, in a replayed CUDA graph or in a closure that the optimizer calls"
            )


class CaptureCounter(StepCounter):
    """Counts the ops issued while a CUDA graph is captured; their FLOPs belong to each of its replays.

    Start it when the capture begins and stop it when it ends. It times, reads and launches nothing in between, and
    leaves compiled code alone: what is captured is what would have been. A graph with compiled code is refused.
    """

    _method = "graph capture"

    def __init__(self, shape: str) -> None:
        super().__init__(shape, time_ops=False)
        self._compiled = 0

    def start(self) -> None:
        """Begins to count the ops of this thread.

        Raises:
            AttachError: the process has compiled code, whose kernels a dispatch mode does not see; or as `StepCounter`.
        """
        self._compiled = count_stack.compiled_frames()
        if self._compiled:
            raise AttachError(
                "a CUDA graph is captured in a process with compiled code, whose kernels cannot be seen without "
                "changing what is captured"
            )
        super().start()

    def _prepare(self) -> tuple[object, OpCounter]:
        return None, CaptureMode(self._roles, timed=False, in_place=True)

    def _check(self, mode: OpCounter) -> None:
        """Refuses a graph in which code was compiled; accepts a backward pass alone (`make_graphed_callables`)."""
        if count_stack.compiled_frames() != self._compiled:
            raise AttachError(
                "code was compiled while a CUDA graph was captured: its kernels were not seen"
            )


#: Extensions that multiply matrices in kernels which are no ops of torch's.
_PAST_TORCH = (
    "transformer_engine_torch",
    "fused_weight_gradient_mlp_cuda",  # Megatron's gradient accumulation fusion, from Apex
    "fused_dense_cuda",
    "selective_scan_cuda",
    "flash_attn_2_cuda",
)


def _blind_spots() -> list[str]:
    """Returns a note for each loaded extension whose products a dispatch mode does not see."""
    notes = []
    for name in _PAST_TORCH:
        if name not in sys.modules:
            continue
        if name == "flash_attn_2_cuda" and hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
            continue  # from 2.7 on its kernels are ops
        notes.append(
            f"{name} is loaded: products in its own kernels are not seen, the count may be too low"
        )
    return notes


def combine(shape: str, method: str, counts: list[FlopCount]) -> FlopCount:
    """Returns the sum of several counts: graphs that were replayed in a step and what ran beside them.

    The coverage is the lowest of them. Name a graph as often as it was replayed.
    """
    return merged(shape, method, counts)
