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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.meter import agreement, finish
from flopwise.meter.amounts import PythonCalls, names_are_text, resident_bytes
from flopwise.meter.clock import DeviceClock, Stamp
from flopwise.meter.patches import Patches
from flopwise.meter.preemption import run_delay_ns
from flopwise.meter.recorder import Recorder, in_main_thread
from flopwise.meter.rows import COMPILED, EPOCH, EVALUATION, SAVE, TIMED, Brief, Row
from flopwise.meter.trainers import in_backward_pass
from flopwise.records.rank import PROFILE_FOLDER, Profile, ProfiledWindow

if TYPE_CHECKING:
    from flopwise.meter.session import Session

PENDING = "pending"
LIGHT, HEAVY, STACKS, AFTER = "light", "heavy", "stacks", "after"
#: Nothing but this is training: what else a step held makes it another one.
OTHER_THAN_TRAINING = EVALUATION | SAVE | EPOCH | COMPILED
#: Why windows end where the script profiles.
THEIRS = "the script began to profile by itself"
#: A heavy window is not to write more than this, bytes: its steps are cut down by what a light one wrote a step, and
#: a heavy one writes up to six times as much (seen in traces of eager GPT-2 and ResNet-50 with shapes).
MOST_BYTES = 400e6
HEAVIER = 6
#: Python's functions are recorded where a step calls no more of them than this, and at some 250 bytes a call (seen with
#: torch 2.13); a step that decodes images in Python calls hundreds of thousands.
MOST_CALLS = 80_000
TOO_MANY_CALLS = (
    f"a step calls more than {MOST_CALLS} Python functions, too many to record with their stacks"
)
#: Why it has no stacks where torch's profiler would fail inside of the script's own code.
NAMELESS = "the name of a function, or of the file that it is in, is no text"
#: A window that has made the process grow by this ends with what it has, bytes, and if one step did so, without it: some
#: 80,000 operators. Closing it takes seven times as much again, and seconds (seen with torch 2.13: 3 kB an operator while
#: it is recorded, 22 kB and 0.1 ms once it is closed).
MOST_MEMORY = 0.25e9
#: Beside a device the driver takes memory of its own meanwhile, and a light window has told how much a step records.
MOST_BESIDE_A_DEVICE = 1.5e9
#: A window with stacks is not to write more than this, bytes, by what the heavy one wrote a step.
MOST_STACKS_BYTES = 100e6
#: Windows that were cut short, by an evaluation or a new epoch, are opened again so many times.
TRIES = 3
#: Ranks that are not ready for their windows are not waited for longer than this.
PATIENCE_S = 60.0
#: Steps for the profiler's first steps to settle, and for the queue to refill after a window was closed.
LEAD = 2
#: A device that has rested while a window was opened runs above its usual clock, then below it, until it is as it was. Source:
#: kernels of an H200 at its power limit, 0.1 to 0.25 s.
SETTLE_S = 0.25
#: At most so many steps for it: those that are shorter than this leaves time for wait for the host.
SETTLE_STEPS = 30


@dataclass
class _Window:
    kind: str
    steps: int  # besides the lead
    lead: int = LEAD
    tries: int = TRIES
    marks_ns: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    waits_from: int = 0
    cost_ns: int = 0
    last: bool = False  # the profiler is to let go of the device after it
    delays_ns: list[int | None] = field(default_factory=list)
    memory: int = 0  # of the process when it was opened

    def mark(self) -> None:
        """Notes the end of a step, or where it was opened."""
        self.marks_ns.append(time.time_ns())
        self.delays_ns.append(run_delay_ns())


class Profiling:
    """The windows of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = Recorder(session, self._make_way)
        self._state = "none: the script ended before enough steps were timed"
        self._windows: list[ProfiledWindow] = []
        self._left: list[
            _Window
        ] = []  # to be recorded; the first one is open while the recorder runs
        self._after: list[tuple[int, Stamp | None, int]] = []  # host time, stamp, flags
        self._after_steps = 0
        self._clock: DeviceClock | None = None
        self._calls = PythonCalls(MOST_CALLS)
        self._notes: list[str] = []
        self._agreed: agreement.Agreed | None = None
        self._patient_until = 0.0
        self._usual = 0  # flags of most steps: an evaluation in each of them is part of it
        self._wanted: str | None = None  # why it is to end, said by another thread

    def install(self, patches: Patches) -> None:
        """Follows from the start whether the script profiles by itself: its profiler comes first."""
        self._recorder.install(patches)

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
        self._recorder.follow_scopes(self._session.patches)
        self._safely(self._try_to_agree)

    def _why_not(self) -> str | None:
        session = self._session
        if session.trainers.several is not None:
            return "several threads train"
        if session.trainers.moved or not in_main_thread():
            return "not the main thread trains, and only there is the profiler sure to be stopped"
        if session.device.type not in ("cpu", "cuda"):
            return f"not done on {session.device.type}"
        if session.device.type == "cuda" and os.environ.get("NSYS_PROFILING_SESSION_ID"):
            return "Nsight Systems is recording, and only one profiler can hold the device"
        if in_backward_pass():
            return "the optimizer steps inside the backward pass, where no profiler can be started"
        if not self._recorder.followed:
            return "whether the script profiles by itself cannot be told with this torch"
        if self._recorder.taken:
            return "the script was profiling by itself"
        return None

    def boundary(self, started: int) -> None:
        """A step has ended."""
        if not in_main_thread():
            self.end("another thread trains, too")
        elif self._wanted is not None:
            self.end(self._wanted)
        else:
            self._safely(self._boundary, started)

    def _safely(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function`; whatever it raises ends the windows, and the timed steps stand.

        Another thread that wants them to end waits meanwhile.
        """
        with self._recorder.lock:
            try:
                function(*args)
            except Exception as error:
                self._end(f"it failed ({type(error).__name__}: {error})")

    def _boundary(self, started: int) -> None:
        session = self._session
        flags, session.interval.flags = session.interval.flags & ~self._usual, 0
        if session.frames_changed():
            flags |= COMPILED
        session.interval.clear()
        if self._agreed is None or session.boundaries.total < self._agreed.step:
            self._try_to_agree()
            return
        if not self._left:
            self._time_after(started, flags)
            return
        window = self._left[0]
        if not self._recorder.running:
            if not self._recorder.in_scopes:
                self._open(window)
            return
        window.mark()
        window.flags.append(flags & OTHER_THAN_TRAINING)
        if self._calls.end():
            self._leave_out_stacks(TOO_MANY_CALLS)
        if self._calls.nameless:
            self._leave_out_stacks(NAMELESS)
        grown = resident_bytes() - window.memory
        most = MOST_BESIDE_A_DEVICE if self._on_cuda else MOST_MEMORY
        if grown > most and len(window.flags) < 2:
            self._end(f"a step has too much to record: {grown / 1e6:.0f} MB")
        elif grown > most or len(window.flags) >= window.lead + window.steps:
            self._finish(window)

    def interrupt(self) -> None:
        """Something other than training begins: what was recorded stands, and the window is opened again if need be."""
        session = self._session
        unusual = session.interval.flags & OTHER_THAN_TRAINING & ~self._usual
        if unusual and self._recorder.running and in_main_thread() and not session.graphs.capturing:
            self._safely(self._interrupt)

    def before_fork(self) -> None:
        """A process that is forked while a profiler runs would crash when it exits."""
        if self._recorder.running and in_main_thread():
            self._safely(self._interrupt)

    def _interrupt(self) -> None:
        window = self._left[0]
        window.tries -= 1
        if self._has_enough(window) or window.tries <= 0:
            self._finish(window)
        else:
            self._stop(window)

    def end(self, why: str) -> None:
        """Ends it for good, and has the session go on without; the main thread does so where a profiler runs."""
        with self._recorder.lock:
            if not in_main_thread():
                self._wanted = self._wanted or why
                if self._recorder.running:
                    return
            self._end(why)

    def _end(self, why: str) -> None:
        self.abandon(why)
        self._session.profiled()

    def abandon(self, why: str) -> None:
        """Ends whatever is under way. What is complete stays."""
        with self._recorder.lock:
            if self._state == PENDING:
                self._abandon(why)

    def _abandon(self, why: str) -> None:
        left, self._left = self._left, []
        if self._recorder.running and in_main_thread():
            try:
                if left and self._has_enough(left[0]):
                    self._close(left[0], lets_go=True)
                else:
                    self._recorder.stop(lets_go=True)
            except Exception as error:
                why += f"; its window was lost ({type(error).__name__}: {error})"
        self._state = f"partial: {why}" if self._windows else f"none: {why}"

    def leave(self) -> None:
        """The meter is being taken out."""
        self.abandon("the meter was taken out")

    def forget(self) -> None:
        """In a forked child: what the parent has open is not ours."""
        self._left = []
        self._recorder.forget()
        self._state = "none: a forked process"

    def _make_way(self) -> None:
        """The script is about to profile by itself, in any thread."""
        if self._state != PENDING:
            return
        self.end(THEIRS)
        until = time.monotonic() + PATIENCE_S
        while self._recorder.running and time.monotonic() < until:
            time.sleep(0.002)

    @staticmethod
    def _has_enough(window: _Window) -> bool:
        return len(window.flags) - window.lead >= min(2, window.steps)

    def _lead_of(self, window: _Window) -> int:
        """Returns how many leading steps do not count; of a window that was cut short, at most half beyond `LEAD`."""
        n = len(window.flags)
        if self._has_enough(window):
            return window.lead
        return min(window.lead, max(LEAD, n // 2), n - 1)

    # ------------------------------------------------------------------ which windows, and when

    def _try_to_agree(self) -> None:
        session = self._session
        if self._agreed is None:
            self._agreed = agreement.agree(session, agreement.PROFILE, self._plan)
            if self._agreed is None:
                if time.monotonic() > self._patient_until:
                    agreement.refuse(session, agreement.PROFILE)
                    self.end("the other ranks were not ready for it")
                return
            if self._agreed.step == agreement.NEVER:
                self.end("another rank could not")
                return
            self._take(self._agreed.text)
        if self._left and session.boundaries.total >= self._agreed.step:
            self._open(self._left[0])

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
        settle = min(SETTLE_STEPS, math.ceil(SETTLE_S / step_s)) if step_s < SETTLE_S else 0
        if self._session.device.type == "cpu":
            light = settle = 0
        return f"{light} {heavy} {stacks} {after} {lead} {lead + settle}"

    def _take(self, plan: str) -> None:
        light, heavy, stacks, self._after_steps, lead, light_lead = map(int, plan.split())
        if _python_is_traced():  # ours would take the place of the script's own tracer
            stacks = 0
        wanted = ((LIGHT, light), (HEAVY, heavy), (STACKS, stacks))
        leads = {LIGHT: light_lead}
        self._left = [_Window(kind, n, leads.get(kind, lead)) for kind, n in wanted if n]
        self._left[-1].last = True
        if not names_are_text():
            self._leave_out_stacks(NAMELESS)

    def _finish(self, window: _Window) -> None:
        """Closes a window; the next one opens at the end of the next step."""
        self._close(window)
        self._left.pop(0)
        if self._left:
            return
        if not self._windows:
            self.end("each was cut short by an evaluation, a save, a new epoch or a forked process")
            return
        self._clock = DeviceClock(self._session.device) if self._on_cuda else None

    @property
    def _on_cuda(self) -> bool:
        return self._session.device.type == "cuda"

    # ------------------------------------------------------------------ one window

    def _open(self, window: _Window) -> None:
        began = time.perf_counter_ns()
        self._cut_down(window)
        window.marks_ns, window.delays_ns, window.flags = [], [], []
        window.waits_from = len(self._session.waits)
        with self._recorder.lock:
            taken = self._recorder.taken
            if not taken and self._wanted is None:
                self._recorder.start(operators=window.kind != LIGHT, stacks=window.kind == STACKS)
        if not self._recorder.running:
            self.end(self._wanted or THEIRS)
            return
        window.cost_ns += time.perf_counter_ns() - began
        window.memory = resident_bytes()
        window.mark()
        if window.kind == HEAVY and any(one.kind == STACKS for one in self._left):
            self._calls.begin()  # in a step of the lead, which does not count

    def _cut_down(self, window: _Window) -> None:
        """Gives a window as many steps as it may write, by what the one before it wrote a step."""
        for before in self._windows:
            each = before.bytes / max(1, len(before.flags))
            if (before.kind, window.kind) == (LIGHT, HEAVY) and each:
                window.steps = max(1, min(window.steps, int(MOST_BYTES / (HEAVIER * each))))
            if (before.kind, window.kind) == (HEAVY, STACKS) and each:
                room = int(MOST_STACKS_BYTES / each)
                window.lead = max(1, min(window.lead, room - window.steps))
                window.steps = max(1, min(window.steps, room - window.lead))

    def _leave_out_stacks(self, why: str) -> None:
        """Python's functions cannot be recorded, or not at a bearable cost."""
        if all(window.kind != STACKS for window in self._left):
            return
        self._left = [window for window in self._left if window.kind != STACKS]
        self._left[-1].last = True
        self._notes.append(f"the lines of findings are not known: {why}")

    def _stop(self, window: _Window, *, lets_go: bool = False) -> Any:
        began = time.perf_counter_ns()
        self._calls.end()
        profile = self._recorder.stop(lets_go=lets_go)
        window.cost_ns += time.perf_counter_ns() - began
        return profile

    def _close(self, window: _Window, *, lets_go: bool = False) -> None:
        """Stops a window and writes its trace: all at once, since the profiler's results hold the interpreter."""
        profile = self._stop(window, lets_go=lets_go or window.last)
        began = time.perf_counter_ns()
        if len(window.flags) < 2:  # nothing would be left behind the first
            return
        session = self._session
        rank = finish.identity_of(session)[0]
        path = Path(session.config.folder or ".") / PROFILE_FOLDER
        path.mkdir(exist_ok=True)
        path /= f"rank{rank}-{os.getpid()}-{window.kind}.json"
        path.unlink(missing_ok=True)
        try:
            profile.export_chrome_trace(str(path))  # says nothing where it could not
            if not path.exists():
                raise OSError("its trace could not be written: the disk may be full")
            size = path.stat().st_size
        except BaseException:  # what there is of it must not fill the disk
            for part in (path, path.with_name(path.name + ".tmp")):
                with contextlib.suppress(OSError):
                    part.unlink()
            raise
        del profile
        window.cost_ns += time.perf_counter_ns() - began
        offset = _offset_ns()
        # Whoever draws batches in another thread does not wait there where the device is fed.
        waits = [] if session.draws_apart else session.waits[window.waits_from :]
        self._windows.append(
            ProfiledWindow(
                kind=window.kind,
                file=f"{PROFILE_FOLDER}/{path.name}",
                marks_ns=window.marks_ns,
                delays_ns=[] if None in window.delays_ns else [d or 0 for d in window.delays_ns],
                flags=window.flags,
                lead=self._lead_of(window),
                waits_ns=[(a + offset, b + offset) for a, b in waits],
                cost_ns=window.cost_ns,
                bytes=size,
            )
        )

    # ------------------------------------------------------------------ afterwards

    def _time_after(self, started: int, flags: int) -> None:
        stamp = self._clock.stamp() if self._clock is not None else None
        self._after.append((started, stamp, flags & OTHER_THAN_TRAINING))
        if len(self._after) > self._after_steps + LEAD:
            self._state = "done"
            self._session.profiled()

    def snapshot(self) -> Callable[[], Profile]:
        """Returns what makes the record of it, later and on another thread."""
        state, windows, after = self._state, list(self._windows), list(self._after)
        torn_down, notes = self._recorder.torn_down, list(self._notes)

        def record() -> Profile:
            spans, clock = _spans(after)
            return Profile(state, windows, spans, clock if spans else None, torn_down, notes)

        return record


def _offset_ns() -> int:
    """Returns what makes ns since 1970 of a reading of the performance counter; the best of a few, should one be interrupted."""
    found = []
    for _ in range(5):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]


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
