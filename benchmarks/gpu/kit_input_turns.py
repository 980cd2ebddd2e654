"""Arms measured in turns, one at a time: none is timed while another's workers still fill what they had used up."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit_input_arms import sync

#: Others are quiet where they use so many cores or fewer, over at least so long.
QUIET_CORES, WINDOW_S = 0.15, 0.1
#: A turn waits for the others so long and no longer; that it was in vain is recorded.
PATIENCE_S = 6.0

Probe = Callable[[], dict[str, float]]


class Crews:
    """Whose worker processes and threads are whose, and how much of the processors they use."""

    def __init__(self) -> None:
        self._of: dict[str, set[Path]] = {}

    @contextmanager
    def beginning(self, name: str) -> Iterator[None]:
        """What begins in this block is this arm's."""
        before = _everyone()
        yield
        self._of[name] = self._of.get(name, set()) | (_everyone() - before)

    def used_s(self, but: str) -> float:
        """Returns the processor time that all arms but one have used, seconds."""
        others = [path for name, paths in self._of.items() if name != but for path in paths]
        return sum(_used_s(path) for path in others)

    def anyone_but(self, name: str) -> bool:
        """Returns whether another arm has workers or threads."""
        return any(paths for other, paths in self._of.items() if other != name)


def _everyone() -> set[Path]:
    """Returns the status files of this process's children and threads."""
    found = {Path(f"/proc/{child.pid}/stat") for child in multiprocessing.active_children()}
    own = Path("/proc/self/task")
    if own.exists():
        found |= {task / "stat" for task in own.iterdir()}
    return found


def _used_s(path: Path) -> float:
    """Returns a process's or a thread's user and system time, seconds; 0 where it is gone. Source: proc_pid_stat(5)."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Turns:
    """Takes arms in turns; `rounds` keeps what each block was, `times` the step times by arm, seconds.

    Args:
        arms: where each way's batches come from, without end.
        step: what is done with a batch.
        drain: batches that may be queued of an arm. So many are taken without the step before a block, since with it an
            arm whose workers are slower than the step would live on them; half a block of steps follows, not timed.
        steps: that are timed in a block: a multiple of the workers where they may be too slow, because those that
            begin together end together.
        probes: read before and after a block, by arm.
    """

    def __init__(
        self,
        arms: dict[str, Iterator[Any]],
        step: Callable[[Any], None],
        drain: int | dict[str, int],
        steps: int | dict[str, int],
        probes: dict[str, Probe] | None = None,
    ) -> None:
        self.arms, self.step = arms, step
        self.drain = drain if isinstance(drain, dict) else dict.fromkeys(arms, drain)
        self.steps = steps if isinstance(steps, dict) else dict.fromkeys(arms, steps)
        self.probes = probes or {}
        self.times: dict[str, list[float]] = {name: [] for name in arms}
        self.rounds: list[dict[str, dict[str, float]]] = []
        self._crews = Crews()
        self._taken = dict.fromkeys(arms, 0)

    def start(self) -> None:
        """Starts every arm, one after the other; what is filled and taken for the first time then comes before rounds."""
        for name in self.arms:
            with self._crews.beginning(name):  # and what the step begins is nobody's
                first = next(self.arms[name])
            self._taken[name] += 1
            self.step(first)
            self._some(name, 2)

    def take_over(self, other: Turns) -> None:
        """Takes the arms of turns that are over as they are: started."""
        self._crews = other._crews

    def run(self, rounds: int, end: float, least: int = 2) -> dict[str, list[float]]:
        """Returns the step times after so many rounds, or those that end before `end` (monotonic), two at least.

        The order is turned about from one round to the next, so that no arm always follows the same one.
        """
        names, longest = list(self.arms), 0.0
        for k in range(rounds):
            if k >= least and time.monotonic() + longest > end:
                break
            begun = time.monotonic()
            at = k // 2 % len(names)
            order = names[at:] + names[:at]
            blocks = {n: self._block(n) for n in (order if k % 2 == 0 else order[::-1])}
            for name in names:
                self.times[name].append(blocks[name]["step_s"])
            self.rounds.append(blocks)
            longest = max(longest, time.monotonic() - begun)
        return self.times

    def taken_by(self, *arms: str) -> int:
        """Returns how many batches these arms have taken."""
        return sum(self._taken[name] for name in arms)

    def _some(self, name: str, count: int) -> None:
        batches = self.arms[name]
        self._taken[name] += count
        for _ in range(count):
            self.step(next(batches))

    def _drain(self, name: str) -> None:
        """Takes what is queued of an arm, and gets into its pace."""
        batches = self.arms[name]
        self._taken[name] += self.drain[name]
        for _ in range(self.drain[name]):
            next(batches)
        self._some(name, (self.steps[name] + 1) // 2)

    def _block(self, name: str) -> dict[str, float]:
        """Returns one block of steps, timed after the arm's drain and after the others have come to rest."""
        steps = self.steps[name]
        self._drain(name)
        others = self._rest_of_others(name)
        sync()
        probe = self.probes.get(name)
        before = probe() if probe is not None else {}
        used, batches, next_s = self._crews.used_s(name), self.arms[name], 0.0
        self._taken[name] += steps
        begun = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            next_s += time.perf_counter() - asked
            self.step(batch)
            del batch
        sync()
        took = time.perf_counter() - begun
        after = probe() if probe is not None else {}
        found = {"step_s": took / steps, "next_s": next_s / steps, **others}
        found["others_cores"] = (self._crews.used_s(name) - used) / took
        return found | {k: (v - before[k]) / steps for k, v in after.items()}

    def _rest_of_others(self, name: str) -> dict[str, float]:
        """Goes on with the arm until the others' workers and threads rest; returns how long that took, and whether."""
        if not self._crews.anyone_but(name):
            return {"rest_s": 0.0, "rested": True}
        begun = since = time.monotonic()
        used = self._crews.used_s(name)
        while True:
            sync()
            if name == "synthetic":
                time.sleep(0.01)  # it needs no supply
            else:
                self._some(name, 1)
            now = time.monotonic()
            if now - since >= WINDOW_S:
                more = self._crews.used_s(name)
                if (more - used) / (now - since) <= QUIET_CORES:
                    return {"rest_s": now - begun, "rested": True}
                since, used = now, more
            if now - begun > PATIENCE_S:
                return {"rest_s": now - begun, "rested": False}


def against(times: dict[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """Returns each arm's median step and its ratio to the reference's, paired by round."""
    found = {}
    for name, values in times.items():
        ratios = [v / r for v, r in zip(values, times[reference], strict=True)]
        found[name] = {
            "step_s": statistics.median(values),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return found


def probe_of(batches: Any, pool: Any = None) -> Probe:
    """Returns what reads a Prefetcher's times: what the device waited, and what reading ahead waited for.

    Where the device waits and the loader was waited for, workers were late; where copies were, the link was.
    """
    device_wait_s = 0.0

    def probe() -> dict[str, float]:
        nonlocal device_wait_s
        device_wait_s += sum(batches.waits_s())
        times = batches.times
        found = {
            "device_wait_s": device_wait_s,
            "no_batch_ready_s": times.loop_s,
            "waited_for_workers_s": times.loader_s,
            "waited_for_copies_s": times.copies_s,
            "waited_for_steps_s": times.steps_s,
        }
        if pool is not None:
            found["workers_waited_for_slots_s"] = pool.counts.slot_wait_s
        return found

    return probe


def said(rounds: list[dict[str, dict[str, float]]], arm: str) -> str:
    """Returns a line a round on where an arm's time went, milliseconds a step."""
    lines = []
    for k, blocks in enumerate(rounds):
        found = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {value * 1e3:.3f}"
            for name, value in blocks[arm].items()
            if name.endswith("_s") and name not in ("step_s", "rest_s")
        )
        synthetic = blocks.get("synthetic", {}).get("step_s")
        against_it = f" (synthetic {synthetic * 1e3:.3f})" if synthetic else ""
        lines.append(
            f"  round {k}, {arm}: step {blocks[arm]['step_s'] * 1e3:.3f} ms{against_it}; ms a step: {found}; "
            f"others used {blocks[arm]['others_cores']:.2f} cores, rested: {blocks[arm]['rested']}"
        )
    return "\n".join(lines)
