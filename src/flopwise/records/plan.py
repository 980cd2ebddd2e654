"""The plan: which fixes to apply to which script, with the evidence. Stored as plan.toml, read by people too."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = "flopwise.plan/2"
#: What is still read: /1 lacks the fields that have a default below.
OLDER = ("flopwise.plan/1",)


@dataclass(frozen=True)
class PlannedFix:
    """One fix of a plan."""

    code: str
    name: str
    setting: dict[str, str] = field(default_factory=dict)
    ratio: float | None = None  # measured t_new / t_old when it was kept
    ci95: tuple[float, float] | None = None
    #: Variables that the process starts with; only those that `plans.ENVIRONMENT` names are accepted.
    environment: dict[str, str] = field(default_factory=dict)
    warmup_s: float | None = None  # from switching it on to steady steps, compilation included
    changes: str | None = None  # of an opt-in: what it changes beside time and rounding


@dataclass(frozen=True)
class Plan:
    """Fixes for one script, on one kind of device and torch."""

    schema: str
    flopwise: str
    created: str
    script: str  # as given on the command line
    script_sha256: str  # of the file's bytes, "" where there is no file (-m, or a command)
    torch: str
    device: str  # device name, or the CPU's
    fixes: list[PlannedFix]
    ratio: float | None = None  # of the final proof
    ci95: tuple[float, float] | None = None
    step_s: float | None = None  # mean step of the proof with the fixes,
    bare_step_s: float | None = None  # and without
