"""A batch cut behind its last token: the columns in which every sequence is padded are left out of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwise.fixes.unpadding.calls import BY_POSITION, Names
from flopwise.fixes.unpadding.padding import Padding
from flopwise.fixes.unpadding.restored import Shape, zeros_behind

#: Columns that are kept are a multiple of this.
MULTIPLE = 64


def crop_problem(module: nn.Module) -> str | None:
    """Returns why batches of this module cannot be cropped, or None."""
    known = Names(module).known
    missing = [n for n in ("input_ids", "attention_mask") if n not in known]
    if missing:
        return f"{type(module).__name__} takes no {' and no '.join(missing)}"
    return None


class Cropped:
    """A call with fewer columns."""

    def __init__(self, named: Mapping[str, Any], padding: Padding) -> None:
        self._padding = padding
        self.width = min(padding.width, -(-max(1, padding.used_width) // MULTIPLE) * MULTIPLE)
        self._inside = isinstance(named.get("labels"), torch.Tensor)
        self.kwargs = {name: self._cut(name, value) for name, value in named.items()}

    @property
    def positions(self) -> int:
        """The positions that it computes."""
        return self._padding.rows * self.width

    def _cut(self, name: str, value: Any) -> Any:
        if name not in BY_POSITION or not isinstance(value, torch.Tensor) or value.dim() != 2:
            return value
        if value.shape[1] != self._padding.width:
            return value
        return value[:, : self.width].contiguous()

    def shape(self) -> Shape:
        """Returns how its outputs are restored."""
        return Shape(self._padding.rows, self.width, zeros_behind(self._padding.width))

    def problem(self, outputs: Any) -> str | None:
        """Returns why these outputs cannot stand for those of the whole batch, or None."""
        values = list(outputs.values()) if isinstance(outputs, Mapping) else [outputs]
        shape, width = self.shape(), self.width
        if not self._inside and any(shape.concerns(v) for v in values):
            return (
                "the loss is computed outside of the model: what it makes of padding is not known"
            )
        for value in values:
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if (
                    isinstance(tensor, torch.Tensor)
                    and not shape.concerns(tensor)
                    and width in tensor.shape[1:]
                ):
                    return f"an output of shape {tuple(tensor.shape)} cannot be restored"
        return None
