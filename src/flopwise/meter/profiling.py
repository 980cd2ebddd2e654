"""Profiled windows after the timed steps: time first, profile last, then see what is left of the disturbance.

A *light* window records the device's activities alone (busy time, and why the device was idle), a *heavy* one the
operators with their shapes, a last one of a step or two Python's stacks as well (the user's lines). Each is opened and
closed at the end of a step, and lies in the run folder as a trace that any reader of PyTorch's traces opens; the parent
makes the ledger of them. Afterwards the profiler gives up its hold on the device, and some more steps are timed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler as torch_profiler

from flopwise.meter import agreement, finish
from flopwise.meter.clock import DeviceClock, Stamp
from flopwise.meter.patches import Patches
from flopwise.meter.rows import COMPILED, EPOCH, EVALUATION, SAVE, TIMED, Brief, Row
from flopwise.meter.trainers import in_backward_pass
from flopwise.records.rank import Profile, ProfiledWindow

if TYPE_CHECKING:
    from flopwise.meter.session import Session

FOLDER = "profile"
PENDING = "pending"
LIGHT, HEAVY, STACKS, AFTER = "light", "heavy", "stacks", "after"
#: Nothing but this is training: what else a step held makes it another one.
OTHER_THAN_TRAINING = EVALUATION | SAVE | EPOCH | COMPILED
#: A heavy window is not to write more than this, bytes: its steps are cut down by what a light one wrote a step, and
#: a heavy one writes up to six times as much (seen in traces of eager GPT-2 and ResNet-50 with shapes).
MOST_BYTES = 400e6
HEAVIER = 6
#: Windows that were cut short, by an evaluation or a new epoch, are opened again so many times.
TRIES = 3
#: Ranks that are not ready for their windows are not waited for longer than this.
PATIENCE_S = 60.0
#: Steps for the profiler's first steps to settle, and for the queue to refill after a window was closed.
LEAD = 2


@dataclass
class _Window:
    kind: str
    steps: int  # besides the lead
    lead: int = LEAD
    tries: int = TRIES
    profile: Any = None
    marks_ns: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    waits_from: int = 0
    cost_ns: int = 0
    last: bool = False  # the profiler is to let go of the device after it


class Profiling:
    """The windows of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state = "none: the script ended before enough steps were timed"
        self._windows: list[ProfiledWindow] = []
        self._left: list[_Window] = []  # to be opened; the first one is open once it has a profile
        self._after: list[tuple[int, Stamp | None, int]] = []  # host time, stamp, flags
        self._after_steps = 0
        self._clock: DeviceClock | None = None
        self._torn_down: str | None = None
        self._agreed: agreement.Agreed | None = None
        self._patient_until = 0.0
        self._patches = Patches()
        self._ours = False  # the profiler is being started or stopped by us
        self._usual = 0  # flags of most steps: an evaluation in each of them is part of it

    # ------------------------------------------------------------------ begin, end

    def prepare(self) -> bool:
        """Called when the last timed step has ended; returns whether windows are to come."""
        reason = self._why_not()
        if reason is not None:
            self._state = f"none: {reason}"
            with contextlib.suppress(OSError):
                agreement.refuse(self._session, agreement.PROFILE)
            return False
        self._state = PENDING
        self._patient_until = time.monotonic() + PATIENCE_S
        self._usual = _usual_flags(self._session.rows)
        return True

    def begin(self) -> None:
        """Opens the first window, once all ranks are ready for it."""
        self._watch_the_scripts_profilers()
        self._safely(self._try_to_agree)

    def _why_not(self) -> str | None:
        session = self._session
        if session.trainers.several is not None:
            return "several threads train"
        if session.device.type not in ("cpu", "cuda"):
            return f"not done on {session.device.type}"
        if session.device.type == "cuda" and os.environ.get("NSYS_PROFILING_SESSION_ID"):
            return "Nsight Systems is recording, and only one profiler can hold the device"
        if in_backward_pass():
            return "the optimizer steps inside the backward pass, where no profiler can be started"
        if torch_profiler._is_profiler_enabled:
            return "the script was profiling by itself"
        return None

    def boundary(self, started: int) -> None:
        """A step has ended."""
        self._safely(self._boundary, started)

    def _safely(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function`; whatever it raises ends the windows, and the timed steps stand."""
        try:
            function(*args)
        except Exception as error:
            reason = f"it failed ({type(error).__name__}: {error})"
            with contextlib.suppress(Exception):
                for window in self._left[:1]:
                    if window.profile is not None:
                        self._stop(window)
            self._left.clear()
            self._settle(f"partial: {reason}" if self._windows else f"none: {reason}")
            self._session.profiled()

    def _boundary(self, started: int) -> None:
        session = self._session
        flags, session.interval.flags = session.interval.flags & ~self._usual, 0
        frames = session.frames_changed()
        if frames:
            flags |= COMPILED
        session.interval.clear()
        if self._agreed is None or session.boundaries.total < self._agreed.step:
            self._try_to_agree()
            return
        if not self._left:
            self._time_after(started, flags)
            return
        window = self._left[0]
        if window.profile is None:
            self._open(window)
            return
        window.marks_ns.append(time.time_ns())
        window.flags.append(flags & OTHER_THAN_TRAINING)
        if len(window.flags) >= window.lead + window.steps:
            self._close(window)
            self._next()

    def interrupt(self) -> None:
        """Something other than training begins: what was recorded stands, and the window is opened again if need be."""
        self._safely(self._interrupt)

    def _interrupt(self) -> None:
        window = self._left[0] if self._left else None
        unusual = self._session.interval.flags & OTHER_THAN_TRAINING & ~self._usual
        if window is None or window.profile is None or not unusual:
            return
        window.tries -= 1
        if self._has_enough(window) or window.tries <= 0:
            self._close(window)
            self._left.pop(0)
        else:
            self._stop(window)
            window.profile = None
        if not self._left:
            self._finish_windows()

    def abandon(self, why: str) -> None:
        """Ends whatever is under way. What is complete stays."""
        if self._state != PENDING:
            return
        for window in self._left[:1]:
            window.last = True
            if window.profile is not None:
                if self._has_enough(window):
                    self._close(window)
                else:
                    self._stop(window)
        self._left.clear()
        self._settle(f"partial: {why}" if self._windows else f"none: {why}")

    def leave(self) -> None:
        """The meter is being taken out."""
        self.abandon("the meter was taken out")

    def forget(self) -> None:
        """In a forked child: what the parent has open is not ours."""
        self._left.clear()
        self._settle("none: a forked process")

    @staticmethod
    def _has_enough(window: _Window) -> bool:
        return len(window.flags) - window.lead >= min(2, window.steps)

    def _settle(self, state: str) -> None:
        self._state = state
        self._patches.undo()

    # ------------------------------------------------------------------ which windows, and when

    def _try_to_agree(self) -> None:
        session = self._session
        if self._agreed is None:
            self._agreed = agreement.agree(session, agreement.PROFILE, self._plan)
            if self._agreed is None:
                if time.monotonic() > self._patient_until:
                    agreement.refuse(session, agreement.PROFILE)
                    self._give_up("the other ranks were not ready for it")
                return
            if self._agreed.step == agreement.NEVER:
                self._give_up("another rank could not")
                return
            self._take(self._agreed.text)
        if self._left and session.boundaries.total >= self._agreed.step:
            self._open(self._left[0])

    def _give_up(self, why: str) -> None:
        self._left.clear()
        self._settle(f"none: {why}")
        self._session.profiled()

    def _plan(self) -> str:
        """Returns how many steps each window has, by how long they are: some tenths of a second at least, each."""
        rows = [row for row in self._session.rows if row.flags & TIMED]
        ns = [b.end_ns - a.end_ns for a, b in itertools.pairwise(rows)]
        step_s = max(1e-4, sorted(ns)[len(ns) // 2] * 1e-9) if ns else 0.1
        light = min(30, max(5, math.ceil(1.0 / step_s))) if step_s < 3 else 3
        heavy = min(8, max(4, math.ceil(0.5 / step_s))) if step_s < 3 else 2
        stacks = 2 if step_s < 1 else 1
        after = min(60, max(8, math.ceil(1.5 / step_s))) if step_s < 3 else 4
        lead = LEAD if step_s < 1 else 1
        if self._session.device.type == "cpu":
            light = 0
        return f"{light} {heavy} {stacks} {after} {lead}"

    def _take(self, plan: str) -> None:
        light, heavy, stacks, self._after_steps, lead = map(int, plan.split())
        if (
            _python_is_traced()
        ):  # recording its stacks would take the place of the script's own tracer
            stacks = 0
        wanted = ((LIGHT, light), (HEAVY, heavy), (STACKS, stacks))
        self._left = [_Window(kind, steps, lead) for kind, steps in wanted if steps]
        self._left[-1].last = True

    def _next(self) -> None:
        self._left.pop(0)
        if self._left:
            self._open(self._left[0])
        else:
            self._finish_windows()

    def _finish_windows(self) -> None:
        self._clock = DeviceClock(self._session.device) if self._on_cuda else None

    @property
    def _on_cuda(self) -> bool:
        return self._session.device.type == "cuda"

    # ------------------------------------------------------------------ one window

    def _open(self, window: _Window) -> None:
        began = time.perf_counter_ns()
        for light in self._windows:
            if light.kind == LIGHT and window.kind == HEAVY:
                each = HEAVIER * light.bytes / max(1, len(light.flags))
                window.steps = max(1, min(window.steps, int(MOST_BYTES / each)))
        window.marks_ns, window.flags = [], []
        window.waits_from = len(self._session.waits)
        profile = torch_profiler.profile(
            use_cpu=window.kind != LIGHT,
            use_device="cuda" if self._on_cuda else None,
            use_kineto=True,
            record_shapes=window.kind != LIGHT,
            with_stack=window.kind == STACKS,
        )
        with self._as_ours():
            profile.__enter__()
        window.profile = profile
        window.cost_ns += time.perf_counter_ns() - began
        window.marks_ns.append(time.time_ns())

    def _stop(self, window: _Window) -> None:
        began = time.perf_counter_ns()
        profile = window.profile
        with self._as_ours(lets_go=window.last):
            profile.__exit__(None, None, None)
        window.cost_ns += time.perf_counter_ns() - began

    def _close(self, window: _Window) -> None:
        """Stops a window and writes its trace: all at once, since the profiler's results hold the interpreter."""
        self._stop(window)
        began = time.perf_counter_ns()
        profile, window.profile = window.profile, None
        if not window.flags:
            return
        session = self._session
        rank = finish.identity()[0]
        path = Path(session.config.folder or ".") / FOLDER / f"rank{rank}-{window.kind}.json"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        profile.export_chrome_trace(str(path))
        del profile
        window.cost_ns += time.perf_counter_ns() - began
        offset = time.time_ns() - time.perf_counter_ns()
        self._windows.append(
            ProfiledWindow(
                kind=window.kind,
                file=f"{FOLDER}/{path.name}",
                marks_ns=window.marks_ns,
                flags=window.flags,
                lead=min(window.lead, max(0, len(window.flags) - 1)),
                waits_ns=[(a + offset, b + offset) for a, b in session.waits[window.waits_from :]],
                cost_ns=window.cost_ns,
                bytes=path.stat().st_size,
            )
        )

    @contextlib.contextmanager
    def _as_ours(self, *, lets_go: bool = False) -> Iterator[None]:
        """The profiler's own log is kept from the script's output; after the last window it lets go of the device.

        To be told so when it is started, too, has it record nothing of the device (seen with torch 2.11).
        """
        variables = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "10")}
        if self._on_cuda and lets_go:
            chosen = os.environ.get("TEARDOWN_CUPTI")
            self._torn_down = f"TEARDOWN_CUPTI={chosen}" if chosen else self._graphs_forbid()
            if self._torn_down is None:
                self._torn_down = "yes"
                variables["TEARDOWN_CUPTI"] = "1"
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self._ours = True
        try:
            yield
        finally:
            self._ours = False
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _graphs_forbid(self) -> str | None:
        """Returns why the profiler must stay: torn down under CUDA graphs it has crashed processes.

        Source: the remark on TEARDOWN_CUPTI in torch/profiler/profiler.py.
        """
        if self._session.graphs.seen:
            return "no: CUDA graphs are in use, under which taking it out can crash the process"
        return None

    def _watch_the_scripts_profilers(self) -> None:
        """Where the script begins to profile by itself, its profiler comes first."""
        for name in ("_prepare_profiler", "_enable_profiler"):
            original = getattr(torch_profiler, name, None)
            if original is not None:
                label = f"torch.autograd.profiler.{name} (while windows are open)"
                self._patches.replace(torch_profiler, name, self._first(original), label)

    def _first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._ours and self._state == PENDING:
                self._session.guard(self._make_way)
            return original(*args, **kwargs)

        return wrapped

    def _make_way(self) -> None:
        self.abandon("the script began to profile by itself")
        self._session.profiled()

    # ------------------------------------------------------------------ afterwards

    def _time_after(self, started: int, flags: int) -> None:
        stamp = self._clock.stamp() if self._clock is not None else None
        self._after.append((started, stamp, flags & OTHER_THAN_TRAINING))
        if len(self._after) > self._after_steps + LEAD:
            self._settle("done")
            self._session.profiled()

    def snapshot(self) -> Callable[[], Profile]:
        """Returns what makes the record of it, later and on another thread."""
        state, windows, after = self._state, list(self._windows), list(self._after)
        torn_down = self._torn_down

        def record() -> Profile:
            spans, clock = _spans(after)
            return Profile(state, windows, spans, clock if spans else None, torn_down)

        return record


def _usual_flags(rows: list[Row | Brief]) -> int:
    """Returns what most of the timed steps hold besides training."""
    timed = [row.flags for row in rows if row.flags & TIMED]
    bits = (EVALUATION, SAVE, EPOCH)
    half = finish.PART_OF_THE_STEP_FRAC * len(timed)
    return sum(bit for bit in bits if timed and sum(bool(f & bit) for f in timed) > half)


def _spans(after: list[tuple[int, Stamp | None, int]]) -> tuple[list[int], str]:
    """Returns the steps between the marks, but for those that held something else and the first, and their clock."""
    good = range(LEAD, len(after))
    if after and after[-1][1] is not None:
        deadline = time.monotonic() + 15
        while not after[-1][1].passed():
            if time.monotonic() > deadline:
                return [], ""
            time.sleep(0.002)
        spans = [s.resolve() for i in good if not after[i][2] and (s := after[i][1]) is not None]
        return [ns for ns in spans if ns is not None], "cuda events"
    return [after[i][0] - after[i - 1][0] for i in good if not after[i][2]], "host clock"


def _python_is_traced() -> bool:
    """Whether the script runs under a tracer of its own: a debugger, a coverage tool, cProfile."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return monitoring is not None and any(monitoring.get_tool(i) for i in range(6))
