"""Which blocks to checkpoint: the set that is cheapest to compute again and keeps memory under a target all the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.kit.memory.block_costs import BlockCost
from flopwise.kit.memory.step_memory import StepMemory

#: Sets that are kept in mind at once. Blocks alike make as many as there are blocks; beyond this, the bytes that a set
#: frees are rounded down, so that a set that fits on paper fits.
MOST_SETS = 2048


@dataclass(frozen=True)
class Choice:
    """A set of blocks, with what it is predicted to do."""

    blocks: tuple[str, ...]
    freed_bytes: int  # kept less, once the last block has run
    recompute_s: float  # a step
    peak_before_bytes: int
    peak_bytes: int  # predicted
    target_bytes: int

    @property
    def fits(self) -> bool:
        """Returns whether the predicted peak is within the target."""
        return self.peak_bytes <= self.target_bytes


#: Bytes that a set frees in forward and in backward, its time, and its blocks by number.
_Set = tuple[int, int, float, tuple[int, ...]]


def predicted_peak(costs: Sequence[BlockCost], memory: StepMemory, chosen: set[str]) -> int:
    """Returns the predicted peak of a step in which these blocks are checkpointed.

    While the first k blocks have kept their activations, that of them which are checkpointed are missing. A block that is
    checkpointed runs its forward again at the beginning of its backward, on top of what is held there. Parameters in 16
    bits are missing only once autocast has ended.
    """
    peak = freed = freed_back = 0
    for i, cost in enumerate(costs):
        again = cost.name in chosen
        peak = max(
            peak, memory.with_blocks[i] - freed, _in_block(cost, memory, i, again) - freed_back
        )
        freed += cost.freed_bytes if again else 0
        freed_back += _freed_back(cost, memory) if again else 0
    return max(peak, memory.with_blocks[-1] - freed)


def choose(costs: Sequence[BlockCost], memory: StepMemory, target_bytes: int) -> Choice:
    """Returns the cheapest set of blocks whose predicted peak is within the target; `fits` tells whether there is one.

    Where there is none, the set with the lowest predicted peak is returned.

    Args:
        costs: of the blocks, in the order of their forward passes.
    """
    chosen = _cheapest(costs, memory, target_bytes)
    if chosen is None:  # the lowest target that can be reached, by halves
        low, high = 0, memory.peak_bytes
        chosen = ()
        while high - low > max(1, memory.peak_bytes >> 20):
            middle = (low + high) // 2
            found = _cheapest(costs, memory, middle)
            if found is None:
                low = middle
            else:
                high, chosen = middle, found
    names = tuple(costs[i].name for i in chosen)
    return Choice(
        names,
        sum(costs[i].freed_bytes for i in chosen),
        sum(costs[i].forward_s for i in chosen),
        memory.peak_bytes,
        predicted_peak(costs, memory, set(names)),
        target_bytes,
    )


def _in_block(cost: BlockCost, memory: StepMemory, i: int, again: bool) -> int:
    """Returns the peak of a block's backward, as if no block before it were checkpointed."""
    if not again:
        return memory.backward[i]
    return max(
        memory.backward[i] + cost.input_bytes,
        memory.backward_start[i] - _freed_back(cost, memory) + memory.working[i],
    )


def _freed_back(cost: BlockCost, memory: StepMemory) -> int:
    """Returns what a checkpointed block keeps less once backward has begun."""
    return cost.freed_bytes + (0 if memory.autocast_in_backward else cost.cast_bytes)


def _cheapest(
    costs: Sequence[BlockCost], memory: StepMemory, target_bytes: int
) -> tuple[int, ...] | None:
    """Returns the set that takes least time of those that stay within the target, None where there is none.

    Block by block it keeps, for each amount freed so far, the cheapest set; sets that free less for more time are dropped,
    and so are those that exceed the target before or in the block.
    """
    sets: list[_Set] = [(0, 0, 0.0, ())]
    for i, cost in enumerate(costs):
        plain, again = (_in_block(cost, memory, i, a) - target_bytes for a in (False, True))
        before = memory.with_blocks[i] - target_bytes
        after = []
        for freed, back, time_s, chosen in sets:
            if freed < before:
                continue
            if back >= plain:
                after.append((freed, back, time_s, chosen))
            if back >= again and cost.freed_bytes > 0:
                more = (freed + cost.freed_bytes, back + _freed_back(cost, memory))
                after.append((*more, time_s + cost.forward_s, (*chosen, i)))
        sets = _worth_keeping(after)
    fitting = [s for s in sets if s[0] >= memory.with_blocks[-1] - target_bytes]
    return min(fitting, key=lambda s: s[2])[3] if fitting else None


def _worth_keeping(sets: list[_Set]) -> list[_Set]:
    """Returns the sets than which no other frees as much for less time."""
    kept: list[_Set] = []
    for found in sorted(sets, key=lambda s: (-s[0], s[2])):
        if not kept or found[2] < kept[-1][2]:
            kept.append(found)
    if len(kept) <= MOST_SETS:
        return kept
    unit = -(-kept[0][0] // (MOST_SETS // 2))
    return _worth_keeping([(freed // unit * unit, *rest) for freed, *rest in kept])  # type: ignore[misc]
