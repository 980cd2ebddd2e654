"""Activation checkpointing of chosen blocks against a memory target, in place and with a way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.kit.memory.block_costs import BlockCost, block_costs
from flopwise.kit.memory.checkpoint_choice import Choice, choose
from flopwise.kit.memory.interleaved import FEWEST_ROUNDS, Ratio, compare
from flopwise.kit.memory.step_memory import step_memory
from flopwise.kit.memory.undisturbed import device_of, undisturbed, without_gradients
from flopwise.units import duration, size


@dataclass
class Checkpointing:
    """Blocks whose activations are computed again in backward."""

    module: nn.Module
    choice: Choice
    costs: list[BlockCost]
    peak_bytes: int | None = None  # measured, with the blocks checkpointed
    step: Ratio | None = None  # time of the step with the blocks checkpointed over that without
    _forwards: dict[str, Any] = field(default_factory=dict)

    def apply(self) -> None:
        """Checkpoints the blocks that were chosen."""
        modules = dict(self.module.named_modules())
        for name in self.choice.blocks:
            if name not in self._forwards:
                modules[name].forward = self._forwards[name] = _Checkpointed(modules[name])

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
        if self.peak_bytes is None:
            return self.choice.fits
        return self.peak_bytes <= self.choice.target_bytes

    def __str__(self) -> str:
        """Returns what was chosen, what was predicted of it and what came of it."""
        c = self.choice
        if not c.blocks:
            return (
                f"no block checkpointed: the peak is {size(c.peak_before_bytes)}, the target {size(c.target_bytes)}"
                + ("" if c.fits else ", which is not reached: blocks keep too little")
            )
        measured = (
            "not measured" if self.peak_bytes is None else f"{size(self.peak_bytes)} measured"
        )
        return (
            f"{len(c.blocks)} of {len(self.costs)} blocks checkpointed: peak {size(c.peak_before_bytes)} -> "
            f"{size(c.peak_bytes)} predicted, {measured} (target {size(c.target_bytes)}"
            f"{'' if self.fits else ', which is not reached'}); {duration(c.recompute_s)} of forward again a step"
            + (f"; step {self.step}" if self.step else "")
        )


def checkpoint_blocks(
    module: nn.Module,
    step: Callable[[], object],
    target_bytes: int,
    *,
    blocks: Sequence[str] | None = None,
    rounds: int = FEWEST_ROUNDS,
) -> Checkpointing:
    """Measures the blocks in a few runs of the step, checkpoints the cheapest set that fits, and returns it.

    Random numbers are drawn again as in the first forward, so dropout is the same. Where the target cannot be reached, the set
    with the lowest predicted peak is applied, and `fits` is False.

    Args:
        step: forward and backward; gradients, buffers and random numbers are put back after each run. A batch that fits
            as it is: what does not fit cannot be measured.
        target_bytes: of the peak of allocated memory in the step.
        blocks: names of modules that may be checkpointed; default: repeated blocks, found by class.
        rounds: of step times with and without, in turns; 0: neither time nor the new peak are measured.

    Raises:
        ValueError: there are no blocks, or the forward of one is replaced already.
    """
    modules = dict(module.named_modules())
    costs = block_costs(module, step, blocks)
    already = [cost.name for cost in costs if "forward" in modules[cost.name].__dict__]
    if already:
        raise ValueError(
            f"the forward of {already} is replaced already: name other blocks, or undo that first"
        )
    memory = step_memory(module, step, [cost.name for cost in costs])
    result = Checkpointing(module, choose(costs, memory, target_bytes), costs)
    result.apply()
    if not result.choice.blocks or not rounds:
        return result
    result.peak_bytes = step_memory(module, step, [cost.name for cost in costs]).peak_bytes

    def switch(is_new: bool) -> None:
        result.undo()
        if is_new:
            result.apply()

    run = without_gradients(module, step)
    try:
        with undisturbed(module):
            result.step = compare(
                run, run, device_of(module), rounds=rounds, least_s=0, before=switch
            )
    finally:
        result.apply()
    return result


class _Checkpointed:
    """The forward of one block, computed again in backward. A copied or loaded block takes its own along."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.block).forward
        if not torch.is_grad_enabled():
            return plain(self.block, *args, **kwargs)
        return checkpoint(
            plain, self.block, *args, use_reentrant=False, preserve_rng_state=True, **kwargs
        )
