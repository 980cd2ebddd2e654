"""Comparisons of a script that is too short for them: pairs of blocks of several processes, judged after each of these.

Each process counts once for what its pairs have in common (`PairedComparison.start`), and comparisons are looked at only
when a process has ended, so that neither the number of pairs in one nor that of processes hangs on what was seen in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flopwise.records.pool import ALL, CONTROL, Standing, Turn
from flopwise.records.verdict import Comparison, Trial
from flopwise.trials.compare import PairedComparison, withheld, withhold
from flopwise.trials.schedule import MIN_PAIRS, Pair
from flopwise.trials.sequential import fewest_pairs

#: With so many times the pairs that an interval takes, of at least so many processes, a comparison is given up.
ENOUGH, ENOUGH_PROCESSES = 2, 3
#: In no case are there more pairs.
MOST_PAIRS = 40
#: Where blocks had not settled after a switch, they are compared anew with so many steps between.
LONG_WASHOUT_STEPS = 8
#: A difference that all pairs show gets so many processes to be shown in.
MOST_PROCESSES = 8


@dataclass
class Pools:
    """The turns of all processes of a trial."""

    turns: list[Turn] = field(default_factory=list)

    def pairs(self, what: str) -> int:
        """Returns how many pairs there are of a comparison as it stands."""
        return sum(len(turn.pairs) for turn in self.now(what))

    def now(self, what: str) -> list[Turn]:
        """Returns the turns of a comparison that were made as the last of them: beside the same fixes, with the same wash-out."""
        turns = [turn for turn in self.turns if turn.what == what and turn.pairs]
        return [turn for turn in turns if _manner(turn) == _manner(turns[-1])]

    def compared(self, what: str, comparisons: int) -> PairedComparison:
        """Returns a comparison of all pairs of all processes."""
        comparison, control = PairedComparison(comparisons=comparisons), what == CONTROL
        for turn in self.now(what):
            comparison.start(turn.process)
            for index, pair in enumerate(turn.pairs):
                old, new = tuple(pair.old), tuple(pair.new)
                comparison.add(Pair(index, old, new, pair.new_first, control))
        return comparison

    def control(self) -> Comparison | None:
        """Returns the A/A control, None while it has too few pairs."""
        if self.pairs(CONTROL) < MIN_PAIRS:
            return None
        return self.compared(CONTROL, 1).control()

    def all_on(self, comparisons: int, control: Comparison | None) -> Comparison | None:
        """Returns what all fixes together give, against none of them, None while that is not known."""
        found = self.compared(ALL, comparisons).comparison() if self.now(ALL) else None
        return found if found is None or control is None else withhold(found, control)

    def standings(self, comparisons: int) -> list[Standing]:
        """Returns how far each comparison has come, for the next process."""
        found = []
        for what in dict.fromkeys(turn.what for turn in self.turns):
            comparison, now = self.compared(what, comparisons), self.now(what)
            if not now:
                continue
            closed = what == ALL and over(comparison)
            pairs, washout = self.pairs(what), now[-1].washout_steps
            if comparison.unsettled and washout < LONG_WASHOUT_STEPS:
                pairs, washout = 0, LONG_WASHOUT_STEPS
            wants = comparison.wants_processes
            found.append(Standing(what, now[-1].beside, pairs, closed, washout, wants))
        return found


def _manner(turn: Turn) -> tuple[list[str], list[str], int]:
    return turn.beside, turn.codes, turn.washout_steps


def over(comparison: PairedComparison) -> bool:
    """Returns whether more pairs are not worth their time: there is an outcome, or none is to be hoped for."""
    n, least = comparison.pairs, max(MIN_PAIRS, fewest_pairs(comparison.alpha))
    if n < least:
        return False
    if comparison.processes < MOST_PROCESSES and (comparison.unsettled or comparison.wants_processes):  # fmt: skip
        return False  # with a longer wash-out, or another process, it may be shown
    many = n >= ENOUGH * least and comparison.processes >= ENOUGH_PROCESSES
    hopeless = many or n >= MOST_PAIRS or comparison.futile(MOST_PAIRS)
    return hopeless or comparison.outcome() != "not shown"


def judge(
    pools: Pools, codes: Sequence[str], comparisons: int, control: Comparison | None
) -> list[Trial]:
    """Returns the fixes of `codes` that have a verdict by now.

    Of those that gain nothing only the least promising gets its verdict: the others may gain once it is out. Their pairs
    were made beside it, and they begin anew.
    """
    judged: list[Trial] = []
    out = False
    for code in sorted(codes, key=lambda code: _promise(pools, code)):
        turns = pools.now(code)
        if not turns:
            continue
        comparison = pools.compared(code, comparisons)
        found = comparison.comparison()
        if found is None:
            continue
        found = found if control is None else withhold(found, control)
        if found.outcome == "faster":
            judged.append(_trial(turns, found, "kept"))
        elif not out and over(comparison):
            judged.append(_trial(turns, found, "not kept"))
            out = True
    return judged


def last_word(
    pools: Pools,
    codes: Sequence[str],
    trials: Sequence[Trial],
    comparisons: int,
    control: Comparison | None,
    why: str,
) -> list[Trial]:
    """Returns a verdict on each of `codes` that has pairs and for which there is no time any more.

    What cannot be told of one fix alone may be told of all together: where they were shown to be faster than none of
    them, and none of them had to be taken out since, they stay on together, for the final proof to judge.

    Args:
        pools: the pairs.
        codes: of the fixes.
        trials: so far.
        comparisons: so many fixes are compared.
        control: the A/A control.
        why: there will be no more pairs.
    """
    last: list[Trial] = []
    together = pools.all_on(comparisons, control)
    members = pools.now(ALL)[-1].known if together is not None else []
    out = {trial.fix for trial in trials if trial.verdict != "kept"}
    as_one = together is not None and together.outcome == "faster"
    as_one = as_one and not out & {trial.fix for trial in members}
    for code in codes:
        turns = pools.now(code)
        comparison = pools.compared(code, comparisons)
        found = comparison.comparison()
        if found is not None and control is not None:
            found = withhold(found, control)
        member = next((trial for trial in members if trial.fix == code), None)
        if as_one and together is not None and member is not None and not _loses(found):
            last.append(_as_one(member, turns, together, len(members), found))
        elif found is not None:
            last.append(_trial(turns, found, "not kept"))
        elif turns:
            least = fewest_pairs(comparison.alpha)
            pairs = f"{comparison.pairs} of the {least} pairs of blocks that an interval takes"
            reason = f"{why}; {pairs} were made in {_processes(comparison.processes)}"
            last.append(replace(_known(turns), verdict="declined", reason=reason))
    return last


def _loses(found: Comparison | None) -> bool:
    return found is not None and found.ci95[0] > 1


def _promise(pools: Pools, code: str) -> float:
    turns = pools.now(code)
    ratio = _known(turns).predicted_ratio if turns else None
    return 0.0 if ratio is None else 1 - ratio


def _trial(turns: Sequence[Turn], found: Comparison, verdict: str) -> Trial:
    where = f" ({found.pairs} pairs of blocks in {_processes(found.processes)})"
    if found.outcome == "faster":
        reason = f"{100 * (1 - found.ratio):.1f} % less time a step{where}"
    elif found.outcome == "slower":
        low, high = found.ci95
        reason = f"slower: a step takes {found.ratio:.4g}x as long (95 %: {low:.4g} to {high:.4g}){where}"
    elif withheld(found):
        reason = f"t_new / t_old {found.ratio:.3f} is not believed: {found.note}"
    else:
        least = f"a gain of {100 * found.minimum_detectable_frac:.1f} % would have been"
        reason = f"no gain shown: {least}{where}"
    return replace(
        _known(turns), verdict=verdict, reason=reason, ratio=found.ratio, ci95=found.ci95, comparison=found,
        warmup_s=_warmup_s(turns),
    )  # fmt: skip


def _known(turns: Sequence[Turn]) -> Trial:
    """Returns what is known of the fix that these turns are of."""
    return turns[-1].known[0]


def _as_one(
    known: Trial,
    turns: Sequence[Turn],
    together: Comparison,
    members: int,
    found: Comparison | None,
) -> Trial:
    """Returns a fix that stays on because all together are faster."""
    gain = f"{100 * (1 - together.ratio):.1f} % less time a step"
    where = f"{together.pairs} pairs of blocks in {_processes(together.processes)}"
    return replace(
        known,
        verdict="kept",
        reason=f"its own part was not shown in the time; all {members} fixes together: {gain} ({where})",
        ratio=found.ratio if found is not None else None,
        ci95=found.ci95 if found is not None else None,
        comparison=found,
        warmup_s=_warmup_s(turns),
    )


def _warmup_s(turns: Sequence[Turn]) -> float | None:
    """Returns the longest warm-up of any process: the first one may have compiled what the others found."""
    return max((_known([turn]).warmup_s or 0.0 for turn in turns), default=0.0) or None


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"
