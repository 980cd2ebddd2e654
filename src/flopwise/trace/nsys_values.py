"""What the columns of an export of Nsight Systems mean: kinds of copies, names of calls and ranges, global ids, times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.trace.kinds import Kind
from flopwise.trace.nsys_database import Table
from flopwise.trace.table import ABSENT

#: A time at which health stops believing it.
NO_TIME_NS = 2**61

#: Source: ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND of exports, in the words of Kineto.
COPIES = (
    "Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP",
    "HtoD", "DtoH", "DtoD",
)  # fmt: skip
MEMORY = (
    "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown",
)  # fmt: skip

#: A call's name ends with the version of its interface: `cudaLaunchKernel_v7000`.
VERSION = re.compile(r"(?:_ptsz|_ptds)?_v\d+$")
#: What torch's emit_nvtx adds to the name of an operator. Source: getNvtxStr in pytorch/pytorch torch/csrc/profiler/util.cpp.
_OF_TORCH = re.compile(
    r"(?P<name>.+?)(?:, seq = (?P<seq>\d+))?(?:, op_id = (?P<op>\d+))?(?:, sizes = .*)?(?:, input_op_ids = .*)?",
    re.DOTALL,
)


def first_of(table: Table, *columns: str) -> str:
    """Returns the first of these columns that the table has."""
    return next((column for column in columns if column in table.columns), columns[0])


def integer(value: Any) -> int:
    """Returns a whole number as it is, and -1 for anything else."""
    return value if isinstance(value, int) else ABSENT


def word(words: Sequence[str], number: Any) -> str:
    """Returns the word of a number, "Unknown" where it has none."""
    known = isinstance(number, int) and 0 <= number < len(words)
    return words[number] if known else "Unknown"


def apart_from(number: int, of: int) -> int:
    """Returns a number that is like no other's of another process; that of the first one is itself."""
    return number + (of << 40) if of and 0 <= number < 1 << 40 else number


def lane_of(thread: int) -> tuple[int | str, int | str]:
    """Returns process and thread of a serialized global id. Source: the SQLite examples of Nsight Systems' guide."""
    return (thread >> 24) & 0xFFFFFF, thread & 0xFFFFFF


def times(
    rows: list[tuple[Any, ...]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns starts and durations; a missing end lies before the start, so that health names it."""
    start = np.clip(np.asarray([row[0] for row in rows], np.int64), -NO_TIME_NS, NO_TIME_NS)
    end = [row[1] if isinstance(row[1], int) else row[0] - 1 for row in rows]
    clipped = np.clip(np.asarray([max(e, -NO_TIME_NS) for e in end], np.int64), None, NO_TIME_NS)
    return start, clipped - start


def of_range(text: str) -> tuple[Kind, str, int]:
    """Returns what a range is, its name without what torch adds to it, and the number of its backward's forward."""
    match = _OF_TORCH.fullmatch(text)
    if match is None:
        return Kind.ANNOTATION, text, ABSENT
    name, sequence = match["name"], match["seq"]
    number = int(sequence) if sequence is not None and len(sequence) < 19 else ABSENT
    by_torch = sequence is not None or (match["op"] is not None and "::" in name)
    return (Kind.OP if by_torch else Kind.ANNOTATION), name, number
