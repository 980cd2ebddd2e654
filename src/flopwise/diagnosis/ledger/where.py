"""Where in the user's code something happened, as far as a trace has stacks.

An operator of the backward pass runs under autograd's engine, which no line of the user's calls: it is given the place of the
forward operator that made its node, which carries the same sequence number. A trace without stacks can take its places from
another one of the same job, recorded with them, by the names and shapes of operators.
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from flopwise.trace.kinds import Kind
from flopwise.trace.nesting import Nesting, nest
from flopwise.trace.table import Events, Ints

#: How the profiler names a Python function: "train.py(88): main". Source: pytorch/pytorch
#: torch/csrc/autograd/profiler_python.cpp.
_FRAME = re.compile(r"^(?P<file>[^()]*\.py)\((?P<line>\d+)\): ")
_LIBRARY = re.compile(
    r"(?:^|/)(?:flopwise/(?:meter|fixes|launch)|torch|site-packages|dist-packages|lib/python3|<frozen)|importlib"
)
_MOST = 64  # frames that are looked at
_ENGINE = "autograd::engine::evaluate_function"

Key = tuple[str, bytes]  # an operator's name, and its operands' sizes as the trace has them


class Places:
    """Finds the user's line around a host event."""

    def __init__(self, events: Events, other: Places | None = None) -> None:
        """Reads places of `events`.

        Args:
            events: of the trace that is asked about.
            other: of a trace of the same job, which is asked where this one shows no place.
        """
        self._events = events
        self._other = other
        python = events.of(Kind.PYTHON)
        self._nesting: Nesting | None = nest(events, python) if python.any() else None
        self._frames: dict[int, str | None] = {-1: None}  # user's line by position in the nesting

    def of(self, row: int) -> str | None:
        """Returns "file:line" of the innermost frame that is no library's, None where no stack was recorded."""
        found = self._here(row)
        return self._elsewhere(row) if found is None and self._other is not None else found

    def _elsewhere(self, row: int) -> str | None:
        """Returns the place in the other trace of the same operator on the same sizes, or of what is around it.

        A call of the runtime says little by itself: only where no operator is around it is its name looked up.
        """
        assert self._other is not None
        rows = [above for above in (row, *self.around(row)) if self._tells(above)]
        for above in rows or [row]:
            found = self._other.by_key.get(self._key(above))
            if found is not None:
                return found
        return None

    def _tells(self, row: int) -> bool:
        """Whether an event is the same wherever it has this name and these sizes: a node of autograd's engine is not."""
        name, dims = self._key(row)
        if self._events.kind[row] == Kind.ANNOTATION:
            return not name.startswith("ProfilerStep")
        return self._events.kind[row] == Kind.OP and bool(dims)

    def _here(self, row: int) -> str | None:
        found = self._by_stack(row)
        if found is not None or not self._has_stacks:
            return found
        for above in (row, *self.around(row)):
            forward = self._forward.get(int(self._events.sequence[above]), -1)
            if self._events.name_of(above).startswith(_ENGINE) and forward >= 0:
                return self._by_stack(forward)
        return None

    @property
    def _has_stacks(self) -> bool:
        return self._nesting is not None or bool(self._events.stacks)

    @cached_property
    def by_key(self) -> dict[Key, str]:
        """Returns, for each operator and its shapes, the line that most of its host time is spent for."""
        spent: dict[Key, dict[str, int]] = {}
        events = self._events
        if not self._has_stacks:
            return {}
        for row in np.flatnonzero(events.of(Kind.OP, Kind.RUNTIME, Kind.ANNOTATION)).tolist():
            place = self._here(row)
            if place is not None:
                lines = spent.setdefault(self._key(row), {})
                lines[place] = lines.get(place, 0) + int(events.duration_ns[row])
        return {key: max(lines, key=lambda place: lines[place]) for key, lines in spent.items()}

    def _key(self, row: int) -> Key:
        number = int(self._events.operands[row])
        dims = self._events.all_operands[number].dims if number >= 0 else b""
        return self._events.name_of(row), dims.replace(b" ", b"").replace(b"\n", b"")

    def _by_stack(self, row: int) -> str | None:
        number = int(self._events.stack[row])
        if number >= 0:
            return _user_frame(self._events.stacks[number].split(";"))
        position = int(self._frame_at[row])
        if position not in self._frames and self._nesting is not None:
            rows = self._nesting.ancestors(position)[:_MOST]
            self._frames[position] = _user_frame([self._events.name_of(frame) for frame in rows])
        return self._frames.get(position)

    @cached_property
    def _frame_at(self) -> Ints:
        """Returns the position of the innermost Python function around each event's start, shape (n,); -1: none."""
        events = self._events
        if self._nesting is None:
            return np.full(len(events), -1, np.int64)
        return self._nesting.position(events.lane, events.start_ns)

    @cached_property
    def _host_at(self) -> Ints:
        """Returns the same of the innermost operator or named range."""
        return self._host.position(self._events.lane, self._events.start_ns)

    def around(self, row: int) -> list[int]:
        """Returns the operators and named ranges around a host event, the innermost first."""
        rows = self._host.ancestors(int(self._host_at[row]))[:_MOST]
        return [above for above in rows if above != row]

    @cached_property
    def _host(self) -> Nesting:
        return nest(self._events, self._events.of(Kind.OP, Kind.ANNOTATION))

    @cached_property
    def _forward(self) -> dict[int, int]:
        """Returns the rows of the forward operators by the sequence number of the node that each made.

        An operator that makes no node carries the number that comes next, so of several the last one made it.
        """
        events = self._events
        engine = events.names_where(lambda name: name.startswith(_ENGINE))
        wanted = events.sequence[engine]
        in_node = events.names_where(lambda name: "Backward" in name or name.startswith("autograd"))
        rows = np.flatnonzero(
            events.of(Kind.OP) & ~in_node & np.isin(events.sequence, wanted[wanted >= 0])
        )
        return dict(zip(events.sequence[rows].tolist(), rows.tolist(), strict=True))


def _user_frame(frames: list[str]) -> str | None:
    for frame in frames[:_MOST]:
        found = _FRAME.match(frame.strip())
        if found and not _LIBRARY.search(found["file"]):
            return f"{found['file']}:{found['line']}"
    return None
