"""A picture of shares as PNG, by the standard library alone."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

_DEPTH, _PALETTE = 8, 3


def data_uri(rows: Sequence[Sequence[float]], color: tuple[int, int, int]) -> str:
    """Returns a picture with one dot a share: the colour, as opaque as the share is large.

    So it fits a light page and a dark one. Rows shorter than the first one end in empty dots, longer ones are cut.

    Source: W3C, Portable Network Graphics (PNG) Specification, sections 5 and 11.
    """
    width = len(rows[0])
    lines = bytearray()
    for row in rows:
        dots = [round(255 * min(max(share, 0.0), 1.0)) if share == share else 0 for share in row]
        lines += b"\0" + bytes(dots[:width]).ljust(width, b"\0")
    head = struct.pack(">IIBBBBB", width, len(rows), _DEPTH, _PALETTE, 0, 0, 0)
    parts = (
        (b"IHDR", head),
        (b"PLTE", bytes(color) * 256),
        (b"tRNS", bytes(range(256))),
        (b"IDAT", zlib.compress(bytes(lines), 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def _chunk(kind: bytes, body: bytes) -> bytes:
    check = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
