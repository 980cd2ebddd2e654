"""The picture of shares, read back by the rules of its format."""

from __future__ import annotations

import base64
import struct
import zlib

from hypothesis import given
from hypothesis import strategies as st

from flopwise.reports.html.png import data_uri

START = "data:image/png;base64,"


def opened(uri: str) -> tuple[tuple[int, int], dict[bytes, bytes], list[list[int]]]:
    data = base64.b64decode(uri.removeprefix(START), validate=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (n,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + n]
        (check,) = struct.unpack(">I", data[at + 8 + n : at + 12 + n])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + n
    assert list(chunks) == [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 3, 0, 0, 0]
    lines = zlib.decompress(chunks[b"IDAT"])
    assert len(lines) == height * (width + 1)
    rows = [list(lines[i * (width + 1) :][: width + 1]) for i in range(height)]
    assert all(row[0] == 0 for row in rows)
    return (width, height), chunks, [row[1:] for row in rows]


def test_opacity_is_the_share() -> None:
    size, chunks, rows = opened(data_uri([[0, 0.5, 1], [1, 0, 0.2]], (1, 2, 3)))
    assert size == (3, 2)
    assert chunks[b"PLTE"] == bytes((1, 2, 3)) * 256
    assert chunks[b"tRNS"] == bytes(range(256))
    assert rows == [[0, 128, 255], [255, 0, 51]]


@given(st.lists(st.lists(st.floats(), max_size=5), min_size=1, max_size=5).filter(lambda r: r[0]))
def test_any_rows_are_a_picture(rows: list[list[float]]) -> None:
    (width, height), _, dots = opened(data_uri(rows, (0, 0, 0)))
    assert (width, height) == (len(rows[0]), len(rows))
    assert all(len(row) == width for row in dots)
