"""What one process of a quality run leaves in its folder: the loss of each step, and when steps ended."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = "flopwise.curve/1"
#: Names of the files of one folder: rank and process.
PATTERN = "curve-*.json"


@dataclass(frozen=True)
class RecordedCurve:
    """The first steps of one process."""

    schema: str
    rank: int
    asked: int  # steps that were wanted
    #: By step: the sum of what backward was called on, unscaled. None: not seen, or not finite.
    losses: list[float | None]
    diverged: int | None  # the first step whose loss is not finite
    stamps: list[tuple[int, float]]  # (step, seconds from the import of torch to its end)
    notes: list[str] = field(
        default_factory=list
    )  # of the meter, what the plan switched on is in them
    offset: int = 0  # by which seeds were moved
    moved: dict[str, int] = field(default_factory=dict)  # calls whose seed was, by function
    trouble: str | None = None  # what kept it from being recorded
