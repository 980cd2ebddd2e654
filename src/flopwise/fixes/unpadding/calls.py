"""Calls of models by the names of their arguments: ids, a mask of the same shape, labels, and nothing that is not known."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

#: Tensors with a value for every position of a batch.
BY_POSITION = ("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids")
#: Arguments whose absence or smallest value means nothing special.
_PLAIN = (None, False, 0)
#: Flags that a call may set either way.
_FLAGS = frozenset(("return_dict", "output_hidden_states"))


class Names:
    """The names of a module's arguments."""

    def __init__(self, module: nn.Module) -> None:
        self._signature = inspect.signature(type(module).forward)
        self._module = module
        kinds = inspect.Parameter
        self.known = frozenset(
            name
            for name, p in list(self._signature.parameters.items())[1:]
            if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        )
        self._rest = next(
            (n for n, p in self._signature.parameters.items() if p.kind is kinds.VAR_KEYWORD), None
        )

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the arguments of a call by name, None where that cannot be."""
        try:
            bound = self._signature.bind(self._module, *args, **kwargs).arguments
        except TypeError:
            return None
        named = dict(list(bound.items())[1:])
        named.update(named.pop(self._rest, {}) if self._rest else {})
        return named


def unknown(named: Mapping[str, Any]) -> str | None:
    """Returns the first argument that may depend on positions in a way that is not known, or None."""
    for name, value in named.items():
        if name in BY_POSITION and (value is None or isinstance(value, torch.Tensor)):
            continue
        if name in _FLAGS and isinstance(value, bool):
            continue
        if name == "num_items_in_batch":  # what the loss is divided by
            continue
        if isinstance(value, (torch.Tensor, list, tuple, dict)) or not any(
            value is p for p in _PLAIN
        ):
            return name
    return None
