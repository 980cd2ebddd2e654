"""What a file is: its first bytes show it, not its name."""

from __future__ import annotations

import re
from pathlib import Path

from flopwise.trace.nsys import why_not
from flopwise.trace.nsys_database import MAGIC
from flopwise.trace.stream import TraceError, opened

#: So much of a file is looked at, bytes once it is uncompressed.
HEAD_BYTES = 1 << 20

#: Where the events of a trace begin.
EVENTS = re.compile(rb'"traceEvents"\s*:')
_ONE_EVENT = re.compile(rb'\s*\[\s*\{[^{}]{0,4000}"ph"\s*:')
_LOG = re.compile(rb"\b[NR]CCL (?:INFO|WARN) |\b[NR]CCL version \d")
_RECORD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"flopwise\.')


def kind_of(path: Path, head: bytes) -> tuple[str | None, str]:
    """Returns what a file is by its first bytes, or None and why it is left out."""
    if head.startswith(MAGIC):
        reason = why_not(path)
        return ("nsys", "") if reason is None else (None, reason)
    if path.suffix.lower() in (".nsys-rep", ".qdrep"):
        name = path.with_suffix(".sqlite").name
        return None, (
            f"is a report of Nsight Systems: export it with `nsys export --type sqlite -o {name} {path.name}`"
        )
    if head.startswith(b"\x80") and b"\0" in head[:64]:
        if b"pg_config" in head or b"collective_seq_id" in head or b"pg_status" in head:
            return "flight", ""
        return None, "is a pickle, but no dump of a flight recorder"
    bare = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if bare[:1] == b"{":
        return _kind_of_object(head)
    if _ONE_EVENT.match(bare):
        return "kineto", ""
    if _LOG.search(head):
        return "nccl-log", ""
    if not head:
        return None, "is empty, or its compressed data is damaged from the start"
    if b"\0" in head[:4096]:
        return None, "is binary, and nothing that is known"
    return None, "is text, but neither a trace nor a log of NCCL"


def _kind_of_object(head: bytes) -> tuple[str | None, str]:
    if _RECORD.match(head):
        return None, "is a record of flopwise, without a trace: give its run folder"
    if EVENTS.search(head):
        return "kineto", ""
    if b'"pg_config"' in head or b'"collective_seq_id"' in head:
        return "flight", ""
    if _LOG.search(head):  # a log of JSON lines
        return "nccl-log", ""
    return None, "is JSON, but no trace: no list of events (`traceEvents`) is in its first MiB"


def head_of(path: Path) -> tuple[bytes, bool]:
    """Returns the first bytes of a file, uncompressed, and whether that is all of it.

    Raises:
        TraceError: it cannot be read.
    """
    parts: list[bytes] = []
    size = 0
    try:
        with opened(path) as file:
            while size < HEAD_BYTES and (more := file.read(HEAD_BYTES - size)):
                parts.append(more)
                size += len(more)
            whole = size < HEAD_BYTES
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    return b"".join(parts), whole
