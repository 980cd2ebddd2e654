"""Step times by the script's own clock, for the scripts here and in ../expert: nothing waits within the loop."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


class StepTimes:
    """Marks the end of each step; written as one line of JSON where a path is given, else nothing is done."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.cuda = torch.cuda.is_available()
        self.marks: list[Any] = []
        self.amounts: list[int | torch.Tensor] = []

    def mark(self, amount: int | torch.Tensor) -> None:
        """Marks the end of a step that trained on `amount` samples (of variable length: tokens; a tensor is read at last)."""
        if self.path is None:
            return
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.time())
        self.amounts.append(amount)

    def write(self, **facts: Any) -> None:
        """Writes the time of each step but the first, its amount, and when it ended on the device, as Unix time."""
        if self.path is None or not self.marks:
            return
        if self.cuda:
            last = torch.cuda.Event(enable_timing=True)
            last.record()
            torch.cuda.synchronize()
            now = time.time()
            unix_s = [now - mark.elapsed_time(last) / 1e3 for mark in self.marks]
        else:
            unix_s = self.marks
        found = {
            "step_s": [b - a for a, b in pairwise(unix_s)],
            "amounts": [int(amount) for amount in self.amounts[1:]],
            "ended_unix_s": unix_s[1:],
            **facts,
        }
        Path(self.path).write_text(json.dumps(found) + "\n")
