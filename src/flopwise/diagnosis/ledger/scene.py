"""What findings look at: the work of a device by the calls of operators, the lines of its ledger, and where the user's code is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flopwise.diagnosis.ledger.replay import Player
from flopwise.diagnosis.ledger.scale import Scale
from flopwise.diagnosis.ledger.tally import Job, Tally
from flopwise.diagnosis.ledger.where import Places
from flopwise.records.ledger import Line
from flopwise.records.run import Clocks
from flopwise.trace.calls import Tensor, tensors
from flopwise.trace.idle import Host
from flopwise.trace.kinds import Kind
from flopwise.trace.nesting import nest
from flopwise.trace.ownership import Owner, own
from flopwise.trace.steps import Steps
from flopwise.trace.table import Operands

MEASURED, SEEN = "measured", "seen"
SHOWN_FRAC = 0.01  # of the step: smaller lines are no finding
_NOTHING = Operands()


@dataclass(frozen=True, eq=False)
class Called:
    """One call of an operator, and what it ran on the device."""

    name: str  # "aten::mm"
    row: int  # of the table
    operands: Operands
    tensors: tuple[Tensor, ...]  # its tensor operands in order; empty: not recorded
    work: tuple[int, ...]  # positions in the device's work, in order
    ns: float  # of the device's time that its work owns
    stream: int
    backward: bool  # run by autograd's engine

    @property
    def op(self) -> str:
        """Returns the name without its namespace and the sign of an operator in place: "add" of "aten::add_"."""
        return self.name.rpartition("::")[2].rstrip("_")

    @property
    def shapes(self) -> str:
        """Returns the sizes of its tensors: "[16384, 768] x [768, 50257] float32"."""
        sizes = " x ".join(str(list(one.operand.shape)) for one in self.tensors[:3])
        return f"{sizes} {self.tensors[0].operand.dtype}" if self.tensors else ""


@dataclass(frozen=True, eq=False)
class Scene:
    """What findings look at. Shares are of the step that the lines sum to; work is that of the recorded steps."""

    job: Job
    tally: Tally
    host: Host | None  # None: a job on a CPU
    replay: Player
    lines: dict[str, Line]
    step_s: float
    marks: Steps
    first: int = 0  # the first step that counts
    scale: Scale | None = None
    profiled: bool = True  # the lines are those of profiled steps; False: of undisturbed ones
    stacks: Places | None = None  # of a second trace of this job, with Python's functions in it
    padding_frac: float | None = None  # of the positions; a trace does not show it
    clocks: Clocks | None = None  # while undisturbed steps ran
    watts: float | None = None  # mean, meanwhile
    #: How long the host is at work in a step where no operators are recorded, over how long in these recorded steps.
    host_pace: float | None = None

    def share(self, *names: str) -> float:
        """Returns the share of the step that some lines have together."""
        return sum(self.lines[name].share_frac for name in names if name in self.lines)

    def family_share(self, family: str) -> float:
        """Returns the share of the step that the lines of a family have together."""
        return sum(line.share_frac for line in self.lines.values() if line.family == family)

    @property
    def steps(self) -> int:
        """Returns how many recorded steps count."""
        return len(self.marks) - self.first

    @property
    def window_ns(self) -> tuple[int, int]:
        """Returns where these steps begin and end."""
        return int(self.marks.bounds_ns[self.first]), int(self.marks.bounds_ns[-1])

    def frac(self, ns: float) -> float:
        """Returns the share of the step that some time over all recorded steps is."""
        return ns * 1e-9 / self.steps / self.step_s if self.step_s else 0.0

    def ms(self, ns: float) -> float:
        """Returns milliseconds a step of some time over all recorded steps."""
        return ns * 1e-6 / self.steps

    @cached_property
    def owned_ns(self) -> list[float]:
        """Returns what each piece of work owns of the device's time within the steps."""
        owned: list[float] = own(self.job.work, self.job.kind, *self.window_ns).share_ns.tolist()
        return owned

    @cached_property
    def calls(self) -> list[Called]:
        """Returns the calls of operators whose compute the steps hold, in the device's order.

        Without: replays of CUDA graphs, whose operators are not known, what an optimizer launched, and forwards that ran again.
        """
        job = self.job
        chosen = (job.kind == Owner.COMPUTE) & (job.work.op >= 0) & ~job.work.replayed
        return self._called(np.flatnonzero(chosen & ~job.in_optimizer & ~job.again).tolist())

    @cached_property
    def optimizer_calls(self) -> list[Called]:
        """Returns those that an optimizer launched."""
        job = self.job
        chosen = (job.kind == Owner.COMPUTE) & (job.work.op >= 0) & ~job.work.replayed
        return self._called(np.flatnonzero(chosen & job.in_optimizer).tolist())

    def _called(self, positions: list[int]) -> list[Called]:
        events, work = self.job.events, self.job.work
        groups: dict[int, list[int]] = defaultdict(list)
        for k in positions:
            if self.owned_ns[k] > 0:
                groups[int(work.op[k])].append(k)
        found = []
        for row, ks in groups.items():
            number = int(events.operands[row])
            operands = events.all_operands[number] if number >= 0 else _NOTHING
            found.append(
                Called(
                    events.name_of(row),
                    row,
                    operands,
                    _tensors(operands),
                    tuple(ks),
                    sum(self.owned_ns[k] for k in ks),
                    int(events.stream[work.rows[ks[0]]]),
                    row in self._in_backward,
                )
            )
        return sorted(found, key=lambda call: call.work[0])

    @cached_property
    def _in_backward(self) -> frozenset[int]:
        """Returns the rows of the operators that run under a node of autograd's engine."""
        events = self.job.events
        node = events.names_where(lambda name: name.startswith("autograd::engine"))
        if not node.any():
            return frozenset()
        host = nest(events, events.of(Kind.OP))
        inside = np.zeros(len(host.rows), bool)
        starts = node[host.rows]
        for i, parent in enumerate(host.parent.tolist()):  # from the outside inwards
            inside[i] = starts[i] or (parent >= 0 and inside[parent])
        return frozenset(host.rows[inside].tolist())

    def kernels(self, call: Called) -> list[str]:
        """Returns the names of a call's kernels, in their order."""
        return [self.job.events.name_of(int(self.job.work.rows[k])) for k in call.work]

    @cached_property
    def places(self) -> Places:
        """Returns what finds the user's lines."""
        return Places(self.job.events, self.stacks)

    def where(self, calls: Iterable[Called]) -> list[str]:
        """Returns the user's lines of calls, those that cost most first, at most three."""
        return self.costliest((call.row, call.ns) for call in calls)

    def waits(self, test: Callable[[str], bool]) -> list[str]:
        """Returns the user's lines of the host's waits whose name passes, those that cost most first."""
        if self.host is None:
            return []
        name = self.job.events.name_of
        return self.costliest(
            (one.row, float(one.end_ns - one.start_ns))
            for one in self.host.blocked
            if test(name(one.row))
        )

    def costliest(self, rows: Iterable[tuple[int, float]]) -> list[str]:
        """Returns the user's lines of rows of the table that cost so much each, at most three."""
        cost: dict[str, float] = defaultdict(float)
        for row, ns in rows:
            place = self.places.of(row)
            if place is not None:
                cost[place] += ns
        return sorted(cost, key=lambda place: -cost[place])[:3]


def _tensors(operands: Operands) -> tuple[Tensor, ...]:
    try:
        return tuple(tensors(operands)) if operands.dims else ()
    except ValueError:
        return ()
