"""Which work on the device is a forward that runs again inside the backward: activation checkpointing.

A reentrant checkpoint runs its forward inside the node `CheckpointFunctionBackward`; the other kind inside whichever node
first asks for a saved tensor. Both show as forward operators (`aten::linear`, ...) under a node of the backward engine,
which by themselves never call those: a gradient is made of `aten::mm`, not of `aten::linear`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.nesting import nest
from flopwise.trace.table import Events

_NODE = "autograd::engine::evaluate_function"
_CHECKPOINT = "CheckpointFunctionBackward"
#: Operators that only a forward calls. Source: tools/autograd/derivatives.yaml of pytorch/pytorch has none of them in
#: a formula of a gradient.
_FORWARD = frozenset(
    f"aten::{name}"
    for name in [
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "scaled_dot_product_attention",
        "layer_norm",
        "rms_norm",
        "batch_norm",
        "embedding",
        "dropout",
        "gelu",
        "silu",
        "relu",
        "softmax",
        "cross_entropy_loss",
    ]
)


def recomputed(events: Events, work: Launches) -> npt.NDArray[np.bool_]:
    """Returns which pieces of work belong to a forward that is run again, shape (n,)."""
    out = np.zeros(len(work.rows), bool)
    node = events.names_where(lambda name: name.startswith(_NODE)) & events.of(Kind.OP)
    if not node.any():
        return out
    host = nest(events, events.of(Kind.OP))
    names = events.name[host.rows]
    is_node = np.fromiter((n.startswith(_NODE) for n in events.names), bool, len(events.names))
    is_forward = np.fromiter(
        (n in _FORWARD or n.endswith(_CHECKPOINT) for n in events.names), bool, len(events.names)
    )
    # From the outside inwards: inside a node; a forward operator inside a node; a node inside that ends it again.
    state = np.zeros(
        len(host.rows), np.int8
    )  # 0: outside, 1: in a backward node, 2: in a forward inside one
    for i, (parent, name) in enumerate(zip(host.parent.tolist(), names.tolist(), strict=True)):
        above = state[parent] if parent >= 0 else 0
        if is_node[name]:
            state[i] = 1
        elif above >= 1 and (above == 2 or is_forward[name]):
            state[i] = 2
        else:
            state[i] = above
    by_row = np.zeros(len(events), np.int8)
    by_row[host.rows] = state
    known = work.op >= 0
    out[known] = by_row[work.op[known]] == 2
    return out
