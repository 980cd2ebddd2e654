"""Copies of traces with our tracks: what they hold, that they read as the original, and traces that are damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwise.errors import RunFolderError, UsageError
from flopwise.records.finding import Finding
from flopwise.reports import perfetto_copy
from flopwise.reports.perfetto import PID, annotated
from flopwise.trace.chrome import read
from flopwise.trace.stream import TraceError

FINDING = Finding("L104", "slow-dtype", 0.5, ["a.py:3"], "seen", "use bf16", None, "measured")
#: Two steps of a trace at 20 ms, in ns.
GIVEN: dict[str, Any] = {
    "bounds_ns": [20_000_000, 21_000_001, 22_000_001],
    "lines": [
        {"ideal": 400_000.0, "residual": -10_000.0, "idle_sync": 200_000.0},
        {"ideal": 1e6, "idle_sync": 0.0},
    ],
    "findings": [FINDING, FINDING],
    "idle": [(21_000_000, 21_000_500, "launch"), (20_500_000, 20_600_000, "sync")],
}


@pytest.fixture
def trace(training: Any) -> Any:
    """Returns a trace of four steps."""
    return training(4)


def added(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(data)["traceEvents"] if event.get("pid") == PID]


def assert_same(first: Path, second: Path) -> None:
    """Both read the same."""
    one, other = read(first), read(second)
    for column in dataclasses.fields(one.events):
        a, b = getattr(one.events, column.name), getattr(other.events, column.name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, column.name
    assert one.header == other.header
    assert one.damage == other.damage


def test_the_tracks(trace: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    copied = annotated(trace.write(), out, **GIVEN)
    events = added(out)
    assert dataclasses.asdict(copied) == {
        "added": len(events), "mended": 0, "dropped": 0, "cut": None,
    }  # fmt: skip
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        1: "flopwise: steps", 2: "flopwise: ledger", 3: "flopwise: idle", 4: "flopwise: findings",
    }  # fmt: skip
    spans = [
        (names[b["tid"]][10:], b["name"], b["ts"], e["ts"])
        for b, e in itertools.pairwise(events)
        if (b["ph"], e["ph"]) == ("B", "E")
    ]
    assert sorted(spans, key=lambda span: (span[0], span[2])) == [
        ("idle", "idle: the host waited for the device", 20500.0, 20600.0),
        ("idle", "idle: the host was late", 21000.0, 21000.5),
        ("ledger", "useful work", 20000.0, 20666.667),
        ("ledger", "idle: the host waited for the device", 20666.667, 21000.001),
        ("ledger", "useful work", 21000.001, 22000.001),
        ("steps", "step 0", 20000.0, 21000.001),
        ("steps", "step 1", 21000.001, 22000.001),
    ]
    step = next(e for e in events if e["name"] == "step 0" and e["ph"] == "B")
    assert step["args"] == {
        "step": 0,
        "ms": 1.000001,
        "lines_ms": {"ideal": 0.4, "residual": -0.01, "idle_sync": 0.2},
    }
    line = next(e for e in events if e["name"] == "useful work")
    assert line["args"]["line"] == "ideal"
    assert line["args"]["ms"] == 0.4
    assert "not when they happened" in line["args"]["note"]
    found = [e for e in events if e["ph"] == "i"]
    assert [(e["name"], e["ts"], e["s"]) for e in found] == [
        ("L104 slow-dtype", 20000.0, "t"),
        ("L104 slow-dtype", 21000.0, "t"),
    ]
    assert found[0]["args"]["evidence"] == "seen"
    assert found[0]["args"]["do"] == "use bf16"
    assert found[0]["args"]["predicted gain"] is None


@pytest.mark.parametrize("packed", [False, True])
def test_events_of_the_trace_are_copied_byte_by_byte(
    trace: Any, tmp_path: Path, packed: bool
) -> None:
    source = trace.write()
    text = source.read_bytes()
    if packed:
        source = tmp_path / "packed.json.gz"
        source.write_bytes(gzip.compress(text))
    out = tmp_path / ("out.json.gz" if packed else "out.json")
    annotated(source, out, **GIVEN)
    got = gzip.decompress(out.read_bytes()) if packed else out.read_bytes()
    end = text.rindex(b"}", 0, text.rindex(b"]")) + 1
    assert got[:end] == text[:end]
    assert got.endswith(text[end:])
    assert_same(source, out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_in_pieces_it_is_the_same(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, whole, pieces = trace.write(), tmp_path / "whole.json", tmp_path / "pieces.json"
    annotated(source, whole, **GIVEN)
    for size in (300, 301, 1000, 4096):
        monkeypatch.setattr(perfetto_copy, "PIECE_BYTES", size)
        annotated(source, pieces, **GIVEN)
        assert pieces.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "form",
    [
        lambda events: json.dumps(events),
        lambda events: json.dumps({"traceEvents": events, "deviceProperties": [{"id": 0}, {"id": 1}]}),
        lambda events: json.dumps({"schemaVersion": 1, "traceEvents": events}, separators=(",", ":")),
        lambda events: "\ufeff" + json.dumps({"traceEvents": events[:1]}),
        lambda events: json.dumps({"traceEvents": []}),
        lambda events: ' {"traceEvents" : [ ] }\n',
        lambda events: json.dumps({"traceEvents": [{**e, "args": {"a": [{"name": 1}, {"name": 2}]}} for e in events]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [256, 1 << 20])
def test_forms_of_traces(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any, size: int
) -> None:
    monkeypatch.setattr(perfetto_copy, "PIECE_BYTES", size)
    source, out = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(form(trace.events), "utf-8")
    before = json.loads(source.read_text("utf-8-sig"))
    copied = annotated(source, out, **GIVEN)
    assert (copied.mended, copied.dropped, copied.cut) == (0, 0, None)
    after = json.loads(out.read_bytes())
    if isinstance(before, dict):
        assert {**after, "traceEvents": 0} == {**before, "traceEvents": 0}
        before, after = before["traceEvents"], after["traceEvents"]
    assert after[: len(before)] == before
    assert len(after) == len(before) + copied.added


def test_a_cut_trace_is_closed(trace: Any, tmp_path: Path) -> None:
    whole = trace.write().read_bytes()
    source, out = tmp_path / "cut.json", tmp_path / "out.json"
    for cut in range(whole.index(b"[", whole.index(b"traceEvents")) + 1, len(whole), 397):
        source.write_bytes(whole[:cut])
        copied = annotated(source, out, **GIVEN)
        assert copied.cut
        assert copied.added == len(added(out))
        assert len(read(out).events) == len(read(source).events)
    packed = gzip.compress(whole)
    source.write_bytes(packed[: len(packed) // 2])
    copied = annotated(source, out, **GIVEN)
    assert copied.cut == "the compressed data is cut off"
    json.loads(out.read_bytes())


def test_what_is_no_json_is_mended_or_left_out(trace: Any, tmp_path: Path) -> None:
    text = trace.text.encode()
    assert text.count(b'"dur": 400') == 4
    text = text.replace(b'"dur": 400', b'"dur": NaN', 1)
    text = text.replace(b'"gemm"', b'"ge\xffm"', 1).replace(b'"relu"', b'"re\x01lu"', 1)
    source, out = tmp_path / "bad.json", tmp_path / "out.json"
    source.write_bytes(text)
    copied = annotated(source, out, **GIVEN)
    events = json.loads(out.read_bytes())["traceEvents"]
    names = [event["name"] for event in events]
    # the first product has both a name that is no UTF-8 and a duration that is no number
    assert (copied.mended, copied.dropped, copied.cut) == (1, 1, None)
    assert "re\x01lu" in names
    assert names.count("gemm") == 3
    assert len(events) == len(trace.events) - 1 + copied.added


def test_mended_numbers_keep_their_digits(tmp_path: Path) -> None:
    source, out = tmp_path / "bad.json", tmp_path / "out.json"
    source.write_bytes(
        b'{"traceEvents": [{"ph": "X", "name": "\xff", "ts": 1712345678901234.567, "dur": 1}]}'
    )
    assert annotated(source, out, bounds_ns=[]).mended == 1
    assert b"1712345678901234.567" in out.read_bytes()
    assert "\ufffd" in out.read_text("utf-8")


def test_any_mutation_is_copied_or_refused(trace: Any, tmp_path: Path) -> None:
    whole = trace.text.encode()
    source, out = tmp_path / "bad.json", tmp_path / "out.json"
    draw = random.Random(7)
    signs = [b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\xff", b"\x00", b"NaN", b"},{", b""]
    for _ in range(300):
        text = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text))
            text[at : at + draw.choice([0, 1, 1, 30])] = draw.choice(signs)
        source.write_bytes(text)
        out.unlink(missing_ok=True)
        try:
            copied = annotated(source, out, **GIVEN)
        except TraceError:
            assert not out.exists()
            continue
        assert copied.added == len(added(out))
    left = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in left if name.startswith(".")]


def test_a_file_that_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto_copy, "MOST_BYTES", 4 << 20)
    source, out = tmp_path / "bomb.json.gz", tmp_path / "out.json"
    event = b'\n{"ph": "X", "name": "a", "ts": 1, "dur": 1},'
    source.write_bytes(gzip.compress(b'{"traceEvents": [' + event * 400_000))
    with pytest.raises(TraceError, match=r"bomb.json.gz: is more than 200 times as large"):
        annotated(source, out, **GIVEN)
    assert os.listdir(tmp_path) == ["bomb.json.gz"]


@pytest.mark.parametrize("filling", [b" ", b"a", b"[", b'{"a":', b'"\\"', b"},{"])
def test_an_event_without_end_is_refused_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filling: bytes
) -> None:
    monkeypatch.setattr(perfetto_copy, "LONGEST_BYTES", 1 << 18)
    monkeypatch.setattr(perfetto_copy, "PIECE_BYTES", 1 << 14)
    source, out = tmp_path / "bad.json", tmp_path / "out.json"
    source.write_bytes(b'{"traceEvents": [{"ph": "X", "name": ' + filling * (1 << 20))
    with contextlib.suppress(TraceError):
        annotated(source, out, **GIVEN)
    assert not out.exists() or json.loads(out.read_bytes())


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    source, out = tmp_path / "large.json", tmp_path / "out.json"
    event = b'{"ph": "X", "name": "a", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 1}'
    with source.open("wb") as file:
        file.write(b'{"traceEvents": [\n' + event)
        for _ in range(24):
            file.write((b",\n" + event) * 15_000)
        file.write(b"]}")
    assert source.stat().st_size > 28 << 20
    tracemalloc.start()
    annotated(source, out, **GIVEN)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert out.stat().st_size > source.stat().st_size


def test_names_that_come_from_outside(trace: Any, tmp_path: Path) -> None:
    hostile = '"}],\x1b[31m\u202e\ud800'
    finding = Finding(hostile, hostile, float("nan"), [hostile], hostile, hostile, None, hostile)
    out = tmp_path / "out.json"
    annotated(
        trace.write(), out, bounds_ns=[1, 2], lines=[{hostile: 1.0, "ideal": float("inf")}],
        findings=[finding], idle=[(1, 2, hostile)],
    )  # fmt: skip
    shown = r'"}],\x1b[31m\u202e\ud800'
    events = added(out)
    assert {e["name"] for e in events if e["ph"] == "B"} == {"step 0", shown, f"idle: {shown}"}
    (found,) = (e for e in events if e["ph"] == "i")
    assert found["args"]["where"] == [shown]
    assert found["args"]["share"] is None


def test_what_must_not_be_written_over(trace: Any, tmp_path: Path) -> None:
    source = trace.write()
    before = source.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(source)
    hard = tmp_path / "hard.json"
    os.link(source, hard)
    for out in (source, link, hard):
        with pytest.raises(UsageError, match="that is the trace itself"):
            annotated(source, out, **GIVEN)
    with pytest.raises(RunFolderError, match="is no file"):
        annotated(source, tmp_path, **GIVEN)
    with pytest.raises(RunFolderError, match="cannot be written"):
        annotated(source, tmp_path / "none" / "out.json", **GIVEN)
    with pytest.raises(TraceError, match="cannot be read"):
        annotated(tmp_path / "absent.json", tmp_path / "out.json", **GIVEN)
    assert source.read_bytes() == before


def test_bounds_that_do_not_fit(trace: Any, tmp_path: Path) -> None:
    source, out = trace.write(), tmp_path / "out.json"
    for bad in (
        {"bounds_ns": [2, 1]},
        {"bounds_ns": [1, 2], "lines": [{}, {}]},
        {"bounds_ns": [], "findings": [FINDING]},
    ):
        with pytest.raises(ValueError, match="bounds"):
            annotated(source, out, **bad)
    assert not out.exists()


def test_reading_tells_how_far_it_is(trace: Any, tmp_path: Path) -> None:
    told: list[int] = []
    source = trace.write()
    annotated(source, tmp_path / "out.json", **GIVEN, progress=told.append)
    assert told[-1] == source.stat().st_size
