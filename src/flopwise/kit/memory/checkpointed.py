"""The forward of one block that is computed again in backward, and finds and leaves everything as the first time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
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
        block, plain = self.block, type(self.block).forward
        if not torch.is_grad_enabled():
            return plain(block, *args, **kwargs)
        # By position, so that no name of the block's is taken for an option of `checkpoint`, and so that it sees on which
        # device random numbers are drawn: it looks at these only.
        n, names = len(args), tuple(kwargs)
        given = (*args, *kwargs.values())
        device = next((p.device for p in block.parameters()), None)
        if not any(isinstance(value, torch.Tensor) and value.device == device for value in given):
            given = (*given, torch.empty(0, device=device))
        buffers = None if torch.compiler.is_compiling() else _Buffers(block)

        def run(*values: Any) -> Any:
            named = dict(zip(names, values[n:], strict=False))
            if buffers is None:
                return plain(block, *values[:n], **named)
            with buffers.as_before(), self._watched():
                return plain(block, *values[:n], **named)

        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=True)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        around = self.around_again if in_backward() else None
        return around() if around is not None else contextlib.nullcontext()


class _Buffers:
    """The buffers of a block: a forward may read and write them, and is to do so once a step.

    The means of batch norm would be moved twice, and a power iteration would go on from where it ended.
    """

    def __init__(self, block: nn.Module) -> None:
        self._first = True
        self._found = [
            (module, name, buffer, _version(buffer), _copy_before(module, buffer))
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.requires_grad
        ]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """The first time, notes which buffers are written; from then on lends copies of what they were before."""
        if self._first:
            try:
                yield
            finally:
                self._first = False
                self._found = [
                    (module, name, buffer, version, copy if changed else None)
                    for module, name, buffer, version, copy in self._found
                    for changed in [
                        module._buffers.get(name) is not buffer or _version(buffer) != version
                    ]
                ]
            return
        now = [(module, name, module._buffers[name]) for module, name, *_ in self._found]
        try:
            for module, name, buffer, _, copy in self._found:
                if copy is not None:
                    module._buffers[name] = copy.clone()
                elif buffer.is_floating_point():  # batch norm writes without a trace
                    module._buffers[name] = buffer.clone()
            yield
        finally:
            for module, name, present in now:
                module._buffers[name] = present


def _copy_before(module: nn.Module, buffer: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy; None for the means of a norm, which it does not read where it writes them."""
    if isinstance(module, _NormBase) and buffer.is_floating_point():
        return None
    return buffer.detach().clone()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
