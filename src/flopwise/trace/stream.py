"""The bytes of a Chrome trace as lists of events: in pieces, so that a file of any size fits in memory.

A piece ends where one event ends and the next one begins. How that looks is learned from the file's first two events:
profilers indent differently. A piece that cannot be decoded as a whole is read event by event, and what is damaged is left
out and named.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from flopwise.errors import FlopwiseError

PIECE_BYTES = 1 << 20
#: No event, and no head of a file, is longer than this.
LONGEST_BYTES = 64 << 20
#: So many damaged events are described; the others are only counted.
MOST_DESCRIBED = 20
#: More damage than this and a file is given up: each damaged event is looked at by itself, and may swallow those behind it,
#: which are then read again.
MOST_DAMAGED = 20_000
MOST_AGAIN_BYTES = 64 << 20
#: What a compressed file may expand to: so many bytes, and beyond them no more than so many times its size. Traces of torch
#: expand 14 to 31 times (18 were tried); the most that deflate can do is 1032 times (zlib.net/zlib_tech.html).
MOST_EXPANSION = 100
EXPANDED_BYTES = 128 << 20

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}(\s*),(\s*)\{")
_SPACE = b" \t\r\n"
_GZIP = b"\x1f\x8b"


class TraceError(FlopwiseError):
    """A trace cannot be read."""


@dataclass
class Damage:
    """What of a file could not be used."""

    events: int = 0
    described: list[str] = field(default_factory=list)
    ends_early: str | None = None  # why, if the file stops before its end
    not_utf8: int = 0  # events that can be read although bytes of them are no UTF-8

    def event(self, at: int, why: str) -> None:
        """Notes a damaged event at a position of the uncompressed file."""
        self.events += 1
        if len(self.described) < MOST_DESCRIBED:
            self.described.append(f"byte {at}: {why}")


class Pieces:
    """The events of a file, piece by piece; afterwards `header` has the rest of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.damage = Damage()
        self.bytes_read = 0  # uncompressed
        self._at = 0  # position of the first byte of the current buffer
        self._head = b""
        self._tail = b""
        self._ended = False
        self._start = 0  # of the piece in hand
        self._carry = b""  # of it, an event that goes on in the next one
        self._again_bytes = 0  # that were read more than once because of damage

    @property
    def position(self) -> int:
        """Where the piece in hand begins, in bytes of the uncompressed file."""
        return self._start

    def __iter__(self) -> Iterator[bytes | list[dict[str, Any]]]:
        """Yields either the JSON text of a list of events or, of a damaged piece, the events that can be read.

        The text may turn out not to be valid: then `salvage` has its events.

        Raises:
            TraceError: the file cannot be opened, or is no Chrome trace.
        """
        with opened(self.path) as file:
            buffer = self._find_events(file)
            separator: bytes | None = None
            while True:
                more = self._read(file)
                buffer += more
                if separator is None:
                    separator = _separator(buffer)
                cut = buffer.rfind(separator) if separator is not None else -1
                if not more or self._ended:
                    break
                if cut < 0:
                    if len(buffer) > LONGEST_BYTES:
                        raise self._endless(self._at, len(buffer))
                    continue
                assert separator is not None
                text = b"".join((b"[", memoryview(buffer)[: cut + 1], b"]"))
                buffer = buffer[cut + len(separator) - 1 :]
                start = self._at
                self._at += cut + len(separator) - 1
                self._start, self._carry = start, b""
                yield text
                if len(self._carry) > LONGEST_BYTES // 4:
                    raise self._endless(start, len(self._carry))
                if self._carry:  # the piece ended within an event
                    buffer = self._carry + separator[1:-1] + buffer
                    self._at -= len(self._carry) + len(separator) - 2
                if self._ended:
                    self._tail += buffer
                    break
            if self._ended:
                while more := self._read(file):
                    self._tail += more[: LONGEST_BYTES - len(self._tail)]
            elif buffer.strip(_SPACE + b","):
                self._start, self._carry = self._at, b""
                yield self._events_of(buffer, last=True)
            if not self._ended and self.damage.ends_early is None and self._head:
                self.damage.ends_early = "the list of events is not closed"
        self.header = _header(self._head, self._tail)

    def salvage(self, text: bytes) -> list[dict[str, Any]]:
        """Returns the readable events of a piece that is not valid JSON as a whole."""
        return self._events_of(text[1:-1], last=False)

    def _find_events(self, file: IO[bytes] | Gunzip) -> bytes:
        buffer = b""
        while True:
            more = self._read(file)
            buffer += more
            found = _EVENTS.search(buffer)
            if found is not None:
                self._head, self._at = buffer[: found.end()], found.end()
                return buffer[found.end() :]
            bare = buffer.lstrip(_SPACE + b"\xef\xbb\xbf")
            if bare[:1] == b"[":  # the array form
                self._at = len(buffer) - len(bare) + 1
                return bare[1:]
            if not more or len(buffer) > LONGEST_BYTES or (bare and bare[:1] != b"{"):
                raise TraceError(
                    f"{self.path}: not a Chrome trace: no list of events (`traceEvents`) was found; "
                    f"{self._seen(bare)}"
                )

    def _endless(self, at: int, length: int) -> TraceError:
        return TraceError(
            f"{self.path}: no end of an event within {length >> 20} MiB from byte {at} on: this is no Chrome trace, or "
            "it is damaged there"
        )

    def _seen(self, bare: bytes) -> str:
        if bare:
            return f"it begins with {bare[:40].decode('utf-8', 'replace')!r}"
        return self.damage.ends_early or "it is empty"

    def _read(self, file: IO[bytes] | Gunzip) -> bytes:
        try:
            more = file.read(PIECE_BYTES)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        self.bytes_read += len(more)
        if isinstance(file, Gunzip):
            if file.damaged is not None:
                self.damage.ends_early = f"the compressed data {file.damaged}"
            if self.bytes_read > max(EXPANDED_BYTES, MOST_EXPANSION * file.bytes_used):
                raise TraceError(
                    f"{self.path}: {file.bytes_used} bytes of it expand to more than {self.bytes_read >> 20} MiB: no "
                    f"trace holds {MOST_EXPANSION} times its compressed size, and the rest is not read. If it is one, "
                    "expand it first"
                )
        return more

    def _events_of(self, body: bytes, last: bool) -> list[dict[str, Any]]:
        """Returns the events in a part of the list, one by one, up to the list's end if it is there."""
        text = body.decode("utf-8", "surrogateescape")
        decoder = json.JSONDecoder(strict=False, parse_float=Decimal)
        position = _Position(text)
        events: list[dict[str, Any]] = []
        at = 0
        while True:
            at = _AFTER.match(text, at).end()  # type: ignore[union-attr]
            if at >= len(text):
                return events
            if text[at] == "]":
                self._ended = True
                self._tail = text[at + 1 :].encode("utf-8", "surrogateescape")
                return events
            begin = at
            try:
                event, at = decoder.raw_decode(text, at)
                if isinstance(event, dict):
                    events.append(event)
                else:
                    self.damage.event(self._start + position.bytes_at(begin), "not an event")
            except (ValueError, RecursionError) as error:
                self._bear(getattr(error, "pos", at) - at)
                found = _BETWEEN_TEXT.search(text, at + 1) or _CLOSING_TEXT.search(text, at + 1)
                if found is None:
                    rest = text[at:].encode("utf-8", "surrogateescape")
                    if not last:
                        self._carry = rest
                    elif self.damage.ends_early is None:
                        self.damage.ends_early = (
                            f"an event is cut off at byte {self._start + position.bytes_at(begin)}"
                        )
                    return events
                self.damage.event(self._start + position.bytes_at(begin), _why(error))
                at = found.end() - 1

    def _bear(self, tried: int) -> None:
        """Notes how much was read in vain.

        Raises:
            TraceError: it is too much.
        """
        self._again_bytes += max(0, tried)
        if self.damage.events >= MOST_DAMAGED or self._again_bytes > MOST_AGAIN_BYTES:
            first = self.damage.described[0] if self.damage.described else "the first event"
            raise TraceError(
                f"{self.path}: too damaged to be read: {self.damage.events} damaged events up to byte {self._start} "
                f"({first})"
            )


class _Position:
    """Counts bytes up to places of a text, each further on than the one before."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._bytes = text, 0, 0

    def bytes_at(self, at: int) -> int:
        """Returns how many bytes are before a place of the text."""
        self._bytes += len(self._text[self._at : at].encode("utf-8", "surrogateescape"))
        self._at = at
        return self._bytes


def _why(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


_AFTER = re.compile(r"[ \t\r\n,]*")
_CLOSING_TEXT = re.compile(r"\}\s*\](?=\s*(?:,\s*\"|\}|$))")
_BETWEEN_TEXT = re.compile(r"\}\s*,\s*\{(?=\s*\"(?:ph|name|cat|pid|tid|ts|args|id|s|bp|dur)\")")


def _separator(buffer: bytes) -> bytes | None:
    """Returns the bytes from the end of the first event to the start of the second one."""
    text = buffer.decode("utf-8", "surrogateescape")
    begin = text.find("{")
    if begin < 0:
        return None
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None if len(buffer) < PIECE_BYTES else b"},{"
    found = _BETWEEN.match(text[end - 1 : end + 200].encode("utf-8", "surrogateescape"))
    return found.group() if found else None


def _header(head: bytes, tail: bytes) -> dict[str, Any]:
    """Returns what a file says besides its events; of a damaged one, what its head alone says."""
    for text in (head + b"]" + tail, head + b"]}"):
        try:
            found = json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            found.pop("traceEvents", None)
            return found
    return {}


class Gunzip:
    """Reads a gzip file as far as it goes: of one that is damaged, everything before the damage."""

    def __init__(self, file: IO[bytes]) -> None:
        self.damaged: str | None = None
        self.bytes_used = 0  # of the file, that the bytes came from which were returned
        self._file = file
        self._member = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._at_end = False

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes, b"" at the end or at the damage."""
        while not self._at_end:
            if not self._packed:
                self._packed = self._file.read(1 << 18)
                if not self._packed:
                    self._at_end = True
                    if not self._member.eof:
                        self.damaged = "is cut off"
                    break
            if self._member.eof:
                if self._packed[:2] != _GZIP:  # padding after the last member
                    self._at_end = True
                    break
                self._member = zlib.decompressobj(wbits=31)
            try:
                out = self._member.decompress(self._packed, size)
            except zlib.error as error:
                self.damaged, self._at_end = f"is damaged ({error})", True
                break
            rest = self._member.unconsumed_tail or self._member.unused_data
            self.bytes_used += len(self._packed) - len(rest)
            self._packed = rest
            if out:
                return out
        return b""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Gunzip:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(path: Path) -> IO[bytes] | Gunzip:
    """Opens a file, compressed or not, whatever its name says."""
    try:
        if path.is_fifo():  # it may never be written, and cannot be read twice
            raise TraceError(f"{path}: is a pipe; write the trace to a file first")
        file = path.open("rb")
        packed = file.read(2) == _GZIP
        file.seek(0)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    return Gunzip(file) if packed else file
