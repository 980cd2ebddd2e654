"""How much shorter the step would be without a cause: by replay, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from flopwise.diagnosis.ledger.replay import Change
from flopwise.diagnosis.ledger.scene import Scene

#: A replay that does not reproduce the steps this well predicts nothing.
REPLAY_ERROR_FRAC = 0.02
#: A host without a profiler takes so much of its time under one, at the least and at the most. Sources: measured on H200s,
#: 0.4 to 0.9 of it with shapes and stacks recorded; more than 1 where a machine was busier in between.
HOST_MOST, HOST_LEAST = 1.2, 0.2
_HALVINGS = 12
_SLACK_FRAC = 1e-3


class Predict:
    """The gain of a change, as 1 - t_new / t_old, where the replay can be trusted.

    Steps that nothing disturbed are shorter than the recorded ones where the host is what they wait for. There the replayed
    host is made faster until the steps are as long as the undisturbed ones; of all paces that fit, the slowest, which
    leaves the least to gain.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def __call__(self, change: Change) -> float | None:
        """Returns the gain of a change; None where the replay does not reproduce the steps."""
        if self.host is None:
            return None
        before = self._scene.replay.step_ns(host=self.host)
        return max(0.0, 1 - self._scene.replay.step_ns(change, self.host) / before)

    def faster(self, ratio: Mapping[int, float]) -> float | None:
        """Returns the gain where pieces of work, by position, take so much of their time; none takes longer than it did."""
        return self(Change(work_ns=lambda k, ns: ns * min(1.0, ratio.get(k, 1.0))))

    @cached_property
    def host(self) -> float | None:
        """Returns the pace of the host at which the replay gives the steps; None where none does."""
        step_ns = self._scene.step_s * 1e9
        play = self._scene.replay.step_ns
        if step_ns <= 0:
            return None
        if abs(play() / step_ns - 1) <= REPLAY_ERROR_FRAC:
            return 1.0
        low, high = HOST_LEAST, HOST_MOST
        # Kernels may be a little slower under a profiler: then no host reaches the steps, and the fastest tells how near it comes.
        reached = max(step_ns, play(host=low)) * (1 + _SLACK_FRAC)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if play(host=middle) <= reached else (low, middle)
        return low if abs(play(host=low) / step_ns - 1) <= REPLAY_ERROR_FRAC else None
