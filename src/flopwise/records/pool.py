"""Pairs of blocks that one process of a trial has left, for the next ones to add to.

A script that ends before a comparison is decided is started again, and the pairs of all its processes are judged together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.records.verdict import Trial

#: What is compared where it is no single fix: all that are tried against none of them, and the script with itself.
ALL, CONTROL = "all", "A/A"


@dataclass(frozen=True)
class BlockPair:
    """Two finished blocks, adjacent in time: durations of their steps in seconds."""

    old: list[float]
    new: list[float]
    new_first: bool


@dataclass(frozen=True)
class Turn:
    """Pairs that ran one after another in one process."""

    process: int  # which of the tune's trial processes
    what: str  # code of a fix, or `ALL` or `CONTROL`
    beside: list[str]  # codes of the fixes that were on in both arms
    pairs: list[BlockPair] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)  # of the fixes that are on in the new arm only
    compared_s: float = 0.0  # what they took
    washout_steps: int = 2  # that were dropped after each switch
    #: The fixes as far as they are known without a verdict: setting, numbers, what was predicted.
    known: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class Standing:
    """How far a comparison has come in earlier processes."""

    what: str
    beside: list[str]
    pairs: int
    closed: bool = False  # it needs no more
    washout_steps: int = 2  # for the next pairs
    wants_processes: bool = (
        False  # all pairs show a difference, and only the processes are too few for it
    )


@dataclass(frozen=True)
class Shares:
    """What steady steps of the script were seen to be made of, before anything was applied."""

    step_s: float | None = None
    data_frac: float | None = None
    compute_frac: float | None = None
    optimizer_frac: float | None = None
    batches_per_step: float = 1.0
