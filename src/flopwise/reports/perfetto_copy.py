"""A copy of a Chrome trace with events added at the end of its list, in pieces, so that a file of any size fits in memory.

Events are copied byte by byte. What is no valid JSON (a NaN, a byte that is not UTF-8, half an event) would keep a viewer
from opening the copy: such an event is written again with what can be read of it, or left out, and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import msgspec

from flopwise.trace.stream import Gunzip, TraceError, opened

PIECE_BYTES = 1 << 20
#: No event, no head and no end of a file is longer than this.
LONGEST_BYTES = 16 << 20
#: A compressed file that grows beyond both is no trace: those of PyTorch shrink to a 14th to a 31st (18 files of 2021 to
#: 2026, measured), and zlib reaches a 1032nd. Source: https://zlib.net/zlib_tech.html, "Maximum Compression Factor".
MOST_TIMES, MOST_BYTES = 200, 1 << 30

Write = Callable[[bytes], object]

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = b" \t\r\n"
_BETWEEN = re.compile(r"\}(\s*,\s*)\{")
_NEXT = re.compile(r"\}\s*,\s*\{(?=\s*\"(?:ph|name|cat|pid|tid|ts|args|id|s|bp|dur)\")")
_CLOSING = re.compile(r"\}\s*\](?=\s*(?:,\s*\"|\}|$))")
_LENIENT = json.JSONDecoder(strict=False)
_VALID = msgspec.json.Decoder(list[msgspec.Raw])
_ONE = msgspec.json.Decoder(msgspec.Raw)


@dataclass
class Copied:
    """What became of a trace when it was copied."""

    added: int = 0  # events of ours
    mended: int = 0  # events that are no valid JSON, written again with what can be read of them
    dropped: int = 0  # events of which nothing can be read
    cut: str | None = None  # why, where the file ends before its end


def copy(source: Path, write: Write, added: Iterable[bytes], progress: Write | None = None) -> Copied:  # fmt: skip
    """Writes a valid trace: what `source` holds, and after its last event those `added`, each as JSON text.

    Args:
        source: a Chrome trace, compressed or not, in the form with `traceEvents` or as a bare list.
        write: called with pieces of the uncompressed copy.
        added: events, taken one by one.
        progress: called with each piece that was read.

    Raises:
        TraceError: the file cannot be read, is no Chrome trace, or is not bounded.
    """
    with opened(source) as file:
        return _Copy(source, file, write, progress).run(added)


class _Copy:
    def __init__(
        self, source: Path, file: IO[bytes] | Gunzip, write: Write, progress: Write | None
    ) -> None:
        self.source = source
        self.file = file
        self.write = write
        self.progress = progress
        self.copied = Copied()
        self.read_bytes = 0
        self.packed_bytes = source.stat().st_size
        self.lead = b",\n"  # what stands between two events
        self.first = True

    def run(self, added: Iterable[bytes]) -> Copied:
        head, buffer = self._head()
        self.write(head)
        ended, rest = self._events(buffer)
        for event in added:
            self._put(event)
            self.copied.added += 1
        self._end(head, ended, rest)
        return self.copied

    def _read(self) -> bytes:
        try:
            more = self.file.read(PIECE_BYTES)
        except OSError as error:
            raise TraceError(f"{self.source}: cannot be read: {error.strerror or error}") from None
        if isinstance(self.file, Gunzip) and self.file.damaged is not None:
            self.copied.cut = f"the compressed data {self.file.damaged}"
        self.read_bytes += len(more)
        if self.read_bytes > max(MOST_BYTES, MOST_TIMES * self.packed_bytes):
            raise TraceError(
                f"{self.source}: is more than {MOST_TIMES} times as large as its file, "
                f"{self.read_bytes >> 20} MiB so far: this is no trace"
            )
        if more and self.progress is not None:
            self.progress(more)
        return more

    def _head(self) -> tuple[bytes, bytes]:
        """Returns what stands before the first event, and what was read of the events."""
        buffer = b""
        while True:
            more = self._read()
            buffer += more
            if found := _EVENTS.search(buffer):
                return self._valid_head(buffer[: found.end()]), buffer[found.end() :]
            bare = buffer.lstrip(_SPACE + b"\xef\xbb\xbf")
            if bare[:1] == b"[":
                return b"[", bare[1:]
            if not more or len(buffer) > LONGEST_BYTES or (bare and bare[:1] != b"{"):
                seen = f"it begins with {bare[:40].decode('utf-8', 'replace')!r}"
                raise TraceError(
                    f"{self.source}: not a Chrome trace: no list of events (`traceEvents`) was found; "
                    f"{seen if bare else self.copied.cut or 'it is empty'}"
                )

    def _valid_head(self, head: bytes) -> bytes:
        head = head.lstrip(b"\xef\xbb\xbf")
        if _is_valid(head + b"]}"):
            return head
        try:
            found = _mended(head + b"]}")
        except ValueError:
            raise TraceError(
                f"{self.source}: not a Chrome trace: what stands before its events is damaged"
            ) from None
        self.copied.mended += 1
        return found[: found.rindex(b"]")]

    def _events(self, buffer: bytes) -> tuple[bool, bytes]:
        """Copies the events; returns whether the list ends, and what follows its last event."""
        least = 0  # of the buffer, before it is worth another look
        separator: bytes | None = None
        while more := self._read():
            buffer += more
            self._check_length(buffer)
            if separator is None and (separator := _separator(buffer)) is not None:
                self.lead = separator[1:-1]
            if len(buffer) < max(least, PIECE_BYTES):
                continue
            cut = buffer.rfind(separator) if separator is not None else -1
            body, between, buffer = buffer, b"", b""
            if separator is not None and cut >= 0:
                body, buffer = body[: cut + 1], body[cut + len(separator) - 1 :]
                between = separator[1:-1]
                if _is_valid(b"[" + body + b"]", _VALID):
                    self._put(body)
                    least = 0
                    continue
            ended, rest = self._singly(body, last=False)
            if ended:
                return True, self._rest(rest + between + buffer)
            buffer = rest + between + buffer if rest else buffer
            least = min(2 * len(buffer), LONGEST_BYTES - PIECE_BYTES) if rest else 0
        if separator is None and (separator := _separator(buffer)) is not None:
            self.lead = separator[1:-1]
        ended, rest = self._singly(buffer, last=True)
        if not ended and self.copied.cut is None:
            self.copied.cut = "the list of events is not closed"
        return ended, rest

    def _check_length(self, buffer: bytes) -> None:
        if len(buffer) > LONGEST_BYTES:
            raise TraceError(
                f"{self.source}: neither an event nor the file ends within {LONGEST_BYTES >> 20} MiB before byte "
                f"{self.read_bytes}: this is no Chrome trace, or it is damaged there"
            )

    def _rest(self, rest: bytes) -> bytes:
        """Returns what follows the last event up to the end of the file."""
        while more := self._read():
            rest += more
            self._check_length(rest)
        return rest

    def _singly(self, body: bytes, *, last: bool) -> tuple[bool, bytes]:
        """Copies the events of a piece one by one; returns whether the list ends in it, and what is left."""
        text = body.decode("latin-1")  # a character a byte: JSON's own signs are ASCII
        at = kept = 0
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if at >= len(text):
                return False, b""
            if text[at] == "]":
                return True, body[kept:]
            try:
                found, end = _LENIENT.raw_decode(text, at)
            except (ValueError, RecursionError):
                if not last and len(text) - at < PIECE_BYTES:  # it may go on in the next piece
                    return False, body[at:]
                stop = _NEXT.search(text, at + 1) or _CLOSING.search(text, at + 1)
                if stop is None:
                    if not last:
                        return False, body[at:]
                    self.copied.cut = self.copied.cut or "an event is cut off"
                    return False, b""
                self.copied.dropped += 1
                at = kept = stop.start() + 1
                continue
            if isinstance(found, dict):
                self._one(body[at:end], body[kept:at])
            else:
                self.copied.dropped += 1
            at = kept = end

    def _one(self, event: bytes, gap: bytes) -> None:
        """Copies one event; `gap` is what stands before it."""
        if not _is_valid(event):
            try:
                event = _mended(event)
            except (ValueError, RecursionError):
                self.copied.dropped += 1
                return
            self.copied.mended += 1
        usual = gap.strip(_SPACE) == (b"" if self.first else b",")
        self._put(event, gap if usual else None)

    def _put(self, events: bytes, gap: bytes | None = None) -> None:
        """Writes events after what stands between them, as the file has it where it can be kept."""
        if gap is None:
            gap = b"" if self.first else self.lead
        self.write(gap + events)
        self.first = False

    def _end(self, head: bytes, ended: bool, rest: bytes) -> None:
        gap, closing, tail = rest.partition(b"]")
        if ended and _is_valid(head + closing + tail):
            self.write((b"" if gap.strip(_SPACE) else gap) + closing + tail)
            return
        if ended and self.copied.cut is None:
            self.copied.cut = "what follows the list of events is damaged"
        self.write(b"\n]" if head == b"[" else b"\n]}")


def _separator(buffer: bytes) -> bytes | None:
    """Returns the bytes from the end of the first event to the start of the second one."""
    text = buffer.decode("latin-1")
    begin = text.find("{")
    if begin < 0:
        return None
    try:
        _, end = _LENIENT.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None if len(buffer) < PIECE_BYTES else b"},{"
    found = _BETWEEN.match(text[end - 1 : end + 200])
    return found.group().encode("latin-1") if found else None


def _is_valid(text: bytes, decoder: msgspec.json.Decoder[Any] = _ONE) -> bool:
    try:
        text.decode("utf-8")
        decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _mended(text: bytes) -> bytes:
    """Returns JSON text again as it can be read.

    Raises:
        ValueError: it cannot, or holds what JSON lacks.
    """
    whole = text.decode("utf-8", "replace")
    found = json.loads(whole, strict=False, parse_float=Decimal, parse_constant=_no_number)
    encoder = msgspec.json.Encoder(decimal_format="number")
    mended = encoder.encode(found)
    if not _is_valid(mended):
        raise ValueError("not JSON")
    return mended


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
