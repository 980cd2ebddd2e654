"""What longer runs say of the losses, in words and in one short table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from flopwise.records.quality import Curve, Gap, Quality
from flopwise.records.verdict import TuneRecord
from flopwise.reports import figures
from flopwise.reports.screen import WARN, Column, Piece, Screen

#: Rows of the table.
ROWS = 6
_STYLES = {"same": "bold green", "worse": "bold red", "not shown": WARN}


def draw(screen: Screen, record: TuneRecord) -> None:
    """Draws the section, where there were longer runs."""
    quality = record.quality
    if record.worse is not None:
        screen.flow("quality", [(before(record.worse), WARN)])
    if quality is not None:
        took = record.time.quality_s if record.time is not None else 0.0
        said = verdict(quality)
        screen.flow("quality", [*said, f"took {figures.duration(took)}"] if took else said)
        _comparisons(screen, quality)
    if record.worse is not None or quality is not None:
        screen.blank()


def _comparisons(screen: Screen, quality: Quality) -> None:
    if quality.equal_steps is not None:
        screen.flow("equal steps", at_equal_steps(quality))
    if quality.equal_time is not None:
        screen.flow("equal time", at_equal_time(quality))
    if quality.seeding:
        screen.flow("seeds", [quality.seeding])
    body = rows(quality)
    if body:
        screen.blank()
        screen.table(COLUMNS, body)


COLUMNS = [
    Column("loss up to step", right=True),
    Column("as it is", right=True),
    Column("with the plan", right=True),
    Column("after", right=True, drop=1),
    Column("with the plan after", right=True, drop=2),
]


def verdict(quality: Quality) -> list[Piece]:
    """Returns the verdict with its reason."""
    said: list[Piece] = [(quality.verdict, _STYLES.get(quality.verdict, "")), quality.reason]
    runs = figures.counted(quality.seeds, "run")
    if quality.steps:
        said.append(f"{runs} of {figures.counted(quality.steps, 'step')} an arm")
    if 0 < quality.steps < quality.asked:
        said.append((f"{quality.asked} steps were asked for: the script ended before", WARN))
    return said


def at_equal_steps(quality: Quality) -> list[Piece]:
    """Returns both losses at the end of as many steps."""
    gap = quality.equal_steps
    assert gap is not None
    return [f"mean loss of the last {gap.window} of {quality.steps} steps", *_losses(gap)]


def at_equal_time(quality: Quality) -> list[Piece]:
    """Returns both losses after the same time, and how soon the plan comes to the bare script's last loss."""
    gap = quality.equal_time
    assert gap is not None
    said: list[Piece] = [f"after {figures.duration(quality.time_s or 0.0)}", *_losses(gap)]
    if quality.time_ratio is not None:
        share = figures.percent(quality.time_ratio)
        said.append(f"the loss at which the bare script ends is reached in {share} of its time")
    return said


def before(quality: Quality) -> str:
    """Returns what was found with the fixes that were taken out."""
    fixes = figures.few(quality.fixes, 8)
    return f"at first, with {fixes}: {quality.verdict}, {quality.reason}; fixes were taken out"


def rows(quality: Quality) -> list[list[Piece]]:
    """Returns the table's rows: means over runs, at some steps."""
    if not quality.old or not quality.new:
        return []
    steps = quality.old[0].steps
    some = (
        [steps[(i + 1) * len(steps) // ROWS - 1] for i in range(ROWS)] if len(steps) >= ROWS else []
    )
    return [
        [
            f"{step}",
            _mean(quality.old, step),
            _mean(quality.new, step),
            _time(quality.old, step),
            _time(quality.new, step),
        ]
        for step in some
    ]


def _losses(gap: Gap) -> list[Piece]:
    words: list[Piece] = [
        f"{gap.old:.4g} as it is, {gap.new:.4g} with the plan",
        f"difference {gap.difference:+.2g} ({gap.low:+.2g} to {gap.high:+.2g})",
        f"seeds alone differ by {gap.spread:.2g}",
    ]
    if gap.verdict == "worse":
        words.append(("worse", "bold red"))
    elif gap.verdict == "lower":
        words.append("lower with the plan")
    return words


def _mean(curves: Sequence[Curve], step: int) -> str:
    losses = [one.losses[one.steps.index(step)] for one in curves if step in one.steps]
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) < len(curves):
        return "-"
    spread = f" ± {stdev(known):.2g}" if len(known) > 1 else ""
    return f"{fmean(known):.4g}{spread}"


def _time(curves: Sequence[Curve], step: int) -> str:
    times = [
        one.times_s[one.steps.index(step)] for one in curves if step in one.steps and one.times_s
    ]
    return figures.duration(fmean(times)) if len(times) == len(curves) and times else "-"
