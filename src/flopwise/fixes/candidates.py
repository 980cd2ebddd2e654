"""Fixes on trial: what is known of each, and the numbers of one alone and of several together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flopwise.fixes.interface import Applied, Eligible, Fix, unless_failed
from flopwise.fixes.slot import Slot, inner
from flopwise.meter.parity import compare_forward
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity


@dataclass
class Candidate:
    """A fix that is applied and being tried."""

    fix: Fix
    applied: Applied
    parity: Parity | None = None
    predicted_gain_frac: float | None = None  # 1 - t_new / t_old
    kept: bool = False
    out: bool = False  # it gained nothing, and stays off
    warmup_s: float = 0.0  # of this process so far


def promise(candidate: Candidate) -> float:
    """Returns by what fixes are ordered: the gain that was predicted, 0 where none was."""
    return candidate.predicted_gain_frac or 0.0


def clashes(one: Fix, other: Fix) -> bool:
    """Returns whether two fixes must not be on together, whichever of them says so."""
    return other.code in one.conflicts or one.code in other.conflicts


def predicted_gain(
    fix: Fix, answer: Eligible, findings: Mapping[str, float | None]
) -> float | None:
    """Returns the gain that was predicted for a fix: its own word, else that of the first finding that it cures."""
    if answer.predicted_gain_frac is not None:
        return answer.predicted_gain_frac
    return next((findings[code] for code in fix.findings if findings.get(code) is not None), None)


def parity_alone(
    applied: Applied,
    snapshot: Snapshot,
    reject: Callable[[list[torch.Tensor]], str | None] | None = None,
) -> Parity:
    """Returns how outputs, loss and gradients differ with one fix on, others as they are; it is off afterwards.

    Held against a float64 reference without any layer, with the coarsest unit roundoff of it and of the layers that are
    on. Not passed if the fix failed meanwhile: it had switched itself off.

    Args:
        snapshot: of a root module; the module inside DistributedDataParallel is compared.
        reject: see `compare_forward`.
    """
    module = inner(snapshot.module)
    slot = Slot.of(module)
    parity = compare_forward(
        snapshot._replace(module=module),
        applied.enable,
        applied.disable,
        unit_roundoff=max(applied.unit_roundoff or 0.0, slot.unit_roundoff()),
        bare=slot.bypassed,
        reject=reject,
    )
    return unless_failed(parity, applied)


def parity_together(applied: Sequence[Applied], snapshot: Snapshot) -> Parity:
    """Returns how outputs, loss and gradients differ with all of these on, against none of them; leaves them on.

    Held against a float64 reference with the unit roundoff of the coarsest. Fixes that do not touch the forward are
    judged apart and stay as they are.
    """
    inside = [a for a in applied if a.unit_roundoff is not None]
    numerics = "reordered" if any(a.unit_roundoff for a in inside) else "identical"

    def on() -> None:
        for a in inside:
            a.enable()

    def off() -> None:
        for a in reversed(inside):
            a.disable()

    if not inside:
        return Parity(
            numerics, True, None, None, None, 0.0, 1.0, 0.0, "", "nothing touches the forward"
        )
    off()
    try:
        return compare_forward(
            snapshot,
            on,
            off,
            numerics=numerics,
            unit_roundoff=max(a.unit_roundoff or 0.0 for a in inside),
        )
    finally:
        on()


class Together(Applied):
    """Several fixes as one: all on, or all off."""

    def __init__(self, tried: Sequence[Candidate]) -> None:
        self.setting = {}
        self._all = [candidate.applied for candidate in tried]

    def enable(self) -> None:
        for applied in self._all:
            applied.enable()

    def disable(self) -> None:
        for applied in reversed(self._all):
            applied.disable()

    def undo(self) -> None:
        for applied in reversed(self._all):
            applied.undo()

    def verify(self, snapshot: Snapshot) -> Parity:
        """Compares outputs, loss and gradients with all of them on; leaves them off."""
        try:
            return parity_together(self._all, snapshot)
        finally:
            self.disable()

    def settled(self) -> bool:
        return all(applied.settled() for applied in self._all)

    def failure(self) -> str | None:
        return next((reason for a in self._all if (reason := a.failure()) is not None), None)
