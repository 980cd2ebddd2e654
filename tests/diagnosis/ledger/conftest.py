"""Jobs made by hand, launch by launch, and what a ledger finds in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flopwise.diagnosis.ledger import build
from flopwise.diagnosis.ledger.build import ledger
from flopwise.diagnosis.ledger.findings import findings
from flopwise.diagnosis.ledger.scene import Scene
from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord

H200 = "NVIDIA H200"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
BACKWARD = "autograd::engine::evaluate_function: "


class Job:
    """A host that takes 10 us for each launch, and a device that takes 4 us to start; streams run in order."""

    def __init__(self, timeline: Any, device: str = H200) -> None:
        self.t = timeline
        self.t.on(device)
        self.host = 0.0
        self.free: dict[int, float] = {}
        self._steps = 0

    def launch(self, kernel: str, us: float, op: int = 0, *, stream: int = 7, **more: Any) -> None:
        """Launches a kernel or a copy."""
        start = max(self.host + 4, self.free.get(stream, 0.0))
        self.t.kernel(kernel, start, us, at=self.host, took=3, op=op, stream=stream, **more)
        self.free[stream] = start + us
        self.host += 10

    def op(
        self,
        name: str,
        us: float | Sequence[float],
        *operands: Any,
        kernel: str | Sequence[str] = "kernel",
        strides: Sequence[Sequence[int]] | None = None,
        backward: bool = False,
        sequence: int | None = None,
        stream: int = 7,
    ) -> None:
        """Calls an operator that launches one kernel, or one for each of `us`; in the backward pass under a node."""
        times = [us] if isinstance(us, (int, float)) else list(us)
        kernels = [kernel] * len(times) if isinstance(kernel, str) else list(kernel)
        args: dict[str, Any] = {} if strides is None else {"Input Strides": strides}
        if sequence is not None and not backward:
            args["Sequence number"] = sequence
        if backward:
            more = {} if sequence is None else {"Sequence number": sequence}
            self.t.op(BACKWARD + "Node0", self.host, 10 * len(times), **more)
        number = self.t.op(name, self.host, 10 * len(times), *operands, **args)
        for one, each in zip(kernels, times, strict=True):
            self.launch(one, each, number, stream=stream)

    def step(self, sync: bool = False, begin: float | None = None) -> None:
        """Ends a step with an optimizer of one kernel of 10 us."""
        self.t.optimizer(self.host - 1, 20)
        number = self.t.op("aten::add_", self.host, 10, ([8], "float"), ([8], "float"), 1)
        self.launch("step", 10, number)
        self.finish(sync, begin)

    def finish(self, sync: bool = False, begin: float | None = None) -> None:
        """Ends a step whose optimizer is there already."""
        if sync:
            end = max(self.host, *self.free.values()) + 2
            self.t.call("cudaStreamSynchronize", self.host, end - self.host)
            self.host = end
        self.host += 20
        begin = self._begin if begin is None else begin
        self.t.mark(self._steps, begin, self.host - begin)
        self._steps += 1

    def steps(self, n: int, body: Callable[[], None], sync: bool = False) -> Job:
        """Returns the job after n steps, each of which calls `body`."""
        for _ in range(n):
            self._begin = self.host
            body()
            self.step(sync)
        return self


@pytest.fixture
def job(timeline: Any) -> Job:
    """Returns an empty job on an H200."""
    return Job(timeline)


@pytest.fixture
def found() -> Callable[[Any], dict[str, Finding]]:
    """Returns a function that returns the findings of a job or of a trace by cause."""

    def find(made: Any) -> dict[str, Finding]:
        t = made.t if isinstance(made, Job) else made
        return {finding.cause: finding for finding in ledger(t.read()).findings}

    return find


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    """Returns a function that returns the scene of a job, some of its fields replaced."""

    def make(made: Job, **fields: Any) -> Scene:
        seen: list[Scene] = []

        def keep(one: Scene) -> list[Finding]:
            seen.append(one)
            return []

        with monkeypatch.context() as patch:
            patch.setattr(build, "findings", keep)
            ledger(made.t.read())
        return dataclasses.replace(seen[-1], **fields)

    return make


@pytest.fixture
def found_in() -> Callable[[Scene], dict[str, Finding]]:
    """Returns a function that returns the findings of a scene by cause."""
    return lambda one: {finding.cause: finding for finding in findings(one)}


@pytest.fixture
def record() -> Callable[[Job], LedgerRecord]:
    """Returns a function that returns the ledger of a job."""
    return lambda made: ledger(made.t.read())
