"""All tokens of a batch in one row: which models take it, and the call that is made instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flopwise.fixes.unpadding.attention import (
    MOST_MASKED,
    Segments,
    Unfit,
    interface_problem,
)
from flopwise.fixes.unpadding.calls import Names
from flopwise.fixes.unpadding.groups import Row, on_device
from flopwise.fixes.unpadding.padding import IGNORED, Padding
from flopwise.fixes.unpadding.restored import Shape, scattered

#: The least multiple of the length of a row.
MULTIPLE = 64
#: A row is rounded up to this share of the batch's positions: where the model is compiled each length is code of its own,
#: where it is not, a length that was met before finds its memory again.
COMPILED_FRAC, EAGER_FRAC = 1 / 16, 1 / 64
#: Heads whose loss is a mean over labelled positions, and those of them that predict the next token.
_HEADS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForTokenClassification")
_SHIFTED = ("ForCausalLM", "LMHeadModel")
_ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


def shifts(module: nn.Module) -> bool:
    """Whether the loss of this model compares each position with the label of the next."""
    return type(module).__name__.endswith(_SHIFTED)


def pack_problem(module: nn.Module) -> str | None:
    """Returns why this module's batches cannot be computed as one row, or None."""
    name = type(module).__name__
    transformers = sys.modules.get("transformers")
    base = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    if base is None or not isinstance(module, base):
        return f"{name} is not a model of transformers: how it attends is not known"
    if not name.endswith(_HEADS):
        return f"{name} may look at more than the tokens that it labels"
    if not getattr(module, "_supports_attention_backend", False):
        return f"the attention of {name} cannot be replaced"
    missing = {"input_ids", "attention_mask", "position_ids", "labels"} - Names(module).known
    if missing:
        return f"{name} takes no {' and no '.join(sorted(missing))}"
    return interface_problem() or _config_problem(module) or _parts_problem(module)


def _config_problem(module: nn.Module) -> str | None:
    config: Any = module.config
    now = getattr(config, "_attn_implementation", None)
    if now not in _ATTENTIONS:
        return f"its attention is {now}"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if getattr(config, "sub_configs", None):
        return "it is made of several models"
    kinds = getattr(config, "layer_types", None) or ()
    if getattr(config, "sliding_window", None) or any(k != "full_attention" for k in kinds):
        return "its layers attend within a window"
    for flag in ("output_attentions", "output_router_logits"):
        if getattr(config, flag, False):
            return f"its outputs hold what is computed for every position ({flag})"
    return None


def _parts_problem(module: nn.Module) -> str | None:
    for part in module.modules():
        if getattr(part, "gradient_checkpointing", False):
            return "its activations are computed again in the backward"
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for hook in hooks.values():
                owner = str(getattr(hook, "__module__", "")).split(".")[0]
                if owner not in ("flopwise", "transformers"):
                    return f"a hook of the script looks at what {type(part).__name__} computes"
    return None


def own_positions(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns how a model numbers the positions of padded ids if not from 0 up (RoBERTa and its kin), else None.

    Source: `create_position_ids_from_input_ids`, transformers/models/roberta/modeling_roberta.py, 4.56 to 5.24.
    """
    for part in module.modules():
        padding = getattr(part, "padding_idx", None)
        if padding is None or not hasattr(part, "position_embeddings"):
            continue
        name = "create_position_ids_from_input_ids"
        make = getattr(part, name, None) or getattr(
            sys.modules.get(type(part).__module__), name, None
        )
        if make is not None:
            return lambda ids: make(ids, padding)
    return None


def row_length(padding: Padding, compiled: bool) -> int:
    """Returns the length of the row: the tokens, and a filler up to a multiple; a compiled row has one always."""
    part = padding.positions * (COMPILED_FRAC if compiled else EAGER_FRAC)
    multiple = max(MULTIPLE, round(part) // MULTIPLE * MULTIPLE)
    return -(-(padding.tokens + (1 if compiled else 0)) // multiple) * multiple


class Packed:
    """A call with all tokens of a batch in one row, each sequence with positions of its own.

    The filler at the end is a sequence of its own without labels. A `row` gives the length, and how many ends it has.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        padding: Padding,
        *,
        compiled: bool,
        shifted: bool,
        caches: bool,
        positions: Callable[[torch.Tensor], torch.Tensor] | None,
        row: Row | None = None,
    ) -> None:
        if min(padding.lengths) == 0:
            raise Unfit("a sequence of the batch has no token")
        self._padding, self._fixed = padding, row
        #: Positions that it computes.
        self.positions = row.length if row is not None else row_length(padding, compiled)
        ids, mask = named["input_ids"], named["attention_mask"]
        held = mask.reshape(-1) != 0
        self._places = torch.nonzero_static(held, size=padding.tokens).squeeze(1)
        self._taken = F.pad(self._places, (0, self.positions - padding.tokens))
        self._ends = self._counted(mask)
        self.kwargs = {name: value for name, value in named.items() if name != "attention_mask"}
        if caches:  # keys and values of the row would be of no use to anybody
            self.kwargs["use_cache"] = False
        for name in ("input_ids", "token_type_ids"):
            if self.kwargs.get(name) is not None:
                self.kwargs[name] = self._row(named[name])
        self.kwargs["position_ids"] = self._numbered(named.get("position_ids"), ids, positions)
        self.kwargs["labels"] = self._labels(named["labels"], shifted)
        self.segments = self._segments(ids.device.type == "cpu", compiled)

    def shape(self) -> Shape:
        """Returns how its outputs are restored."""
        rows, width = self._padding.rows, self._padding.width
        return Shape(1, self.positions, scattered(self._places, rows, width))

    def problem(self, outputs: Any) -> str | None:
        """Returns why these outputs cannot stand for those of the padded batch, or None."""
        values = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
        found = self.shape().problem(values)
        return None if found is None else f"an output of shape {found} cannot be restored"

    def _row(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.expand(self._padding.rows, -1).reshape(-1)
        return flat.index_select(0, self._taken)[None]

    def _counted(self, mask: torch.Tensor) -> torch.Tensor:
        if self._fixed is not None:
            return on_device(self._fixed.ends(self._padding.lengths), torch.int32, mask.device)
        ends = F.pad((mask != 0).sum(1).cumsum(0), (1, 0))
        if self.positions > self._padding.tokens:
            ends = F.pad(ends, (0, 1), value=self.positions)
        return ends.to(torch.int32)

    def _numbered(
        self,
        given: torch.Tensor | None,
        ids: torch.Tensor,
        own: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        if given is not None:
            if given.dim() != 2:
                raise Unfit("its positions have more than one number each")
            return self._row(given)
        if own is not None:
            return self._row(own(ids))
        return (self._taken % self._padding.width)[None]

    def _labels(self, labels: torch.Tensor, shifted: bool) -> torch.Tensor:
        row = self._row(labels)
        row[:, self._padding.tokens :] = IGNORED
        if shifted:  # the last token of a sequence does not predict the first of the next
            first = self._ends[: self._padding.rows].long()
            row.index_fill_(1, first, IGNORED)
        return row

    def _segments(self, on_host: bool, compiled: bool) -> Segments:
        padding, filler = self._padding, self.positions - self._padding.tokens
        lengths = [*padding.lengths, filler] if filler else list(padding.lengths)
        if self._fixed is not None:
            if on_host and compiled and self.positions > MOST_MASKED:
                raise Unfit(f"a mask for {self.positions} positions is too large")
            parts = self._fixed.lengths(padding.lengths)
            ends = self._ends if compiled else self._ends[: len(parts) + 1]  # no empty sequences
            return Segments(ends, self._fixed.width, parts)
        if not compiled:
            return Segments(self._ends, max(lengths), lengths)
        if on_host and self.positions > MOST_MASKED:
            raise Unfit(f"a mask for {self.positions} positions is too large")
        # The same for all batches of this shape: another number would be other code.
        longest = max(padding.width, round(padding.positions * COMPILED_FRAC), MULTIPLE)
        return Segments(self._ends, longest, lengths)
