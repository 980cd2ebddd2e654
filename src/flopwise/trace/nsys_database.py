"""A SQLite file that is not trusted, open for reading: only stored columns of its ordinary tables, and no longer than is sound.

Nothing in the file is executed: views, virtual tables and generated columns are never read.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwise.trace.stream import TraceError

MAGIC = b"SQLite format 3\0"
#: Rows that are held as Python objects at one time.
CHUNK = 10_000
#: Names are cut off here, characters: the longest templates of CUTLASS have some thousands.
LONGEST_NAME = 16_384
#: Texts and blobs of columns that hold no names are cut off here, bytes: payloads of NCCL's ranges have less than 100.
LONGEST_OTHER = 1_024
#: No answer for so long, and the file is given up: a damaged tree of pages can send the search in circles.
PATIENCE_S = 60.0
#: A stored row takes more bytes than this, so that no sound file has more rows than its size over this.
#: Source: a cell of a table's leaf page is a payload size, a row id and a header (https://www.sqlite.org/fileformat2.html).
LEAST_ROW_BYTES = 4
#: A value longer than this ends the reading of its table, bytes: many rows of a file that is made for it may share one.
LONGEST_VALUE = 1 << 20
#: What a damaged file may raise: a message of SQLite's may quote bytes that are no text.
FAILURES = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)


@dataclass(frozen=True)
class Table:
    """An ordinary table."""

    name: str
    columns: frozenset[str]  # those that are stored


class Database:
    """A SQLite file that is not trusted, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._until = 0.0
        try:
            if not path.is_file():
                raise TraceError(f"{path}: cannot be read: not a regular file")
            self.size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(100)
            if head[: len(MAGIC)] != MAGIC:
                raise TraceError(f"{path}: not a SQLite file")
            self.cut_off = _cut_off(head, self.size)
            wal = path.with_name(path.name + "-wal")
            self.unfinished = wal.is_file() and wal.stat().st_size > 0
            address = path.resolve().as_uri() + "?mode=ro&immutable=1"
            self._connection = sqlite3.connect(address, uri=True, isolation_level=None)
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"{path}: cannot be read: {reason}") from None
        except FAILURES as error:
            raise TraceError(f"{path}: cannot be read as SQLite: {error}") from None
        try:
            self._restrict()
            self._tables = self._schema()
        except FAILURES as error:
            self._connection.close()
            raise TraceError(f"{path}: cannot be read as SQLite: {error}") from None

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    @property
    def is_export(self) -> bool:
        """Whether it has tables of Nsight Systems."""
        return any(
            name.startswith(("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "META_DATA_EXPORT"))
            for name in self._tables
        )

    def _restrict(self) -> None:
        connection = self._connection
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for pragma in (
            # The file is opened for reading alone; this has SQLite read what is left of one that was cut off.
            *(["writable_schema=ON"] if self.cut_off else ()),
            "query_only=ON",
            "trusted_schema=OFF",
            "cell_size_check=ON",
            "mmap_size=0",
            "automatic_index=OFF",
            "cache_size=-16384",
        ):
            connection.execute(f"PRAGMA {pragma}").close()
        limit = getattr(connection, "setlimit", None)  # Python 3.11
        if limit is not None:
            limit(_LIMIT_LENGTH, LONGEST_VALUE)
            limit(_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(lambda: time.monotonic() > self._until, 100_000)
        connection.set_authorizer(_allowed)

    def _ask(self, query: str, values: Sequence[Any] = ()) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows of an answer, some at a time.

        Raises:
            sqlite3.Error: the file is damaged, or it takes too long.
        """
        most = self.size // LEAST_ROW_BYTES
        self._until = time.monotonic() + PATIENCE_S
        rows: list[tuple[Any, ...]] = []
        try:
            for row in self._connection.execute(query, values):
                rows.append(row)
                if len(rows) == CHUNK:
                    most -= CHUNK
                    if most < 0:
                        raise sqlite3.DatabaseError(
                            "more rows than bytes: its pages refer to each other"
                        )
                    yield rows
                    rows = []
                    self._until = time.monotonic() + PATIENCE_S
        except FAILURES:
            if rows:  # those before the damage
                yield rows
            raise
        if rows:
            yield rows

    def _schema(self) -> dict[str, Table]:
        """Returns the ordinary tables by name; views and virtual tables are not read."""
        found: dict[str, Table] = {}
        asked = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        for (name,) in itertools.chain.from_iterable(self._ask(asked)):
            if not isinstance(name, str) or not re.fullmatch(r"\w{1,200}", name):
                continue
            asked = f'PRAGMA table_xinfo("{name}")'
            rows = itertools.chain.from_iterable(self._ask(asked))
            found[name] = Table(name, frozenset(str(row[1]) for row in rows if row[6] == 0))
            if len(found) > 10_000:
                raise sqlite3.DatabaseError("more than 10000 tables")
        return found

    def table(self, base: str) -> Table | None:
        """Returns the newest table of a name, which later exports suffix (`NVTX_EVENTS_V2`); None where there is none."""
        found = [
            (int(match[1] or 1), table)
            for name, table in self._tables.items()
            if (match := re.fullmatch(re.escape(base) + r"(?:_V(\d{1,3}))?", name, re.IGNORECASE))
        ]
        return max(found, key=lambda one: one[0])[1] if found else None

    def last_row(self, table: Table) -> int:
        """Returns the highest row id of a table: about how many rows it has."""
        try:
            rows = next(self._ask(f'SELECT rowid FROM "{table.name}" ORDER BY rowid DESC LIMIT 1'))
            return max(1, min(int(rows[0][0]), self.size // LEAST_ROW_BYTES))
        except (StopIteration, TypeError, ValueError, *FAILURES):
            return 1

    def rows(
        self, table: Table, columns: Sequence[str], where: str = ""
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the values of stored columns, some rows at a time; of a column that is not there None.

        Raises:
            sqlite3.Error: the file is damaged, or it takes too long.
        """
        values = [_cut(column) if column in table.columns else "NULL" for column in columns]
        return self._ask(f'SELECT {", ".join(values)} FROM "{table.name}" NOT INDEXED {where}')

    def small(self, base: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Returns the first rows of a small table; none where it cannot be read."""
        table = self.table(base)
        if table is None:
            return []
        try:
            return next(self.rows(table, columns, "LIMIT 4096"), [])
        except FAILURES:
            return []

    def ids_of(self, texts: Sequence[str]) -> list[int]:
        """Returns the numbers of strings, of those that are there.

        Raises:
            sqlite3.Error: the file is damaged, or it takes too long.
        """
        table = self.table("StringIds")
        if table is None or not {"id", "value"} <= table.columns:
            return []
        marks = ", ".join("?" * len(texts))
        asked = f'SELECT id FROM "{table.name}" WHERE value IN ({marks}) LIMIT 1000'
        rows = itertools.chain.from_iterable(self._ask(asked, texts))
        return [number for (number,) in rows if isinstance(number, int)]

    def strings(self, ids: Sequence[int]) -> dict[int, str]:
        """Returns the strings of these ids, as many of them as there are."""
        table = self.table("StringIds")
        if table is None or not {"id", "value"} <= table.columns:
            return {}
        found: dict[int, str] = {}
        for first in range(0, len(ids), 500):
            some = ids[first : first + 500]
            query = (
                f'SELECT id, substr(value, 1, {LONGEST_NAME}) FROM "{table.name}" '
                f"WHERE id IN ({', '.join('?' * len(some))})"
            )
            for rows in self._ask(query, some):
                found.update((i, str(value)) for i, value in rows if isinstance(i, int))
        return found


def _cut(column: str) -> str:
    """Returns what reads a column: numbers as they are, of texts and blobs no more than is of use."""
    most = LONGEST_NAME if column == "text" or "name" in column.lower() else LONGEST_OTHER
    return (
        f"CASE WHEN typeof(\"{column}\") IN ('text', 'blob') THEN substr(\"{column}\", 1, {most}) "
        f'ELSE "{column}" END'
    )


#: Source: https://www.sqlite.org/c3ref/c_limit_attached.html
_LIMIT_LENGTH, _LIMIT_ATTACHED = 0, 7
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
_PRAGMAS = {"table_xinfo"}
_FUNCTIONS = {"substr", "typeof"}


def _allowed(action: int, first: str | None, second: str | None, *_: object) -> int:
    """What a statement may do: read columns, see a table's columns, tell the type of a value, cut it."""
    good = (
        action in _READS
        or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS)
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
    )
    return sqlite3.SQLITE_OK if good else sqlite3.SQLITE_DENY


def _cut_off(head: bytes, size: int) -> str | None:
    """Returns how much of a file is missing by its header. Source: https://www.sqlite.org/fileformat2.html, section 1.3."""
    page, pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
    whole = (65_536 if page == 1 else page) * pages
    if (
        head[24:28] != head[92:96] or size >= whole
    ):  # the number of pages is not kept by old writers
        return None
    return f"the file is cut off: {size} of {whole} bytes are there"
