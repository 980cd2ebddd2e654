"""Where in the user's code something happened, as far as a trace has stacks."""

from __future__ import annotations

import re

import numpy as np

from flopwise.trace.kinds import Kind
from flopwise.trace.nesting import Nesting, nest
from flopwise.trace.table import Events

#: How the profiler names a Python function: "train.py(88): main". Source: pytorch/pytorch
#: torch/csrc/autograd/profiler_python.cpp.
_FRAME = re.compile(r"^(?P<file>[^()]*\.py)\((?P<line>\d+)\): ")
_LIBRARY = re.compile(r"(?:^|/)(?:torch|site-packages|dist-packages|lib/python3|<frozen)|importlib")
_MOST = 64  # frames that are looked at


class Places:
    """Finds the user's line around a host event: by its recorded stack, or by the Python functions that contain it."""

    def __init__(self, events: Events) -> None:
        self._events = events
        python = events.of(Kind.PYTHON)
        self._nesting: Nesting | None = nest(events, python) if python.any() else None

    def of(self, row: int) -> str | None:
        """Returns "file:line" of the innermost frame that is no library's, None where no stack was recorded."""
        events = self._events
        number = int(events.stack[row])
        if number >= 0:
            return _user_frame(events.stacks[number].split(";"))
        if self._nesting is None:
            return None
        at = np.asarray([events.start_ns[row]])
        position = int(self._nesting.position(events.lane[row : row + 1], at)[0])
        rows = self._nesting.ancestors(position)[:_MOST]
        return _user_frame([events.name_of(frame) for frame in rows])


def _user_frame(frames: list[str]) -> str | None:
    for frame in frames[:_MOST]:
        found = _FRAME.match(frame.strip())
        if found and not _LIBRARY.search(found["file"]):
            return f"{found['file']}:{found['line']}"
    return None
