"""The calls of one module, made with sequences of several batches: each with as many tokens as fill its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from flopwise.fixes.slot import UNPADDED, Call, Slot
from flopwise.fixes.unpadding.attention import Unfit
from flopwise.fixes.unpadding.calls import BY_POSITION, Names, unknown
from flopwise.fixes.unpadding.groups import Group, Row, Waiting, computing, split
from flopwise.fixes.unpadding.host_copies import HostCopies
from flopwise.fixes.unpadding.packing import shifts
from flopwise.fixes.unpadding.padding import IGNORED, Padding, look, mask_problem
from flopwise.fixes.unpadding.restored import Later, Restoring, named, plain_kind
from flopwise.meter.replay import error_words, is_replaying


@dataclass
class Tally:
    """What has been computed while the fix was on."""

    groups: int = 0
    plain: int = 0
    drawn: int = 0  # tokens of the batches
    computed: int = 0  # tokens of the groups
    most_waiting: int = 0  # sequences
    why_plain: str = ""


class Owner(Protocol):
    """The fix, as its part knows it."""

    tally: Tally
    copies: HostCopies

    def row(self) -> Row | None:
        """Returns the row to fill now; None: calls are left as they are."""

    def saw(self, padding: Padding) -> None:
        """Is told of each batch that could be regrouped."""

    def overflowed(self) -> None:
        """Is told that more tokens waited than may."""

    def fail(self, reason: str) -> None:
        """Leaves calls as they are from here on."""

    def given_up(self) -> bool:
        """Whether calls are left as they are."""


@dataclass(frozen=True)
class Batch:
    """A call's arguments by name, and what is padded of them."""

    named: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]  # those by position
    padding: Padding


class Regrouping:
    """The calls of one module."""

    def __init__(self, module: nn.Module, owner: Owner) -> None:
        self.module, self._owner = module, owner
        self._names = Names(module)
        self._slot = Slot.of(module)
        self._shifted = shifts(module)
        self._restoring = Restoring()
        self.waiting = Waiting()

    def layer(self, call: Call) -> Call:
        """Returns the call with a group of sequences; `call` is the one with a batch."""
        owner = self._owner

        def regrouped(*args: Any, **kwargs: Any) -> Any:
            if owner.given_up() or not self.module.training:
                return call(*args, **kwargs)
            batch = self._looked_at(args, kwargs)
            row = owner.row()
            if batch is None or row is None:
                return call(*args, **kwargs)
            try:
                if is_replaying():
                    return self._whole(batch, row, call)
                return self._exchanged(batch, row, call, args, kwargs)
            except Exception as error:
                words = (
                    str(error) if isinstance(error, Unfit) else f"it raised {error_words(error)}"
                )
            # Outside of the except clause, which keeps the memory of what failed.
            result = call(*args, **kwargs)  # if it fails, too, the error is the script's own
            owner.fail(
                f"a call with sequences of several batches was made again with its own: {words}"
            )
            return result

        return regrouped

    # ------------------------------------------------------------------ the batch

    def _looked_at(self, args: Any, kwargs: Any) -> Batch | None:
        """Returns the batch of a call, None where the call is left as it is."""
        tally = self._owner.tally
        try:
            batch = self._batch(args, kwargs)
        except Exception as error:
            self._owner.fail(f"a batch could not be looked at: {error_words(error)}")
            return None
        if isinstance(batch, str):
            tally.plain += 1
            tally.why_plain = batch
            return None
        if not is_replaying():
            self._owner.saw(batch.padding)
        return batch

    def _batch(self, args: Any, kwargs: Any) -> Batch | str:
        given = self._names.of(args, kwargs)
        if given is None:
            return "its arguments have no names"
        ids, mask, labels = (given.get(n) for n in ("input_ids", "attention_mask", "labels"))
        for tensor in (ids, mask, labels):
            if not isinstance(tensor, torch.Tensor):
                return "it was called without ids, an attention mask or labels"
        assert ids is not None
        assert mask is not None
        assert labels is not None
        reason = mask_problem(mask, ids) or _argument_problem(self.module, given, ids)
        if reason is not None:
            return reason
        copies = self._owner.copies
        on_host, labels_on_host = copies.of(mask), copies.of(labels)
        if on_host is not None and labels_on_host is not None:
            padding = look(on_host, labels_on_host)
        else:  # waits for the device, as unpadded-batches does, which asks no more then
            padding = look(mask, labels)
        if not (padding.plain and padding.ignored and padding.right):
            return "its sequences are not padded behind their end alone, without labels there"
        if min(padding.lengths) == 0:
            return "a sequence of the batch has no token"
        tensors = {n: given[n] for n in BY_POSITION if given.get(n) is not None}
        return Batch(given, tensors, padding)

    # ------------------------------------------------------------------ groups

    def _exchanged(self, batch: Batch, row: Row, call: Call, args: Any, kwargs: Any) -> Any:
        """Returns the outputs of a group in exchange for the batch, whose sequences may wait."""
        owner, tally = self._owner, self._owner.tally
        group, after = self.waiting.exchange(batch.tensors, batch.padding.lengths, row)
        outputs = self._computed(group, batch, call)
        overflow = after.overflows > self.waiting.overflows
        self.waiting = after
        tally.groups += 1
        tally.drawn += batch.padding.tokens
        tally.computed += group.padding.tokens
        tally.most_waiting = max(tally.most_waiting, after.sequences)
        if overflow:
            owner.overflowed()
        others = [name for name in outputs if name != "loss"]
        kind, loss = plain_kind(outputs), outputs["loss"]
        del outputs  # with what was computed for other sequences than the script's batch
        made: dict[str, Any] = {}

        def again(name: str) -> Any:
            if not made:
                owner.fail(
                    f"the script reads {name}: they were computed again, for the sequences of its own batch"
                )
                made.update(self._slot.plain(*args, **kwargs).items())
            return made[name]

        return self._restoring.back(named(kind, {"loss": loss}, others), Later(again))

    def _whole(self, batch: Batch, row: Row, call: Call) -> Any:
        """Returns the outputs of all sequences of the batch, computed group by group: nothing waits, nothing changes."""
        losses, counts, places = [], [], []
        parts: dict[str, list[torch.Tensor]] = {}
        kind: Any = None
        for taken, group in split(batch.tensors, batch.padding.lengths, row):
            outputs = self._computed(group, batch, call)
            kind = plain_kind(outputs)
            losses.append(outputs["loss"])
            counts.append(self._labelled(group.tensors["labels"]))
            places += taken
            for name, value in outputs.items():
                if name == "loss":
                    continue
                if not isinstance(value, torch.Tensor) or value.shape[:1] != (len(taken),):
                    raise Unfit(f"its output {name} is not one for each sequence")
                parts.setdefault(name, []).append(value)
        self._owner.tally.groups += len(losses)
        order = torch.tensor(places, device=losses[0].device).argsort()
        values = {name: torch.cat(found).index_select(0, order) for name, found in parts.items()}
        return kind(loss=_mean(losses, counts), **values)

    def _computed(self, group: Group, batch: Batch, call: Call) -> Any:
        """Returns the outputs of a group, of which the loss can be read."""
        if UNPADDED not in self._slot.composition:
            raise Unfit("unpadded-batches is not on, which computes a group as one row")
        given = {**batch.named, **group.tensors}
        if "use_cache" in self._names.known:  # keys and values of other sequences are of no use
            given["use_cache"] = False
        with computing(group):
            outputs = call(**given)
        loss = outputs.get("loss") if type(outputs) is dict else None
        if isinstance(outputs, Mapping) and type(outputs) is not dict:
            loss = outputs["loss"]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or type(outputs) is dict:
            raise Unfit("the model gives no outputs by name, with one loss")
        return outputs

    def _labelled(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns how many labels the loss is a mean over."""
        return (labels[:, 1:] if self._shifted else labels).ne(IGNORED).sum()


def _mean(losses: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean over all labels from the means over those of each group."""
    total = torch.stack(list(counts)).sum()
    shares = [
        torch.where(n > 0, loss * n, torch.zeros_like(loss)) / total
        for loss, n in zip(losses, counts, strict=True)
    ]
    return torch.stack(shares).sum()


def _argument_problem(module: nn.Module, given: Mapping[str, Any], ids: Any) -> str | None:
    """Returns why a call cannot be made with other sequences, or None."""
    name = unknown(given)
    if name is not None:
        return f"its argument {name} may depend on positions"
    if given.get("num_items_in_batch") is not None:
        return "its loss is divided by a number that is the batch's (num_items_in_batch)"
    returns = given.get("return_dict")
    config = getattr(module, "config", None)
    if returns is False or (returns is None and getattr(config, "return_dict", True) is False):
        return "its outputs are a tuple, in which nothing can be left until it is read"
    for name in BY_POSITION:
        value = given.get(name)
        if value is not None and value.shape != ids.shape:
            return f"its argument {name} is not one for each sequence"
    return None
