"""FW123 chunked-loss: logits of some places at a time, where nothing but the loss reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwise.fixes.chunked_loss import Kind, chunk_rows, chunked, piece
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.labelled_loss import Loss
from flopwise.fixes.loss_outside import Beside, LossOutside, eligible
from flopwise.fixes.slot import Slot, inner


class ChunkedLoss(Fix):
    """Logits of some places at a time, where nothing but the loss reads them.

    What it does:
    Runs the model without its labels and without the product of its head, and makes the loss that the model would have
    made in chunks of places: the logits of a chunk, their losses and their gradients, and of these at once the
    gradients of the head's input and weight. No logits outlive their chunk. The vocabulary is padded within a chunk on
    a GPU (50257 to 50304). Where the model is compiled, what happens between the products is, too. The output's
    `logits` are computed if they are read after all, exactly, and gradient included; then the fix takes itself back.
    Only while gradients are recorded.

    Why it helps:
    In the plain form logits of all places are written and read some ten times, forward and backward, half of them in
    float32, and lie in memory in two or three copies: 3.3 GB each of GPT-2 at 16 x 1024 places. In chunks they take a
    tenth of that, `saves` says how much less, and are passed over less often.

    When it declines:
    The model does not take `labels` and give `loss` beside `logits`; the logits are not what a Linear layer gives, as
    it is or in float32; the loss is not one cross_entropy of them with the labels, or the labels shifted by one; something else is
    added to the loss (the numbers then differ); the script reads the logits in the first steps; labelled-logits is on,
    which computes fewer of them; the head is less than 3 % of the products; hooks would see its output; the script
    compiles its model. A model that returns the loss alone is not looked at.

    What can change:
    The loss and the gradient of the head's weight are summed in another order, over chunks in float32: results differ
    by rounding, held against a float64 reference. The gradient of the head's weight lies in memory from the forward on.
    Logits that are read are computed by a product of their own, with the weights of that step. Second derivatives of
    the loss cannot be had.
    """

    code = "FW123"
    name = "chunked-loss"
    causes = ("logits-in-memory",)
    numerics = "reordered"
    conflicts = ("FW112",)

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether the model has a head whose logits could be made in chunks."""
        return eligible(scene)

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix, switched off: for some calls it watches whether logits are read, unless a trial has seen that."""
        return _Applied(inner(scene.roots[0]), setting)


class _Applied(LossOutside):
    def __init__(self, module: nn.Module, setting: Mapping[str, str] | None) -> None:
        super().__init__(module, setting)
        self._beside = Beside(Slot.of(module), piece)

    def label_problem(self, labelled_frac: float, places: int) -> str | None:
        return None

    def asked(self, loss: Loss, targets: torch.Tensor) -> None:
        return None

    def made(
        self, head: nn.Linear, loss: Loss, hidden: torch.Tensor, targets: torch.Tensor, asked: Any
    ) -> torch.Tensor:
        places, classes = hidden.shape[0], head.out_features
        rows = chunk_rows(places, classes, hidden.device.type)
        if rows < places:
            saved = 4e-9 * classes * (places - rows)
            self.setting["saves"] = f"{saved:.3g} GB of float32 logits: {rows} of {places} places"
        made = chunked(loss, hidden, head.weight, head.bias, targets, rows, self._piece)
        self.compile_s = self._beside.compile_s
        return made

    def forget(self) -> None:
        self._beside.forget()

    def _piece(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        kind: Kind,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = (hidden.shape, weight.shape, kind)
        found: tuple[torch.Tensor, torch.Tensor] = self._beside(
            known, hidden, weight, bias, targets, kind
        )
        return found
