from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import RecordError, RunFolderError
from flopwise.records import rank, run, store, verdict

STORED = [
    (run.RunRecord, run.SCHEMA),
    (rank.RankRecord, rank.SCHEMA),
    (verdict.TuneRecord, verdict.SCHEMA),
]
NUMBERS = {
    str: st.text(max_size=8),
    int: st.one_of(st.integers(), st.integers(2**60, 2**75)),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    type(None): st.none(),
}


def records(hint):
    """Returns a strategy for a class of records, or for the type of one of its fields."""
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{name: records(part) for name, part in hints.items()})
    if hint in NUMBERS:
        return NUMBERS[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(records(parts[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(records(parts[0]), records(parts[1]), max_size=2)
    if origin is tuple:
        return st.tuples(*map(records, parts))
    assert origin is types.UnionType, hint
    return st.one_of(*map(records, parts))


@dataclasses.dataclass(frozen=True)
class Small:
    schema: str
    value: float
    names: list[str] = dataclasses.field(default_factory=list)
    by_name: dict[str, float] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(("kind", "schema"), STORED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back_equal(kind, schema, data):
    record = dataclasses.replace(data.draw(records(kind)), schema=schema)
    text = store.encode(record)
    assert store.decode(text.encode("ascii"), kind, schema, "here") == record
    assert store.encode(store.decode(text.encode(), kind, schema, "here")) == text


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_every_bit(value):
    small = Small("s/1", value)
    back = store.decode(store.encode(small).encode(), Small, "s/1", "here")
    assert back.value.hex() == value.hex()


def test_encoded_form_is_this_text():
    small = Small("s/1", 0.1, ["é", "漢"], {"a": 1.0})
    assert store.encode(small) == (
        '{\n "schema": "s/1",\n "value": 0.1,\n "names": [\n  "\\u00e9",\n  "\\u6f22"\n ],\n'
        ' "by_name": {\n  "a": 1.0\n }\n}\n'
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused_by_name(tmp_path, value):
    path = tmp_path / "small.json"
    with pytest.raises(RecordError, match=rf"^value is {value}, which a record cannot hold"):
        store.write(path, Small("s/1", value))
    with pytest.raises(RecordError, match=r"^by_name\.loss is "):
        store.write(path, Small("s/1", 0.0, [], {"loss": value}))
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_a_file_name_that_are_no_text_survive_as_an_escape():
    small = Small("s/1", 0.0, [os.fsdecode(b"caf\xe9.py"), "🚀"])
    back = store.decode(store.encode(small).encode(), Small, "s/1", "here")
    assert back.names == [r"caf\udce9.py", "🚀"]


def test_write_replaces_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "small.json"
    for value in (1.0, 2.0):
        store.write(path, Small("s/1", value))
        assert store.read(path, Small, "s/1").value == value
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_never_ends_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "small.json")
    for path in (tmp_path / "small.json", Path("/dev/zero")):
        with pytest.raises(RecordError, match="not a regular file"):
            store.read(path, Small, "s/1")


def test_no_umask_takes_from_us_what_we_wrote(tmp_path):
    before = os.umask(0o777)
    try:
        store.write(tmp_path / "small.json", Small("s/1", 1.0))
    finally:
        os.umask(before)
    assert (tmp_path / "small.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_at_any_point_leaves_the_old_file(tmp_path, monkeypatch, where, error):
    path = tmp_path / "small.json"
    store.write(path, Small("s/1", 1.0))

    def fail(*_args, **_more):
        raise error

    monkeypatch.setattr(os, where, fail)
    kind = RunFolderError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind):
        store.write(path, Small("s/1", 2.0))
    assert list(tmp_path.iterdir()) == [path]
    assert store.read(path, Small, "s/1").value == 1.0


KILLED = """
import os, sys
from pathlib import Path
from flopwise.records import store
os.fsync = lambda _: os._exit(9)
store.write_text(Path(sys.argv[1]), "new" * 1000)
"""


def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "small.json"
    store.write_text(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == 9
    assert path.read_text() == "old"
    assert sorted(tmp_path.glob("*.json")) == [path]  # what is left over is hidden from readers


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    real = os.fdopen

    def on_a_full_disk(handle, *args, **more):
        os.dup2(os.open("/dev/full", os.O_WRONLY), handle)
        return real(handle, *args, **more)

    monkeypatch.setattr(os, "fdopen", on_a_full_disk)
    with pytest.raises(RunFolderError) as caught:
        store.write_text(path, "text")
    assert str(caught.value) == (
        f"{path}: cannot be written (No space left on device). "
        "Nothing was left half-written; choose another folder with --out, or make room"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_or_not_a_folder_is_one_clear_error(tmp_path):
    with pytest.raises(RunFolderError, match=r"cannot be written \(No such file or directory\)"):
        store.write_text(tmp_path / "none" / "run.json", "text")
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot be written \(Not a directory\)"):
        store.write_text(tmp_path / "file" / "run.json", "text")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunFolderError, match=r"cannot be written \(Permission denied\)"):
            store.write_text(tmp_path / "run.json", "text")
    finally:
        tmp_path.chmod(0o700)


GOOD = store.encode(Small("s/1", 1.5, ["a"])).encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Input data was truncated"),
        (GOOD[:-10], "Input data was truncated"),
        (GOOD.replace(b"1.5", b"NaN"), "invalid character"),
        (GOOD.replace(b"1.5", b"1e999"), "out of range"),
        (GOOD.replace(b"1.5", b'"1.5"'), r"Expected `float`, got `str` - at `\$.value`"),
        (GOOD.replace(b"1.5", b"null"), r"Expected `float`, got `null` - at `\$.value`"),
        (GOOD.replace(b' "value": 1.5,\n', b""), "missing required field `value`"),
        (GOOD + b"x", "trailing characters"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff", "invalid character"),
        (GOOD.replace(b'"a"', b'"\xff"'), "(?i)invalid utf-8"),
        (b"[" * 100_000, "not a readable record"),
    ],
)
def test_damage_is_one_clear_error(data, why):
    with pytest.raises(RecordError, match=why) as caught:
        store.decode(data, Small, "s/1", "runs/a/run.json")
    text = str(caught.value)
    assert text.startswith("runs/a/run.json: not a readable record (")
    assert text.endswith("It may have been cut short or edited; run again to replace it")


@given(cut=st.integers(0, len(GOOD) - 3))
def test_a_file_cut_anywhere_is_never_read(cut):
    with pytest.raises(RecordError):
        store.decode(GOOD[:cut], Small, "s/1", "here")


def test_another_schema_or_version_is_named():
    for data, seen in ((GOOD, "s/1"), (b"{}", "")):
        with pytest.raises(RecordError) as caught:
            store.decode(data, Small, "s/2", "here")
        assert str(caught.value) == (
            f"here: schema {seen!r}, this flopwise reads 's/2'. "
            "It was written by another version, or it is another kind of file"
        )


def test_fields_of_a_later_minor_change_are_skipped():
    later = json.loads(GOOD) | {"new": {"deep": 1}}
    assert store.decode(json.dumps(later).encode(), Small, "s/1", "here").value == 1.5


def test_missing_file_is_one_clear_error(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(RecordError, match=f"^{re.escape(str(path))}: cannot be read .No such file"):
        store.read(path, Small, "s/1")


def test_schema_can_be_asked_for_alone():
    assert store.schema_of(GOOD, "here") == "s/1"
    assert store.schema_of(b'{"other": 1}', "here") == ""
    with pytest.raises(RecordError, match=r"^here: not a readable record"):
        store.schema_of(b'{"schema": 1}', "here")


ALONE = """
import sys
before = set(sys.modules)
from flopwise.records import rank, store
store.encode(rank.Telemetry())
outside = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(outside - set(sys.stdlib_module_names) - {"flopwise"}))
"""


def test_writing_needs_the_standard_library_alone():
    """It runs in the process that trains, where only torch can be counted on."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout == "[]\n"


def test_text_goes_where_an_option_says(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store.put_text("--html", str(tmp_path / "link"), "a\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "a\n"
    store.put_text("--html", "/dev/null", "a")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(RunFolderError, match=f"^--html {re.escape(str(tmp_path))}: cannot be"):
        store.put_text("--html", str(tmp_path), "a")


def test_a_page_is_not_printed_by_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"^--html -: give a path \(/dev/stdout"):
        store.put_text("--html", "-", "a")
    assert list(tmp_path.iterdir()) == []
