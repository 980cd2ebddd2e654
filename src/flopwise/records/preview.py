"""The preview: what a tune would try on a script and why, with nothing tried yet."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.records.verdict import Side

SCHEMA = "flopwise.tune-preview/1"


@dataclass(frozen=True)
class Prospect:
    """One fix, not tried."""

    code: str
    name: str
    outcome: (
        str  # "would be tried" | "declined" | "only if asked for" | "not asked for" | "unknown"
    )
    reason: str
    predicted_ratio: float | None  # t_new / t_old; None: no finding predicts it
    findings: list[str]  # of the script as it is that it cures: "CODE cause"
    opt_in: bool
    in_processes: bool  # tried in pairs of fresh processes, and not in a running one
    changes: str = ""  # of an opt-in: what it changes beside time and rounding


@dataclass(frozen=True)
class Preview:
    """One dry run."""

    schema: str
    flopwise: str
    created: str
    command: list[str]
    script: str
    baseline_folder: str
    baseline: Side
    fixes: list[Prospect]
    notes: list[str]
