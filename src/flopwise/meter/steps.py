"""Where a step ends, decided from the order of optimizer events alone.

A script may step one optimizer, several (`D G`, `D D G`, one a parameter, Muon beside AdamW), or change over to
another halfway. `Boundaries` reads the stream of optimizer identities and finds the smallest cycle that repeats:
one cycle is one step, and it ends with the rarest optimizer in it. No clock, no torch: the meter feeds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

#: Events of one kind, or whole cycles, after which a pattern is established: a break after that is a new phase of
#: the script, a break before it shows that the pattern was not yet understood.
ESTABLISHED = 20
#: Events without any cycle after which the order is taken as irregular and the rarest optimizer ends a step.
GIVE_UP = 3 * 4096


def smallest_period(ids: Sequence[int]) -> int | None:
    """Returns the smallest p such that `ids` repeats after p events, seen at least twice in full; None if none does."""
    n = len(ids)
    for p in range(1, n // 2 + 1):
        if ids[p] == ids[0] and all(ids[i] == ids[i - p] for i in range(p, n)):
            return p
    return None


def anchor_of(ids: Sequence[int]) -> int:
    """Returns the identity whose event ends a step: the rarest, and among equals the one that comes last."""
    counts = Counter(ids)
    rarest = min(counts.values())
    return next(i for i in reversed(ids) if counts[i] == rarest)


class Boundaries:
    """Tells for each optimizer event whether it ends a step.

    Until a cycle has shown itself twice the answers are provisional (a boundary at each event of the optimizer seen
    first); `settled` says when it is known, and from then on `total` is exact for what came before, too.
    """

    def __init__(self) -> None:
        self.total = 0  # steps ended so far
        self.settled = False
        self.cycle: tuple[
            int, ...
        ] = ()  # one step, ending with its anchor; () while unknown or irregular
        self._phase: list[
            int
        ] = []  # events of this phase of the script, while a break would make us reconsider
        self._base = 0  # steps ended before this phase
        self._position = 0  # events into the cycle
        self._irregular: int | None = None

    def feed(self, identity: int) -> bool:
        """Takes one optimizer event; returns True if it ends a step."""
        if self._irregular is not None:
            ends = identity == self._irregular
            self.total += ends
            return ends
        if not self.settled:
            return self._provisional(identity)
        if identity != self.cycle[self._position]:
            self._reconsider()
            return self._provisional(identity)
        if len(self._phase) <= ESTABLISHED * len(self.cycle):
            self._phase.append(identity)
        self._position += 1
        if self._position < len(self.cycle):
            return False
        self._position = 0
        self.total += 1
        return True

    def repeat(self, times: int) -> None:
        """Takes `times` events of the one optimizer whose every event ends a step."""
        self.total += times
        room = ESTABLISHED + 1 - len(self._phase)
        self._phase += self.cycle * max(0, min(times, room))

    def close(self) -> None:
        """Settles what was seen when the script ends before any cycle has repeated: each optimizer once a step."""
        if not self.settled and self._phase:
            self.cycle = tuple(dict.fromkeys(self._phase))
            self.total = self._base + max(1, self._phase.count(anchor_of(self._phase)))
            self.settled = True

    def describe(self) -> str:
        """Returns what ends a step, in words."""
        if self._irregular is not None:
            return "optimizer that steps least often (no regular order)"
        if len(self.cycle) > 1:
            return f"optimizer cycle of {len(self.cycle)} ({len(set(self.cycle))} optimizers)"
        return "optimizer"

    def _provisional(self, identity: int) -> bool:
        phase = self._phase
        phase.append(identity)
        period = smallest_period(phase)
        if period is not None and len(phase) >= max(3, 2 * period):
            return self._settle(period)
        tail = self._regular_tail()
        if tail:
            self._base += phase[:-tail].count(anchor_of(phase[:-tail]))
            del phase[:-tail]
            return self._settle(smallest_period(phase) or 1)
        if len(phase) > GIVE_UP:
            self._irregular = anchor_of(phase)
            self.settled = True
            self.total = self._base + phase.count(self._irregular)
            return identity == self._irregular
        self.total = self._base + phase.count(phase[0])
        return identity == phase[0]

    def _regular_tail(self) -> int:
        """Returns the length of a regular tail behind an irregular start (another optimizer warmed up), else 0."""
        phase = self._phase
        for period in range(1, len(phase) // 8 + 1):
            n = max(ESTABLISHED, 4 * period)
            if n < len(phase) and all(
                phase[-i] == phase[-i - period] for i in range(1, n - period + 1)
            ):
                return n
        return 0

    def _settle(self, period: int) -> bool:
        """Fixes the cycle, turned so that it ends with its anchor; returns whether the last event ended a step."""
        phase = self._phase
        anchor = anchor_of(phase[:period])
        last = max(i for i in range(period) if phase[i] == anchor)
        self.cycle = tuple(phase[last + 1 : period] + phase[: last + 1])
        done = len(phase) - (last + 1)  # events after the first step's end
        self._position = done % period
        self.total = self._base + 1 + done // period
        self.settled = True
        return self._position == 0

    def _reconsider(self) -> None:
        """An event broke the cycle: start again, from this phase's first event if little was seen, else from here."""
        self.settled = False
        if len(self._phase) > ESTABLISHED * len(self.cycle):
            self._base = self.total
            self._phase = list(self.cycle[: self._position])
        self.cycle = ()
        self._position = 0
