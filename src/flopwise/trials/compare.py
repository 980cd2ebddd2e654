"""From pairs of blocks to a comparison: faster, slower, no different, or not shown.

A block counts with the *mean* of its steps: throughput is steps over time, and a stall that an arm
causes is part of what that arm costs. So nothing is trimmed; stalls widen the interval instead, and
are counted in the note.

The estimate is the mean log ratio of the pairs (`trials.sequential`). Drift is taken out of a pair
before it is used: the slope is the median of the last four differences between neighbouring pairs'
mean log times, per block. Those means hold both arms once, so they say nothing about which arm came
first, and the coin's argument stays exact.

Pairs may come from several processes (`start`), where a script is too short for enough of them. What is alike in one
process (the layout of its memory, where its threads run) then moves all of its pairs, and only another process can tell.
So the interval is the hull of two: that of all pairs, which is exact where the arms are equal in every process, and that of
the processes' means (`interval.among_processes`), which counts each process once. An outcome needs both.

"faster" and "slower" are withheld, as "not shown" with the reason in the note, where the trial
itself is in doubt: the A/A control finds a difference that cannot be, the blocks had not settled
after the switch, or the plain means of all steps point the other way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, median

from flopwise.records.verdict import Comparison
from flopwise.trials.interval import among_processes, independent_ratio
from flopwise.trials.schedule import Pair
from flopwise.trials.sequential import ConfidenceSequence, fewest_pairs

# The median of four follows a ramp, and one pair with a stall cannot bend it far: it spoils two.
DRIFT_DIFFERENCES = 4
#: From so many pairs on a trial may be given up that will not show a gain.
FUTILE_PAIRS = 12
STALL_RATIO = 3.0  # steps beyond this multiple of their block's median are counted in the note
_OUTCOMES = {-1: "faster", 0: "not shown", 1: "slower"}  # by the sign of the log ratio


class PairedComparison:
    """Accumulates pairs; says at any time what they show.

    Args:
        alpha: error probability of the interval over all looks, both sides: 0.05 gives 95 %.
        comparisons: number of fixes that are tried side by side; alpha is divided by it
            (Bonferroni), so that even one false "faster" among them has a chance below alpha / 2.
        margin_frac: a difference that does not matter. Where the whole interval lies between
            1 / (1 + margin) and 1 + margin, the outcome is "no different", even if it excludes 1.
            None: never.

    Raises:
        ValueError: comparisons under 1, a margin not above 0, or an alpha outside (0, 1).
    """

    def __init__(
        self, alpha: float = 0.05, comparisons: int = 1, margin_frac: float | None = None
    ) -> None:
        if comparisons < 1 or (margin_frac is not None and not margin_frac > 0):
            raise ValueError(f"{comparisons=} is at least 1, {margin_frac=} is above 0")
        self.alpha = alpha / comparisons
        self.margin_frac = margin_frac
        self._effect = _Arms(self.alpha)
        self._control = _Arms(alpha)
        self._halves: list[float] = []  # a pair: how much more the new arm's second half differs

    @property
    def pairs(self) -> int:
        """Returns the number of A/B pairs so far."""
        return self._effect.pairs

    @property
    def control_pairs(self) -> int:
        """Returns the number of A/A pairs so far."""
        return self._control.pairs

    @property
    def aa_ok(self) -> bool | None:
        """Returns whether the A/A interval covers 1, as it must; None: too few A/A pairs to say."""
        if self._control.pairs < fewest_pairs(self._control.sequence.alpha):
            return None
        return self._control.sequence.direction == 0

    def add(self, pair: Pair) -> None:
        """Takes a complete pair, A/B or A/A.

        Raises:
            ValueError: a block without steps, or a duration that is not positive and finite.
        """
        if not pair.old or not pair.new:
            raise ValueError(f"pair {pair.index} has a block without steps")
        if not all(math.isfinite(step) and step > 0 for step in (*pair.old, *pair.new)):
            raise ValueError(f"pair {pair.index}: a duration is positive and finite")
        if pair.control:
            self._control.add(pair)
        else:
            self._effect.add(pair)
            self._halves.append(_half_ratio(pair.new) - _half_ratio(pair.old))

    def start(self, process: int) -> None:
        """Tells that the pairs to come follow the earlier ones at some distance, and in which process they ran.

        With pairs of several processes, look only once a process has ended.
        """
        self._effect.start(process)
        self._control.start(process)

    @property
    def processes(self) -> int:
        """Returns how many processes the A/B pairs are from."""
        return self._effect.processes

    def outcome(self) -> str:
        """Returns "faster", "slower", "no different" or "not shown", as of now."""
        return self._judge()[0]

    def decided(self, min_pairs: int = 8, max_pairs: int = 200) -> bool:
        """Returns whether to stop: an outcome, a failed A/A control, or max_pairs reached.

        Stopping here is what the interval allows for: the error stays within alpha however often
        this is asked. Never before min_pairs, which guards against what no interval can know,
        stalls too rare to have been seen: each arm has then run min_pairs blocks.
        """
        if self.pairs < min_pairs:
            return False
        return self.pairs >= max_pairs or self.aa_ok is False or self.outcome() != "not shown"

    @property
    def unsettled(self) -> bool:
        """Returns whether an outcome is withheld for nothing but that blocks had not settled after a switch."""
        return bool(self._effect.direction) and self._judge()[1][:1] == [self._unsettled_words()]

    @property
    def wants_processes(self) -> bool:
        """Returns whether all pairs together show a difference, and only the processes are too few, or too unlike, for it."""
        return bool(self._effect.sequence.direction) and not self._effect.direction

    def futile(self, most_pairs: int) -> bool:
        """Returns whether to give up: so many pairs would not show a gain that can still be hoped for.

        Hoped for is what was seen and two standard errors more; what would show is the smallest effect to be detected,
        which shrinks with the square root of the number of pairs. Giving up calls nothing faster, so it costs power
        alone: a tenth of it for gains that just as many pairs would show in three of four trials (docs/trials.md).
        """
        n, sequence = self.pairs, self._effect.sequence
        if n < FUTILE_PAIRS or n >= most_pairs or sequence.direction:
            return False
        detectable = sequence.detectable()
        if detectable is None:
            return False
        hoped = 2 * sequence.spread / math.sqrt(n) - sequence.mean
        return hoped < detectable * math.sqrt(n / most_pairs)

    def comparison(self) -> Comparison | None:
        """Returns what the A/B pairs say; None while too few for an interval (`fewest_pairs`)."""
        outcome, reasons = self._judge()
        return self._effect.comparison(outcome, [*reasons, *self._remarks()])

    def control(self) -> Comparison | None:
        """Returns what the A/A pairs say ("not shown" is right); None while too few."""
        direction = self._control.sequence.direction
        return self._control.comparison(_OUTCOMES[direction], [])

    def _judge(self) -> tuple[str, list[str]]:
        """Returns the outcome, and why a faster or slower one was withheld."""
        direction = self._effect.direction
        reasons = []
        if self.aa_ok is False:
            reasons.append(
                f"the A/A control is off: {_of(self.control())}; the trial is not trusted"
            )
        unsettled = self._unsettled() if direction or self.margin_frac else 0.0
        if direction and unsettled and not self._lies_beyond(abs(unsettled)):
            reasons.append(self._unsettled_words())
        if direction and direction * self._effect.plain_log_ratio < 0:
            plain = math.exp(self._effect.plain_log_ratio)
            reasons.append(
                f"the plain means of all steps point the other way ({plain:.3f}): stalls"
            )
        if reasons:
            return "not shown", reasons
        if self.margin_frac is not None:
            room = math.log1p(self.margin_frac) - abs(unsettled)
            if self._lies_within(room) and abs(self._effect.plain_log_ratio) <= room:
                return "no different", []
        return _OUTCOMES[direction], []

    def _unsettled_words(self) -> str:
        return (
            "blocks had not settled after a switch: from their first half to their second, "
            f"steps change by {math.expm1(self._unsettled()):+.1%} more in the new arm than in "
            "the old; raise the wash-out"
        )

    def _lies_beyond(self, bias: float) -> bool:
        """Returns whether the interval excludes 0 by more than `bias`."""
        interval = self._effect.interval()
        return interval is not None and (interval[0] > bias or interval[1] < -bias)

    def _lies_within(self, room: float) -> bool:
        interval = self._effect.interval()
        return interval is not None and -room <= interval[0] and interval[1] <= room

    def _unsettled(self) -> float:
        """Returns how much more the new arm's steps change within a block than the old arm's do.

        A log ratio, 0.0 where it is within two standard errors (which is not an exact test, and
        need not be: a false alarm costs a few pairs). The bias of the ratio is about half of it.
        """
        n = len(self._halves)
        if n < 2:
            return 0.0
        contrast = math.fsum(self._halves) / n
        error = math.sqrt(math.fsum((x - contrast) ** 2 for x in self._halves) / (n - 1) / n)
        return contrast if abs(contrast) > 2 * error else 0.0

    def _remarks(self) -> list[str]:
        """Returns what a reader should know beside the outcome."""
        remarks = []
        if self._control.pairs and self.aa_ok is None:
            remarks.append(f"A/A control: {self._control.pairs} pairs, too few to judge")
        old, new = self._effect.stalls
        if old or new:
            remarks.append(
                f"stalls (steps over {STALL_RATIO:g}x their block's median): {old} in the old "
                f"arm, {new} in the new, of {self._effect.steps} steps each"
            )
        return remarks


class _Arms:
    """The running totals of one kind of pair."""

    def __init__(self, alpha: float) -> None:
        self.sequence = ConfidenceSequence(alpha)
        self.pairs = 0
        self.steps = 0  # timed steps an arm
        self.block_steps = 0
        self.stalls = (0, 0)  # old, new
        self._sums = (0.0, 0.0)  # of block means, old, new
        self._slopes: list[float] = []  # the last differences of pair means, per block
        self._last: tuple[int, float] | None = None  # index and mean log time of the pair before
        self._process = 0
        self._of_process: dict[int, list[float]] = {}  # the log ratios of each

    @property
    def processes(self) -> int:
        return len(self._of_process)

    @property
    def direction(self) -> int:
        """Returns -1 if the interval lies below 0, 1 if above, 0 if it covers 0."""
        own = self.sequence.direction
        among = self._among()
        if among is None or own == 0:
            return own
        return own if (among[1] < 0 if own < 0 else among[0] > 0) else 0

    def interval(self) -> tuple[float, float] | None:
        """Returns the interval for the log ratio: of all pairs, and of all processes if there are several."""
        own, among = self.sequence.interval(), self._among()
        if own is None or among is None:
            return own
        return min(own[0], among[0]), max(own[1], among[1])

    def detectable(self) -> float | None:
        """Returns the smallest effect that as many pairs would have shown."""
        interval, own, reach = self.interval(), self.sequence.interval(), self.sequence.detectable()
        if interval is None or own is None or reach is None:
            return None
        return reach + (interval[1] - interval[0] - own[1] + own[0]) / 2

    def start(self, process: int) -> None:
        self._process = process
        self._slopes, self._last = [], None

    def _among(self) -> tuple[float, float] | None:
        means = [math.fsum(logs) / len(logs) for logs in self._of_process.values()]
        return among_processes(means, self.sequence.alpha)

    @property
    def old_s(self) -> float:
        return self._sums[0] / self.pairs

    @property
    def new_s(self) -> float:
        return self._sums[1] / self.pairs

    @property
    def plain_log_ratio(self) -> float:
        return math.log(self.new_s / self.old_s)

    def add(self, pair: Pair) -> None:
        old, new = _mean_s(pair.old), _mean_s(pair.new)
        log_ratio = math.log(new / old)
        drift = self._drift_per_block(pair, (math.log(old) + math.log(new)) / 2)
        log_ratio += drift if pair.new_first else -drift
        self.sequence.add(log_ratio)
        self._of_process.setdefault(self._process, []).append(log_ratio)
        self.pairs += 1
        self.steps += len(pair.old)
        self.block_steps = len(pair.old)
        self._sums = self._sums[0] + old, self._sums[1] + new
        self.stalls = self.stalls[0] + _stalls(pair.old), self.stalls[1] + _stalls(pair.new)

    def comparison(self, outcome: str, notes: list[str]) -> Comparison | None:
        interval, detectable = self.interval(), self.detectable()
        if interval is None or detectable is None:
            return None
        mean = self.sequence.mean
        plain = self.plain_log_ratio
        if not interval[0] <= plain <= interval[1]:
            notes = [*notes, f"the plain means of all steps have the ratio {math.exp(plain):.4f}"]
        return Comparison(
            outcome=outcome,
            ratio=math.exp(mean),
            ci95=(math.exp(interval[0]), math.exp(interval[1])),
            pairs=self.pairs,
            block_steps=self.block_steps,
            old_s=self.old_s,
            new_s=self.new_s,
            spread_frac=self.sequence.spread,
            minimum_detectable_frac=-math.expm1(-detectable),
            note="; ".join(notes) or None,
            processes=self.processes,
        )

    def _drift_per_block(self, pair: Pair, mean_log: float) -> float:
        """Returns the growth of the log step time a block, from this pair and those before."""
        if self._last is not None:
            index, before = self._last
            self._slopes.append((mean_log - before) / (2 * (pair.index - index)))
            del self._slopes[:-DRIFT_DIFFERENCES]
        self._last = pair.index, mean_log
        return median(self._slopes) if len(self._slopes) > 1 else 0.0


def withheld(comparison: Comparison) -> bool:
    """Returns whether the interval excludes 1 although the outcome is "not shown"; the note says why."""
    low, high = comparison.ci95
    return comparison.outcome == "not shown" and not low <= 1 <= high


def withhold(comparison: Comparison, control: Comparison) -> Comparison:
    """Returns the comparison, its outcome withheld if a separate A/A trial does not cover 1."""
    if control.ci95[0] <= 1 <= control.ci95[1]:
        return comparison
    reason = f"the A/A control is off: {_of(control)}; the trial is not trusted"
    note = f"{reason}; {comparison.note}" if comparison.note else reason
    return replace(comparison, outcome="not shown", note=note)


def compare_runs(
    old_means_s: Sequence[float],
    new_means_s: Sequence[float],
    steps: int,
    margin_frac: float | None = None,
    comparisons: int = 1,
) -> Comparison:
    """Returns the comparison of fresh processes, paired in the order in which they ran.

    The number of processes is fixed beforehand: this interval is not for looking along the way
    (`trials.interval.independent_ratio`).

    Args:
        old_means_s: mean step time in seconds of each process, at least 3.
        new_means_s: the same for the new arm.
        steps: timed steps a process.
        margin_frac: see `PairedComparison`.
        comparisons: see `PairedComparison`; 1 for the final proof, which is one.

    Raises:
        ValueError: fewer than 3 processes an arm, unequal numbers, or a mean that is not positive.
    """
    ratio = independent_ratio(old_means_s, new_means_s, 1 - 0.05 / comparisons)
    outcome = "faster" if ratio.high < 1 else "slower" if ratio.low > 1 else "not shown"
    if margin_frac is not None:
        inside = 1 / (1 + margin_frac) <= ratio.low and ratio.high <= 1 + margin_frac
        outcome = "no different" if inside else outcome
    half = math.log(ratio.high / ratio.low) / 2
    reach = NormalDist().inv_cdf(0.8) * ratio.spread_frac / math.sqrt(ratio.pairs)
    return Comparison(
        outcome=outcome,
        ratio=ratio.ratio,
        ci95=(ratio.low, ratio.high),
        pairs=ratio.pairs,
        block_steps=steps,
        old_s=_mean_s(old_means_s),
        new_s=_mean_s(new_means_s),
        spread_frac=ratio.spread_frac,
        minimum_detectable_frac=-math.expm1(-half - reach),
    )


def _mean_s(steps_s: Sequence[float]) -> float:
    return math.fsum(steps_s) / len(steps_s)


def _half_ratio(steps_s: Sequence[float]) -> float:
    """Returns the log ratio of a block's second half to its first: below 0 while it settles."""
    half = len(steps_s) // 2
    if half == 0:
        return 0.0
    return math.log(_mean_s(steps_s[-half:]) / _mean_s(steps_s[:half]))


def _stalls(steps_s: Sequence[float]) -> int:
    limit = STALL_RATIO * median(steps_s)
    return sum(step > limit for step in steps_s)


def _of(comparison: Comparison | None) -> str:
    if comparison is None:
        return "no interval"
    low, high = comparison.ci95
    return f"{comparison.ratio:.3f} ({low:.3f}-{high:.3f}, {comparison.pairs} pairs)"
