"""What moved data between ranks: the operation, its size and its group, by the call's own words or by its kernel's name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from flopwise.trace.table import Collective

#: Operations by the words that callers and kernels have for them, the longest first. Sources: torch/csrc/distributed/c10d
#: (ProcessGroupNCCL.cpp, `RECORD_PARAM_COMMS` and profiling titles), names of NCCL's kernels ("ncclDevKernel_AllReduce_Sum_f32_RING_LL").
_OPS = (
    ("reduce_scatter", ("reducescatter", "reduce_scatter")),
    ("all_reduce", ("allreduce", "all_reduce", "cross_device_reduce")),
    ("all_gather", ("allgather", "all_gather")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("send", ("send",)),
    ("recv", ("recv",)),
    ("broadcast", ("broadcast",)),
    ("scatter", ("scatter",)),
    ("gather", ("gather",)),
    ("reduce", ("reduce",)),
    ("barrier", ("barrier",)),
)
#: Element sizes by the names that c10d and NCCL's kernels have for dtypes.
_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "u8": 1, "i8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "f8e4m3": 1, "f8e5m2": 1, "half": 2, "float16": 2, "f16": 2, "bfloat16": 2, "bf16": 2, "short": 2, "int16": 2,
    "int": 4, "int32": 4, "i32": 4, "u32": 4, "float": 4, "float32": 4, "f32": 4,
    "long": 8, "int64": 8, "i64": 8, "u64": 8, "double": 8, "float64": 8, "f64": 8,
}  # fmt: skip
#: Short words for dtypes, by those of c10d and of torch.
DTYPE_WORDS = {
    "bfloat16": "bf16", "half": "f16", "float16": "f16", "float": "f32", "float32": "f32", "double": "f64", "float64": "f64",
    "byte": "u8", "uint8": "u8", "char": "i8", "int8": "i8", "int": "i32", "int32": "i32", "long": "i64", "int64": "i64",
}  # fmt: skip
#: No call moves so many bytes, which no device holds.
MOST_BYTES = 1 << 50
_RANKS = re.compile(r"-?\d+")
_MOST_RANKS = 1 << 16
_ADDRESS = re.compile(r"\d{1,20}")


@dataclass(frozen=True)
class Moved:
    """What one call moves."""

    op: str  # "all_reduce" ...; "other" where no word is known
    nbytes: int  # what one rank gives or gets, whichever is more; -1: not recorded
    dtype: str  # "bf16" ...; "" where not known
    group: str
    group_size: int  # -1: not known
    members: tuple[int, ...]  # ranks of the group; () where not known
    sequence: int  # -1: not recorded
    peer: int  # -1: none
    tensors: tuple[int, ...] = ()  # addresses of what it is given; () where not recorded


@lru_cache(maxsize=4096)
def op_of(name: str) -> str:
    """Returns the operation that a call or kernel of this name is; "send_recv" where both are one kernel; else "other"."""
    text = name.lower()
    if "sendrecv" in text or "send_recv" in text:
        return "send_recv"
    for op, words in _OPS:
        if any(word in text for word in words):
            return op
    return "other"


@lru_cache(maxsize=4096)
def kernel_dtype(name: str) -> str:
    """Returns the dtype in a kernel's name, "" where it has none."""
    for part in re.split(r"[_(<\s]", name):
        if part in _BYTES and part != "int":
            return DTYPE_WORDS.get(part, part)
    return ""


@lru_cache(maxsize=4096)
def moved(said: Collective | None, kernel: str) -> Moved:
    """Returns what a call moves.

    Args:
        said: what it said about itself; None: nothing.
        kernel: the name of its kernel.
    """
    if said is None:
        return Moved(op_of(kernel), -1, kernel_dtype(kernel), "", -1, (), -1, -1)
    dtype = said.dtype.lower()
    size = _BYTES.get(dtype)
    elements = max(said.elements_in, said.elements_out)
    nbytes = elements * size if size is not None and elements >= 0 else -1
    if nbytes >= MOST_BYTES:
        nbytes = -1
    op = op_of(said.name)
    if op == "other":
        op = op_of(kernel)
    return Moved(
        op,
        nbytes,
        DTYPE_WORDS.get(dtype, dtype),
        said.group,
        said.group_size,
        members_of(said.ranks),
        said.sequence,
        said.peer,
        tuple(map(int, _ADDRESS.findall(said.tensors))),
    )


@lru_cache(maxsize=4096)
def members_of(text: str) -> tuple[int, ...]:
    """Returns the ranks in a text such as "[0, 1, 2]"; () where it is cut ("[0, 1, ..., 63]") or none."""
    if "..." in text:
        return ()
    found = [int(part) for part in _RANKS.findall(text[: 12 * _MOST_RANKS]) if len(part) < 10]
    return tuple(found[:_MOST_RANKS])


def bus_factor(op: str, n: int) -> float | None:
    """Returns how many of a call's bytes each link has to carry, of n ranks; None where that is not known.

    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md: all-reduce 2 (n - 1) / n of its bytes; all-gather, reduce-scatter and
    all-to-all (n - 1) / n of the whole; broadcast, reduce, send and receive 1.
    """
    if n < 2:
        return None
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n
    return 1.0 if op in ("broadcast", "reduce", "send", "recv", "send_recv") else None
