"""FW110 host-settings: garbage collection between steps, threads within the cores, cores beside the GPU."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, unless_failed
from flopwise.meter.parity import compare_forward
from flopwise.meter.patches import never_compiled
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

#: Pauses for garbage collection below this share of the time are no cause.
LEAST_GC_FRAC = 0.005
#: Steps over which the pauses are measured: full collections come seldom.
WATCHED_STEPS = 40
#: After so many steps what was made since the freeze is collected whole, and after so many more what was frozen, too.
WHOLE_STEPS, THAW_STEPS = 100, 2000
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


class HostSettings(Fix):
    """Settings of the host process: when garbage is collected, how many threads compute, and on which cores.

    What it does:
    Up to three things, each only where its cause is there. Garbage collection: objects that live are frozen, automatic
    collection is off, and young objects are collected after each optimizer step, all new ones after every 100th, and
    everything after every 2000th. Threads: the process computes with as many threads as there are cores that loader
    workers leave. Cores: the threads of the process stay on the cores of the GPU's NUMA node.

    Why it helps:
    A full collection walks over every object of the process, some hundred milliseconds with large libraries loaded,
    in the middle of a step; most of these objects never die. More threads than cores wait for each other. Memory of
    another node is slower for the host and for the copies to the device.

    When it declines:
    Nothing was measured: pauses for garbage collection take less than 0.5 % of the time over forty steps (or the
    script has switched it off, or frozen objects itself), no finding says that threads exceed cores, and there is one
    NUMA node, or the cores were chosen by somebody already, or the node has too few for the loader's workers.

    What can change:
    On a GPU, nothing in the numbers. On a CPU another number of threads sums in another order: results differ by
    rounding, held against a float64 reference. Objects in reference cycles that were there when it was switched on
    are freed up to 2000 steps later; younger ones, at the next step's end.
    """

    code = "FW110"
    name = "host-settings"
    causes = ("garbage-collection", "threads-exceed-cores", "remote-memory")
    findings = ("D104",)
    numerics = "identical"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether there is anything to set, or to measure."""
        if not scene.optimizers:
            return Declined("no optimizer was seen: there are no steps between which to collect")
        parts = [_threads_problem(scene), _cores_problem(scene), _gc_problem()]
        if all(parts):
            return Declined(f"nothing measured: {'; '.join(str(p) for p in parts)}")
        if parts[2] is None:
            return Eligible("pauses for garbage collection are measured first")
        return Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the settings, switched off; pauses for garbage collection are measured from now on.

        Raises:
            ValueError: a planned setting cannot be read.
        """
        return _Applied(scene, setting)


class _Applied(Applied):
    def __init__(self, scene: Scene, planned: Mapping[str, str] | None) -> None:
        self.setting = {}
        self._scene = scene
        self._on = False
        self._failure: str | None = None
        self._threads: int | None = None
        self._cores: set[int] | None = None
        if planned is not None:
            self._take(planned)
        else:
            self._find()
        # The first optimizer's steps are the steps; of several the others fall between two of them.
        self._first = scene.optimizers[0]
        measured = planned is None and _gc_problem() is None
        self._pauses = Pauses(self._first) if measured else None
        self._collector = Collector(self._first) if "gc" in self.setting else None
        self._threads_before = torch.get_num_threads()
        self._masks: dict[int, set[int]] = {}

    def _take(self, planned: Mapping[str, str]) -> None:
        if "gc" in planned and _gc_problem() is None:
            self.setting["gc"] = planned["gc"]
        if "threads" in planned:
            self._threads = int(planned["threads"])
            if self._threads < 1:
                raise ValueError(f"host-settings: threads = {self._threads}")
            self.setting["threads"] = str(self._threads)
        if "cores" in planned and _cores_problem(self._scene) is None:
            self._set_cores()

    def _find(self) -> None:
        if _threads_problem(self._scene) is None:
            self._threads = _threads_left(self._scene)
            self.setting["threads"] = str(self._threads)
        if _cores_problem(self._scene) is None:
            self._set_cores()

    def _set_cores(self) -> None:
        self._cores = node_cores(self._scene.device) & os.sched_getaffinity(0)
        self.setting["cores"] = words_of(self._cores)

    # ------------------------------------------------------------------ switching

    def enable(self) -> None:
        self._conclude()
        if self._on or self._failure is not None:
            return
        self._on = True
        if self._collector is not None:
            self._collector.begin()
        if self._threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
        if self._cores is not None:
            self._masks = confine(self._cores)

    def disable(self) -> None:
        if not self._on:
            return
        self._on = False
        if self._collector is not None:
            self._collector.end()
        if self._threads is not None and torch.get_num_threads() == self._threads:
            torch.set_num_threads(self._threads_before)
        if self._cores is not None:
            release(self._masks, self._cores)

    def undo(self) -> None:
        self.disable()
        if self._pauses is not None:
            self._pauses.stop()

    def ready(self) -> bool:
        return self._pauses is None or self._pauses.enough

    def failure(self) -> str | None:
        if self._pauses is not None and self._pauses.enough:
            self._conclude()
        return self._failure

    def verify(self, snapshot: Snapshot) -> Parity:
        self._conclude()
        if self._threads is not None and self._scene.device.type == "cpu":
            parity = compare_forward(snapshot, self.enable, self.disable)
            return unless_failed(parity, self)
        self.disable()
        detail = "no kernel, dtype, layout or order of anything on the device is touched"
        parity = Parity(
            "identical", True, None, None, None, 0.0, 1.0, 0.0, "by construction", detail
        )
        return unless_failed(parity, self)

    def _conclude(self) -> None:
        """Decides, once pauses were measured, whether collecting is worth setting."""
        pauses = self._pauses
        if pauses is None:
            return
        pauses.stop()
        self._pauses = None
        if pauses.share is not None and pauses.share >= LEAST_GC_FRAC:
            self._collector = Collector(self._first)
            self.setting["gc"] = f"frozen, young each step, all new every {WHOLE_STEPS} steps"
        if not self.setting:
            seen = (
                "no step was seen"
                if pauses.share is None
                else f"pauses for garbage collection take {100 * pauses.share:.2f} % of the time"
            )
            self._failure = f"nothing measured: {seen}"


# ---------------------------------------------------------------------- garbage collection


class Pauses:
    """How long garbage collection stops the process, and of how much time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        self._pause_ns = self._from_ns = self._to_ns = self._started_ns = 0
        self._unhook = after_each_step(optimizer, self._step)
        gc.callbacks.append(self._collecting)

    @property
    def enough(self) -> bool:
        """Whether as many steps were seen as are wanted."""
        return self.steps >= WATCHED_STEPS

    @property
    def share(self) -> float | None:
        """Returns the share of the time between the first step's end and the last's; None: fewer than two were seen."""
        span = self._to_ns - self._from_ns
        return self._pause_ns / span if self.steps > 1 and span > 0 else None

    def stop(self) -> None:
        """Takes the hooks out."""
        self._unhook()
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def _step(self) -> None:
        now = time.perf_counter_ns()
        if not self.steps:
            self._from_ns, self._pause_ns = now, 0
        self.steps += 1
        self._to_ns = now

    def _collecting(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.perf_counter_ns()
        if phase == "start":
            self._started_ns = now
        elif self._started_ns:
            self._pause_ns += now - self._started_ns


class Collector:
    """Collects at the ends of steps, and at no other time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = 0
        self._was_on = self._froze = self._collected = False
        self._unhook: Callable[[], None] | None = None

    def begin(self) -> None:
        """Freezes what lives and takes collection over."""
        self._was_on = gc.isenabled()
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.collect(1 if self._collected else 2)  # a whole one once; switching is frequent
            self._collected = True
            gc.freeze()
        gc.disable()
        self._unhook = after_each_step(self._optimizer, self._step)

    def end(self) -> None:
        """Leaves collecting to Python again."""
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._was_on:
            gc.enable()

    def _step(self) -> None:
        self._steps += 1
        if self._froze and self._steps % THAW_STEPS == 0:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        else:
            gc.collect(2 if self._steps % WHOLE_STEPS == 0 else 1)


def after_each_step(
    optimizer: torch.optim.Optimizer, call: Callable[[], None]
) -> Callable[[], None]:
    """Has `call` called after each step of an optimizer; returns what takes that back."""

    def after(*_: Any) -> None:
        call()

    never_compiled(after, nor_what_it_calls=True)
    handle = optimizer.register_step_post_hook(after)
    return handle.remove


def _gc_problem() -> str | None:
    if not gc.isenabled():
        return "the script has switched garbage collection off"
    if gc.get_freeze_count():
        return "the script has frozen objects itself"
    return None


# ---------------------------------------------------------------------- threads and cores


def _workers(scene: Scene) -> int:
    return sum(loader.num_workers for loader in scene.loaders)


def _threads_left(scene: Scene) -> int:
    return max(1, scene.cores - _workers(scene))


def _threads_problem(scene: Scene) -> str | None:
    if "D104" not in scene.findings:
        return "threads were not found to exceed the cores"
    now, left = torch.get_num_threads(), _threads_left(scene)
    return None if left < now else f"this process computes with {now} threads, and {left} fit"


def _cores_problem(scene: Scene) -> str | None:
    if scene.device.type != "cuda":
        return "there is no GPU to be near"
    if not hasattr(os, "sched_getaffinity"):
        return "this system has no affinity"
    if len(_nodes()) < 2:
        return "there is one NUMA node"
    mask = os.sched_getaffinity(0)
    if len(mask) < (os.cpu_count() or 1):
        return "the cores were chosen already"
    near = node_cores(scene.device) & mask
    if not near:
        return "the node of the GPU is not known"
    if near == mask:
        return "all cores are near the GPU"
    if len(near) <= _workers(scene) + 1:
        return f"the GPU's node has {len(near)} cores, too few for the loader's workers"
    return None


def _nodes() -> list[Path]:
    try:
        return [p for p in sorted(_NODES.glob("node[0-9]*")) if _read(p / "cpulist")]
    except OSError:
        return []


def node_cores(device: torch.device) -> set[int]:
    """Returns the cores of the NUMA node that a CUDA device is attached to; empty where that is not known.

    Source: Linux Documentation/ABI/testing/sysfs-bus-pci (numa_node) and sysfs-devices-node (cpulist).
    """
    try:
        facts: Any = torch.cuda.get_device_properties(device)
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int(_read(_PCI / address / "numa_node") or -1)
    except (AttributeError, RuntimeError, AssertionError, ValueError):
        return set()
    return cores_of(_read(_NODES / f"node{node}" / "cpulist")) if node >= 0 else set()


def cores_of(words: str) -> set[int]:
    """Returns the cores of a list as the kernel writes it: "0-3,8,10-11"."""
    cores: set[int] = set()
    for part in filter(None, words.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def words_of(cores: Iterable[int]) -> str:
    """Returns a list of cores as the kernel writes it."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def confine(cores: set[int]) -> dict[int, set[int]]:
    """Keeps every thread of this process to these cores; returns what each was allowed before."""
    before: dict[int, set[int]] = {}
    for thread in _own_threads():
        with suppress(OSError):
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, cores)
    return before


def release(before: Mapping[int, set[int]], cores: set[int]) -> None:
    """Gives threads their cores back; those that were started since get the main thread's."""
    main = before.get(os.getpid())
    for thread in _own_threads():
        with suppress(OSError):
            if os.sched_getaffinity(thread) != cores:
                continue  # somebody has chosen anew
            mask = before.get(thread, main)
            if mask:
                os.sched_setaffinity(thread, mask)


def _own_threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [os.getpid()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
