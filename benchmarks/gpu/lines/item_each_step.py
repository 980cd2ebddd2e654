"""The loss is read with `.item()` at every step, before six milliseconds of bookkeeping on the host.

Moves: `idle_sync`. Without the read the host runs ahead and its bookkeeping hides behind the device's work. The read
lets the device run dry, and everything that the host does until the queue is full again is paid for: that is the line,
and no longer than the call blocked. A rest may lie in `idle_launch`.

The bookkeeping lasts by the clock, not by its work, since the speed of a host differs between processes and within them, and
the device has enough work to hide it. Narrow layers: the step moves bytes more than it multiplies, and draws less than the power
limit. At the limit a device that waits may run at a higher clock, and the read costs less than the time in which the device
waits for it.
"""

from __future__ import annotations

import time

import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences

BOOKKEEPING_S = 6e-3


def book(total: float, value: float) -> float:
    """Returns a running figure after some milliseconds of Python."""
    until = time.perf_counter() + BOOKKEEPING_S
    while time.perf_counter() < until:
        total += (value - total) * 0.001
    return total


def build(fault: bool, where: Where) -> Arm:
    """Returns training that reads the loss at each step, or never."""
    vocab, width, layers, batch, length = (
        (512, 64, 2, 4, 32) if where.small else (4096, 256, 6, 160, 1024)
    )
    model = TokenNet(vocab, width, layers).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    pool = sequences(where, vocab, batch, length)
    state = {"steps": 0, "total": 0.0}

    def step() -> None:
        ids = pool[state["steps"] % len(pool)]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        state["steps"] += 1
        value = loss.item() if fault else float(state["steps"])
        state["total"] = book(state["total"], value)

    return Arm(step, settle=6)


if __name__ == "__main__":
    main(__doc__, build)
