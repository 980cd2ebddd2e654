"""Which arm runs when: randomised pairs of blocks, with wash-out steps after each block boundary.

A pair is two adjacent blocks, one of each arm, and a fair coin says which comes first. The coin is
the whole argument: if the arms do not differ, the sign of each pair's difference is a coin flip,
whatever the noise, the drift of the clocks or the autocorrelation of the steps may be
(`trials.sequential` builds on exactly this). A fixed order does not have that property: AB AB reads
a clock ramp as a gain, ABBA a disturbance with a period of four blocks
(benchmarks/trials_simulation.py shows both).

The schedule counts steps and never looks at their durations, so all ranks of a job that share a
seed switch at the same step. Wash-out steps follow every boundary, also where the arm stays the
same: otherwise the coin would shift the blocks in time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

FEWEST_BLOCK_STEPS = 4  # a block's halves are compared (trials.compare): two steps each
SHORTEST_BLOCK_S = 0.05  # several scheduler ticks (1-10 ms) and well above any clock's resolution
FEWEST_BLOCKS = 8  # of a series; fewer give no usable standard deviation
# What a tune asks for.
PLANNING_STEPS = 24  # steady steps that the block length is planned from
WASHOUT_STEPS = 2
MIN_PAIRS = 8


@dataclass(frozen=True)
class Pair:
    """Two finished blocks: step times in seconds, in the order of the steps, wash-out left out."""

    index: int  # position in the schedule, A/A control pairs included
    old: tuple[float, ...]
    new: tuple[float, ...]
    new_first: bool
    control: bool  # A/A: both blocks ran the old arm, "new" is only a label


@dataclass(frozen=True)
class Event:
    """What the step that just ended means for the schedule."""

    toggle: str | None  # the arm to switch to before the next step, None: stay
    pair: Pair | None  # a pair that is now complete


class Schedule:
    """Endless schedule of randomised pairs, fed once a step.

    Put `schedule.arm` in place before the first step, then after each step::

        event = schedule.advance(step_s)
        if event and event.toggle: ...  # switch to this arm
        if event and event.pair: ...    # compare

    Where durations arrive late (CUDA events that are resolved without a synchronisation), call
    `tick()` when a step ends and `feed(step_s)` when its duration is known, in the order of the
    steps; `advance` is both at once.

    Args:
        seed: of the coin; equal seeds give equal schedules.
        block_steps: timed steps a block, at least 4.
        washout_steps: dropped at the start of each block. They must cover what the other arm leaves
            behind: batches already prefetched, steps already issued to the device, the first call
            after a switch.
        control_every: every n-th pair is an A/A control; 0: none; 1: all of them, an A/A trial.

    Raises:
        ValueError: block_steps under 4, or a negative washout_steps or control_every.
    """

    def __init__(
        self, seed: int, block_steps: int, washout_steps: int = 2, control_every: int = 0
    ) -> None:
        if block_steps < FEWEST_BLOCK_STEPS:
            raise ValueError(f"block_steps is {block_steps}, at least {FEWEST_BLOCK_STEPS}")
        if washout_steps < 0 or control_every < 0:
            raise ValueError(f"negative: {washout_steps=}, {control_every=}")
        self.block_steps = block_steps
        self.washout_steps = washout_steps
        self.control_every = control_every
        self._coin = random.Random(seed)
        self._index = -1  # of the pair whose steps are running
        self._second = True  # whether its second block is running
        self._new_first = False
        self._position = 0  # kept steps of the running block, wash-out included
        self._slots: deque[_Slot] = deque()  # steps that ended and whose duration is not known yet
        self._times: list[float] = []  # durations of the pair that is being filled
        self._next_block()

    @property
    def control(self) -> bool:
        """Returns whether the running pair is an A/A control."""
        return self.control_every > 0 and (self._index + 1) % self.control_every == 0

    @property
    def arm(self) -> str:
        """Returns the arm that the step now running belongs to: "old" or "new"."""
        labelled_new = self._new_first != self._second
        return "new" if labelled_new and not self.control else "old"

    @property
    def timed(self) -> bool:
        """Returns whether the step now running will be used (it is not a wash-out step)."""
        return self._position >= self.washout_steps

    def tick(self, keep: bool = True) -> str | None:
        """Returns the arm to switch to now that a step has ended, None to stay.

        Args:
            keep: False for a step that is no measurement (it held an evaluation, a checkpoint, a
                compilation): it does not count, and the block goes on one step longer.
        """
        last = self._position + 1 == self.washout_steps + self.block_steps
        done = keep and last and self._second
        self._slots.append(
            _Slot(keep and self.timed, self._index, self._new_first, self.control, done)
        )
        if not keep:
            return None
        self._position += 1
        if not last:
            return None
        before = self.arm
        self._next_block()
        return self.arm if self.arm != before else None

    def feed(self, step_s: float) -> Pair | None:
        """Returns the pair that this duration completes, if any.

        Args:
            step_s: duration in seconds of the oldest step that was ticked and not yet fed.

        Raises:
            ValueError: no step waits for its duration, or a timed step's duration is not a positive
                finite number.
        """
        if not self._slots:
            raise ValueError("a duration without a step: call tick() when a step ends, then feed()")
        slot = self._slots[0]
        if slot.timed:
            if not (math.isfinite(step_s) and step_s > 0):
                raise ValueError(f"step_s is {step_s}: a duration is positive and finite")
            self._times.append(step_s)
        self._slots.popleft()
        if not slot.completes_pair:
            return None
        first = tuple(self._times[: self.block_steps])
        second = tuple(self._times[self.block_steps :])
        self._times = []
        old, new = (second, first) if slot.new_first else (first, second)
        return Pair(slot.pair_index, old, new, slot.new_first, slot.control)

    def advance(self, step_s: float, keep: bool = True) -> Event | None:
        """Returns what the step that just ended means: a toggle, a complete pair, both, or None.

        Args:
            step_s: its duration in seconds.
            keep: see `tick`.

        Raises:
            ValueError: see `feed`.
        """
        toggle = self.tick(keep)
        pair = self.feed(step_s)
        return Event(toggle, pair) if toggle is not None or pair is not None else None

    def _next_block(self) -> None:
        self._position = 0
        self._second = not self._second
        if not self._second:
            self._index += 1
            self._new_first = bool(self._coin.getrandbits(1))


class _Slot(NamedTuple):
    """A step that ended."""

    timed: bool
    pair_index: int
    new_first: bool
    control: bool
    completes_pair: bool


@dataclass(frozen=True)
class BlockPlan:
    """How long blocks should be, and what that buys."""

    block_steps: int
    washout_steps: int
    spread_frac: float  # expected standard deviation of the log ratio of one pair
    pairs: int  # pairs that fit into the budget, at least 1
    extrapolated: bool  # the blocks are longer than the series could show; spread_frac is a hope


def plan_blocks(
    steps_s: Sequence[float],
    *,
    target_spread_frac: float = 0.01,
    budget_s: float = 120.0,
    pairs: int = 30,
    washout_steps: int = 2,
) -> BlockPlan:
    """Returns the shortest block whose pairs are quiet enough, from steps of the old arm.

    Short blocks cancel slow noise and drift; long ones average fast noise and waste less on
    wash-out. The series is cut into blocks, whose neighbours serve as pairs, so that its own
    autocorrelation and stalls are in the answer, and the block is doubled until the spread of their
    log ratios is within the target. Where the series is too short for eight blocks of a length, the
    spread is extrapolated with the square root of the length (which hopes for independent steps,
    and is said). Blocks never grow beyond what lets `pairs` pairs fit into the budget.

    Args:
        steps_s: durations in seconds, in order, warm-up left out; at least 8.
        target_spread_frac: wanted standard deviation of one pair's log ratio.
        budget_s: wall time for the trial.
        pairs: pairs that should fit into it.
        washout_steps: see `Schedule`.

    Raises:
        ValueError: fewer than 8 steps, or a duration that is not positive.
    """
    if len(steps_s) < FEWEST_BLOCKS:
        raise ValueError(f"{len(steps_s)} steps, at least {FEWEST_BLOCKS} are needed")
    if not all(math.isfinite(step) and step > 0 for step in steps_s):
        raise ValueError("a duration is positive and finite")
    step_s = math.fsum(steps_s) / len(steps_s)
    shortest = max(FEWEST_BLOCK_STEPS, math.ceil(SHORTEST_BLOCK_S / step_s))
    longest = max(shortest, int(budget_s / (2 * pairs * step_s)) - washout_steps)
    visible = len(steps_s) // FEWEST_BLOCKS  # the longest block that the series shows
    block = shortest
    while True:
        seen = min(block, visible)
        spread = _pseudo_spread(steps_s, seen) * math.sqrt(seen / block)
        if spread <= target_spread_frac or block == longest:
            break
        block = min(2 * block, longest)
    fit = int(budget_s / (2 * (block + washout_steps) * step_s))
    return BlockPlan(block, washout_steps, spread, max(1, fit), block > visible)


def _pseudo_spread(steps_s: Sequence[float], block: int) -> float:
    """Returns the root mean square log ratio of adjacent blocks of one series."""
    sums = [
        math.fsum(steps_s[start : start + block])
        for start in range(0, len(steps_s) - block + 1, block)
    ]
    logs = [math.log(b / a) for a, b in pairwise(sums)]
    return math.sqrt(math.fsum(x * x for x in logs) / len(logs))
