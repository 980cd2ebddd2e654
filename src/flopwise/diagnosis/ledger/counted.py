"""The FLOPs of one step as a live run counted them: what kernels without an operator in the trace can share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flopwise.records.rank import FlopCount


@dataclass(frozen=True)
class Counted:
    """FLOPs of one step on one device, by executed dtype ("bf16", "tf32", ...)."""

    needed: Mapping[str, float]  # of the model, attention counted full
    needed_causal: Mapping[str, float]  # the same, without what masks rule out
    #: What ran: `needed` and forwards that ran again. Without what fused kernels compute beyond what the model asks for.
    executed: Mapping[str, float] = field(default_factory=dict)
    source: str = "counted in the live run"

    @classmethod
    def of(cls, count: FlopCount, times: float = 1.0) -> Counted:
        """Returns the FLOPs of a step that does what was counted `times` times (backward passes over those counted)."""
        executed = {
            dtype: count.needed.get(dtype, 0) + count.repeated.get(dtype, 0)
            for dtype in {*count.needed, *count.repeated}
        }
        return cls(
            _scaled(count.needed, times),
            _scaled(count.needed_causal, times),
            _scaled(executed, times),
            f"counted in the live run ({count.method})",
        )

    @property
    def repeated(self) -> dict[str, float]:
        """FLOPs of forwards that ran again, by executed dtype."""
        extra = {d: n - self.needed.get(d, 0.0) for d, n in self.executed.items()}
        return {dtype: n for dtype, n in extra.items() if n > 0}


def left(counted: Mapping[str, float], mapped: Mapping[str, float]) -> dict[str, float]:
    """Returns what was counted beyond the FLOPs of a step's operators, by dtype.

    The total is never more than the difference of both totals, even where both name a dtype differently, nor below 0.
    """
    beyond = {d: n - mapped.get(d, 0.0) for d, n in counted.items() if n > mapped.get(d, 0.0)}
    total = max(0.0, sum(counted.values()) - sum(mapped.values()))
    share = min(1.0, total / sum(beyond.values())) if beyond else 0.0
    return {dtype: n * share for dtype, n in sorted(beyond.items()) if n * share > 0}


def _scaled(flops: Mapping[str, int | float], times: float) -> dict[str, float]:
    return {dtype: n * times for dtype, n in flops.items()}
