"""Reading and writing records: atomic writes, typed and strict reads, one clear error for anything damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from flopwise.errors import RecordError, RunFolderError

T = TypeVar("T")


def encode(record: Any) -> str:
    """Returns a record (a dataclass) as indented JSON. NaN and infinity are refused: they are not numbers."""
    return json.dumps(dataclasses.asdict(record), indent=1, allow_nan=False) + "\n"


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
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise RunFolderError(
            f"{path}: cannot be written ({error.strerror or error}). Nothing was left half-written; "
            "choose another folder with --out, or make room"
        ) from error


def read(path: Path, kind: type[T], schema: str) -> T:
    """Returns the record stored at `path`, checked field by field.

    Raises:
        RecordError: missing, not JSON, of another schema or version, or with a field of the wrong type.
    """
    try:
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

    @dataclasses.dataclass
    class Head:
        schema: str = ""

    try:
        head = msgspec.json.decode(data, type=Head)
        if head.schema == schema:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(
            f"{where}: not a readable record ({error}). It may have been cut short or edited; run again to replace it"
        ) from error
    raise RecordError(
        f"{where}: schema {head.schema[:60]!r}, this flopwise reads {schema!r}. "
        "It was written by another version, or it is another kind of file"
    )
