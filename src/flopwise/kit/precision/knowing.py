"""A scaler that knows late what its device did, and keeps that in checkpoints that GradScaler can load."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from flopwise.errors import PrecisionError
from flopwise.kit.precision.arguments import power_of_two, scale_of
from flopwise.kit.precision.late import Late, Review
from flopwise.kit.precision.schedule import MagnitudeSchedule
from flopwise.kit.precision.unwaiting import UnwaitingScaler

#: Attributes that `_forget` sets anew.
_FORGOTTEN = (
    "_late",
    "_alarm",
    "_once",
    "_left",
    "_amaxes",
    "_plain_step",
    "_looked",
    "_clip_watch",
    "_left_out",
    "_unread",
    "_one_pass",
)


class KnowingScaler(UnwaitingScaler):
    """Counts updates and skipped ones, reads them when they have come, and saves and loads all of its state.

    Args:
        magnitude: the schedule whose ceilings belong to the state.
        verbose: prints each review.
        others: as UnwaitingScaler has them.
    """

    def __init__(self, magnitude: MagnitudeSchedule, verbose: bool, **others: Any) -> None:
        super().__init__(**others)
        self._magnitude, self.verbose = magnitude, verbose
        self._updates = 0
        # Whether every scale so far was a power of two, if its factors are.
        self._powers = power_of_two(others["init_scale"])
        self._history: list[list[float]] = []  # rows of a checkpoint, until there is a ring
        self._skipped = 0  # up to that checkpoint

    def _forget(self) -> None:
        super()._forget()
        self._late: Late | None = None
        self._owed = self._seen_skips = 0

    @property
    def skipped(self) -> int:
        """Updates whose step was skipped, as far as is known: on a CUDA device up to some updates ago."""
        return self._late.known.skipped if self._late else self._skipped

    @property
    def reviews(self) -> tuple[Review, ...]:
        """The last reviews of the scale that have arrived, at most 100."""
        return tuple(self._late.known.reviews) if self._late else ()

    def stepped(self) -> bool:
        """Returns whether the last update's step took place. Waits for the device: `advance` does not."""
        self.drain()
        return self._late is None or self._late.known.in_a_row == 0

    def drain(self) -> None:
        """Waits for the numbers of all updates so far: for the end of a training, or before a report."""
        if self._late is not None:
            self._late.ask(force=True)
            self._say_reviews(self._late.arrived(wait=True))

    def advance(self, *schedulers: Any) -> bool:
        """Advances learning rate schedulers once, unless a step was skipped that they have not been held back for.

        Returns whether they were advanced. Call it after `update`. On a CPU that is exact. On a CUDA device skips are known
        late, so a schedule is ahead by the skips of at most the last 20 updates, and then held back.
        """
        self._owed += self.skipped - self._seen_skips
        self._seen_skips = self.skipped
        if self._owed > 0:
            self._owed -= 1
            return False
        for scheduler in schedulers:
            scheduler.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns GradScaler's five entries, which it can load, and one of ours beside. Waits for the device."""
        state = super().state_dict()
        if state:
            self.drain()
            state["flopwise"] = {
                "updates": self._updates,
                "skipped": self.skipped,
                "ceilings": [float(c) for c in self._magnitude.ceilings],
                "history": self._late.recent().tolist() if self._late else self._history,
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of ours or of `GradScaler`.

        Raises:
            RuntimeError: the state is empty: it is that of a scaler that was switched off.
            PrecisionError: it is no state; or its scale is no number, negative or not finite; or its scale is 0, which makes weights NaN at the first step that is not skipped.
        """
        if not isinstance(state_dict, Mapping):
            raise PrecisionError(
                f"load_state_dict: a dict is needed, not {type(state_dict).__name__}"
            )
        if self._enabled and state_dict.get("scale") == 0:
            raise PrecisionError(
                "the loss scale of this checkpoint is 0: every step before it was skipped, and the next one would make the "
                "weights NaN. Do not continue from it: roll back to one before the losses overflowed, and look for what did."
            )
        own = state_dict.get("flopwise", {})
        if self._enabled and state_dict:
            scale = scale_of("scale in the checkpoint", state_dict.get("scale"))
            if not isinstance(own, Mapping):
                raise PrecisionError(
                    f"load_state_dict: 'flopwise' in it is {type(own).__name__}, not a dict"
                )
            self._powers = power_of_two(scale)
            state_dict = {**state_dict, "scale": scale}
        super().load_state_dict(state_dict)
        if self._enabled:
            self._load_own(dict(own))

    def __getstate__(self) -> dict[str, Any]:
        own = self.state_dict()
        state = super().__getstate__()
        for name in _FORGOTTEN:
            state.pop(name, None)
        magnitude = copy.copy(self._magnitude)
        magnitude.forget()
        state.update(_group=None, _magnitude=magnitude, own_state=own.get("flopwise", {}))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = state.pop("own_state", {})
        super().__setstate__(state)
        self._forget()
        self._load_own(own)

    def _load_own(self, own: dict[str, Any]) -> None:
        self._updates = int(own.get("updates", 0))
        self._magnitude.forget(own.get("ceilings", ()))
        self._history = [list(row) for row in own.get("history", ())]
        self._skipped = self._seen_skips = int(own.get("skipped", 0))
        self._late, self._owed = None, 0

    def _rows(self, scale: torch.Tensor) -> Late:
        if self._late is None:
            self._late = Late(self._magnitude.review_steps, scale.device)
            self._late.resume(self._history, self._updates, self._skipped)
            self._history = []
        return self._late

    def _say_reviews(self, reviews: list[Review]) -> None:
        if self.verbose:
            for review in reviews:
                print(f"flopwise scaler: {review}", flush=True)
