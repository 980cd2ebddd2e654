"""What a training process has around it: loaders, cores, threads, switches, parameters.

Looked at when the meter attaches, during warm-up, when a loader starts and when the measurement ends: never inside a
timed step. A failure in here loses the fact, not the measurement.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from flopwise.hardware.limits import usable_cores
from flopwise.meter import threads
from flopwise.meter.patches import Patches
from flopwise.meter.switches import Switches
from flopwise.meter.where import caller
from flopwise.meter.worker_loads import Page, start
from flopwise.records import surroundings as records

if TYPE_CHECKING:
    from flopwise.meter.session import Session

#: Loaders that are kept apart; the rest of a script with more is not looked at.
MOST_LOADERS = 8
#: The step of the warm-up at whose end the threads are looked at first.
FIRST_LOOK = 3


@dataclass
class _Loader:
    where: str | None
    facts: dict[str, Any]  # read when it starts: the script frees it and its data when it likes
    page: Page = field(default_factory=Page)
    starts: int = 0


class Surroundings:
    """Watches the surroundings of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._masks: list[records.CoreMask] = []
        self._loaders: dict[Any, _Loader] = {}
        self._pages: weakref.WeakKeyDictionary[Any, Page] = weakref.WeakKeyDictionary()
        self._switches = Switches()
        self._first: threads.Sample | None = None
        self._main: threads.Use | None = None
        self._closed: records.Surroundings | None = None
        self._parameters: records.Parameters | None = None  # of models that may be gone at the end

    def install(self, patches: Patches) -> None:
        """Patches what tells who changes cores or switches on anomaly detection."""
        self._look_at_cores("at attach")
        patches.replace(
            torch,
            "set_anomaly_enabled",
            self._switches.watch(torch.set_anomaly_enabled, lambda: self._session.boundaries.total),
            "torch.set_anomaly_enabled",
        )
        if hasattr(os, "sched_setaffinity"):
            patches.replace(
                os,
                "sched_setaffinity",
                self._set_cores(os.sched_setaffinity),
                "os.sched_setaffinity",
            )

    def start_loader(self, original: Callable[..., Any], loader: Any) -> Any:
        """Returns the iterator of a training loader that is being started, and notes what the loader is like."""
        try:
            held = self._held(loader)
        except Exception as error:
            self._trouble(error)
            held = None
        if held is None:
            return original(loader)
        held.starts += 1
        self._pages[loader] = held.page
        self._look_at_cores("when a loader started")
        return start(held.page, original, loader)

    def warmed(self, steps: int) -> None:
        """Looks around at a step end in the warm-up."""
        try:
            self._look_at_cores(f"after step {steps}")
            if steps == FIRST_LOOK:
                self._first = threads.sample()
                self._switches.look()
        except Exception as error:
            self._trouble(error)

    def close(self) -> None:
        """Looks around a last time, at the end of the measurement; later calls do nothing."""
        if self._closed is not None or not self._session.rows:
            return
        try:
            self._look_at_cores(f"after step {self._session.boundaries.total}")
            self._switches.look()
            if self._first is not None:
                self._main = threads.between(self._first, threads.sample())
            self._closed = self._facts(parameters_of(self._session.roots.found) or self._parameters)
        except Exception as error:
            self._trouble(error)
        self._loaders.clear()

    def found(self, roots: Iterable[nn.Module]) -> None:
        """Counts the parameters of the root modules while they live."""
        self._parameters = parameters_of(roots)

    def loads(self) -> dict[Any, tuple[float, float]]:
        """Returns how long a worker takes to load a batch and how much of it it computes, s, by training loader."""
        found = {}
        for loader, page in list(self._pages.items()):
            loads, load_ns, cpu_ns = page.loads()
            if loads:
                found[loader] = (load_ns / loads * 1e-9, cpu_ns / loads * 1e-9)
        return found

    def record(self) -> records.Surroundings | None:
        """Returns what was seen: at the end of the measurement where that is over, else up to now."""
        if self._closed is not None:
            return self._closed
        try:
            return self._facts(None)
        except Exception as error:
            self._trouble(error)
            return None

    # ------------------------------------------------------------------ cores

    def _look_at_cores(self, when: str, where: str | None = None) -> None:
        if not hasattr(os, "sched_getaffinity"):
            return
        cores = sorted(os.sched_getaffinity(0))
        if not self._masks or self._masks[-1].cores != cores:
            self._masks.append(records.CoreMask(when, where, cores))

    def _set_cores(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sched_setaffinity(pid: Any, mask: Iterable[int], /) -> Any:
            result = original(pid, mask)
            try:
                steps = self._session.boundaries.total
                when = f"after step {steps}" if steps else "before the first step"
                self._look_at_cores(when, caller(sys._getframe(1)))
            except Exception as error:
                self._trouble(error)
            return result

        return sched_setaffinity

    # ------------------------------------------------------------------ loaders

    def _held(self, loader: Any) -> _Loader | None:
        where = caller(sys._getframe(1))
        key = (where, loader.num_workers, loader.batch_size)
        held = self._loaders.get(key)
        if held is None:
            if len(self._loaders) >= MOST_LOADERS:
                return None
            held = self._loaders[key] = _Loader(where, {})
        held.facts = _facts_of(loader)
        return held

    def _loader_facts(self, held: _Loader) -> records.LoaderFacts:
        page = held.page
        loads, load_ns, cpu_ns = page.loads()
        return records.LoaderFacts(
            where=held.where,
            **held.facts,
            starts=held.starts,
            loads=loads,
            load_ns=load_ns // loads if loads else None,
            load_cpu_ns=cpu_ns // loads if loads else None,
            worker_cores=page.cores(),
        )

    # ------------------------------------------------------------------ the record

    def _facts(self, parameters: records.Parameters | None) -> records.Surroundings:
        reads, read_steps = self._session.reads.seen()
        return records.Surroundings(
            machine_cores=os.cpu_count() or 1,
            usable_cores=usable_cores(),
            masks=list(self._masks),
            loaders=[self._loader_facts(held) for held in self._loaders.values()],
            threads=self._threads(),
            switches=self._switches.found(first_step=FIRST_LOOK),
            parameters=parameters,
            reads=reads,
            read_steps=read_steps,
        )

    def _threads(self) -> records.Threads | None:
        main = self._main
        if main is None or not main.window_ns:
            return None
        runnable = (main.run_ns + main.wait_ns) / main.window_ns
        waiting = main.wait_ns / main.window_ns
        busy_worker, workers = 0, 0
        libraries = threads.libraries()
        for held in self._loaders.values():
            theirs = held.page.threads()
            runnable += theirs[0]
            waiting += theirs[1]
            busy_worker = max(busy_worker, theirs[2])
            libraries += [name for name in theirs[3] if name not in libraries]
            workers += len(held.page.cores())
        return records.Threads(
            window_ns=main.window_ns,
            runnable=runnable,
            waiting=waiting,
            busy_main=main.busy,
            busy_worker=busy_worker,
            workers=workers,
            libraries=libraries,
            variables=threads.variables(),
        )

    def _trouble(self, error: Exception) -> None:
        self._session.note(
            f"what surrounds the training was not fully seen ({type(error).__name__}: {error})"
        )


def _facts_of(loader: Any) -> dict[str, Any]:
    """Returns what a loader is like.

    The length of an iterable data set is not asked for: torch then warns where it yields more than that.
    """
    batches: int | None = None
    if not isinstance(loader.dataset, IterableDataset):
        try:
            batches = len(loader)
        except Exception:
            batches = None
    return {
        "num_workers": int(loader.num_workers),
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
        "batches": batches,
    }


def parameters_of(roots: Iterable[nn.Module]) -> records.Parameters | None:
    """Returns the counts of parameters in the trees of `roots`; None without any."""
    total: dict[int, int] = {}
    trained: dict[int, int] = {}
    embedded: dict[int, int] = {}
    elsewhere: set[int] = set()
    for root in roots:
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                key, n = id(parameter), parameter.numel()
                total[key] = n
                if parameter.requires_grad:
                    trained[key] = n
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                    embedded[key] = n
                else:
                    elsewhere.add(key)
    if not total:
        return None
    return records.Parameters(
        total=sum(total.values()),
        trained=sum(trained.values()),
        looked_up=sum(n for key, n in embedded.items() if key not in elsewhere),
    )
