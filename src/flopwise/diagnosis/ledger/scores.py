"""Attention that is written out: operators that read and write the scores, one number for each query and key.

They show as a softmax over [..., queries, keys] of a batched product's result. All that touches a tensor of that size belongs
to it, forward and backward: scaling, masks, dropout, casts.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.diagnosis.ledger.scene import Called, Scene

_SOFTMAX = frozenset(("_softmax", "_safe_softmax"))
_PRODUCTS = frozenset(("bmm", "baddbmm"))

Size = tuple[int, int]  # how many scores there are, and how many keys


@dataclass(frozen=True, eq=False)
class Scores:
    """The calls that touch scores."""

    softmaxes: list[Called]  # forward
    products: list[Called]  # that make scores or multiply with them
    traffic: list[Called]  # everything else that reads or writes them, softmaxes included

    @property
    def traffic_ns(self) -> float:
        """Returns the device's time of what fused attention does not do at all."""
        return sum(call.ns for call in self.traffic)


def scores(scene: Scene) -> Scores:
    """Returns what touches the scores of attention; nothing where it is fused."""
    made = {
        (planes * queries * keys, keys)
        for call in scene.calls
        if call.op in _PRODUCTS and len(call.tensors) >= 2
        for planes, queries, keys in [_result(call)]
        if min(queries, keys) > 1
    }
    softmaxes = [
        call
        for call in scene.calls
        if call.op in _SOFTMAX and call.tensors and _size(call, 0) in made
    ]
    sizes = {_size(call, 0) for call in softmaxes}
    products, traffic = [], []
    for call in scene.calls:
        touches = any(_size(call, i) in sizes for i in range(len(call.tensors)))
        if call.op in _PRODUCTS:
            planes, queries, keys = _result(call)
            if touches or (planes * queries * keys, keys) in sizes:
                products.append(call)
        elif touches:
            traffic.append(call)
    return Scores(softmaxes, products, traffic)


def _size(call: Called, i: int) -> Size | None:
    operand = call.tensors[i].operand
    return (operand.numel, operand.shape[-1]) if len(operand.shape) >= 3 else None


def _result(call: Called) -> tuple[int, int, int]:
    """Returns the planes, rows and columns of a batched product's result; zeros where they are not known."""
    shapes = [one.operand.shape for one in call.tensors if len(one.operand.shape) == 3][-2:]
    if len(shapes) < 2:
        return 0, 0, 0
    return shapes[0][0], shapes[0][1], shapes[1][2]
