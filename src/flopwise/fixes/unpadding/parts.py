"""The calls of one module, made without the padding of their batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from flopwise.fixes.slot import Call, Slot
from flopwise.fixes.unpadding import attention
from flopwise.fixes.unpadding.attention import Unfit
from flopwise.fixes.unpadding.calls import Names, unknown
from flopwise.fixes.unpadding.cropping import Cropped
from flopwise.fixes.unpadding.groups import Row, current
from flopwise.fixes.unpadding.host_copies import HostCopies
from flopwise.fixes.unpadding.packing import Packed, own_positions, shifts
from flopwise.fixes.unpadding.padding import Padding, look, mask_problem
from flopwise.fixes.unpadding.restored import Restoring
from flopwise.meter.replay import error_words, is_replaying

PACKED, CROPPED = "packed", "cropped"


@dataclass
class Tally:
    """What has been computed while the fix was on."""

    calls: int = 0  # that were made without padding
    plain: int = 0
    read: int = 0  # for which the mask was read from the device
    tokens: int = 0
    positions: int = 0  # that were computed
    padded: int = 0  # that would have been
    why_plain: str = ""


class Owner(Protocol):
    """The fix, as its parts know it."""

    mode: str
    tally: Tally
    copies: HostCopies

    def given_up(self) -> bool:
        """Whether calls are left as they are."""

    def fail(self, reason: str) -> None:
        """Leaves calls as they are from here on."""


class Part:
    """The calls of one module."""

    def __init__(self, module: nn.Module, owner: Owner) -> None:
        self.module, self._owner = module, owner
        self._names = Names(module)
        self._below = [m for m in module.modules() if m is not module]
        self._slot = Slot.of(module)
        self._shifted = shifts(module)
        self._positions = own_positions(module)
        self._restoring = Restoring()

    def layer(self, call: Call) -> Call:
        """Returns the call without padding; `call` is the one with it."""
        owner = self._owner

        def unpadded(*args: Any, **kwargs: Any) -> Any:
            if owner.given_up():
                return call(*args, **kwargs)
            short = self._shortened(args, kwargs)
            if short is None:
                return call(*args, **kwargs)
            try:
                return self._made(short, call)
            except Exception as error:
                words = (
                    str(error) if isinstance(error, Unfit) else f"it raised {error_words(error)}"
                )
            # Outside of the except clause, which keeps the memory of what failed.
            result = call(*args, **kwargs)  # if it fails, too, the error is the script's own
            owner.fail(f"a call without padding was made again with it: {words}")
            return result

        return unpadded

    def _shortened(self, args: Any, kwargs: Any) -> Packed | Cropped | None:
        """Returns the call to make instead, None where the call is left as it is."""
        tally = self._owner.tally
        try:
            short = self._short(args, kwargs)
        except Unfit as unfit:
            short = str(unfit)
        except Exception as error:
            self._owner.fail(f"a batch could not be looked at: {error_words(error)}")
            return None
        if isinstance(short, str):
            tally.plain += 1
            tally.why_plain = short
            return None
        return short

    def _short(self, args: Any, kwargs: Any) -> Packed | Cropped | str:
        named = self._names.of(args, kwargs)
        if named is None:
            return "its arguments have no names"
        ids, mask, labels = (named.get(n) for n in ("input_ids", "attention_mask", "labels"))
        if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor):
            return "it was called without ids or without an attention mask"
        reason = mask_problem(mask, ids) or self._argument_problem(named)
        if reason is not None:
            return reason
        by_position = isinstance(labels, torch.Tensor) and labels.shape == ids.shape
        if self._owner.mode == PACKED and not by_position:
            return "the loss is computed outside of the model, or not by position"
        group = current(ids) if self._owner.mode == PACKED else None
        padding = (
            group.padding
            if group is not None
            else self._look(mask, labels if by_position else None)
        )
        if not padding.plain:
            return "its mask holds other numbers than 0 and 1"
        if not padding.ignored:
            return "positions without a token have labels that count"
        if self._owner.mode == PACKED and self._shifted and not padding.right:
            return "its sequences are padded on the left, or have gaps"
        short = self._cut(named, padding, group.row if group is not None else None)
        if short.positions >= padding.positions:
            return f"{padding.tokens} of {padding.positions} positions hold a token"
        self._count(padding, short)
        return short

    def _argument_problem(self, named: Mapping[str, Any]) -> str | None:
        name = unknown(named) if self._owner.mode == PACKED else None
        return None if name is None else f"its argument {name} may depend on positions"

    def _look(self, mask: torch.Tensor, labels: torch.Tensor | None) -> Padding:
        copies = self._owner.copies
        on_host = copies.of(mask)
        held = copies.of(labels) if labels is not None else None
        if on_host is not None and (labels is None or held is not None):
            return look(on_host, held)
        self._owner.tally.read += not is_replaying()  # copies of a batch: nobody minds waiting
        return look(mask, labels)

    def _cut(self, named: Mapping[str, Any], padding: Padding, row: Row | None) -> Packed | Cropped:
        if self._owner.mode == CROPPED:
            return Cropped(named, padding)
        return Packed(
            named,
            padding,
            compiled=self._compiles(),
            shifted=self._shifted,
            caches="use_cache" in self._names.known,
            positions=self._positions,
            row=row,
        )

    def _compiles(self) -> bool:
        """Whether compiled code will run: of the module, or of a part of it."""
        return self._slot.compiles or any(
            vars(m).get("_compiled_call_impl") is not None for m in self._below
        )

    def _count(self, padding: Padding, short: Packed | Cropped) -> None:
        tally = self._owner.tally
        tally.calls += 1
        tally.tokens += padding.tokens
        tally.positions += short.positions
        tally.padded += padding.positions

    def _made(self, short: Packed | Cropped, call: Call) -> Any:
        if isinstance(short, Packed):
            with attention.over(short.segments, self.module.config):
                outputs = call(**short.kwargs)
        else:
            outputs = call(**short.kwargs)
        reason = short.problem(outputs)
        if reason is not None:
            raise Unfit(reason)
        return self._restoring.back(outputs, short.shape())
