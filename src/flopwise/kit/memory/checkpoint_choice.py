"""Which blocks to checkpoint: the set that is cheapest to compute again and brings memory under a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.kit.memory.block_costs import BlockCost

#: Steps that freed bytes are counted in, rounded down, so that a set that fits on paper fits.
UNITS = 512


@dataclass(frozen=True)
class Choice:
    """A set of blocks, with what it is predicted to do."""

    blocks: tuple[str, ...]
    freed_bytes: int  # kept no longer
    again_bytes: (
        int  # of the largest block that is computed again: it lives while its backward runs
    )
    recompute_s: float  # a step
    peak_before_bytes: int
    target_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Returns the predicted peak: an upper bound, as if the largest block were computed again at the peak."""
        return self.peak_before_bytes - self.freed_bytes + self.again_bytes

    @property
    def fits(self) -> bool:
        """Returns whether the predicted peak is within the target."""
        return self.peak_bytes <= self.target_bytes


def choose(costs: Sequence[BlockCost], peak_bytes: int, target_bytes: int) -> Choice:
    """Returns the cheapest set of blocks whose predicted peak is within the target; `fits` tells whether there is one.

    Where there is none, the set with the lowest predicted peak is returned. Exact to the rounding of freed bytes to
    1/512 of the largest sum, always to the safe side: a knapsack by bytes freed, for each size of the block that is computed
    again last.

    Ignores: that memory for temporaries may be reused by a block that is computed again.
    """
    nothing = Choice((), 0, 0, 0.0, peak_bytes, target_bytes)
    if nothing.fits:
        return nothing
    worth = [cost for cost in costs if cost.kept_bytes > 0]
    best: Choice | None = None
    for largest in sorted({cost.kept_bytes for cost in worth}):
        allowed = [cost for cost in worth if cost.kept_bytes <= largest]
        needed = peak_bytes + largest - target_bytes
        chosen = _cheapest(allowed, needed)
        if chosen is None:
            continue
        choice = _choice(chosen, peak_bytes, target_bytes)
        if choice.fits and (best is None or choice.recompute_s < best.recompute_s):
            best = choice
    if best is not None:
        return best
    sets = [
        _choice([c for c in worth if c.kept_bytes <= largest], peak_bytes, target_bytes)
        for largest in {cost.kept_bytes for cost in worth}
    ]
    return min([nothing, *sets], key=lambda choice: (choice.peak_bytes, choice.recompute_s))


def _choice(chosen: Sequence[BlockCost], peak_bytes: int, target_bytes: int) -> Choice:
    return Choice(
        tuple(cost.name for cost in chosen),
        sum(cost.kept_bytes for cost in chosen),
        max((cost.kept_bytes for cost in chosen), default=0),
        sum(cost.forward_s for cost in chosen),
        peak_bytes,
        target_bytes,
    )


def _cheapest(costs: Sequence[BlockCost], needed_bytes: int) -> list[BlockCost] | None:
    """Returns the set that frees at least this much in the least time; None where all of them free too little."""
    total = sum(cost.kept_bytes for cost in costs)
    if total < needed_bytes:
        return None
    unit = max(1, -(-total // UNITS))
    need = -(-needed_bytes // unit)
    if sum(cost.kept_bytes // unit for cost in costs) < need:
        return list(costs)  # only the rounding says that it is too little
    # best[u]: least time and the set that frees at least u units.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())] + [None] * need
    for index, cost in enumerate(costs):
        units = cost.kept_bytes // unit
        for have in range(need, -1, -1):
            before = best[have]
            if before is None:
                continue
            to = min(need, have + units)
            time_s = before[0] + cost.forward_s
            after = best[to]
            if to != have and (after is None or time_s < after[0]):
                best[to] = (time_s, (*before[1], index))
    found = best[need]
    return None if found is None else [costs[index] for index in found[1]]
