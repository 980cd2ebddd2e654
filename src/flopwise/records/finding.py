"""A finding: one thing that costs a job time, or that its figures must be read with, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Alternative:
    """Something else that could be done about the same cause, and what that alone would give."""

    advice: str
    predicted_gain_frac: float | None  # as that of a finding


@dataclass(frozen=True)
class Finding:
    """One cause that was found in a run. A share or a gain that was not measured is None, never 0."""

    code: str  # e.g. "D101"; the list is in docs/findings.md
    cause: str  # the bad pattern, e.g. "input-wait"
    share_frac: (
        float | None
    )  # share of the time of a step that it takes (`evidence` says so where of the run)
    where: list[str]  # "file:line", or the variable that was set; empty: not known
    evidence: str  # what was seen, with its numbers
    advice: str  # what to do
    predicted_gain_frac: float | None  # predicted 1 - t_new / t_old, if only this were cured
    certainty: str  # "measured" | "counted" | "seen"
    #: Other cures of it, each instead of the advice: less work to put in, or less of a change to the numbers.
    alternatives: list[Alternative] = field(default_factory=list)
