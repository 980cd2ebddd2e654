"""FW118 cross-batch-packing: rows of one length, filled with sequences of several batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, stdev

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.fixes.compile_settings import deadline_s
from flopwise.fixes.compiling import rehearse_beside
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, unless_failed
from flopwise.fixes.slot import REGROUPED, UNPADDED, Layers, Slot, forward_problem, inner
from flopwise.fixes.unpadding.groups import MULTIPLE, Row
from flopwise.fixes.unpadding.host_copies import HostCopies
from flopwise.fixes.unpadding.packing import pack_problem
from flopwise.fixes.unpadding.padding import Padding
from flopwise.fixes.unpadding.regrouping import Regrouping, Tally
from flopwise.meter.parity import compare_forward, not_shown
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

#: Batches that are watched before the length of a row is chosen.
WATCHED_CALLS = 32
#: A row has room for this much more than a batch has tokens on average, so that what waits does not grow.
ROOM_FRAC = 1 / 64
#: So many overflows make the rows longer, by this share; so often at most.
OVERFLOWS, GROWTH_FRAC, MOST_GROWTHS = 3, 1 / 16, 4
#: After so many calls of which none could be regrouped it is taken back.
MOST_PLAIN_CALLS = 8


class CrossBatchPacking(Fix):
    """Rows of one length, filled with sequences of several batches.

    What it does:
    A batch of the script goes to those sequences that wait; as many of them as fill one row are computed, the oldest
    first and behind it each that fits, and the rest waits for the next call. The row is as long as a batch has tokens
    on average, and a little longer (1/64, and the uncertainty of 32 watched batches), so that little waits and little
    of a row is filler. unpadded-batches computes it, with attention within each sequence alone. The loss is the mean over
    the labels of the row. Only in training mode and while gradients are recorded: evaluations are left as they are.

    Why it helps:
    Without it a row is as long as its own batch, rounded up: compiled code needs a round length of its own for each, or
    code for any length, and on average a tenth of it is filler (32 sequences of 164 tokens on average, padded to 512).
    Rows of one length need one piece of compiled code, and are full.

    When it declines:
    unpadded-batches is not on, or cannot compute the model's batches as one row; several models are trained; the script
    compiles the model; the model's call cannot be wrapped. Within a run a call is left as it is where its loss is
    divided by a number that the script gives (`num_items_in_batch`), sequences have gaps or are padded in front, outputs
    are a tuple, or an argument is not known. It is taken back when the script reads logits: those are
    computed once more then, exactly, for the batch of that call.

    What can change:
    The order of the data. Which sequences share a step is not what the script drew: a sequence is computed in the
    call that draws it or a few calls later, so a step has other sequences, about as many tokens as before, and not
    always the same number of sequences. The number of optimizer steps, the batches that the script sees, the learning
    rate's schedule and the evaluation stay. At the end of the training, and when a checkpoint is resumed, the
    sequences that then wait are not computed: at most the tokens of two rows. Losses of single steps are of other
    sequences than the script's. Beside that results differ by rounding, as with unpadded-batches, which is held against a
    float64 reference with the sequences of one batch, computed in two groups.
    """

    code = "FW118"
    name = "cross-batch-packing"
    causes = ("padding",)
    findings = ("L113", "D401")
    numerics = "reordered"
    opt_in = True
    changes = (
        "which sequences share a step: some wait a few steps until they fill a row; the number of optimizer steps stays, "
        "and the sequences that wait at the end of the training (two rows at most) are not trained on"
    )
    late = True

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether sequences may change their batches."""
        planned = scene.step_s is None  # its cause was measured when the plan was made
        if not planned and not any(code in scene.findings for code in self.findings):
            return Declined("no padding was found in the run")
        if scene.device.type not in ("cpu", "cuda"):
            return Declined(f"not tested on devices of type {scene.device.type}")
        reason = forward_problem(scene, "another call of it")
        if reason is None and len(scene.roots) != 1:
            reason = f"{len(scene.roots)} models are trained, not one"
        if reason is None:
            reason = pack_problem(inner(scene.roots[0])) or _wrapper_problem(scene.roots[0])
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off; it watches some batches, unless `setting` holds the shape of a row."""
        return _Applied(inner(scene.roots[0]), _row_of(setting), deadline_s(scene))


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, module: nn.Module, row: Row | None, compile_limit_s: float) -> None:
        self.tally, self.copies = Tally(), HostCopies()
        self.part = Regrouping(module, self)
        self._slot = Slot.of(module)
        self._layers = Layers([module], REGROUPED)
        self._limit_s = compile_limit_s
        self._row = row
        self._for_comparison: Row | None = None
        self._watched: list[Padding] = []
        self._on = False
        self._over = self._grown = 0
        self._reason: str | None = None
        if UNPADDED not in self._slot.composition:
            self._reason = "unpadded-batches is not on, which computes a group as one row"
        self.setting = dict(_words_of(row)) if row is not None else {}
        if row is None and self._reason is None:
            self.copies.watch()
            self._layers.on([self.part.layer])

    # ------------------------------------------------------------------ on and off

    def enable(self) -> None:
        if self.failure() is not None:
            return
        self.copies.watch()
        self._layers.on([self.part.layer])
        self._on = True

    def disable(self) -> None:
        self._on = False
        self._layers.off()
        self.copies.unwatch()
        self._tell()

    def undo(self) -> None:
        self.disable()
        self.part = Regrouping(self.part.module, self)  # what waits is not computed any more

    def ready(self) -> bool:
        """Whether enough batches were seen to choose a row."""
        if self._row is None and len(self._watched) >= WATCHED_CALLS:
            self._row = row_for(self._watched)
            self.setting = dict(_words_of(self._row))
        if self._row is not None and not self._on:
            self.disable()
        return self._row is not None or self._reason is not None

    def settled(self) -> bool:
        self._tell()
        return self._layers.settled()

    def failure(self) -> str | None:
        tally = self.tally
        seen = tally.groups or self._watched
        if self._reason is None and not seen and tally.plain >= MOST_PLAIN_CALLS:
            self._reason = (
                f"none of {tally.plain} calls could be made with other sequences: {tally.why_plain}"
            )
        return self._reason or self._layers.failure()

    # ------------------------------------------------------------------ for its part

    def row(self) -> Row | None:
        """Returns the row to fill now; None: calls are left as they are."""
        return (self._for_comparison or self._row) if self._on else None

    def saw(self, padding: Padding) -> None:
        """Is told of each batch that could be regrouped."""
        if self._row is None:
            self._watched.append(padding)

    def overflowed(self) -> None:
        """Makes rows longer where more tokens come than they hold."""
        self._over += 1
        if self._over < OVERFLOWS or self._row is None:
            return
        if self._grown == MOST_GROWTHS:
            self.fail("batches hold more and more tokens than were seen before")
            return
        self._over = 0
        self._grown += 1
        longer = _rounded(self._row.length * (1 + GROWTH_FRAC))
        self._row = replace(self._row, length=longer)
        self.setting.update(_words_of(self._row))

    def fail(self, reason: str) -> None:
        """Leaves calls as they are from here on."""
        if self._reason is None:
            self._reason = reason

    def given_up(self) -> bool:
        """Whether calls are left as they are."""
        return self._reason is not None

    # ------------------------------------------------------------------ numbers

    def verify(self, snapshot: Snapshot) -> Parity:
        """Compares the sequences of one batch, computed in two groups; has compiled code made ready for full rows after."""
        if self._row is None:
            return not_shown("reordered", f"only {len(self._watched)} batches were seen")
        module = inner(snapshot.module)
        snapshot = snapshot._replace(module=module)
        self.tally = Tally()
        self._for_comparison = replace(self._row, length=_half_of(snapshot, self._row))
        try:
            parity = compare_forward(
                snapshot,
                self.enable,
                self.disable,
                unit_roundoff=max(FLOAT32, self._slot.unit_roundoff()),
                bare=self._slot.bypassed,
            )
        finally:
            self._for_comparison = None
        seen, self.tally = self.tally, Tally()
        parity = unless_failed(parity, self)
        if parity.passed and seen.groups < 2:
            return replace(parity, passed=False, detail=f"not made of groups: {seen.why_plain}")
        if parity.passed:
            self.enable()
            reason = rehearse_beside(snapshot, self._limit_s)
            self.disable()
            if reason is not None:
                return replace(parity, passed=False, detail=f"no code for its rows: {reason}")
        words = f"compared as {seen.groups} groups of one batch's sequences"
        return replace(parity, detail=f"{parity.detail}; {words}")

    def _tell(self) -> None:
        """Writes down what was computed."""
        tally = self.tally
        if not tally.groups or self._row is None or not tally.drawn:
            return
        computed, drawn = (round(n / tally.groups) for n in (tally.computed, tally.drawn))
        self.setting["tokens"] = f"{computed} computed and {drawn} drawn a call"
        self.setting["waiting"] = f"{tally.most_waiting} sequences at most"


def row_for(seen: list[Padding]) -> Row:
    """Returns the row for batches like those that were seen: no shorter than what a batch has on average, with its uncertainty."""
    tokens = [float(padding.tokens) for padding in seen]
    error = stdev(tokens) / math.sqrt(len(tokens)) if len(tokens) > 1 else 0.0
    width = _rounded(max(padding.width for padding in seen))
    length = max(_rounded(fmean(tokens) * (1 + ROOM_FRAC) + error), width)
    return Row(length, 2 * max(padding.rows for padding in seen), width)


def _rounded(positions: float) -> int:
    return math.ceil(positions / MULTIPLE) * MULTIPLE


def _half_of(snapshot: Snapshot, row: Row) -> int:
    """Returns the length of rows of which the snapshot's batch takes two, where its longest sequence allows."""
    mask = snapshot.kwargs.get("attention_mask")
    tensors = [mask] if mask is not None else [*snapshot.args[1:2]]
    tokens = [int(t.ne(0).sum()) for t in tensors if t is not None and hasattr(t, "ne")]
    longest = [int(t.ne(0).sum(1).max()) for t in tensors if t is not None and hasattr(t, "ne")]
    if not tokens:
        return row.length
    return max(-(-tokens[0] // 2), longest[0])


def _words_of(row: Row) -> dict[str, str]:
    return {"row": str(row.length), "sequences": str(row.sequences), "width": str(row.width)}


def _row_of(setting: Mapping[str, str] | None) -> Row | None:
    """Returns the row of an earlier trial's setting, None without one.

    Raises:
        ValueError: it is none.
    """
    if not setting or "row" not in setting:
        return None
    names = ("row", "sequences", "width")
    words = [str(setting.get(name, "")) for name in names]
    if not all(word.isdecimal() and 0 < int(word) < 1 << 30 for word in words):
        raise ValueError(f"{dict(zip(names, words, strict=True))} is the shape of no row")
    length, sequences, width = map(int, words)
    if length < width:
        raise ValueError(f"a row of {length} positions for sequences of {width}")
    return Row(length, sequences, width)


def _wrapper_problem(root: nn.Module) -> str | None:
    for wrapper in root.modules():
        if isinstance(wrapper, DistributedDataParallel) and (
            wrapper.find_unused_parameters or wrapper.static_graph
        ):
            return "DistributedDataParallel looks through the outputs of the model"
    return None
