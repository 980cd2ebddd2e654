"""What a training process had around it: loaders and their workers, cores, threads, switches, parameters, host reads.

Part of a rank record. Facts only; what they mean is concluded by `flopwise.diagnosis`. Times are integer nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoaderFacts:
    """One DataLoader that fed the training."""

    where: str | None  # "file:line" of the loop over it
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: int | None
    batches: int | None  # in an epoch; None: it has no length
    starts: int  # how often it was started
    loads: int = 0  # batches that its workers were seen to load
    load_ns: int | None = None  # mean time to load one of them in a worker; None: not seen
    load_cpu_ns: int | None = None  # of which the worker's thread computed
    worker_cores: list[list[int]] = field(default_factory=list)  # cores each worker may use


@dataclass(frozen=True)
class CoreMask:
    """The cores that the process may use, from some moment on."""

    when: str  # e.g. "at attach", "after step 2"
    where: str | None  # "file:line" of the call that set it, where it was one of Python's
    cores: list[int]


@dataclass(frozen=True)
class Threads:
    """Threads of this process and of its loader workers, over `window_ns`.

    Runnable is running or waiting for a core. Source: /proc/PID/task/TID/schedstat, Linux
    Documentation/scheduler/sched-stats.
    """

    window_ns: int
    runnable: float  # mean number of runnable threads
    waiting: float  # of which waited for a core
    busy_main: int  # threads of this process that were runnable for a tenth of the window
    busy_worker: int  # the most such threads of one worker
    workers: int
    libraries: list[str]  # with thread pools, loaded here or in a worker
    variables: dict[str, str]  # that cap such pools, where they are set


@dataclass(frozen=True)
class Switch:
    """A setting that slows training down, found switched on."""

    name: str  # e.g. "autograd anomaly detection"
    setting: str  # e.g. "CUDA_LAUNCH_BLOCKING=1"
    where: str | None  # "file:line" of the call, or "environment"; None: not known


@dataclass(frozen=True)
class Parameters:
    """The parameters of the trained modules, each counted once."""

    total: int
    trained: int  # require a gradient
    looked_up: int  # of embeddings that are not also the weight of another module


@dataclass(frozen=True)
class HostRead:
    """An op that makes the host wait for the device (on a CPU: that would), from one line of code."""

    op: str  # e.g. "aten::_local_scalar_dense"
    kind: str  # see meter/reads.py
    where: str | None  # innermost "file:line" outside of torch; None: in the backward pass
    caller: str | None  # the script's own line, where `where` is in an installed package
    via: str  # torch's function in between that asked for it, "" for none
    metric: str | None  # class of the metric whose method it was in
    count: int  # in all steps that were looked at
    steps: int  # steps of those in which it was seen
    elements: int  # of the largest tensor
    bytes: int  # of all tensors
    on_host: bool = False  # the value lives on the host anyway: no wait


@dataclass(frozen=True)
class Surroundings:
    """All of it. Lists are empty and values None where nothing was seen."""

    machine_cores: int
    usable_cores: int  # by affinity and quota
    masks: list[CoreMask] = field(default_factory=list)
    loaders: list[LoaderFacts] = field(default_factory=list)
    threads: Threads | None = None
    switches: list[Switch] = field(default_factory=list)
    parameters: Parameters | None = None
    reads: list[HostRead] = field(default_factory=list)
    read_steps: int = 0  # steps in which reads were looked for; 0: not looked for
