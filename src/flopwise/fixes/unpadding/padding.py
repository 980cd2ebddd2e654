"""What is padded in a batch, told from its attention mask and its labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Labels with this value are left out of a loss. Source: `ignore_index` of torch.nn.functional.cross_entropy.
IGNORED = -100

_KINDS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@dataclass(frozen=True)
class Padding:
    """The padding of one batch of B sequences of width S."""

    rows: int
    width: int
    lengths: tuple[int, ...]  # tokens of each sequence
    used_width: int  # behind this column there is no token
    right: bool  # every sequence begins in the first column and has no gap
    plain: bool  # the mask holds nothing but 0 and 1
    ignored: bool  # no label that counts lies at a position without a token

    @property
    def tokens(self) -> int:
        """The positions that hold a token."""
        return sum(self.lengths)

    @property
    def positions(self) -> int:
        """All positions."""
        return self.rows * self.width


def look(mask: torch.Tensor, labels: torch.Tensor | None = None) -> Padding:
    """Returns what is padded, from tensors of one device; if that is not the host, it waits for the device once.

    Args:
        mask: (B, S), integer or bool.
        labels: of the same shape, where there are any.
    """
    rows, width = mask.shape
    held = mask != 0
    columns = torch.arange(1, width + 1, device=mask.device)
    begins = held[:, 1:] & ~held[:, :-1]
    stray = held.new_zeros(()) if labels is None else ((labels != IGNORED) & ~held).any()
    facts = torch.stack(
        [
            (held * columns).amax(),
            held[:, 0].all() & ~begins.any(),
            ((mask == 0) | (mask == 1)).all(),
            ~stray,
        ]
    )
    found = torch.cat([facts, held.sum(1)]).tolist()
    used_width, right, plain, ignored = found[:4]
    return Padding(
        rows, width, tuple(found[4:]), used_width, bool(right), bool(plain), bool(ignored)
    )


def mask_problem(mask: torch.Tensor, ids: torch.Tensor) -> str | None:
    """Returns why a mask says nothing of the padding of these token ids, or None."""
    if mask.dim() != 2 or mask.shape != ids.shape:
        return f"an attention mask of shape {tuple(mask.shape)} for ids of shape {tuple(ids.shape)}"
    if mask.dtype not in _KINDS:
        name = str(mask.dtype).removeprefix("torch.")
        return f"an attention mask of {name}: its numbers may be added to scores"
    return None
