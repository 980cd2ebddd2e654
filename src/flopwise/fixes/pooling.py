"""The pairs of blocks that this process leaves for the next ones of its trial, and what earlier ones have left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flopwise.records.pool import ALL, CONTROL, BlockPair, Shares, Standing, Turn
from flopwise.records.verdict import Trial
from flopwise.trials.schedule import MIN_PAIRS, WASHOUT_STEPS, Pair
from flopwise.trials.sequential import fewest_pairs

#: A comparison that has enough pairs and no verdict gets so many more in a row, before the next one has its turn; fewer
#: where it is processes that it wants.
TURN_PAIRS, TURN_PAIRS_FOR_PROCESSES = 4, 2


class Pooling:
    """The turns of one process, beside what is known of earlier ones.

    Args:
        options: of the trial: `process` (its number), `short` (an earlier one ended before all was tried), `pools` (what those
            have left), `shares` (of the steps as they were first), `kept` (codes that are on from the start).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._process = int(options.get("process", 1))
        self.short = bool(options.get("short"))
        self.kept: list[str] = list(options.get("kept") or ())
        stored = options.get("shares")
        self.shares: Shares | None = Shares(**stored) if stored else None
        self._standings = {_key(s["what"], s["beside"]): Standing(**s) for s in options.get("pools") or ()}  # fmt: skip
        self.turns: list[Turn] = []

    def begin(
        self,
        what: str,
        on: Iterable[str],
        codes: Sequence[str],
        known: Sequence[Trial] = (),
        washout_steps: int = WASHOUT_STEPS,
    ) -> None:
        """Tells what the pairs to come compare.

        Args:
            what: code of a fix, or `ALL` or `CONTROL`.
            on: codes of the fixes that this process has on in both arms.
            codes: of those that are on in the new arm only.
            known: of these fixes, without a verdict.
            washout_steps: after each switch.
        """
        beside = self._beside(what, on)
        turn = Turn(self._process, what, beside, [], list(codes), 0.0, washout_steps, list(known))
        self.turns.append(turn)

    def take(self, pair: Pair, compared_s: float) -> None:
        """Takes a pair of the turn that was begun last, which has lasted for `compared_s` by now."""
        turn = self.turns[-1]
        turn.pairs.append(BlockPair(list(pair.old), list(pair.new), pair.new_first))
        self.turns[-1] = replace(turn, compared_s=compared_s)

    def drop(self, what: str) -> None:
        """Drops the turns of what has its verdict."""
        self.turns = [turn for turn in self.turns if turn.what != what]

    def earlier(self, what: str, on: Iterable[str]) -> Standing | None:
        """Returns how far earlier processes have come with a comparison, None where they have no pair of it."""
        found = self._standings.get(_key(what, self._beside(what, on)))
        return found if found is not None and (found.pairs or found.closed) else None

    def quota(self, what: str, on: Iterable[str], alpha: float) -> int:
        """Returns how many pairs the next turn has: what an interval still takes, and else some more."""
        on = list(on)
        key = _key(what, self._beside(what, on))
        have = sum(len(turn.pairs) for turn in self.turns if _key(turn.what, turn.beside) == key)
        before = self._standings.get(key)
        have += before.pairs if before is not None else 0
        least = MIN_PAIRS if what == CONTROL else max(MIN_PAIRS, fewest_pairs(alpha))
        if have < least:
            return least - have
        wants_processes = before is not None and before.wants_processes
        return TURN_PAIRS_FOR_PROCESSES if wants_processes else TURN_PAIRS

    def washout_steps(self, what: str, on: Iterable[str]) -> int:
        """Returns how many steps to drop after each switch."""
        before = self._standings.get(_key(what, self._beside(what, on)))
        return WASHOUT_STEPS if before is None else before.washout_steps

    def _beside(self, what: str, on: Iterable[str]) -> list[str]:
        # Equal arms are equal whatever is on.
        return [] if what == CONTROL else sorted({*self.kept, *on})


def _key(what: str, beside: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    return what, () if what == CONTROL else tuple(beside)


__all__ = ["ALL", "CONTROL", "Pooling"]
