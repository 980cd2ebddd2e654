"""FW112 labelled-logits: logits at labelled places only, where nothing but the loss reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.labelled_loss import Count, Loss
from flopwise.fixes.loss_outside import Beside, LossOutside, eligible
from flopwise.fixes.replaced_linear import PRODUCT, product_of
from flopwise.fixes.slot import Call, Slot, inner

#: With more of the places labelled there is too little to leave out.
MOST_LABELLED_FRAC = 0.8
ROUND_TO = 256  # rows


class LabelledLogits(Fix):
    """Logits at labelled places only, where nothing but the loss reads them.

    What it does:
    Runs the model without its labels and without the product of its head, and makes the loss that the model would have
    made of logits at those places only whose label is not ignored (15 % of them in BERT's masked language model).
    Their number is rounded up, so that shapes stay. It is counted on the device before the forward and read after the
    forward was launched: the host waits for nothing that the device has still to do. The output's `logits` are computed
    if they are read after all, exactly, and gradient included; then the fix takes itself back. Only while gradients
    are recorded.

    Why it helps:
    The head's product and what cross_entropy makes of its logits (in float32, forward and backward) are a tenth of
    BERT-large's step, and 85 % of it are for places that no loss looks at: 118.6 -> 104.6 ms on an H200, compiled
    91.6 -> 85.2 ms.

    When it declines:
    The model does not take `labels` and give `loss` beside `logits`; the logits are not what a Linear layer gives, as
    it is or in float32; the loss is not one cross_entropy of them with the labels, or the labels shifted by one; something else is
    added to the loss (the numbers then differ); the script reads the logits in the first steps; more than 80 % of the
    places have a label (causal models, as a rule); the head is less than 3 % of the products; hooks would see its
    output; the script compiles its model. A model that returns the loss alone is not looked at.

    What can change:
    The loss is summed in another order: results differ by rounding, held against a float64 reference. The mean is over
    the same labels. Logits that are read are computed by a product of their own, with the weights of that step.
    """

    code = "FW112"
    name = "labelled-logits"
    causes = ("unlabelled-logits",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether the model has a head that could be left out."""
        return eligible(scene)

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off: for some calls it watches whether logits are read, unless a trial has seen that."""
        return _Applied(inner(scene.roots[0]), setting)


class _Applied(LossOutside):
    def __init__(self, module: nn.Module, setting: Mapping[str, str] | None) -> None:
        super().__init__(module, setting)
        self._slot_of_root = Slot.of(module)
        self._beside: Beside | None = None
        self._rows = 0

    def label_problem(self, labelled_frac: float, places: int) -> str | None:
        if labelled_frac > MOST_LABELLED_FRAC:
            return (
                f"{labelled_frac:.0%} of the places have a label: there is too little to leave out"
            )
        return None

    def asked(self, loss: Loss, targets: torch.Tensor) -> Count:
        return Count(targets, loss.ignore_index)

    def made(
        self, head: nn.Linear, loss: Loss, hidden: torch.Tensor, targets: torch.Tensor, asked: Any
    ) -> torch.Tensor:
        if self._beside is None:
            self._beside = Beside(self._slot_of_root, _loss_of(head, loss))
        rows = self._enough(asked.read(), targets.numel())
        kind = hidden.device.type
        under = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        known = (rows, hidden.shape, hidden.dtype, under, getattr(head, PRODUCT, None))
        made: torch.Tensor = self._beside(known, hidden, targets, rows)
        self.compile_s = self._beside.compile_s
        return made

    def forget(self) -> None:
        if self._beside is not None:
            self._beside.forget()

    def _enough(self, labelled: int, places: int) -> int:
        """Returns how many rows to compute: as before where that is enough, so that nothing compiles anew."""
        if not labelled <= self._rows <= 2 * (labelled + ROUND_TO):
            spare = labelled + 4 * math.sqrt(labelled)  # of a number that is drawn, four deviations
            self._rows = -(-math.ceil(spare) // ROUND_TO) * ROUND_TO
        return min(self._rows, places)


def _loss_of(head: nn.Linear, loss: Loss) -> Call:
    def of(hidden: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        return loss(lambda some: product_of(head, some), hidden, targets, rows)

    return of
