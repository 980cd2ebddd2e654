"""A script's bytes, its text, and a unified diff between two texts that keeps encoding and line endings."""

from __future__ import annotations

import difflib
import io
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flopwise.errors import PatchError

#: A training script is some hundred kilobytes at most; what is larger is another file.
LARGEST_BYTES = 4 * 1024 * 1024
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_BOM = "\ufeff"


@dataclass(frozen=True)
class Source:
    """A script as it lies on disk."""

    path: Path  # of the file itself, links followed
    name: str  # as a diff calls it, from the working folder
    data: bytes
    text: str  # without a byte order mark; line endings as they are
    encoding: str
    bom: str


def read(path: str) -> Source:
    """Returns the script at `path`.

    Raises:
        PatchError: not a readable file, not text in the encoding it declares, or not Python.
    """
    found = Path(os.path.realpath(path))
    try:
        if not stat.S_ISREG(found.stat().st_mode):
            raise PatchError(f"{path}: not a regular file. Nothing was written")
        data = found.read_bytes()
    except OSError as error:
        raise PatchError(
            f"{path}: cannot be read ({error.strerror or error}). Nothing was written"
        ) from error
    if len(data) > LARGEST_BYTES:
        raise PatchError(
            f"{path}: larger than {LARGEST_BYTES} bytes, which no script is. Nothing was written"
        )
    text, encoding = _decoded(path, data)
    check_compiles(path, data, "is not Python")
    bom = _BOM if text.startswith(_BOM) else ""
    return Source(found, _name(path, found), data, text[len(bom) :], encoding, bom)


def check_compiles(path: str, data: bytes, said: str) -> None:
    """Does nothing where `data` is Python.

    Raises:
        PatchError: it is not; `said` is what that means.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own, for whoever runs it
            compile(data, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else path
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise PatchError(f"{where}: {said} ({what}). Nothing was written") from error


def encoded(source: Source, text: str) -> bytes:
    """Returns another text of the script as its bytes would be."""
    return (source.bom + text).encode(source.encoding)


def unified_diff(source: Source, text: str) -> bytes:
    """Returns what turns the script into `text`, for `patch -p1` and `git apply`; empty where nothing changes."""
    before, after = (_LINES.findall(source.bom + t) for t in (source.text, text))
    if before == after:
        return b""
    tab = "\t" if " " in source.name else ""  # else a name is taken to end at its first blank
    head = f"--- a/{source.name}{tab}\n+++ b/{source.name}{tab}\n"
    body = "".join(_body(before, after))
    return os.fsencode(head) + body.encode(source.encoding)


def _body(before: list[str], after: list[str]) -> Iterator[str]:
    for number, line in enumerate(difflib.unified_diff(before, after, "a", "b")):
        if number < 2:
            continue
        yield line
        if not line.endswith("\n"):
            yield "\n\\ No newline at end of file\n"


def _decoded(path: str, data: bytes) -> tuple[str, str]:
    """Returns the text with its byte order mark, and the encoding."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        return data.decode(encoding), encoding
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PatchError(
            f"{path}:{line}: not {error.encoding}, and it declares no other encoding that fits. Python would not run "
            "it either. Nothing was written"
        ) from error
    except (SyntaxError, LookupError) as error:
        raise PatchError(f"{path}: {error}. Nothing was written") from error


def _name(path: str, found: Path) -> str:
    """Returns the name of a file in a diff: from the working folder where it lies below it, else its last part."""
    name = os.path.relpath(found)
    if name.startswith(os.pardir + os.sep) or os.path.isabs(name):
        name = found.name
    name = name.replace(os.sep, "/")
    if any(ord(letter) < 32 or letter in '"\\' for letter in name):
        raise PatchError(
            f"{path!r}: a diff cannot name such a file; rename it. Nothing was written"
        )
    return name
