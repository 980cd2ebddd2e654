"""The reader of Chrome traces: layouts, times, categories of all ages, and what is damaged."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.trace import stream
from flopwise.trace.chrome import read
from flopwise.trace.kinds import Kind
from flopwise.trace.stream import TraceError


def one(**more: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.25}
    return {**event, **more}


def many(n: int) -> list[dict[str, Any]]:
    return [one(ts=float(i), name=f"k{i % 7}", args={"correlation": i + 1}) for i in range(n)]


@pytest.mark.parametrize("indent", [None, 0, 2, 4])
def test_any_layout_is_read_in_pieces(
    write: Any, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 1000)
    events = [one(ts=float(i), args={"correlation": i + 1, "nested": [{}, {}]}) for i in range(300)]
    trace = read(write(events, indent=indent))
    assert len(trace.events) == 300
    assert trace.events.correlation.tolist() == list(range(1, 301))
    assert trace.damage.events == 0
    assert trace.damage.ends_early is None
    assert trace.header["traceName"] == "t"


def test_compressed_and_array_form(tmp_path: Path) -> None:
    path = tmp_path / "t.json"  # the name does not say that it is compressed
    path.write_bytes(gzip.compress(json.dumps(many(5)).encode()))
    trace = read(path)
    assert len(trace.events) == 5
    assert trace.header == {}


def test_times_are_whole_nanoseconds(write: Any) -> None:
    trace = read(write([one(ts=6322354305173.787, dur=64.748)], baseTimeNanoseconds=1))
    assert trace.events.start_ns.tolist() == [6322354305173787]
    assert trace.events.duration_ns.tolist() == [64748]


def test_absolute_microseconds_keep_their_fraction(write: Any) -> None:
    path = write([one(ts=0, dur=1)])
    text = path.read_text("utf-8").replace('"ts": 0', '"ts": 1690000000123456.789')
    path.write_text(text, "utf-8")
    # float64 would say ...456.75: its spacing is a quarter of a microsecond there
    assert read(path).events.start_ns.tolist() == [1690000000123456789]


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("Kernel", Kind.KERNEL),
        ("kernel", Kind.KERNEL),
        ("Memcpy", Kind.MEMCPY),
        ("gpu_memset", Kind.MEMSET),
        ("Operator", Kind.OP),
        ("cpu_op", Kind.OP),
        ("Runtime", Kind.RUNTIME),
        ("cuda_driver", Kind.RUNTIME),
        ("python_function", Kind.PYTHON),
        ("user_annotation", Kind.ANNOTATION),
        ("something new", Kind.OTHER),
        (None, Kind.OTHER),
    ],
)
def test_categories(write: Any, category: str | None, kind: Kind) -> None:
    assert read(write([one(cat=category)])).events.kind.tolist() == [kind]


def test_threads_named_by_text_and_by_number_are_one(write: Any) -> None:
    events = read(write([one(cat="Operator", tid="25738"), one(cat="Runtime", tid=25738)])).events
    assert len(set(events.lane.tolist())) == 1
    assert events.lanes == [(0, 25738)]


def test_external_id_of_either_spelling(write: Any) -> None:
    events = read(
        write([one(args={"external id": 7}), one(ts=2.0, args={"External id": 8})])
    ).events
    assert events.external.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("name", "ends", "peer"),
    [
        ("send", {"Dst Rank": 3}, 3),
        ("recv", {"Src Rank": 5}, 5),
        ("recv", {"Src Rank": 5, "Dst Rank": 0}, 5),
        ("send", {"Src Rank": 0, "Dst Rank": 3}, 3),
        ("recv", {"Src Rank": "5"}, 5),
        ("allreduce", {}, -1),
    ],
)
def test_the_other_end_of_a_call_between_two_ranks(
    write: Any, name: str, ends: dict[str, Any], peer: int
) -> None:
    events = read(write([one(args={"Collective name": name, **ends})])).events
    assert [said.peer for said in events.collectives] == [peer]


def test_operands_are_kept_as_text(write: Any) -> None:
    args = {"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "External id": 1}
    events = read(
        write([one(cat="cpu_op", args=args), one(cat="cpu_op", ts=3.0, args=args)])
    ).events
    assert len(events.all_operands) == 1
    assert json.loads(events.all_operands[0].dims) == [[2, 3], []]
    assert events.operands.tolist() == [0, 0]


def test_a_damaged_event_is_left_out_and_named(write: Any) -> None:
    path = write(many(40))
    text = path.read_text("utf-8").replace('"name": "k3"', '"name": "q"uote"', 1)
    path.write_text(text, "utf-8")
    trace = read(path)
    assert len(trace.events) == 39
    assert trace.damage.events == 1
    at = int(trace.damage.described[0].split()[1].rstrip(":"))
    assert abs(at - text.index('q"uote')) < 400


@pytest.mark.parametrize("bad", ["\x01", "\\p"])
def test_control_characters_and_bad_escapes(write: Any, bad: str) -> None:
    path = write([*many(3), one(ts=9.0, name="HERE")])
    path.write_text(path.read_text("utf-8").replace("HERE", f"a{bad}b"), "utf-8")
    trace = read(path)
    assert len(trace.events) + trace.damage.events == 4
    assert len(trace.events) >= 3


def test_numbers_that_are_none(write: Any) -> None:
    path = write([*many(3), one(ts=9.0, args={"bandwidth": 1234.5})])
    path.write_text(path.read_text("utf-8").replace("1234.5", "NaN"), "utf-8")
    assert len(read(path).events) == 4


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "1e308", "-1e308", "9e15", "9" * 30])
def test_what_is_no_possible_time_is_the_largest_one(write: Any, bad: str) -> None:
    path = write([*many(3), one(ts=8.125), one(ts=9.0)])
    path.write_text(path.read_text("utf-8").replace("8.125", bad), "utf-8")
    assert read(path).events.start_ns.max() == 2**62  # and no warning of numpy's


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(TraceError, match="is a pipe"):
        read(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("packed", "why"),
    [(b"", "it is empty"), (gzip.compress(b"{}")[:10], "the compressed data is cut off")],
)
def test_files_with_nothing_in_them_say_so(tmp_path: Path, packed: bytes, why: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(packed)
    with pytest.raises(TraceError, match=why):
        read(path)


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_file_that_ends_early(write: Any, kept: float) -> None:
    path = write(many(400))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    trace = read(path)
    assert abs(len(trace.events) - 400 * kept) < 5
    assert trace.damage.ends_early is not None


def test_a_compressed_file_that_ends_early(tmp_path: Path) -> None:
    events = [one(ts=float(i), name=f"k{i * 7919 % 10007}") for i in range(20000)]
    whole = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    trace = read(path)
    assert 100 < len(trace.events) < 20000
    assert "compressed" in (trace.damage.ends_early or "")


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"{}", b'{"a": 1}', b"\x00\x01", b"null", b'"traceEvents"'],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.json"):
        read(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("value", ["text", None, [1], {"a": 1}, 1e400, -1e30, True])
def test_times_of_a_wrong_kind_never_raise(write: Any, value: Any) -> None:
    trace = read(write([*many(2), one(ts=value), one(dur=value)]))
    assert 2 <= len(trace.events) <= 4


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_in_the_list_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("junk") / "t.json"
    body = json.dumps(many(3)).encode()
    path.write_bytes(b'{"traceEvents": ' + body[:-1] + b", " + junk + b"]}")
    trace = read(path)
    assert len(trace.events) >= 3


def test_the_order_in_the_file_does_not_matter(write: Any) -> None:
    events = many(50)
    forward = read(write(events)).events
    backward = read(write(events[::-1])).events
    assert np.array_equal(forward.start_ns, backward.start_ns)
    assert [forward.name_of(i) for i in range(50)] == [backward.name_of(i) for i in range(50)]


@pytest.mark.parametrize(
    "bad", ["9223372036854775808", "18446744073709551616", "1e999999999", '"seven"', "9" * 5000]
)
def test_numbers_that_no_column_can_hold_are_left_out(write: Any, bad: str) -> None:
    path = write([*many(3), one(ts=9.0, args={"External id": 123454321, "device": 1})])
    path.write_text(path.read_text("utf-8").replace("123454321", bad), "utf-8")
    events = read(path).events
    assert (len(events), events.external.max()) in {(4, -1), (3, -1)}


def test_durations_that_are_no_number_are_told_from_those_of_centuries(write: Any) -> None:
    path = write([*many(3), one(ts=8.0, dur=8.125), one(ts=9.0, dur=1e300)])
    path.write_text(path.read_text("utf-8").replace("8.125", "NaN"), "utf-8")
    assert sorted(read(path).events.duration_ns.tolist())[-2:] == [2**62 - 1, 2**62]


def test_bytes_that_are_no_utf_8_are_replaced_and_counted(write: Any) -> None:
    path = write([*many(3), one(ts=8.0, name="HERE"), one(ts=9.0, args={"HERE": ["HERE"]})])
    path.write_bytes(path.read_bytes().replace(b"HERE", b"a\xff\xc3("))
    trace = read(path)
    assert (len(trace.events), trace.damage.not_utf8, trace.damage.events) == (5, 2, 0)
    assert "a\ufffd\ufffd(" in trace.events.names


def test_half_of_a_surrogate_pair_is_replaced(write: Any) -> None:
    path = write([*many(3), one(ts=8.0, name="HERE")])
    path.write_text(path.read_text("utf-8").replace("HERE", "a\\ud800b"), "utf-8")
    names = read(path).events.names
    assert "a\\ud800b" in names
    assert all(name.encode() for name in names)


@pytest.mark.parametrize(
    ("head", "block", "why"),
    [
        (
            b'{"traceEvents": [',
            b'{"ph": "X", "name": "k", "ts": 1.5, "dur": 2.5},',
            "expand to more",
        ),
        (b'{"traceEvents": [', b" ", "no end of an event within 65 MiB"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "X", "name": "', b"x", "no end of an event"),
        (b'{"traceEvents": [{"ph": "X"}, ', b"[", "no end of an event"),
        (b'{"a": "', b"x", "no list of events"),
    ],
)
def test_bombs(tmp_path: Path, head: bytes, block: bytes, why: str) -> None:
    """4 GiB each, of 4 MB on the disk."""
    path = tmp_path / "bomb.json.gz"
    member = gzip.compress(block * ((16 << 20) // len(block)))
    path.write_bytes(gzip.compress(head) + member * 256)
    with pytest.raises(TraceError, match=why):
        read(path)


def test_what_expands_further_than_any_trace_may_while_it_is_small(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    event = b'{"ph": "X", "name": "k", "ts": 1.5, "dur": 2.5},'
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + event * 100_000 + b"{}]}"))
    assert path.stat().st_size * 100 < 100_000 * len(event)
    assert len(read(path).events) == 100_000


def test_a_file_that_is_damaged_all_over_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    event = b'{"ph": "X", "args": {"x": [}, '
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "a"}, ' + event * 40_000 + b"]}")
    with pytest.raises(TraceError, match="too damaged to be read: 20000 damaged events"):
        read(path)


def test_events_that_swallow_those_behind_them_are_given_up(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    event = b'{"ph": "X", "args": {"x": [0, 0]}}, '
    piece = b'{"ph": "X", "x": [0, ' + event * 500
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "a"}, ' + piece * 300 + b"]}")
    with pytest.raises(TraceError, match="too damaged to be read"):
        read(path)
