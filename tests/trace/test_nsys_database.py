"""SQLite files that mean no good."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ledger.build import ledger
from flopwise.trace import nsys_database
from flopwise.trace.chrome import Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.nsys import notes_of, read_nsys, why_not
from flopwise.trace.nsys_database import Database
from flopwise.trace.stream import TraceError

PID, TID = 4711, 4712
THREAD, PROCESS = (1 << 48) + (PID << 24) + TID, (1 << 48) + (PID << 24)


def names(trace: Trace, *kinds: Kind) -> list[str]:
    events = trace.events.where(trace.events.of(*kinds))
    return [events.name_of(row) for row in range(len(events))]


def test_no_sqlite_no_export_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with pytest.raises(TraceError, match="not a regular file"):
        read_nsys(path)
    with pytest.raises(TraceError, match="not a regular file"):
        read_nsys(tmp_path)
    path.write_bytes(b"hello")
    with pytest.raises(TraceError, match="not a SQLite file"):
        read_nsys(path)
    path.write_bytes(nsys_database.MAGIC + b"\xff" * 2000)
    with pytest.raises(TraceError, match="cannot be read as SQLite"):
        read_nsys(path)
    assert "cannot be read as SQLite" in (why_not(path) or "")
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(TraceError, match="no export of Nsight Systems"):
        read_nsys(path)
    assert (why_not(path) or "").startswith("a SQLite file, but no export")


def test_views_and_virtual_tables_are_not_read(export: Any) -> None:
    e = export
    e.kernel("k", 0, 10)
    e.database.execute(
        "CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS start, x + 1 AS end, 59 AS eventType, 'step 1' AS text, 1 AS globalTid FROM n"
    )
    e.database.execute("CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_RUNTIME USING fts5(start, end, nameId)")  # fmt: skip
    trace = e.read()
    assert names(trace, Kind.KERNEL) == ["k"]
    assert len(trace.events) == 1


def test_generated_columns_are_not_computed(export: Any) -> None:
    e = export
    e.kernel("k", 0, 10)
    e.database.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
        "nameId TEXT GENERATED ALWAYS AS (hex(zeroblob(1000000))) VIRTUAL)"
    )
    e.database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 3, 4)")
    assert names(e.read(), Kind.RUNTIME) == ["a call"]


def test_the_file_is_not_changed(export: Any) -> None:
    export.step(0)
    export.close()
    before = export.path.read_bytes()
    read_nsys(export.path)
    assert export.path.read_bytes() == before
    assert [one.name for one in export.path.parent.iterdir()] == ["export.sqlite"]


def test_values_of_other_types_are_counted_or_passed_over(export: Any) -> None:
    e = export
    e.kernel("good", 0, 10)
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    odd = ["x", b"\xff\xfe", None, 1.5, 2**62, -(2**63), 2**63 - 1]
    for i, value in enumerate(odd):
        row: list[Any] = [100, 110, 0, 1, 7, 0, PROCESS, 1, None, 32, 1, 1, 1, 1, 1, 1, 0, 0]
        for at in range(len(row)):
            e.insert(table, *row[:at], value, *row[at + 1 :])
        assert i < 99
    e.range("x" * 1_000_000, 0, 10)
    e.range("\x1b[31m \0 \ud7ff", 20, 30)
    e.database.execute("INSERT INTO StringIds VALUES (77, CAST(x'fffe41' AS TEXT))")
    e.kernel("later", 500, 510)
    e.database.execute(f"UPDATE {table} SET demangledName = 77 WHERE start = 500")
    trace = e.read()
    assert trace.damage.events == 4  # starts that are no whole numbers
    assert "its start is 'x'" in trace.damage.described[0]
    assert max(map(len, trace.events.names)) == nsys_database.LONGEST_NAME
    assert "\ufffd\ufffdA" in names(trace, Kind.KERNEL)
    assert len(ledger(trace).lines) > 0


def test_names_that_are_missing_are_said_by_number(export: Any) -> None:
    export.kernel("k", 0, 10)
    export.database.execute("DROP TABLE StringIds")
    assert names(export.read(), Kind.KERNEL) == ["a kernel 1"]


def test_a_write_ahead_log_beside_it_is_said(export: Any) -> None:
    export.kernel("k", 0, 10)
    export.close()
    export.path.with_name("export.sqlite-wal").write_bytes(b"x")
    assert any("write-ahead log" in note for note in notes_of(read_nsys(export.path)))


def test_odd_names_of_files(make_export: Any, tmp_path: Path) -> None:
    for name in ("a?mode=rw&b=#c%41 d.sqlite", "ü" * 100, "-"):
        e = make_export(tmp_path / name)
        e.kernel("k", 0, 10)
        assert len(e.read().events) == 1
        assert (tmp_path / name).exists()


def test_progress_tells_bytes(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_database, "CHUNK", 3)
    for i in range(10):
        export.step(i)
    export.close()
    told: list[int] = []
    read_nsys(export.path, told.append)
    assert told == sorted(told)
    assert told[-1] == export.path.stat().st_size
    assert len(told) > 5


def test_a_search_without_an_answer_ends(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(200):
        export.step(i)
    export.database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end) VALUES (?, ?)", ((i, i) for i in range(200_000))
    )  # fmt: skip
    export.database.execute("DROP TABLE StringIds")
    export.table("StringIds", "id INTEGER, value TEXT")
    export.database.executemany("INSERT INTO StringIds VALUES (?, 'x')", ((i,) for i in range(200_000)))  # fmt: skip
    export.close()
    monkeypatch.setattr(nsys_database, "PATIENCE_S", -1.0)
    with pytest.raises(TraceError, match="interrupted"):
        read_nsys(export.path)


@pytest.fixture(scope="module")
def sound(make_export: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    e = make_export(tmp_path_factory.mktemp("sound") / "e.sqlite")
    for i in range(150):
        e.step(i)
        e.range(f"step {i}", 1_000_000 * (i + 1) - 1, 1_000_000 * (i + 1) + 900_000)
    e.close()
    return e.path.read_bytes()


def test_a_file_of_which_nothing_is_left(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(sound[:5000])
    with pytest.raises(TraceError, match=r"malformed|cut off"):
        read_nsys(path)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 0.99])
def test_a_file_that_was_cut(tmp_path: Path, sound: bytes, share: float) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(sound[: int(share * len(sound))])
    trace = read_nsys(path)
    assert trace.damage.ends_early is not None
    assert 0 < len(trace.events) < 750


@pytest.mark.parametrize("seed", range(6))
def test_random_damage(tmp_path: Path, sound: bytes, seed: int) -> None:
    coin = random.Random(seed)
    path = tmp_path / "damaged.sqlite"
    for _ in range(60):
        data = bytearray(sound)
        for _ in range(coin.choice((1, 4, 40))):
            at = coin.randrange(16, len(data))
            data[at] = coin.randrange(256)
        if coin.random() < 0.3:  # pages in place of others
            a, b = (coin.randrange(len(data) // 4096) * 4096 for _ in range(2))
            data[a : a + 4096] = data[b : b + 4096]
        path.write_bytes(data)
        try:
            trace = read_nsys(path)
        except TraceError:
            continue
        assert len(trace.events) < 100_000
        notes_of(trace)


def test_pages_that_refer_to_each_other_end(make_export: Any, tmp_path: Path) -> None:
    """An interior page whose children are all one leaf has more rows than the file could hold."""
    e = make_export(tmp_path / "e.sqlite")
    e.database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId) VALUES (?, ?, 0)",
        ((i, i + 1) for i in range(60_000)),
    )
    (root,) = e.database.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'"
    ).fetchone()
    e.close()
    data = bytearray(e.path.read_bytes())
    page = (root - 1) * 4096
    assert data[page] == 5  # interior page of a table
    n = int.from_bytes(data[page + 3 : page + 5], "big")
    cells = [int.from_bytes(data[page + 12 + 2 * i : page + 14 + 2 * i], "big") for i in range(n)]
    for cell in cells:  # all children are the root itself
        data[page + cell : page + cell + 4] = root.to_bytes(4, "big")
    e.path.write_bytes(data)
    with pytest.raises(TraceError, match=r"malformed|more rows"):
        read_nsys(e.path)


def test_texts_are_cut_before_they_are_held_and_numbers_are_not(export: Any) -> None:
    """Many rows of a file that is made for it may share one long text."""
    long = "x" * 100_000
    export.range(long, 0, 10, data=long.encode())
    export.insert("NVTX_EVENTS", 2**62, None, "59", 7, long, None, long, 1.5)
    export.close()
    with closing(Database(export.path)) as database:
        table = database.table("NVTX_EVENTS")
        assert table is not None
        wanted = ("start", "end", "eventType", "text", "globalTid", "textId", "binaryData", "none")
        ((first, second),) = database.rows(table, wanted)
    cut = nsys_database.LONGEST_NAME, nsys_database.LONGEST_OTHER
    assert first[:3] == (0, 10, 59)
    assert (first[3], first[6]) == ("x" * cut[0], b"x" * cut[1])
    assert second[:4] == (2**62, None, 59, "7")
    assert second[4:] == ("x" * cut[1], None, 1.5, None)


@pytest.mark.skipif(not hasattr(sqlite3.Connection, "setlimit"), reason="before Python 3.11")
def test_a_value_that_no_export_has_ends_its_table(export: Any) -> None:
    export.step(0)
    export.range("x" * (nsys_database.LONGEST_VALUE + 1), 0, 10)
    trace = export.read()
    assert trace.damage.ends_early == "table NVTX_EVENTS: string or blob too big"
    assert len(trace.events) == 4
