"""Makes corrupt variants of a folder of rank traces, to see what is said of them.

    python tools/corrupt.py TRACES OUT [--only NAME ...] [--rank N] [--seed N] [--mutations N]

Each variant is a folder of OUT with all files of TRACES, links to those that are as they were. What is not asked for stays
byte by byte as it was: events are cut out and put back as text. No more than one file is in memory at a time.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

LONG_US = 2_000_000
SHIFT_US = 5_000
HEAD_FRAC = 0.3
CUT_FRAC = 0.6
NAN_EVERY = 10  # kernels
BYTES_EVERY = 50  # events
BOMB_BYTES = 8 << 30
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Seen(msgspec.Struct):
    """What of an event decides whether it is touched."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0


class File:
    """One trace in memory: its events as text, and what is around them."""

    def __init__(self, path: Path) -> None:
        self.head: dict[str, Any] = msgspec.json.decode(unpacked(path), type=dict[str, msgspec.Raw])
        self.raw: list[bytes] = [
            bytes(one)
            for one in msgspec.json.decode(self.head["traceEvents"], type=list[msgspec.Raw])
        ]
        self.seen = [msgspec.json.decode(one, type=Seen, strict=False) for one in self.raw]

    def rows(self, *categories: str) -> list[int]:
        """Returns the rows of these categories by their time."""
        found = [i for i, one in enumerate(self.seen) if one.ph == "X" and one.cat in categories]
        return sorted(found, key=lambda i: self.seen[i].ts)

    def text(self) -> bytes:
        """Returns the file as it would be written, an event a line."""
        events = b"[\n" + b",\n".join(self.raw) + b"\n]"
        parts = [
            msgspec.json.encode(key) + b": " + (events if key == "traceEvents" else bytes(value))
            for key, value in self.head.items()
        ]
        return b"{\n" + b",\n".join(parts) + b"\n}"


def files_of(folder: Path) -> list[Path]:
    """Returns the traces of a folder in the order of their names."""
    return sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")))


def unpacked(path: Path) -> bytes:
    """Returns the text of a trace."""
    text = path.read_bytes()
    return gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text


def packed(text: bytes, like: Path) -> bytes:
    """Returns a text as the file of that name has it."""
    return gzip.compress(text, 1, mtime=0) if like.name.endswith(".gz") else text


def one_long_kernel(path: Path) -> bytes:
    """The compute kernel in the middle of the file lasts 2 s."""
    file = File(path)
    rows = [i for i in file.rows("kernel") if "nccl" not in file.seen[i].name.lower()]
    row = rows[len(rows) // 2]
    file.raw[row] = _with(file.raw[row], b"dur", str(LONG_US).encode())
    return packed(file.text(), path)


def one_long_collective(path: Path) -> bytes:
    """The communication kernel in the middle of the file lasts 2 s."""
    file = File(path)
    rows = [i for i in file.rows("kernel") if "nccl" in file.seen[i].name.lower()]
    row = rows[len(rows) // 2]
    file.raw[row] = _with(file.raw[row], b"dur", str(LONG_US).encode())
    return packed(file.text(), path)


def head_removed(path: Path) -> bytes:
    """The first 30 % of the kernels are not in the file."""
    file = File(path)
    rows = file.rows("kernel")
    gone = set(rows[: int(HEAD_FRAC * len(rows))])
    file.raw = [one for i, one in enumerate(file.raw) if i not in gone]
    return packed(file.text(), path)


def middle_removed(path: Path) -> bytes:
    """30 % of the kernels in the middle are not in the file."""
    file = File(path)
    rows = file.rows("kernel")
    low = int((1 - HEAD_FRAC) / 2 * len(rows))
    gone = set(rows[low : low + int(HEAD_FRAC * len(rows))])
    file.raw = [one for i, one in enumerate(file.raw) if i not in gone]
    return packed(file.text(), path)


def cut(path: Path) -> bytes:
    """The file ends after 60 % of its bytes."""
    whole = path.read_bytes()
    return whole[: int(CUT_FRAC * len(whole))]


def cut_text(path: Path) -> bytes:
    """The text ends after 60 % of its bytes; the compressed data is whole."""
    text = unpacked(path)
    return packed(text[: int(CUT_FRAC * len(text))], path)


def clock_shifted(path: Path) -> bytes:
    """All times are 5 ms later."""
    file = File(path)
    file.raw = [_STAMP.sub(_later, one, count=1) for one in file.raw]
    return packed(file.text(), path)


def nan_durations(path: Path) -> bytes:
    """Every tenth kernel has a duration that is no number."""
    file = File(path)
    for row in file.rows("kernel")[::NAN_EVERY]:
        file.raw[row] = _with(file.raw[row], b"dur", b"NaN")
    return packed(file.text(), path)


def not_utf8(path: Path) -> bytes:
    """Every fiftieth name has bytes that are not UTF-8."""
    file = File(path)
    for row in range(0, len(file.raw), BYTES_EVERY):
        file.raw[row] = re.sub(
            rb'("name"\s*:\s*")', lambda m: m[1] + b"\xff\xfe\xc3(", file.raw[row], count=1
        )
    return packed(file.text(), path)


def starts_at_launch(path: Path) -> bytes:
    """The device's starts are those of the calls that launched the work."""
    file = File(path)
    at: dict[bytes, bytes] = {}
    for row in file.rows("cuda_runtime", "cuda_driver"):
        number, stamp = _CORRELATION.search(file.raw[row]), _STAMP.search(file.raw[row])
        if number and stamp:
            at[number[1]] = stamp[2]
    for row in file.rows(*DEVICE):
        number = _CORRELATION.search(file.raw[row])
        if number and number[1] in at:
            file.raw[row] = _with(file.raw[row], b"ts", at[number[1]])
    return packed(file.text(), path)


def empty_step(path: Path) -> bytes:
    """Of the second profiled step no work and no launch is in the file."""
    file = File(path)
    marks = [
        i for i in file.rows("user_annotation") if file.seen[i].name.startswith("ProfilerStep")
    ]
    mark = file.seen[marks[1]]
    numbers = {
        number[1]
        for row in file.rows("cuda_runtime", "cuda_driver")
        if mark.ts <= file.seen[row].ts < mark.ts + mark.dur
        and (number := _CORRELATION.search(file.raw[row]))
    }
    kept = []
    for one, seen in zip(file.raw, file.seen, strict=True):
        number = _CORRELATION.search(one)
        touched = seen.cat in (*DEVICE, "cuda_runtime", "cuda_driver")
        if not (touched and number and number[1] in numbers):
            kept.append(one)
    file.raw = kept
    return packed(file.text(), path)


#: What is done to one file of a folder.
ONE_FILE: dict[str, Callable[[Path], bytes]] = {
    made.__name__: made
    for made in (
        one_long_kernel,
        one_long_collective,
        head_removed,
        middle_removed,
        cut,
        cut_text,
        clock_shifted,
        nan_durations,
        not_utf8,
        starts_at_launch,
        empty_step,
    )
}
#: What is done to the names of the files, or to which there are.
FOLDERS = ("permuted", "renamed", "missing", "twice", "bomb")

_STAMP = re.compile(rb'("ts"\s*:\s*)([0-9.]+)')
_CORRELATION = re.compile(rb'"correlation"\s*:\s*(\d+)')


def _with(event: bytes, key: bytes, value: bytes) -> bytes:
    return re.sub(rb'("%s"\s*:\s*)[-+.\w]+' % key, lambda m: m[1] + value, event, count=1)


def _later(stamp: re.Match[bytes]) -> bytes:
    return stamp[1] + str(Decimal(stamp[2].decode()) + SHIFT_US).encode()


def corrupt(folder: Path, out: Path, name: str, rank: int = 3) -> Path:
    """Returns the folder of one variant; of its files the one at place `rank` is corrupt.

    Raises:
        KeyError: there is no variant of that name.
    """
    target = out / name
    target.mkdir(parents=True)
    files = files_of(folder)
    if name in FOLDERS:
        _renamed(files, target, name, rank % len(files))
        return target
    make = ONE_FILE[name]
    for place, path in enumerate(files):
        if place == rank % len(files):
            (target / path.name).write_bytes(make(path))
        else:
            os.symlink(path.resolve(), target / path.name)
    return target


def _renamed(files: list[Path], target: Path, name: str, rank: int) -> None:
    for place, path in enumerate(files):
        if name == "missing" and place == rank:
            continue
        if name == "bomb" and place == rank:
            write_bomb(target / f"{path.name.partition('.')[0]}.json.gz")
            continue
        called = {
            "permuted": files[(place + 1) % len(files)].name,
            "renamed": f"trace-{(7 * place + 3) % 101:03d}-of-host.{path.name.partition('.')[2]}",
        }.get(name, path.name)
        os.symlink(path.resolve(), target / called)
    if name == "twice":
        shutil.copyfile(files[rank], target / f"again-{files[rank].name}")


def write_bomb(path: Path, size: int | None = None) -> None:
    """Writes a small file that expands to a trace of `size` bytes, BOMB_BYTES where it is not said."""
    size = BOMB_BYTES if size is None else size
    event = (
        b'{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.5, '
        b'"args": {"device": 0, "stream": 7}},\n'
    )
    block = event * ((16 << 20) // len(event))
    again = gzip.compress(block, 9, mtime=0)
    with path.open("wb") as file:
        file.write(gzip.compress(b'{"schemaVersion": 1, "traceEvents": [\n', mtime=0))
        for _ in range(max(1, size // len(block))):
            file.write(again)
        file.write(gzip.compress(event.rstrip(b",\n") + b"]}", mtime=0))


def mutations(text: bytes, n: int, seed: int = 0) -> Iterator[bytes]:
    """Yields a text with 1 to 8 random changes, n times, the same ones for the same seed."""
    coin = random.Random(seed)
    for _ in range(n):
        changed = bytearray(text)
        for _ in range(coin.choice((1, 1, 1, 2, 4, 8))):
            coin.choice(_CHANGES)(changed, coin)
        yield bytes(changed)


def packed_mutations(text: bytes, n: int, seed: int = 0) -> Iterator[bytes]:
    """Yields a compressed text of which single bytes are changed, n times."""
    whole = gzip.compress(text, 6, mtime=0)
    coin = random.Random(seed)
    for _ in range(n):
        changed = bytearray(whole)
        for _ in range(coin.choice((1, 2, 8))):
            _flip(changed, coin)
        yield bytes(changed)


def _flip(text: bytearray, coin: random.Random) -> None:
    if text:
        text[coin.randrange(len(text))] = coin.randrange(256)


def _drop(text: bytearray, coin: random.Random) -> None:
    at = coin.randrange(len(text) + 1)
    del text[at : at + coin.choice((1, 10, 100, 1000))]


def _repeat(text: bytearray, coin: random.Random) -> None:
    at = coin.randrange(len(text) + 1)
    text[at:at] = text[at : at + coin.choice((1, 10, 100, 1000))]


def _insert(text: bytearray, coin: random.Random) -> None:
    at = coin.randrange(len(text) + 1)
    text[at:at] = coin.choice(
        (b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\x00", b"\xff", b"[" * 2000, b'{"a":' * 2000)
    )


def _cut(text: bytearray, coin: random.Random) -> None:
    del text[coin.randrange(len(text) + 1) :]


_NUMBER = re.compile(rb"(?<=[:\s\[])-?\d+(?:\.\d+)?")
_WORD = re.compile(rb'"[^"\\]{0,80}"')
_NUMBERS = (
    b"0", b"-1", b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"1e308", b"-1e308", b"1e999999999", b"1e-400",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616",
    b"9" * 5000, b"1.5", b"null", b"true", b'"7"', b"[]", b"{}", b"4611686018427387904", b"2147483648",
)  # fmt: skip
_WORDS = (
    b'""', b"null", b"0", b'"X"', b'"\\ud800"', b'"\xff"', b'"\\u0000"', b"[]", b"{}", b'"kernel"', b'"cpu_op"',
    b'"ProfilerStep#99999999999999999999"', b'"Optimizer.step#SGD.step"', b'"ts"', b'"args"', b'"Input Dims"',
    b'"nccl:all_reduce"', b'"cudaGraphLaunch"', b'"\x1b[31m"', b'"' + b"n" * 10_000 + b'"',
)  # fmt: skip


def _other_number(text: bytearray, coin: random.Random) -> None:
    _replace(text, coin, _NUMBER, _NUMBERS)


def _other_word(text: bytearray, coin: random.Random) -> None:
    _replace(text, coin, _WORD, _WORDS)


def _replace(
    text: bytearray, coin: random.Random, pattern: re.Pattern[bytes], values: tuple[bytes, ...]
) -> None:
    found = pattern.search(text, coin.randrange(len(text) + 1))
    if found:
        text[found.start() : found.end()] = coin.choice(values)


_CHANGES = (_flip, _flip, _drop, _repeat, _insert, _cut, *[_other_number] * 6, *[_other_word] * 4)


def main(argv: list[str] | None = None) -> int:
    """Writes the variants; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*ONE_FILE, *FOLDERS], metavar="NAME")
    parser.add_argument("--rank", type=int, default=3, help="the place of the file to be corrupted")
    parser.add_argument("--mutations", type=int, default=0, help="of that file, each a folder")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        files = files_of(given.traces)
    except OSError as error:
        print(f"{given.traces}: {error.strerror}", file=sys.stderr)
        return 2
    if not files:
        print(f"{given.traces}: no .json or .json.gz file is in it", file=sys.stderr)
        return 2
    for name in given.only or [*ONE_FILE, *FOLDERS]:
        print(corrupt(given.traces, given.out, name, given.rank))
    path = files[given.rank % len(files)]
    for i, text in enumerate(mutations(unpacked(path), given.mutations, given.seed)):
        target = given.out / f"mutation-{i:05d}" / path.name
        target.parent.mkdir(parents=True)
        target.write_bytes(packed(text, path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
