"""Reading and writing records.

Writes are atomic, reads typed and strict, and anything damaged is one clear error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from flopwise.errors import RecordError, RunFolderError

T = TypeVar("T")


def encode(record: Any) -> str:
    """Returns a record (a dataclass, or a dictionary made of one) as indented JSON in ASCII.

    A byte of a file name that is not text (a lone surrogate) is written as an escape, because
    JSON cannot hold it.

    Raises:
        RecordError: a number is NaN or infinite, which is no number; the field is named.
    """
    data = record if isinstance(record, dict) else dataclasses.asdict(record)
    return json.dumps(_plain(data, ""), indent=1, allow_nan=False) + "\n"


def encode_together(record: Any, more: Any) -> str:
    """Returns a record as JSON with those fields of a second one that it does not have itself.

    Raises:
        RecordError: a number is NaN or infinite.
    """
    both = {**dataclasses.asdict(more), **dataclasses.asdict(record)}
    return json.dumps(_plain(both, ""), indent=1, allow_nan=False) + "\n"


def _plain(value: Any, where: str) -> Any:
    """Returns `value` with nothing in it that JSON lacks; `where` is its field, for the error."""
    if isinstance(value, dict):
        return {
            _plain(key, where): _plain(item, f"{where}.{key}" if where else str(key))
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where} is {value}, which a record cannot hold; nothing was written")
    return value


def write(path: Path, record: Any) -> None:
    """Writes a record so that a reader sees the old file or the new one, never half of one.

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    write_text(path, encode(record))


def write_text(path: Path, text: str) -> None:
    """Writes text atomically (a temporary file in the same folder, then a rename).

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    try:
        _put(path, text)
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be written ({error.strerror or error}). "
            "Nothing was left half-written; choose another folder with --out, or make room"
        ) from error


def _put(path: Path, text: str) -> None:
    """Writes a file in one piece, or leaves what was there.

    Raises:
        OSError: it cannot be written.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask | 0o600)  # whatever the umask, we are to read it
        os.replace(temporary, path)
    except BaseException:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def put_text(option: str, path: str, text: str) -> None:
    """Writes text where an option says; a pipe or a device is written to, never replaced by a file.

    Raises:
        RunFolderError: it cannot be written; `option` names the place.
    """
    if path == "-":
        raise RunFolderError(f"{option} -: give a path (/dev/stdout, where it is to be printed)")
    target = os.path.realpath(path)
    try:
        if not os.path.exists(target) or os.path.isfile(target):
            _put(Path(target), text)
            return
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise RunFolderError(
            f"{option} {path}: cannot be written ({error.strerror or error})"
        ) from error


def read(path: Path, kind: type[T], schema: str) -> T:
    """Returns the record stored at `path`, checked field by field.

    Raises:
        RecordError: missing, not JSON, of another schema or version, or with a field of the wrong
            type.
    """
    try:
        if path.is_fifo() or path.is_char_device():  # it would have us wait, or never end
            raise RecordError(f"{path}: cannot be read (not a regular file)")
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror or error})") from error
    return decode(data, kind, schema, str(path))


def decode(data: bytes, kind: type[T], schema: str, where: str) -> T:
    """Returns the record encoded in `data`; `where` names it in errors.

    Raises:
        RecordError: not JSON, of another schema or version, or with a field of the wrong type.
    """
    import msgspec

    seen = schema_of(data, where)
    if seen != schema:
        raise RecordError(
            f"{where}: schema {seen[:60]!r}, this flopwise reads {schema!r}. "
            "It was written by another version, or it is another kind of file"
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(_damaged(where, error)) from error


def schema_of(data: bytes, where: str) -> str:
    """Returns what `data` says its schema is, "" where it says nothing; `where` names it in errors.

    Raises:
        RecordError: not a JSON object.
    """
    import msgspec

    try:
        return msgspec.json.decode(data, type=_Head).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(_damaged(where, error)) from error


@dataclasses.dataclass
class _Head:
    schema: str = ""


def _damaged(where: str, error: Exception) -> str:
    return (
        f"{where}: not a readable record ({error}). It may have been cut short or edited; "
        "run again to replace it"
    )
