"""What an event of a trace is, by its category: the names of today and of earlier profilers."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an event is."""

    OTHER = 0
    OP = 1  # an operator on a host thread
    RUNTIME = 2  # a call of the CUDA or HIP runtime or driver
    ANNOTATION = 3  # a range that somebody named, on a host thread
    PYTHON = 4  # a Python function
    OVERHEAD = 5  # the profiler's own
    KERNEL = 6
    MEMCPY = 7
    MEMSET = 8
    GPU_ANNOTATION = 9  # a named range, as drawn over the device's work


#: Those that occupy a device.
DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)

#: By category in lower case. Source: the activity types of pytorch/kineto, libkineto/src/ActivityType.cpp, and what
#: torch 1.8 to 1.11 wrote ("Operator", "Runtime", ...).
BY_CATEGORY = {
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "hip_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "driver": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "user_annotation": Kind.ANNOTATION,
    "user_defined": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "overhead": Kind.OVERHEAD,
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
}


def kind_of(category: str | None) -> Kind:
    """Returns the kind of an event's category; OTHER if it says nothing that we know."""
    return BY_CATEGORY.get((category or "").lower(), Kind.OTHER)
