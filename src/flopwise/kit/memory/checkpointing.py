"""Activation checkpointing of chosen blocks against a memory target, in place and with a way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.kit.memory.block_costs import BlockCost, measure_blocks
from flopwise.kit.memory.checkpoint_choice import Choice, choose
from flopwise.kit.memory.timeline import memory_timeline


@dataclass
class Checkpointing:
    """Blocks whose activations are computed again in backward."""

    module: nn.Module
    choice: Choice
    costs: list[BlockCost]
    measured_peak_bytes: int | None = None  # with the blocks checkpointed
    _forwards: dict[str, Any] = field(default_factory=dict)

    def undo(self) -> None:
        """Lets every block keep its activations again."""
        modules = dict(self.module.named_modules())
        for name, forward in self._forwards.items():
            if modules[name].__dict__.get("forward") is forward:
                del modules[name].forward
        self._forwards.clear()

    def __str__(self) -> str:
        """Returns what was chosen and what is predicted of it."""
        c = self.choice
        if not c.blocks:
            return f"nothing to checkpoint: the peak is {_gb(c.peak_before_bytes)}, the target {_gb(c.target_bytes)}"
        measured = self.measured_peak_bytes
        return (
            f"{len(c.blocks)} of {len(self.costs)} blocks checkpointed: peak {_gb(c.peak_before_bytes)} -> at most "
            f"{_gb(c.peak_bytes)} predicted, {_gb(measured) if measured is not None else 'not'} measured (target "
            f"{_gb(c.target_bytes)}{'' if self.fits else ', which is not reached'}), "
            f"{c.recompute_s * 1e3:.3g} ms of forward again in each step"
        )

    @property
    def fits(self) -> bool:
        """Returns whether the peak is within the target: the measured one, where it was measured."""
        if self.measured_peak_bytes is None:
            return self.choice.fits
        return self.measured_peak_bytes <= self.choice.target_bytes


def checkpoint_blocks(
    module: nn.Module,
    step: Callable[[], object],
    target_bytes: int,
    *,
    blocks: Sequence[str] | None = None,
    peak_bytes: int | None = None,
) -> Checkpointing:
    """Measures the blocks in a few runs of the step, checkpoints the cheapest set that fits, and returns it.

    Random numbers are drawn again as in the first forward, so dropout is the same. Where the target cannot be reached,
    the set with the lowest predicted peak is applied, and `fits` is False.

    Args:
        step: forward and backward; it runs up to four times, for real. Large enough a batch that it still fits.
        target_bytes: of the peak of allocated memory.
        blocks: names of modules that may be checkpointed; default: repeated blocks, found by class.
        peak_bytes: of the step as it is. Default: measured.

    Raises:
        ValueError: there are no blocks, or one is checkpointed already.
    """
    costs = measure_blocks(module, step, blocks)
    peak = peak_of(module, step) if peak_bytes is None else peak_bytes
    result = Checkpointing(module, choose(costs, peak, target_bytes), costs)
    modules = dict(module.named_modules())
    already = [name for name in result.choice.blocks if "forward" in modules[name].__dict__]
    if already:
        raise ValueError(f"the forward of {already} is replaced already")
    for name in result.choice.blocks:
        block = modules[name]
        block.forward = result._forwards[name] = _Checkpointed(block)
    if peak_bytes is None:
        result.measured_peak_bytes = peak_of(module, step)
    return result


def peak_of(module: nn.Module, step: Callable[[], object]) -> int:
    """Returns the peak of allocated bytes over one run of the step.

    On CUDA the allocator's own; elsewhere the sum over the storages of tensors.
    """
    first = next(module.parameters(), None)
    if first is not None and first.is_cuda:
        torch.cuda.synchronize(first.device)
        torch.cuda.reset_peak_memory_stats(first.device)
        step()
        torch.cuda.synchronize(first.device)
        return torch.cuda.max_memory_allocated(first.device)
    with memory_timeline(module) as recorder:
        step()
    return recorder.timeline.peak.total_bytes


class _Checkpointed:
    """The forward of one block, computed again in backward. A copied or loaded block takes its own along."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        return checkpoint(
            self._plain, *args, use_reentrant=False, preserve_rng_state=True, **kwargs
        )

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.3g} MB"
