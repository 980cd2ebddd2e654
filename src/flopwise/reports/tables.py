"""Parquet tables of a trace's events, its ledger's lines and its collectives, for notebooks and databases.

Written with Polars (`pip install 'flopwise[tables]'`), a row group at a time: beside what is given, only one group is in
memory.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flopwise.errors import RunFolderError, UsageError
from flopwise.trace.kinds import Kind
from flopwise.trace.table import Events, Launch, Operands

GROUP_ROWS = 1 << 18

#: The columns of `events.parquet`: what they hold. A number or text that an event does not have is null.
EVENT_COLUMNS = {
    "start_ns": "when it begins, in the trace's own time",
    "duration_ns": "how long it takes",
    "kind": "op, runtime, annotation, python, overhead, kernel, memcpy, memset, gpu_annotation or other",
    "name": "its name",
    "process": "its process, or its device",
    "thread": "its thread, or its stream",
    "device": "the number of its device",
    "stream": "the number of its stream",
    "correlation": "joins a call of the runtime with the kernel that it launched",
    "external": "joins calls of the runtime and kernels with their operator",
    "sequence": "joins a backward operator with its forward one",
    "nbytes": "of copies and memsets",
    "dims": "shapes of an operator's inputs, JSON",
    "types": "their types, JSON",
    "strides": "their strides, JSON",
    "concrete": "values of inputs that are no tensors, JSON",
    "grid": "of a kernel's launch, JSON",
    "block": "of a kernel's launch, JSON",
    "registers": "of a thread of a kernel",
    "shared_bytes": "shared memory of a kernel's block",
    "collective": "the operation of a collective or point-to-point call",
    "collective_dtype": "its type",
    "elements_in": "its input's elements",
    "elements_out": "its output's elements",
    "group": "the name of its process group",
    "group_size": "ranks in that",
    "group_ranks": "which, as the trace has it",
    "collective_sequence": "its number in that",
    "peer": "the rank at the other end",
    "stack": "where an operator was called",
}


def write_tables(
    folder: Path,
    *,
    events: Events | None = None,
    lines: Mapping[str, Sequence[Any]] | None = None,
    calls: Mapping[str, Sequence[Any]] | None = None,
) -> list[Path]:
    """Writes `events.parquet`, `lines.parquet` and `collectives.parquet`, those that are given, and returns their paths.

    Args:
        folder: is made where it is missing. A table in it is replaced as a whole, never half-written.
        events: of a trace; columns as in EVENT_COLUMNS.
        lines: columns of one length: `rank`, `step`, `name` and `ns` of each line of each step.
        calls: columns of one length, of any names: numbers, text, or sequences of numbers.

    Raises:
        UsageError: Polars is not installed.
        RunFolderError: the folder cannot be written, or the disk is full.
        ValueError: columns differ in length.
    """
    pl = _polars()
    tables: list[tuple[str, int, Callable[[int, int], Any]]] = []
    if events is not None:
        tables.append(("events", len(events), _Events(pl, events).frame))
    for name, columns in (("lines", lines), ("collectives", calls)):
        if columns is not None:
            rows = _length(name, columns)
            tables.append((name, rows, _Columns(pl, columns).frame))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be made ({error.strerror or error})") from error
    return [_write(pl, folder / f"{name}.parquet", rows, frame) for name, rows, frame in tables]


def _polars() -> Any:
    try:
        pl = importlib.import_module("polars")
        importlib.import_module("polars.io.plugins")
    except ImportError as error:
        raise UsageError(
            "Parquet tables need Polars 1.32 or newer, which is not installed "
            f"({error}): pip install 'flopwise[tables]'"
        ) from None
    return pl


def _length(name: str, columns: Mapping[str, Sequence[Any]]) -> int:
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of {name} differ in length: {lengths}")
    return max(lengths.values(), default=0)


def _write(pl: Any, path: Path, rows: int, frame: Callable[[int, int], Any]) -> Path:
    """Writes a table from pieces that `frame(low, high)` makes, and returns its path."""

    def pieces(*_: Any) -> Iterator[Any]:  # neither a filter nor a choice of columns is asked for
        for low in range(0, max(rows, 1), GROUP_ROWS):
            yield frame(low, min(low + GROUP_ROWS, rows))

    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        source = pl.io.plugins.register_io_source(pieces, schema=frame(0, 0).schema)
        source.sink_parquet(half, row_group_size=GROUP_ROWS)
        os.replace(half, path)
    except (OSError, pl.exceptions.ComputeError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunFolderError(
            f"{path}: cannot be written ({said}); nothing was left half-written"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
    return path


class _Columns:
    """Pieces of a table that is given by its columns."""

    def __init__(self, pl: Any, columns: Mapping[str, Sequence[Any]]) -> None:
        self.pl = pl
        self.columns = {_text(name): values for name, values in columns.items()}
        self.types = {name: self._type(values) for name, values in self.columns.items()}

    def frame(self, low: int, high: int) -> Any:
        """Returns the rows from `low` on, before `high`."""
        return self.pl.DataFrame(
            [self._piece(name, values[low:high]) for name, values in self.columns.items()]
        )

    def _piece(self, name: str, values: Sequence[Any]) -> Any:
        if not isinstance(values, np.ndarray):
            values = [self._plain(value) for value in values]
        return self.pl.Series(name, values, dtype=self.types[name])

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return value.tolist()
        return list(value) if isinstance(value, tuple) else value

    def _type(self, values: Sequence[Any]) -> Any:
        """Returns the type of a column, the same for each piece of it."""
        pl = self.pl
        if isinstance(values, np.ndarray):
            return pl.Series(values[:0]).dtype
        kinds = {type(value) for value in values if value is not None}
        if kinds <= {tuple, list, np.ndarray} and kinds:
            parts = {type(part) for value in values if value is not None for part in value}
            return pl.List(self._scalar(parts))
        return self._scalar(kinds)

    def _scalar(self, kinds: set[type]) -> Any:
        pl = self.pl
        if not kinds:
            return pl.Null
        for accepted, found in (
            ((bool, np.bool_), pl.Boolean),
            ((int, np.integer), pl.Int64),
            ((int, float, np.integer, np.floating), pl.Float64),
            ((str,), pl.String),
        ):
            if all(issubclass(kind, accepted) for kind in kinds):
                return found
        raise ValueError(f"a column holds {', '.join(sorted(kind.__name__ for kind in kinds))}")


class _Events:
    """Pieces of the table of a trace's events, with the numbers of pools resolved."""

    def __init__(self, pl: Any, events: Events) -> None:
        self.pl = pl
        self.events = events
        operands, launches = events.all_operands, events.launches
        collectives = events.collectives
        # by column: which column of the table numbers it, and the values of its pool
        self.texts: dict[str, tuple[str, Any]] = {
            "kind": ("kind", self._pool([kind.name.lower() for kind in Kind])),
            "name": ("name", self._pool(events.names)),
            "process": ("lane", self._pool([str(process) for process, _ in events.lanes])),
            "thread": ("lane", self._pool([str(thread) for _, thread in events.lanes])),
            "stack": ("stack", self._pool(events.stacks)),
        }
        for name in Operands._fields:
            self.texts[name] = ("operands", self._pool([getattr(one, name) for one in operands]))
        for name in ("grid", "block"):
            self.texts[name] = ("launch", self._pool([getattr(one, name) for one in launches]))
        for name, of in (
            ("collective", "name"), ("collective_dtype", "dtype"), ("group", "group"), ("group_ranks", "ranks"),
        ):  # fmt: skip
            pool = self._pool([getattr(one, of) for one in collectives])
            self.texts[name] = ("collective", pool)
        self.numbers: dict[str, tuple[str, Any]] = {}
        for name in Launch._fields[2:]:
            self.numbers[name] = ("launch", _numbers([getattr(one, name) for one in launches]))
        for name, of in (
            ("elements_in", "elements_in"), ("elements_out", "elements_out"), ("group_size", "group_size"),
            ("collective_sequence", "sequence"), ("peer", "peer"),
        ):  # fmt: skip
            values = _numbers([getattr(one, of) for one in collectives])
            self.numbers[name] = ("collective", values)

    def frame(self, low: int, high: int) -> Any:
        """Returns the rows from `low` on, before `high`."""
        return self.pl.DataFrame([self._column(name, low, high) for name in EVENT_COLUMNS])

    def _column(self, name: str, low: int, high: int) -> Any:
        if name in self.texts:
            numbered_by, pool = self.texts[name]
            at = self._nulls(getattr(self.events, numbered_by)[low:high].astype(np.int64))
            return pool.gather(at).alias(name)
        if name in self.numbers:
            numbered_by, values = self.numbers[name]
            at = getattr(self.events, numbered_by)[low:high].astype(np.int64)
            found = values[at] if len(values) else np.full(len(at), -1, np.int64)
            return self._nulls(np.where(at < 0, -1, found)).alias(name)
        column = getattr(self.events, name)[low:high].astype(np.int64)
        if name in ("start_ns", "duration_ns"):
            return self.pl.Series(name, column)
        return self._nulls(column).alias(name)

    def _nulls(self, values: Any) -> Any:
        """Returns numbers with null for those below 0, which the event does not have."""
        column = self.pl.Series("", np.ascontiguousarray(values))
        return column.set(column < 0, None)

    def _pool(self, values: Sequence[str | bytes]) -> Any:
        """Returns a pool as categories, null for one that is empty."""
        texts = [_text(value) or None for value in values]
        return self.pl.Series(texts or [None], dtype=self.pl.Categorical)


def _numbers(values: Sequence[int]) -> Any:
    """Returns numbers of a pool in 64 bits; one that has no place there is not known."""
    fitting = [value if -(2**63) <= value < 2**63 else -1 for value in values]
    return np.asarray(fitting, np.int64)


def _text(value: str | bytes) -> str:
    """Returns text as Parquet can hold it; what is no UTF-8 is written as escapes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
