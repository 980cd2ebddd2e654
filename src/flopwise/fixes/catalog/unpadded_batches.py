"""FW117 unpadded-batches: the padding of a batch is left out of the computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, unless_failed
from flopwise.fixes.slot import UNPADDED, Layers, Slot, forward_problem, inner
from flopwise.fixes.unpadding import attention
from flopwise.fixes.unpadding.cropping import crop_problem
from flopwise.fixes.unpadding.host_copies import HostCopies
from flopwise.fixes.unpadding.packing import pack_problem
from flopwise.fixes.unpadding.parts import CROPPED, PACKED, Part, Tally
from flopwise.meter.parity import compare_forward
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity

#: After so many calls of which none had padding to leave out, it is taken back.
MOST_PLAIN_CALLS = 8


class UnpaddedBatches(Fix):
    """The padding of a batch left out of the computation.

    What it does:
    Packed: a model of transformers that is called with ids, an attention mask and labels is called with all tokens of
    the batch in one row instead, each sequence with its own positions, attention within each sequence alone, labels
    moved along, and a short filler without labels so that lengths repeat (1/64 of the batch's positions; 1/16 where
    the model is compiled). Cropped: other models with arguments of these names, and those that cannot be packed, get
    the batch without the columns behind the longest sequence, rounded up to 64. Batches, their order and the loss
    stay as they are; logits and hidden states get their padded shape back when the script reads them. How many
    tokens there are is taken from the mask on the host, before it was sent to the device; where the mask was made on
    the device it is read there, which waits for the device once a call.

    Why it helps:
    Matrix products, normalisation and activations are computed for every position, attention for every pair, whether a
    token is there or not. What is left out costs nothing.

    When it declines:
    No padding was found in the run; the loss is computed outside of the model; the script compiles the model; the
    model's call cannot be wrapped; a hook of the script looks at its parts. Packed is not for encoder-decoders,
    sliding windows, mixtures with a router loss, activations computed again in the backward, attention that does not
    go through the interface of transformers, DistributedDataParallel that looks for unused parameters. Within a run
    a call is left as it is where a position without a token has a label that counts, a causal model is padded on the
    left, a sequence is empty, or an argument is not known.

    What can change:
    Sums run in another order and other attention kernels are used: results differ by rounding, held against a float64
    reference. Dropout draws other random numbers, so numbers are compared with dropout off. Where the script reads
    logits or hidden states, positions without a token are zeros, and it holds for real tokens only; those outputs are
    not compared. `past_key_values` are not returned by a packed call. Hooks that the script adds later see one row.
    """

    code = "FW117"
    name = "unpadded-batches"
    causes = ("padding",)
    findings = ("L113", "D401")
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether padding may be left out."""
        planned = scene.step_s is None  # its cause was measured when the plan was made
        if not planned and not any(code in scene.findings for code in self.findings):
            return Declined("no padding was found in the run")
        if scene.device.type not in ("cpu", "cuda"):
            return Declined(f"not tested on devices of type {scene.device.type}")
        reason = forward_problem(scene, "another call of it")
        if reason is None:
            problems = [_problem(root) for root in scene.roots]
            reason = problems[0] if all(problems) else None
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root that takes masks, switched off. `setting` may hold the `mode`."""
        roots = [inner(root) for root in scene.roots if _problem(root) is None]
        return _Applied(roots, (setting or {}).get("mode"))


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, roots: list[nn.Module], mode: str | None = None) -> None:
        if mode not in (None, PACKED, CROPPED):
            raise ValueError(f"mode {mode!r} is neither {PACKED} nor {CROPPED}")
        self.copies = HostCopies()
        self._reason: str | None = None
        self.tally = Tally()
        packs = mode != CROPPED and all(pack_problem(root) is None for root in roots)
        self._parts = [Part(root, self) for root in roots]
        self._layers = Layers(roots, UNPADDED)
        self.mode = PACKED if packs else CROPPED
        self.setting = {"mode": self.mode}
        self._on = False

    def enable(self) -> None:
        if self.failure() is not None:
            return
        self.copies.watch()
        if self.mode == PACKED:
            attention.register()
        self._layers.on([part.layer for part in self._parts])
        self._on = True

    def disable(self) -> None:
        self._layers.off()
        if self._on:
            self._on = False
            self.copies.unwatch()
            if self.mode == PACKED:
                attention.unregister()
        self._tell()

    def undo(self) -> None:
        self.disable()

    def settled(self) -> bool:
        self._tell()
        return self._layers.settled()

    def failure(self) -> str | None:
        tally = self.tally
        if self._reason is None and not tally.calls and tally.plain >= MOST_PLAIN_CALLS:
            self._reason = (
                f"none of {tally.plain} calls had padding to leave out: {tally.why_plain}"
            )
        return self._reason or self._layers.failure()

    def fail(self, reason: str) -> None:
        """Leaves calls as they are from here on."""
        if self._reason is None:
            self._reason = reason

    def given_up(self) -> bool:
        """Whether calls are left as they are."""
        return self._reason is not None

    def verify(self, snapshot: Snapshot) -> Parity:
        """Compares one step; where a packed row does not hold its numbers, a cropped batch is tried."""
        parity = self._verified(snapshot)
        if parity.passed or self.mode == CROPPED:
            return parity
        self.mode, self._reason = CROPPED, None
        self.setting["mode"] = CROPPED
        self._layers = Layers([part.module for part in self._parts], UNPADDED)
        cropped = self._verified(snapshot)
        return replace(cropped, detail=f"packed: {parity.detail}; cropped: {cropped.detail}")

    def _verified(self, snapshot: Snapshot) -> Parity:
        module = inner(snapshot.module)
        slot = Slot.of(module)
        self.tally = Tally()
        parity = compare_forward(
            snapshot._replace(module=module),
            self.enable,
            self.disable,
            unit_roundoff=max(FLOAT32, slot.unit_roundoff()),
            bare=slot.bypassed,
        )
        seen, self.tally = self.tally, Tally()
        parity = unless_failed(parity, self)
        if parity.passed and not seen.calls:
            why = f"the call had no padding to leave out: {seen.why_plain}"
            return replace(parity, passed=False, detail=why)
        words = "positions without a token are zeros in the outputs, and were not compared"
        return replace(parity, detail=f"{parity.detail}; {words}", output_rel=None)

    def _tell(self) -> None:
        """Writes down what was computed."""
        tally = self.tally
        if not tally.calls:
            return
        each = (round(n / tally.calls) for n in (tally.tokens, tally.positions, tally.padded))
        tokens, positions, padded = each
        self.setting["positions"] = f"{positions} of {padded} for {tokens} tokens a call"
        if tally.read:
            self.setting["masks_read"] = f"{tally.read} of {tally.calls + tally.plain} calls"


def _problem(root: nn.Module) -> str | None:
    """Returns why neither way is one for this root, or None."""
    module = inner(root)
    reason = crop_problem(module)
    if reason is not None:
        return reason
    for wrapper in root.modules():
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and (
            wrapper.find_unused_parameters or wrapper.static_graph
        ):
            return "DistributedDataParallel looks through the outputs of the model"
    return None
