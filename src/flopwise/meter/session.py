"""The meter of one training process: it attaches, finds steps, times them, counts FLOPs, and takes itself out again.

Life of a session: *warm-up* (steps are found, the root modules are looked up, FLOPs are counted once) -> *timed*
(nothing but clock reads and CUDA events) -> *profiled* (windows of a profiler, if they were asked for) -> *done* (every
hook is undone, the record is written). Nothing here
synchronises with the device. Whatever fails in here is caught, reported once and ends the measurement, never the run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flopwise.errors import NothingMeasuredError
from flopwise.meter import agreement, ending, finish, marks, selftest
from flopwise.meter.clock import DeviceClock
from flopwise.meter.config import Config, StopTraining
from flopwise.meter.counting import Counting
from flopwise.meter.found import Reading, frames_compiled, read_roots
from flopwise.meter.fresh import FreshGradients
from flopwise.meter.graphs import Graphs
from flopwise.meter.hooks import Hooks
from flopwise.meter.identities import Identities
from flopwise.meter.own_cost import call_cost_ns
from flopwise.meter.patches import Patches, never_compiled
from flopwise.meter.preemption import Preemption
from flopwise.meter.profiling import Profiling
from flopwise.meter.reads import Reads
from flopwise.meter.roots import Roots
from flopwise.meter.rows import (
    COMPILED,
    COUNTED,
    SAVE,
    TIMED,
    Brief,
    Interval,
    Row,
)
from flopwise.meter.steps import Boundaries
from flopwise.meter.surroundings import Surroundings
from flopwise.meter.trainers import Trainers
from flopwise.meter.window import Window
from flopwise.meter.writing import Writing

now = time.perf_counter_ns

WARMUP, MEASURING, PROFILING, STOPPING, DONE = (
    "warm-up",
    "timed",
    "profiled",
    "stopping",
    "done",
)
#: A first record is written when this many steps are timed, so that a killed run still leaves one.
FIRST_RECORD_STEPS = 10
#: Short steps are looked at closely (phases, shapes, device time) once in this many ns, and only counted in between:
#: one close look costs some 0.1 to 0.2 ms of host time.
CLOSE_LOOK_NS = 250_000_000
#: Where inputs have several shapes, the work of a step is only known of those that were looked at: as often as about a
#: hundredth of the time allows.
VARIED_LOOK_NS = 15_000_000
#: But in a measurement of N steps at least this often, and never more seldom than every 128th step.
CLOSE_LOOKS = 8
LONGEST_STRIDE = 128


class Fast:
    """What the optimizer hook needs in steps of which only the end is noted, where one optimizer alone ends them."""

    __slots__ = ("ends", "left", "on", "sole")

    def __init__(self) -> None:
        self.on = False
        self.sole = 0
        self.left = 0
        self.ends: list[int] = []


class Session:
    """The meter in one process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.live = False
        self.phase = WARMUP
        self.patches = Patches()
        self.notes: list[str] = []
        self.rows: list[Row | Brief] = []
        self.losses: list[torch.Tensor] = []
        self.boundaries = Boundaries()
        self.mode: str | None = None  # "optimizer" | "backward" | "mark"
        self.optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.device = torch.device("cpu")
        self.roots = Roots(self)
        self.reading = Reading(False, None, True)
        self.counting = Counting(self)
        self.graphs = Graphs(self)
        self.window = Window(self)
        self.reads = Reads(self)
        self.surroundings = Surroundings(self)
        self.trainers = Trainers(self)
        self.profiling = Profiling(self)
        self.preemption = Preemption()
        self.stepper = (
            0  # thread of the last optimizer step, a thread of autograd's maybe; -1: several train
        )
        self.draws_apart = False  # a thread that does not train has drawn batches
        self.observers: list[Callable[[Session, Row], None]] = []
        self.record: Any = None
        self.pid = os.getpid()
        self.identity: tuple[int, int, int] | None = None  # rank, world size, local rank
        self.attach_ns = 0
        self.uses_scaler = False
        self.autocast: torch.dtype | None = None  # put around the forward by a fix
        self.plan: Any = None  # fixes to apply once the modules are known; has `apply()`
        self.interval = Interval()
        self.fast = Fast()
        self.hooks = Hooks(self)
        self.identities = Identities(self._meet, self._optimizer_died)
        self.events = 0  # optimizer events, nested ones not counted
        self.fresh = FreshGradients()
        self._last_ns = now()
        self._last_event: Any = None
        self._clock: DeviceClock | None = None
        self._frames = 0
        self._timed = 0
        self._slow = 0  # leading steps taken out of the timed ones for good
        self.enough = False  # as many steps are timed as were wanted
        self.ended = False  # the script has
        self._first_replay = 0  # row from which steps are replays of a CUDA graph
        self._timed_from_ns = 0
        self.brief = False  # the running interval is only counted
        # From when to when such intervals waited for data: all of them, so that a stall at every n-th is not missed.
        self.waits: list[tuple[int, int]] = []
        self._gaps = random.Random(0)  # of our own: the script's random numbers stay what they are
        self._stride = 1  # every how many steps one is looked at closely
        self._until_close = 0
        self._target = sys.maxsize if config.steps is None else config.steps
        self._sole = 0  # id of the optimizer that alone ends steps, while that is established
        self._written_at = 0
        self._brief_own_ns = 0
        self._own_call_ns = 0
        self.writing = Writing(self)
        self._stop_at: int | None = None

    # ------------------------------------------------------------------ attach, detach

    def attach(self) -> None:
        """Installs every hook.

        Raises:
            AttachError: a hook is not there in this torch; nothing is installed then.
        """
        started = now()
        problems = selftest.missing_hooks()
        if problems:
            from flopwise.errors import AttachError

            raise AttachError(
                f"cannot measure with torch {torch.__version__}: {'; '.join(problems)}. "
                "The script runs unmeasured; a newer flopwise may know this torch"
            )
        self._own_call_ns = call_cost_ns()
        try:
            self._begin()
        except BaseException:
            self.detach()
            raise
        self.attach_ns += self._last_ns - started

    def _begin(self) -> None:
        self.live = True
        marks.current = self
        self.hooks.install()
        self.graphs.install(self.patches)
        self.surroundings.install(self.patches)
        if self.config.profile:
            self.profiling.install(self.patches)
        if self.config.folder is not None:
            atexit.register(self.close)
            os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)
        self._last_ns = now()

    def detach(self) -> None:
        """Takes every hook out again."""
        if self.fast.on:
            with contextlib.suppress(Exception):
                self.leave_fast()
        self.live = self.brief = self.fast.on = False
        self.phase = DONE
        if marks.current is self:
            marks.current = None
        self.fresh.forget()
        for part in (
            self.profiling.leave,
            self.surroundings.close,
            self.counting.check,
            self.counting.abandon,
            self.roots.release,
        ):
            try:
                part()
            except Exception as error:
                self.note(f"could not be taken out: {type(error).__name__}: {error}")
        for failure in self.patches.undo():
            self.note(f"a patch could not be undone: {failure}")
        self.counting.leave_behind()

    @property
    def is_measuring(self) -> bool:
        """Whether more steps are wanted."""
        return self.live and self.phase in (WARMUP, MEASURING)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is under way."""
        return self.hooks.in_backward

    @property
    def watched_leaf(self) -> Any:
        """The parameter that shows when gradients are fresh, while no optimizer of torch's has stepped."""
        return self.fresh.leaf

    def device_ran_dry(self) -> bool | None:
        """Returns whether the device has done all that was issued up to the last step's end; None: unknown."""
        return self._last_event.passed() if self._last_event is not None else None

    def settle(self) -> None:
        """The script has ended: settles how many steps it made."""
        self.ended = True
        self.trainers.script_ended()
        self.boundaries.close()
        if self.trainers.several is None and (
            self.mode in (None, "backward")
            and self.fresh.leaf is not None
            and self.interval.backwards
        ):
            self.mode = "backward"
            self.boundaries.total += 1  # the last one, which no later backward has closed

    def paused(self, flag: int) -> None:
        """Something else than training begins in the running step: an evaluation, a save, a loader's start."""
        self.interval.flags |= flag
        if self.phase == PROFILING:
            self.guard(self.profiling.interrupt)

    @property
    def takes_waits(self) -> bool:
        """Whether of the waits for data only the times are taken."""
        return self.brief or self.phase == PROFILING

    def note(self, text: str) -> None:
        """Keeps a remark for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    # ------------------------------------------------------------------ steps

    def mark(self) -> None:
        """Ends a step by hand (`flopwise.step()`)."""
        if not self.live:
            return
        started = now()
        if self.mode != "mark":
            self.leave_sole()
            self._restart("mark")
        self.boundaries.total += 1
        if self.trainers.several is not None:
            self.guard(self.trainers.book, started)
            return
        self.guard(self._boundary, started)

    def backward_starts(self, tensors: Any, started: int) -> None:
        """A backward begins: without an optimizer of torch's it may be what begins a step."""
        if self.events or self.mode == "mark":
            self.fresh.forget()
        elif self.fresh.begins_step(tensors):
            self.mode = self.mode or "backward"
            self.boundaries.total += 1
            self._boundary(started)
        elif self.fresh.leaf is not None:
            self.device = self.fresh.leaf.device

    def optimizer_stepped(self, optimizer: Any, started: int) -> None:
        """An optimizer has stepped, or a GradScaler has skipped its step."""
        self.events += 1
        if self.mode in ("mark", "replay"):
            return
        try:
            ident = get_ident()
            if ident != self.stepper and self.trainers.changed(optimizer, ident, started):
                return
            if self.mode == "backward":
                self._restart("optimizer")
            self.mode = "optimizer"
            if self.uses_scaler:
                found_inf = getattr(optimizer, "found_inf", None)
                if found_inf is not None:
                    self.interval.found_inf = found_inf
            identity = self.identities.of(optimizer)
            settled = self.boundaries.settled
            ends = self.boundaries.feed(identity)
            if self.phase == PROFILING and settled and not self.boundaries.settled:
                self.profiling.end("another optimizer steps")
                return
            if self.boundaries.settled != settled and self.is_measuring:
                self.leave_sole()
                self._align_rows()
                if settled:
                    self._new_regime("another optimizer steps")
            if ends:
                self._boundary(started)
        except StopTraining:
            raise
        except Exception as error:
            self.fail(error)

    def graph_replayed(self, graph: Any, started: int) -> None:
        """A CUDA graph that holds an optimizer step was replayed: that is a step."""
        self.events += 1
        if self.mode == "mark":
            return
        ident = get_ident()
        try:
            if ident != self.stepper and self.trainers.changed(graph, ident, started):
                return
        except Exception as error:
            self.fail(error)
            return
        if self.mode != "replay" and self.is_measuring:
            self.leave_sole()
            self.mode = "replay"
            self.boundaries.close()
            self._new_regime("CUDA graphs are replayed")
            self._first_replay = len(self.rows)
            self.counting.tried = self.counting.settled = True
        self.boundaries.total += 1
        self.guard(self._boundary, started)

    def _new_regime(self, what: str) -> None:
        """From here on the steps are others: those before stay counted, as warm-up, and what was counted is void."""
        if self.phase not in (WARMUP, MEASURING):
            return
        if self.phase == MEASURING:
            self.note(f"from step {self.boundaries.total} on {what}: the steps before are left out")
        self.brief = False
        self.rows = [Brief(row.end_ns, row.flags & ~TIMED, None) for row in self.rows]
        self.phase = WARMUP
        self._timed = 0
        self.counting.restart()
        self.roots.restart()

    def forget_steps(self) -> None:
        """Several threads train: what was cut into steps is dropped, and what is seen from here on is only counted."""
        self.leave_sole()
        self.counting.give_up_for_good()
        self.roots.release()
        self.roots.settled = True
        self.fresh.forget()
        total = self.boundaries.total if self.mode in ("mark", "backward") else self.events
        self.boundaries = Boundaries()
        self.boundaries.total = total
        self.boundaries.settled = True
        self.rows, self.waits, self.losses = [], [], []
        self.interval.clear()
        self._timed = self._slow = 0
        self._timed_from_ns = now()
        self.window.prepare()
        self.window.begin()
        if self.plan is not None:
            self.plan = None
            self.note("the plan was not applied: several threads train")
        self.only_count()

    def only_count(self) -> None:
        """Has every hook of ours but those at the ends of steps pass its calls on, whatever was under way."""
        self.leave_sole()
        self.fast.sole = 0
        self.stepper = -1
        self.phase = MEASURING
        self.brief = True
        self.counting.abandon()

    def _optimizer_died(self, key: int) -> None:
        """Called by the garbage collector, at any moment: notes it, and leaves the rest to the next step."""
        if self._sole == key:
            self._sole = self.fast.sole = 0

    def _meet(self, identity: int, optimizer: torch.optim.Optimizer) -> None:
        if not self.optimizers and self.config.folder is not None:
            self.hooks.watch_exit()
            self.identity = (
                finish.identity()
            )  # a process group may be gone when the record is built
            with contextlib.suppress(OSError):
                agreement.begin(self)
        self.optimizers[identity] = weakref.ref(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == "meta" or isinstance(parameter, FakeTensor):
                    raise NothingMeasuredError(
                        "the model's parameters hold no data (the meta device, or fake tensors): nothing is computed"
                    )
                self.device = parameter.device
                return

    def _align_rows(self) -> None:
        """Once the cycle is known, rows that were cut at other places are replaced by as many warm-up rows."""
        before = self.boundaries.total - (1 if self.boundaries._position == 0 else 0)
        if len(self.rows) != before:
            self.rows = [Brief(now(), COUNTED, None)] * before

    def _restart(self, mode: str) -> None:
        """A better signal for steps has appeared: what was cut by the old one is dropped."""
        self.mode = mode
        self.rows.clear()
        self.boundaries = Boundaries()
        self.phase = WARMUP
        self._timed = 0
        self.interval.clear()

    # ------------------------------------------------------------------ the end of a step

    def leave_sole(self) -> None:
        """Another signal than the one optimizer's steps has to be heeded from now on."""
        self._sole = 0
        if self.fast.on:
            self.leave_fast()

    def leave_fast(self) -> None:
        """Books the steps whose ends were only noted, and looks closely at the next one if that is due."""
        fast, interval = self.fast, self.interval
        started = now()
        ends, fast.ends = fast.ends, []
        fast.on = False
        frames = frames_compiled()
        flags = (
            TIMED if frames == self._frames else TIMED | COMPILED
        )  # in one of them; nobody knows which
        self._frames = frames
        self.rows.extend([Brief(end, flags, None) for end in ends])
        if interval.flags and ends:
            self.rows[-1] = Brief(ends[-1], flags | interval.flags, None)
            interval.clear()
        n = len(ends)
        self.events += n
        self.boundaries.repeat(n)
        self._timed += sum(not row.flags & (COUNTED | SAVE) for row in self.rows[-n:]) if n else 0
        self._until_close -= n
        if self._until_close <= 0 or self._timed + 1 >= self._target:
            self.brief = False
        elif self.brief and self._sole and self.live:
            fast.left = min(self._until_close, self._target - self._timed - 1)
            fast.on = True
        self._brief_own_ns += now() - started

    def _brief_boundary(self, started: int) -> None:
        """The end of a step that is only counted."""
        interval = self.interval
        flags = interval.flags
        if self.frames_changed():
            flags |= COMPILED
        self.rows.append(Brief(started, flags | TIMED, interval.found_inf))
        if flags or interval.found_inf is not None:
            interval.clear()
        if not flags & (COUNTED | SAVE):
            self._timed += 1
        self._until_close -= 1
        if self._until_close <= 0 or self._timed + 1 >= self._target:
            self.brief = False
        self._brief_own_ns += now() - started

    def frames_changed(self) -> bool:
        """Returns whether Dynamo has compiled something since it was asked last."""
        frames, before = frames_compiled(), self._frames
        self._frames = frames
        return frames != before

    def brief_own_ns(self, rows: Sequence[Row | Brief]) -> int:
        """Returns what our hooks cost over all steps that were only counted: five of them are passed in each."""
        brief = sum(isinstance(row, Brief) for row in rows)
        return self._brief_own_ns + (5 * brief + len(self.waits)) * self._own_call_ns

    def _choose_stride(self) -> int:
        """Returns every how many steps one is looked at closely in the timed window."""
        if self.mode == "backward":  # each backward has to be looked at: it may begin a step
            return 1
        if self.observers or self.config.stride is not None:
            return self.config.stride or 1
        recent = self.rows[-4:]
        step_ns = max(1, (recent[-1].end_ns - recent[0].end_ns) // max(1, len(recent) - 1))
        shapes = {row.shape for row in self.rows if isinstance(row, Row)} - {""}
        look_ns = CLOSE_LOOK_NS if len(shapes) < 2 else VARIED_LOOK_NS
        stride = min(LONGEST_STRIDE, -(-look_ns // step_ns))
        if self.config.steps is not None:
            # Twice as often where inputs differ: the summary wants so many to tell the work of all.
            stride = min(stride, self.config.steps // (CLOSE_LOOKS * (2 if len(shapes) > 1 else 1)))
        return max(1, stride)

    def _boundary(self, started: int) -> None:
        if self.phase == PROFILING:
            self.profiling.boundary(started)
        elif self.brief:
            self._brief_boundary(started)
        else:
            with self.trainers.lock:
                self._close_boundary(started)

    def _close_boundary(self, started: int) -> None:
        """The end of a step that is looked at closely."""
        interval = self.interval
        if self.phase == STOPPING:
            self._stop_if_due()
            return
        if self.trainers.interval_ended():
            self.trainers.book(started)
            return
        self.counting.clear_away()
        event = None
        if self.device.type == "cuda":
            if self._clock is None:
                self._clock = DeviceClock(self.device)
            event = self._clock.stamp()
        counted = self.counting.step_ended()
        flags = interval.flags
        if self.frames_changed():
            flags |= COMPILED
        if self.phase == MEASURING:
            flags |= TIMED
        # A root that is called several times for one backward (two views, a closure) does not count samples.
        once = interval.root_calls <= max(1, interval.backwards)
        row = Row(
            end_ns=started,
            flags=flags,
            data_ns=interval.data_ns,
            forward_ns=interval.forward_ns,
            backward_ns=interval.backward_ns,
            optimizer_ns=interval.optimizer_ns,
            own_ns=interval.own_ns + (interval.calls + 1) * self._own_call_ns,
            pause_ns=interval.pause_ns,
            micro_batches=interval.backwards,
            samples=interval.loader_samples or (interval.root_samples if once else 0) or None,
            # What the model was given, where it was given ids: a script may cut the batch, as into x[:, :-1] and x[:, 1:].
            tokens=(interval.root_tokens if once else 0) or interval.loader_tokens or None,
            real_tokens=(interval.real_tokens or None) if interval.real_known else None,
            shape=interval.shape(),
            data_dry=interval.data_dry,
            event=event,
            found_inf=interval.found_inf,
        )
        interval.clear()
        self.roots.new_interval()
        self.rows.append(row)
        self._last_event = event
        if self.phase == MEASURING:
            self.measured(row, started)
        elif self.phase == WARMUP and not counted:
            self._warm_up(started)
        for observer in self.observers:
            observer(self, row)
        # The first timed step is always looked at: a script may end before the next one is.
        looked = self.phase == MEASURING and flags & TIMED
        if self._stride > 1 and looked and self._timed + 1 < self._target:
            # At random distances: a fixed one could always meet the same kind of step.
            self._until_close = self._gaps.randrange(2 * self._stride - 1)
            self.brief = self._until_close > 0
            if self.brief and self._sole and not self.hooks.nested:
                self.fast.sole = self._sole
                self.fast.left = min(self._until_close, self._target - self._timed - 1)
                self.fast.on = True
        interval.own_ns += now() - started
        if self.phase == STOPPING:
            self._stop_if_due()

    def _warm_up(self, started: int) -> None:
        n = len(self.rows)
        if n <= 6:
            self.surroundings.warmed(n)
        if n <= 6 or not self.roots.settled:
            self.roots.look(n)
            if self.roots.found:
                self.reading = read_roots(self.roots.found)
                self.surroundings.found(self.roots.found)
        if self.plan is not None and self.roots.settled:
            plan, self.plan = self.plan, None
            plan.apply()
            self.interval.flags |= COUNTED
        waits = self.counting.tried or self.plan is not None
        if self.config.count and n >= 2 and not waits and self.boundaries_known():
            self.counting.begin()
            return
        self.window.prepare()
        if self._is_warm(n) and self.window.begin():
            self.phase = MEASURING
            self.preemption.begin()
            self._timed_from_ns = started
            self._stride = self._choose_stride()
            alone = (
                self.mode == "optimizer"
                and len(self.boundaries.cycle) == 1
                and len(self.identities.known) == 1
            )
            if alone and not self.uses_scaler:
                self._sole = next(iter(self.identities.known))

    def boundaries_known(self) -> bool:
        """Whether it is settled what ends a step."""
        return self.mode in ("mark", "backward", "replay") or self.boundaries.settled

    def _is_warm(self, n: int) -> bool:
        """The rule that ends the warm-up; `finish.WARMUP_RULE` says it in words."""
        if self.config.warmup is not None:
            counted = not self.config.count or self.counting.settled
            return n >= self.config.warmup and (counted or n >= 20)
        if (
            n < 5
            or (self.config.count and not self.counting.settled)
            or not self.boundaries_known()
        ):
            return False
        last = self.rows[-3:]
        if any(row.flags & (COMPILED | COUNTED) for row in last[1:]):
            return False
        spans = [b.end_ns - a.end_ns for a, b in zip(self.rows[-4:], last, strict=False)]
        return max(spans) <= 1.25 * min(spans) or n >= 20

    def measured(self, row: Row | Brief, started: int) -> None:
        """A step of the timed window has ended; completes the measurement if it was the last."""
        if row.flags & (COUNTED | COMPILED | SAVE):
            return
        self._timed += 1
        elapsed_s = (started - self._timed_from_ns) * 1e-9
        if self._done(elapsed_s):
            self._recount()
            if self._done(elapsed_s):
                self._complete()
            else:
                self.interval.flags |= COUNTED
        elif self._first_record_due(elapsed_s):
            self._written_at = self._timed
            self.interval.flags |= COUNTED
            self.writing.later("partial: still measuring")

    def _done(self, elapsed_s: float) -> bool:
        config = self.config
        if config.steps is not None:
            return self._timed >= config.steps
        if self._timed >= FIRST_RECORD_STEPS and elapsed_s >= config.max_window_s:
            return True
        return self._timed >= config.default_steps and elapsed_s >= config.min_window_s

    def _recount(self) -> None:
        """Counts as timed what the record will: pauses are not, and what leads slowly is warm-up from here on.

        More is timed in its place. Where steps get faster for ever, no more is given up than was wanted.
        """
        wanted = self.config.steps or self.config.default_steps
        kinds = finish.kinds_so_far(self.rows, self.config.warmup, lead=self._slow >= wanted)
        for i, kind in enumerate(kinds, start=1):
            row = self.rows[i]
            if kind == "warmup" and row.flags & TIMED:
                self.rows[i] = row._replace(flags=row.flags & ~TIMED)
                self._slow += 1
        self._timed = kinds.count("timed")

    def _first_record_due(self, elapsed_s: float) -> bool:
        if self.config.folder is None:
            return False
        if self._written_at == 0:
            return self._timed >= FIRST_RECORD_STEPS or (elapsed_s >= 20 and self._timed >= 3)
        return self._written_at <= FIRST_RECORD_STEPS and elapsed_s >= 55

    def _complete(self) -> None:
        self.enough = True
        self.preemption.end()
        self.window.close()
        self.surroundings.close()
        self.counting.check()
        self.leave_sole()
        self.phase = PROFILING
        self.brief = self.mode != "backward"  # hooks pass their calls on, but for the ends of steps
        if not self.config.profile or not self.profiling.prepare():
            self.writing.later("complete")
            self._conclude()
            return
        self.writing.later("complete")
        self.roots.release()
        self.profiling.begin()

    def profiled(self) -> None:
        """The profiled windows are over, or there are to be none after all."""
        if self.phase == PROFILING:
            self.writing.profile()
            self._conclude()

    def _conclude(self) -> None:
        """Nothing more is measured: the meter leaves, or ends the script if it was asked to."""
        self.brief = False
        several = self.trainers.several is not None
        if self.config.stop_after and not several:
            self.phase = STOPPING
            self.roots.release()
        else:
            if self.config.stop_after:
                self.note("--stop-after: several threads train, so the script was not ended")
                agreement.refuse(self, agreement.STOP)
            self.detach()

    def _stop_if_due(self) -> None:
        """Ends the script at the step that all ranks have agreed on."""
        if self._stop_at is None:
            agreed = agreement.agree(self, agreement.STOP)
            self._stop_at = None if agreed is None else agreed.step
        if self._stop_at == agreement.NEVER:
            self.note("--stop-after: another rank is not measured, so the script was not ended")
            self.detach()
        elif self._stop_at is not None and self.boundaries.total >= self._stop_at:
            refused = agreement.refused(self, agreement.STOP)
            self.detach()
            if refused:
                self.note("--stop-after: another rank's meter failed, so the script was not ended")
                return
            agreement.leave_together(self)
            ending.end_script(self.trainers.thread, self.config.folder)

    # ------------------------------------------------------------------ the record

    def close(self) -> None:
        """Writes what was measured when the process ends before the measurement was complete."""
        if os.getpid() != self.pid:
            return
        try:
            if self.phase == PROFILING and self.live:
                self.profiling.abandon("the script ended first")
                self.writing.profile()
                self.detach()  # there is no script left to end
            self.writing.join()
            if self.phase in (WARMUP, MEASURING) and self.live:
                self.settle()
                self.window.close()
                self.detach()
                enough = self.config.steps is None and self._timed >= FIRST_RECORD_STEPS
                status = "complete" if enough else "partial: the script ended first"
                self.writing.now(status)
        except Exception as error:
            self.writing.complain(error)

    def _before_fork(self) -> None:
        if self.live and self.phase == PROFILING and os.getpid() == self.pid:
            self.guard(self.profiling.before_fork)

    def _after_fork(self) -> None:
        """In a forked child: nothing of the parent's measurement is ours, and a child that trains starts anew."""
        if self.phase == DONE:
            return
        self.pid = os.getpid()
        if not self._begun:
            return
        self.profiling.forget()
        self.rows = []  # there is nothing to be told about them, so nobody needs to look around
        self.detach()
        child = Session(self.config)
        child._own_call_ns = self._own_call_ns
        child.guard(child._begin)

    @property
    def _begun(self) -> bool:
        """Whether anything of a training has been seen."""
        return bool(
            self.optimizers
            or self.boundaries.total
            or self.fresh.leaf is not None
            or self.loaders
            or self.losses
        )

    # ------------------------------------------------------------------ faults

    def guard(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function`; whatever it raises ends the measurement and nothing else."""
        try:
            function(*args)
        except StopTraining:
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Reports a failure of ours, takes every hook out, and lets the script go on."""
        if self.phase == PROFILING:
            with contextlib.suppress(Exception):
                self.profiling.abandon("the meter failed")
                self.writing.profile()
        self.detach()
        self.writing.complain(error)
        with contextlib.suppress(Exception):
            for purpose in (agreement.PROFILE, agreement.STOP):
                if purpose == agreement.PROFILE or self.config.stop_after:
                    agreement.refuse(self, purpose)


# Called from hooks: Dynamo must not try to compile what they do.
for _ours in (Session.guard, Session.mark, Session.optimizer_stepped):
    never_compiled(_ours, nor_what_it_calls=True)
