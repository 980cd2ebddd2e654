"""How much shorter the step would be without a cause: by replay, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from flopwise.diagnosis.ledger.replay import AS_IT_WAS, HOST_LEAST, Change
from flopwise.diagnosis.ledger.scene import SHOWN_FRAC, Scene

#: A replay that does not reproduce the steps this well predicts nothing.
REPLAY_ERROR_FRAC = 0.02
#: The steps of a live run's windows may be so far from the undisturbed ones where nothing of the host explains it: then the
#: gain is that of the window's steps, as a share of them.
DRIFT_FRAC = 0.10
#: A host without a profiler takes at most so much of its time under one: more than all where a machine was busier in between.
HOST_MOST = 1.2
#: Loading is no steadier than the machine's other work: twofold between sittings of one kind of machine.
LOADER_LEAST, LOADER_MOST = 0.3, 3.0
_HALVINGS = 12
_SLACK_FRAC = 1e-3


class Predict:
    """The gain of a change, as 1 - t_new / t_old, where the replay can be trusted.

    Steps that nothing disturbed are shorter than the recorded ones where the host is what they wait for. There the replayed
    host is made faster until the steps are as long as the undisturbed ones; of all paces that fit, the slowest, which
    leaves the least to gain. It is never slower than in a window without operators, where there was one: such a window
    disturbs the host, too, but less.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def __call__(self, change: Change) -> float | None:
        """Returns the gain of a change; None where the replay does not reproduce the steps."""
        if self.pace is None:
            return None
        after_ns = self._scene.replay.step_ns(change, *self.pace)
        return max(0.0, float(1 - after_ns / self._before_ns))

    def faster(self, ratio: Mapping[int, float]) -> float | None:
        """Returns the gain where pieces of work, by position, take so much of their time; none takes longer than it did."""
        return self(Change(work_ns=lambda k, ns: ns * min(1.0, ratio.get(k, 1.0))))

    @cached_property
    def _before_ns(self) -> float:
        return self._scene.replay.step_ns(AS_IT_WAS, *(self.pace or (1.0, 1.0)))

    @cached_property
    def pace(self) -> tuple[float, float] | None:
        """Returns the paces of host and loader at which the replay gives the steps; None where none do.

        Where steps without a profiler are longer, and batches are waited for, it is the loader that took longer.
        """
        step_ns, play = self._scene.step_s * 1e9, self._scene.replay.step_ns
        if step_ns <= 0:
            return None
        known = self._scene.host_pace
        slowest = 1.0 if known is None else min(1.0, max(HOST_LEAST, known))
        if self._near(play(AS_IT_WAS, slowest)):
            return slowest, 1.0
        most = HOST_MOST if slowest == 1 else slowest
        host = _fitted(lambda pace: play(AS_IT_WAS, pace), step_ns, HOST_LEAST, most)
        loader = _fitted(
            lambda pace: play(AS_IT_WAS, slowest, pace), step_ns, LOADER_LEAST, LOADER_MOST
        )
        fits = [(host, 1.0), (slowest, loader)]
        if step_ns > play(AS_IT_WAS, slowest) and self._scene.share("idle_input") >= SHOWN_FRAC:
            fits.reverse()
        exact = next((pace for pace in fits if self._near(play(AS_IT_WAS, *pace))), None)
        if exact is not None or self._scene.profiled:
            return exact
        nearest = min([(slowest, 1.0), *fits], key=lambda pace: self._off(play(AS_IT_WAS, *pace)))
        return nearest if self._off(play(AS_IT_WAS, *nearest)) <= DRIFT_FRAC else None

    def _near(self, ns: float) -> bool:
        return self._off(ns) <= REPLAY_ERROR_FRAC

    def _off(self, ns: float) -> float:
        return abs(ns * 1e-9 / self._scene.step_s - 1)


def _fitted(play: Callable[[float], float], step_ns: float, low: float, high: float) -> float:
    """Returns the largest pace between two that makes steps no longer than they were.

    Kernels may be a little slower under a profiler: then no pace reaches the steps, and the lowest tells how near one comes.
    """
    reached = max(step_ns, play(low)) * (1 + _SLACK_FRAC)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if play(middle) <= reached else (low, middle)
    return low
