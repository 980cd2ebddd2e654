"""What the parent knows about a job besides its rank records."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.hardware.accelerators import Peak
from flopwise.records.ceilings import CeilingsRecord


@dataclass(frozen=True)
class Context:
    """What the parent knows besides the rank records."""

    command: list[str]
    script: str
    exit_code: int | None = None
    peak: Peak | None = None  # given by the user
    price_usd_per_hour: float | None = None
    ceilings: CeilingsRecord | None = None  # of this device, measured, where they are known
    notes: list[str] = field(default_factory=list)
    created: str = ""
    plan: str | None = None  # path of the plan that was applied
