"""Watches the fixes of a plan in production: what makes steps slower, compiles for ever or runs out of memory is undone.

Only ends of optimizer steps are seen, and a clock is read at each. Everything happens there, between two steps, and is
said in one line. On several ranks nothing is undone, since ranks must not differ: it is only said.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from flopwise.fixes.interface import Applied
from flopwise.meter.found import frames_compiled
from flopwise.meter.patches import never_compiled

#: Steps of which the median is a step time.
WINDOW = 64
#: Windows in a row that must be slow.
SLOW_WINDOWS = 3
#: So much slower than its own first steady window is a slowdown.
SLOWER = 1.25
#: So much slower than the bare script was when the plan was made, and the plan does not help here.
NO_HELP = 1.05
#: Without the fixes steps must be this much faster for them to stay out.
FASTER_WITHOUT = 0.97
#: Frames compiled in the last `STORM_STEPS` steps, once steps had settled, that are a storm.
STORM_FRAMES, STORM_STEPS = 8, 256
#: Steps after a switch that do not count, besides those until the fixes have settled.
LEADING = 8
#: It may take so many steps to settle; then the steps are taken as they are.
MOST_SETTLING = 512
#: Slowdowns that are looked into; after that the job is left alone.
MOST_PROBES = 3
#: Out of memory in the first steps is put down to the plan.
FIRST_STEPS = 100


@dataclass(frozen=True)
class Watched:
    """A fix of the plan that is on."""

    code: str
    name: str
    applied: Applied | None  # None: it was put in before the script began, and cannot be taken out
    compiles: bool = False

    @property
    def words(self) -> str:
        """How it is called."""
        return f"{self.code} {self.name}"


class Canary:
    """The fixes of a plan, watched."""

    def __init__(
        self,
        fixes: Sequence[Watched],
        expected: Mapping[str, float | None],
        say: Callable[[str], None],
        *,
        events_per_step: int = 1,
        alone: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begins to watch.

        Args:
            fixes: that are on.
            expected: `step_s` with the plan and `bare_step_s` without, as they were when it was proven; None: not known.
            say: tells the user.
            events_per_step: optimizer steps that make a step.
            alone: whether this is the only rank: only then anything is undone.
        """
        self._fixes = list(fixes)
        self._bare_s = expected.get("bare_step_s")
        self._say, self._clock, self._alone = say, clock, alone
        self._events = max(1, events_per_step)
        self._state = self._settling
        self._then: Callable[[float], None] = self._learnt
        self._event = 0
        self.steps = 0  # seen so far
        self._last: float | None = None
        self._spans: list[float] = []
        self._leading = 0
        self._reference_s = 0.0
        self._slow_s = 0.0
        self._slow = 0
        self._probes = 0
        self._frames: list[tuple[int, int]] = []  # (step, frames compiled by then)
        self.out_of_memory = False
        self.done = not self._fixes

    @property
    def fixes(self) -> list[Watched]:
        """Those that are still on."""
        return list(self._fixes)

    def event(self) -> None:
        """Takes the end of an optimizer's step."""
        if self.done:
            return
        self._event += 1
        if self._event % self._events:
            return
        now = self._clock()
        span = None if self._last is None else now - self._last
        self._last = now
        self.steps += 1
        if self.out_of_memory:
            self._memory()
        self._failures()
        if self._fixes and span is not None:
            self._state(span)
        if not self._fixes:
            self.done = True

    # ------------------------------------------------------------------ slower than before

    def _settling(self, span: float) -> None:
        """Waits until what was switched has settled."""
        self._leading += 1
        frames = frames_compiled()
        quiet = not self._frames or self._frames[-1][1] == frames
        self._frames = [(self.steps, frames)]
        settled = all(f.applied is None or f.applied.settled() for f in self._fixes)
        if (self._leading > LEADING and quiet and settled) or self._leading >= MOST_SETTLING:
            self._spans = []
            self._state = self._measuring

    def _measuring(self, span: float) -> None:
        """Times one window, and has what waits for it go on."""
        self._spans.append(span)
        if len(self._spans) == WINDOW:
            step_s, self._spans = median(self._spans), []
            self._then(step_s)

    def _watching(self, span: float) -> None:
        self._storm()
        self._spans.append(span)
        if len(self._spans) < WINDOW:
            return
        step_s, self._spans = median(self._spans), []
        self._slow = self._slow + 1 if step_s > SLOWER * self._reference_s else 0
        if self._slow >= SLOW_WINDOWS:
            self._slow = 0
            times = step_s / self._reference_s
            self._probe(step_s, f"steps take {times:.2f} times as long as at first")

    def _learnt(self, step_s: float) -> None:
        """The first steady window has passed."""
        self._reference_s = step_s
        if self._bare_s is not None and step_s > NO_HELP * self._bare_s:
            why = f"a step takes {step_s:.4g} s, and took {self._bare_s:.4g} s without the plan when it was made"
            self._probe(step_s, why)
        else:
            self._watch()

    def _watch(self) -> None:
        self._frames = [(self.steps, frames_compiled())]
        self._state = self._watching

    def _probe(self, slow_s: float, why: str) -> None:
        """Takes the fixes out for a window, to see whether it is them."""
        self._probes += 1
        removable = [f.applied for f in self._fixes if f.applied is not None]
        if not self._alone or not removable or self._probes > MOST_PROBES:
            self._say(f"{why}; the plan's fixes stay on")
            self._reference_s = slow_s
            self._watch()
            if self._probes > MOST_PROBES:
                self.done = True
            return
        for applied in reversed(removable):
            applied.disable()
        self._why, self._slow_s = why, slow_s
        self._settle(self._probed)

    def _settle(self, then: Callable[[float], None]) -> None:
        self._leading, self._then, self._state = 0, then, self._settling

    def _probed(self, bare_s: float) -> None:
        removable = [f for f in self._fixes if f.applied is not None]
        if bare_s < FASTER_WITHOUT * self._slow_s:
            self._undo(removable, f"{self._why}, and {bare_s:.4g} s without the fixes")
            return
        for fix in removable:
            if fix.applied is not None:
                fix.applied.enable()
        self._say(
            f"{self._why}; it is not the plan's fixes ({bare_s:.4g} s without them): they stay on"
        )
        self._settle(self._again)

    def _again(self, step_s: float) -> None:
        self._reference_s = step_s
        self._watch()

    # ------------------------------------------------------------------ what else goes wrong

    def _storm(self) -> None:
        """Undoes what compiles where compiling does not come to an end."""
        frames = frames_compiled()
        if frames == self._frames[-1][1]:
            return
        self._frames.append((self.steps, frames))
        # The first is what there was when the last `STORM_STEPS` steps began.
        while self._frames[1][0] < self.steps - STORM_STEPS:
            del self._frames[0]
        new = frames - self._frames[0][1]
        compilers = [f for f in self._fixes if f.compiles and f.applied is not None]
        if new >= STORM_FRAMES and compilers:
            why = f"{new} frames were compiled anew in the last {STORM_STEPS} steps"
            if self._alone:
                self._undo(compilers, why)
            else:
                self._say(f"{why}; take {_names(compilers)} out of the plan")
                self._frames = [(self.steps, frames)]

    def _failures(self) -> None:
        """Says what a fix that has given up says."""
        for fix in list(self._fixes):
            failure = fix.applied.failure() if fix.applied is not None else None
            if failure:
                self._fixes.remove(fix)
                self._say(f"{fix.words} has switched itself off at step {self.steps}: {failure}")

    def _memory(self) -> None:
        """The device had no memory left, and the script has gone on."""
        self.out_of_memory = False
        if self.steps > FIRST_STEPS:
            return
        removable = [f for f in self._fixes if f.applied is not None]
        why = f"the device ran out of memory at step {self.steps} of the plan"
        if self._alone and removable:
            self._undo(removable, why)
        else:
            self._say(f"{why}; if it does again, take {_names(self._fixes)} out of the plan")

    def ended(self) -> None:
        """The script has ended: says what to leave out if it did so for want of memory."""
        if self.out_of_memory and self.steps <= FIRST_STEPS and self._fixes:
            self._say(
                f"the device ran out of memory in the first {self.steps + 1} steps with the plan. Without it: leave --plan out; or take "
                f"one fix after the other out of it, the last first: {_names(self._fixes)}"
            )

    def _undo(self, fixes: Sequence[Watched], why: str) -> None:
        """Takes fixes out for good, the last first."""
        for fix in reversed(fixes):
            if fix.applied is not None:
                try:
                    fix.applied.undo()
                except Exception as error:
                    self._say(f"{fix.words} could not be undone: {type(error).__name__}: {error}")
            self._fixes.remove(fix)
        self._say(f"{why}: {_names(fixes)} undone at step {self.steps}; the run goes on")
        if self._fixes:
            self._settle(self._again)
        else:
            self.done = True


def _names(fixes: Sequence[Watched]) -> str:
    return ", ".join(fix.words for fix in fixes)


class Post:
    """The place in a process from which a canary watches: put in before training, since hooks cannot be added at a step's end."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self.canary: Canary | None = None

    def install(self) -> None:
        """Puts the hooks in. They stay, and do nothing without a canary."""

        def after_step(*_: Any) -> None:
            canary = self.canary
            if canary is None or canary.done or os.getpid() != self._pid:
                return
            try:
                canary.event()
            except Exception as error:
                canary.done = True
                self.say(f"the plan is no longer watched: {type(error).__name__}: {error}")

        def no_memory(*_: Any) -> None:
            if self.canary is not None:
                self.canary.out_of_memory = True

        never_compiled(after_step, nor_what_it_calls=True)
        torch_optimizer.register_optimizer_step_post_hook(after_step)
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None and torch.cuda.is_available():
            with contextlib.suppress(Exception):
                attach(no_memory)
        atexit.register(self._ended)

    def say(self, text: str) -> None:
        """Tells the user, and the run folder."""
        with contextlib.suppress(OSError, ValueError):
            print(f"flopwise: {text}", file=sys.stderr, flush=True)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                path = os.path.join(self._folder, f"canary-{os.getpid()}.txt")
                with open(path, "a", encoding="utf-8") as stream:
                    stream.write(text + "\n")

    def _ended(self) -> None:
        if self.canary is not None and os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                self.canary.ended()
