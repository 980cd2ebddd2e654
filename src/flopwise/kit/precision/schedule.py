"""The scale by the size of the gradients: chosen on the device every so many updates, by all ranks alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from flopwise.errors import PrecisionError
from flopwise.kit.precision.arguments import LEAST, MOST, count, power_of_two
from flopwise.kit.precision.statistics import scale_for, underflow

#: Reviews for which an overflow keeps the scale below the one that overflowed: 20 of 100 steps are the 2,000 steps
#: after which GradScaler tries the next power of two (torch.amp.GradScaler, growth_interval).
CEILING_REVIEWS = 20
#: Updates between two reviews whose gradients are looked at, at least: each takes one more pass over them.
LOOKS = 10
#: Ceilings take at most this factor from what gradients allow: with a headroom of 16 the largest gradient is then 4096
#: times below 65504, and what still is not finite does not come from the scale (a bad batch, say).
CEILING_MARGIN = 256.0


class MagnitudeSchedule:
    """Chooses the largest power of two that keeps `headroom` between the largest gradient and 65504.

    Everything it works with stays on the device.

    Args:
        review_steps: updates between two reviews.
        headroom: a power of two of at least 1.
        least, most: bounds of the scale.

    Raises:
        PrecisionError: an argument is out of range.
    """

    def __init__(self, review_steps: int, headroom: float, least: float, most: float) -> None:
        if not power_of_two(headroom) or headroom < 1:
            raise PrecisionError(f"headroom={headroom!r}: it must be a power of two of at least 1")
        count("review_steps", review_steps)
        for name, bound in (("min_scale", least), ("max_scale", most)):
            if not power_of_two(bound) or not LEAST <= bound <= MOST:
                raise PrecisionError(
                    f"{name}={bound!r}: it must be a power of two from 2**-126 to 2**126"
                )
        if least > most:
            raise PrecisionError(f"min_scale={least:g} is above max_scale={most:g}")
        self.review_steps, self.headroom, self.least, self.most = (
            review_steps,
            headroom,
            least,
            most,
        )
        self.ceilings: deque[torch.Tensor]
        self._shares: torch.Tensor | None
        self.forget()

    def forget(self, ceilings: Iterable[float] = ()) -> None:
        """Goes on with these ceilings, of a checkpoint, and without what was looked at."""
        self.ceilings = deque((torch.tensor(float(c)) for c in ceilings), maxlen=CEILING_REVIEWS)
        self._shares = None

    def looks(self, updates: int) -> bool:
        """Returns whether the gradients of this update are looked at: every one, or every n-th of many."""
        return updates % max(1, self.review_steps // LOOKS) == 0

    def due(self, updates: int) -> bool:
        """Returns whether the scale is reviewed after this many updates."""
        return updates % self.review_steps == 0

    def look(self, grads: Sequence[torch.Tensor], scale: torch.Tensor, scaled: bool) -> None:
        """Takes the shares of gradients that float16 loses, for the coming review; none for several devices."""
        if grads and len({g.device for g in grads}) == 1:
            self._shares = underflow(grads, scale.to(grads[0].device, non_blocking=True), scaled)

    def review(self, rows: torch.Tensor, scale: torch.Tensor, backoff: float) -> torch.Tensor:
        """Sets the scale in place and returns the review's numbers: largest gradient, scale, three shares.

        Args:
            rows: of the updates since the last review, [n, 2]: largest scaled gradient (0 where nobody looked), scale. A
                step whose gradients were not finite says what its scale must stay below, and nothing of the gradients.
            backoff: a scale that overflowed, times this, is a ceiling for the next 20 reviews.
        """
        amax, scales = rows.unbind(1)
        finite = torch.isfinite(amax)
        largest_seen = torch.where(finite, amax / scales, 0.0).amax()
        self.ceilings.append(torch.where(finite, math.inf, scales * backoff).amin())
        ceiling = torch.stack([c.to(scale.device, non_blocking=True) for c in self.ceilings]).amin()
        seen = largest_seen.clamp(min=2.0**-126)
        target = scale_for(seen, self.headroom, self.least, self.most)
        lowest = (target / CEILING_MARGIN).clamp(min=self.least)
        target = torch.minimum(target, torch.maximum(ceiling, lowest))
        scale.copy_(torch.where(largest_seen > 0, target, scale))
        shares, self._shares = self._shares, None
        if shares is None:
            shares = torch.full((3,), math.nan, device=scale.device)
        numbers = [torch.stack([largest_seen, scale]), shares.to(scale.device, non_blocking=True)]
        return torch.cat(numbers)
