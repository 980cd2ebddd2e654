"""Another seed for an unmodified script: what it gives to the global generators is moved by a stated amount.

Moved are the seeds that the script, or a library that it calls, hands to `torch.manual_seed`, to those of
`torch.cuda`, to `random.seed` and to `numpy.random.seed`. A script that seeds nothing would begin where chance has it: so
these generators are given a seed before it begins, the same one in both runs of a pair. Not moved are generators
that a script makes itself (`torch.Generator`, `numpy.random.default_rng`, `random.Random`), and names that were taken from
their modules before torch was imported.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

#: Where generators begin that the script does not seed, besides the offset. Any number would do.
FIRST = 1
#: Seeds of numpy must be below this. Source: the documentation of numpy.random.seed.
NUMPY_LIMIT = 2**32
#: torch takes more, but adding must not leave the numbers that it takes.
TORCH_LIMIT = 2**63


class Seeds:
    """The seeds of this process, each moved by `offset`."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.moved: Counter[str] = Counter()  # calls whose seed was moved, by function
        self._inside = threading.local()

    def install(self) -> None:
        """Seeds the generators, and puts the functions in, which stay. With an offset of 0 seeds are not moved."""
        numpy = sys.modules.get("numpy")
        numpy = numpy if hasattr(numpy, "random") else None
        first = FIRST + self.offset
        torch.manual_seed(first)
        random.seed(first)
        if numpy is not None:
            numpy.random.seed(first % NUMPY_LIMIT)
        if not self.offset:
            return
        places: list[tuple[Any, str, str, int]] = [
            (torch, "manual_seed", "torch.manual_seed", TORCH_LIMIT),
            (torch.random, "manual_seed", "torch.manual_seed", TORCH_LIMIT),
            (torch.cuda, "manual_seed", "torch.cuda.manual_seed", TORCH_LIMIT),
            (torch.cuda, "manual_seed_all", "torch.cuda.manual_seed_all", TORCH_LIMIT),
            (random, "seed", "random.seed", TORCH_LIMIT),
        ]
        if numpy is not None:
            places.append((numpy.random, "seed", "numpy.random.seed", NUMPY_LIMIT))
        for owner, name, label, limit in places:
            original = getattr(owner, name, None)
            if callable(original):
                setattr(owner, name, self._moving(original, label, limit))

    def _moving(self, original: Callable[..., Any], label: str, limit: int) -> Callable[..., Any]:
        """Returns a function that moves the seed it is given, and passes all else on.

        One that is called by another one (torch seeds its devices, too) has been given a moved seed already.
        """

        @functools.wraps(original)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "deep", False):
                return original(*args, **kwargs)
            name = "seed" if "seed" in kwargs else "a" if "a" in kwargs else None
            seed = kwargs[name] if name else args[0] if args else None
            if isinstance(seed, int):
                moved = (seed + self.offset) % limit
                if name:
                    kwargs[name] = moved
                else:
                    args = (moved, *args[1:])
                self.moved[label] += 1
            self._inside.deep = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.deep = False

        return seeded
