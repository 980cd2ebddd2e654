"""Activation checkpointing of chosen blocks against a memory target, in place and with a way back."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.arguments import (
    ArgumentError,
    need_module,
    need_number,
    need_step,
    need_whole,
)
from flopwise.kit.memory.block_costs import (
    BlockCost,
    block_costs,
    call_order,
    repeated_blocks,
)
from flopwise.kit.memory.checkpoint_choice import Choice, choose
from flopwise.kit.memory.checkpointed import Checkpointed
from flopwise.kit.memory.interleaved import FEWEST_ROUNDS, Ratio, compare
from flopwise.kit.memory.step_memory import StepMemory, step_memory
from flopwise.kit.memory.undisturbed import device_of, undisturbed, without_gradients
from flopwise.units import duration, size

#: Sets that are measured against the target, at most: each misses it by less. Our choice.
TRIES = 4


@dataclass
class Checkpointing:
    """Blocks whose activations are computed again in backward."""

    module: nn.Module
    target_bytes: int
    choice: Choice
    costs: list[BlockCost]
    ran_out: bool = (
        False  # the step did not fit as it was: it was measured with all blocks checkpointed
    )
    peak_bytes: int | None = None  # measured, with the blocks checkpointed
    step: Ratio | None = None  # time of the step with the blocks checkpointed over that without
    _forwards: dict[str, Any] = field(default_factory=dict)

    def apply(self) -> None:
        """Checkpoints the blocks that were chosen."""
        modules = dict(self.module.named_modules())
        for name in self.choice.blocks:
            if name not in self._forwards:
                modules[name].forward = self._forwards[name] = Checkpointed(modules[name])

    def undo(self) -> None:
        """Lets every block keep its activations again."""
        modules = dict(self.module.named_modules())
        for name, forward in self._forwards.items():
            if modules[name].__dict__.get("forward") is forward:
                del modules[name].forward
        self._forwards.clear()

    @property
    def fits(self) -> bool:
        """Returns whether the peak is within the target: the measured one, where it was measured."""
        if self.peak_bytes is not None:
            return self.peak_bytes <= self.target_bytes
        return self.choice.fits

    def __str__(self) -> str:
        """Returns what was chosen, what was predicted of it and what came of it."""
        c, missed = self.choice, "" if self.fits else ", which is not reached"
        before, target = size(c.peak_before_bytes), size(self.target_bytes)
        if self.ran_out:
            before = f"{before}, for which there is no memory,"
        if not c.blocks:
            why = f"{missed}: blocks keep too little" if missed else ""
            return f"no block checkpointed: the peak is {before}, the target {target}{why}"
        measured = (
            "not measured" if self.peak_bytes is None else f"{size(self.peak_bytes)} measured"
        )
        return (
            f"{len(c.blocks)} of {len(self.costs)} blocks checkpointed: peak {before} -> {size(c.peak_bytes)} predicted, "
            f"{measured} (target {target}{missed}); {duration(c.recompute_s)} of forward again a step"
            + (f"; step {self.step}" if self.step else "")
        )


def checkpoint_blocks(
    module: nn.Module,
    step: Callable[[], object],
    target_bytes: float,
    *,
    blocks: Sequence[str] | None = None,
    rounds: int = FEWEST_ROUNDS,
) -> Checkpointing:
    """Measures the blocks in a few runs of the step, checkpoints the cheapest set that fits, and returns it.

    Where the measured peak of that set is above the target all the same, one that frees more is taken, a few times.

    Random numbers are drawn again as in the first forward, so dropout is the same. Where the target cannot be reached, the set
    with the lowest predicted peak is applied, and `fits` is False. Where the step runs out of memory as it is, it is
    measured with all blocks checkpointed, and what the others would keep is added.

    Args:
        step: forward and backward; gradients, buffers and random numbers are put back after each run.
        target_bytes: of the peak of allocated memory in the step.
        blocks: names of modules that may be checkpointed; default: repeated blocks, found by class.
        rounds: of step times with and without, in turns; 0: neither time nor the new peak are measured, only predicted.

    Raises:
        ArgumentError: there are no blocks, one lies in another, or the forward of one is replaced already.
        torch.OutOfMemoryError: the step does not fit with all blocks checkpointed either; the model is as it was.
    """
    where = "checkpoint_blocks"
    need_module(where, module)
    need_step(where, step)
    if type(module).__name__ == "OptimizedModule":
        raise ArgumentError(
            f"{where}: the module is compiled: choose on the module that it was made from, before it is compiled"
        )
    need_number(where, "target_bytes", target_bytes)
    need_whole(where, "rounds", rounds)
    names = list(repeated_blocks(module)) if blocks is None else _named(blocks)
    modules = dict(module.named_modules())
    already = [name for name in names if name in modules and "forward" in modules[name].__dict__]
    if already:
        raise ArgumentError(
            f"{where}: the forward of {already} is replaced already: name other blocks, or undo that first"
        )
    ran_out = False
    try:
        costs = block_costs(module, step, names)
        memory = step_memory(module, step, [cost.name for cost in costs])
    except torch.OutOfMemoryError:
        if not names:
            raise
        ran_out = True
    if ran_out:
        gc.collect()  # out of the except clause, which keeps the tensors of the frames that failed
        torch.cuda.empty_cache()
        costs, memory = _with_all_checkpointed(module, step, names)
    target_bytes = int(target_bytes)
    choice = choose(costs, memory, target_bytes)
    result = Checkpointing(module, target_bytes, choice, costs, ran_out)
    result.apply()
    if choice.blocks and rounds:
        _reach(result, step, memory)
        _measure(result, step, rounds)
    return result


def _named(blocks: Sequence[str]) -> list[str]:
    """Returns the names, each once.

    Raises:
        ArgumentError: they are no names, or one block lies in another, which would be counted twice.
    """
    if isinstance(blocks, str) or not all(isinstance(name, str) for name in blocks):
        raise ArgumentError(
            f"checkpoint_blocks: blocks={blocks!r}; a list of names of modules is meant"
        )
    names = list(dict.fromkeys(blocks))
    for outer, inner in itertools.permutations(names, 2):
        if not outer or inner.startswith(f"{outer}."):
            raise ArgumentError(f'checkpoint_blocks: "{inner}" lies in "{outer}": name one of them')
    return names


def _with_all_checkpointed(
    module: nn.Module, step: Callable[[], object], names: Sequence[str]
) -> tuple[list[BlockCost], StepMemory]:
    """Returns costs and memory as they would be without checkpoints, from a run in which all blocks are checkpointed."""
    modules = dict(module.named_modules())
    for name in names:
        modules[name].forward = Checkpointed(modules[name])
    try:
        order = call_order(module, step, names)
        memory = step_memory(module, step, order)
    finally:
        for name in names:
            del modules[name].forward
    costs = [
        BlockCost(name, type(modules[name]).__name__, kept, forward_s=again_s, calls=1)
        for name, kept, again_s in zip(order, memory.again_bytes, memory.again_s, strict=True)
    ]
    kept_before = [0, *itertools.accumulate(memory.again_bytes)]
    memory.with_blocks = [b + kept for b, kept in zip(memory.with_blocks, kept_before, strict=True)]
    memory.backward = [b + kept for b, kept in zip(memory.backward, kept_before[:-1], strict=True)]
    memory.backward_start = [
        b + kept for b, kept in zip(memory.backward_start, kept_before[1:], strict=True)
    ]
    return costs, memory


def _reach(result: Checkpointing, step: Callable[[], object], memory: StepMemory) -> None:
    """Adds the measured peak; where it misses the target that was predicted to be kept, aims lower by what was missed.

    An allocator rounds, and leaves what remains of a block with it: a peak may lie above the prediction by that.
    """
    names, aim = [cost.name for cost in result.costs], result.target_bytes
    for left in reversed(range(TRIES)):
        try:
            result.peak_bytes = step_memory(result.module, step, names).peak_bytes
        except BaseException:
            result.undo()
            raise
        if result.fits or not result.choice.fits or not left:
            return
        aim -= result.peak_bytes - result.target_bytes
        lower = choose(result.costs, memory, aim)
        if lower.blocks == result.choice.blocks:
            return
        result.undo()
        result.choice = replace(lower, target_bytes=result.target_bytes)
        result.apply()


def _measure(result: Checkpointing, step: Callable[[], object], rounds: int) -> None:
    """Adds the time of the step with the blocks checkpointed and without, where it fits without."""
    module = result.module

    def switch(is_new: bool) -> None:
        result.undo()
        if is_new:
            result.apply()

    run = without_gradients(module, step)
    try:
        if not result.ran_out:
            with undisturbed(module):
                result.step = compare(
                    run, run, device_of(module), rounds=rounds, least_s=0, before=switch
                )
    except BaseException:
        result.undo()
        raise
    result.apply()
