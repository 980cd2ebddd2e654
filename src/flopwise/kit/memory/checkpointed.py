"""The forward of one block that is computed again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.kit.memory.modules import in_backward


class Checkpointed:
    """Stands as `forward` on a block. A copied or loaded block takes its own along."""

    #: Entered while the block is computed again, to measure it; None in training.
    around_again: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the block's own forward returns; keeps the inputs only, if a backward is to come."""
        plain = type(self.block).forward
        if not torch.is_grad_enabled():
            return plain(self.block, *args, **kwargs)
        run = plain if self.around_again is None else self._measured
        return checkpoint(
            run, self.block, *args, use_reentrant=False, preserve_rng_state=True, **kwargs
        )

    def _measured(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = self.around_again if in_backward() else None
        with around() if around is not None else contextlib.nullcontext():
            return type(block).forward(block, *args, **kwargs)
