"""Takes in a log of NCCL line by line.

What a line says of no interest here is passed over; a line of NCCL's that begins as a known one and cannot be read is counted.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator

from flopwise.trace import nccl_patterns as patterns
from flopwise.trace.nccl_communicators import MOST_KEPT, Communicators, Kept, Speaker
from flopwise.trace.nccl_records import (
    Choice,
    Communicator,
    NcclLog,
    Operation,
    Warned,
)

#: So many different warnings, variables, choices and operations are kept, and the others counted.
MOST_WARNINGS = 1_000
#: So many variables that differ between ranks are named.
MOST_DIFFERING = 16


class Reader:
    """Takes in a log line by line."""

    def __init__(self) -> None:
        self.lines = self.nccl_lines = 0
        self._kept = Kept()
        self._communicators = Communicators(self._kept)
        self._versions: dict[str, None] = {}
        self._cuda: dict[str, None] = {}
        self._hosts: dict[str, None] = {}
        self._networks: dict[str, None] = {}
        self._nvls: bool | None = None
        self._environment: dict[str, dict[str, None]] = {}
        self._warned: dict[tuple[str, str], list[int | str]] = {}
        self._choices: dict[tuple[str, str, str], list[int]] = {}
        self._operations: dict[tuple[str, str, int], list[int]] = {}

    def line(self, line: str) -> None:
        """Takes in one line."""
        self.lines += 1
        if "NCCL" not in line:
            return
        for part in _unpacked(line):
            self._line(patterns.COLOUR.sub("", part).rstrip())

    def _line(self, line: str) -> None:
        version = patterns.VERSION.search(line)
        if version is not None:
            self._note(self._versions, version[1])
        found = list(
            itertools.islice(patterns.PREFIX.finditer(line), 64)
        )  # several where ranks write at once
        if not found:
            sign = patterns.SIGN.search(line)
            self.nccl_lines += sign is not None
            self._kept.unreadable += sign is not None and version is None
            return
        self.nccl_lines += 1
        for match, following in itertools.zip_longest(found, found[1:]):
            end = following.start() if following is not None else len(line)
            self._message(match, line[match.end() : end].strip())

    def _message(self, match: re.Match[str], text: str) -> None:
        host = match["host"]
        if host not in self._hosts and match.start():  # the rest of another line may be before it
            ends = (host[k:] for k in range(1, len(host)))
            host = next((end for end in ends if end in self._hosts), host)
        self._note(self._hosts, host)
        speaker = Speaker(host, int(match["pid"]), int(match["tid"]), int(match["device"]))
        if not text.startswith("Trees"):
            text = text[: patterns.LONGEST_MESSAGE]
        if match["level"] == "WARN":
            self._warning(speaker, match["where"].strip(), text)
        elif (
            match["level"] == "INFO"
            and not self._read(speaker, text)
            and patterns.KNOWN.match(text)
        ):
            self._kept.unreadable += 1

    def _note(self, into: dict[str, None], value: str) -> None:
        if value in into:
            return
        if len(into) >= MOST_KEPT:
            self._kept.unkept += 1
        else:
            into[value] = None

    def _read(self, speaker: Speaker, text: str) -> bool:
        """Takes in one message; returns whether it is one of interest."""
        if text.startswith("Channel"):
            return self._communicators.channel(speaker, text)
        if text.startswith("Trees"):
            return self._communicators.trees(speaker, text)
        if text.startswith("CollNet"):
            return self._communicators.collnet(speaker, text)
        for pattern, take in self._PLAIN:
            match = pattern.match(text)
            if match is not None:
                take(self, speaker, match)
                return True
        return False

    # ------------------------------------------------------------------ other lines

    def _init(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._communicators.init(speaker, match)

    def _ready(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._communicators.ready(speaker, int(match["rank"]), int(match["n"]))

    def _counts(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._communicators.counts(speaker, match)

    def _set(self, speaker: Speaker, match: re.Match[str]) -> None:
        value = patterns.NOT_SHOWN.sub(" ", match["value"]).strip().removesuffix(".")
        values = self._environment.get(match["name"])
        if values is None:
            if len(self._environment) >= MOST_WARNINGS:
                self._kept.unkept += 1
                return
            values = self._environment[match["name"]] = {}
        if len(values) < 64:
            values[value] = None
        elif value not in values:
            self._kept.unkept += 1

    def _warning(self, speaker: Speaker, where: str, text: str) -> None:
        text = patterns.NOT_SHOWN.sub(" ", text)[:1000]
        spot = patterns.SPOT.search(patterns.NOT_SHOWN.sub(" ", where))
        where = spot[1] if spot is not None else ""
        key = where, re.sub(r"0x[0-9a-f]+|\d+", "#", text)  # of one kind, whatever the numbers are
        old = self._warned.get(key)
        if old is not None:
            old[0] = int(old[0]) + 1
        elif len(self._warned) < MOST_WARNINGS:
            self._warned[key] = [1, text, speaker.host]
        else:
            self._kept.unkept += 1

    def _network(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._note(self._networks, match[1])

    def _multicast(self, speaker: Speaker, match: re.Match[str]) -> None:
        self._nvls = (match[1] is None) and self._nvls is not False

    def _driver(self, speaker: Speaker, match: re.Match[str]) -> None:
        number = int(match[1])
        self._note(self._cuda, f"{number // 1000}.{number % 1000 // 10}")

    def _choice(self, speaker: Speaker, match: re.Match[str]) -> None:
        key = (
            match["op"] or "",
            patterns.named(match["algorithm"], patterns.ALGORITHMS),
            patterns.named(match["protocol"], patterns.PROTOCOLS),
        )
        n = int(match["bytes"])
        channels = int(match["high"]) - int(match["low"]) + 1 if match["high"] else -1
        old = self._choices.get(key)
        if old is not None:
            old[:] = [old[0] + 1, min(old[1], n), max(old[2], n), max(old[3], channels)]
        elif len(self._choices) < MOST_WARNINGS:
            self._choices[key] = [1, n, n, channels]
        else:
            self._kept.unkept += 1

    def _operation(self, speaker: Speaker, match: re.Match[str]) -> None:
        number = int(match["type"])
        name, size = (
            patterns.DATATYPES[number]
            if number < len(patterns.DATATYPES)
            else (f"type {number}", 0)
        )
        key = match["op"], name, int(match["n"] or -1)
        old = self._operations.get(key)
        nbytes = size * int(match["count"])
        if old is not None:
            old[:] = [old[0] + 1, old[1] + nbytes]
        elif len(self._operations) < MOST_WARNINGS:
            self._operations[key] = [1, nbytes]
        else:
            self._kept.unkept += 1

    _PLAIN: tuple[tuple[re.Pattern[str], Callable[[Reader, Speaker, re.Match[str]], None]], ...] = (
        (patterns.INIT, _init),
        (patterns.READY, _ready),
        (patterns.COUNTS, _counts),
        (patterns.SET, _set),
        (patterns.CHOICE, _choice),
        (patterns.CALL, _operation),
        (patterns.NETWORK, _network),
        (patterns.NVLS, _multicast),
        (patterns.CUDA, _driver),
    )

    # ------------------------------------------------------------------ the result

    def log(self, path: str, ends_early: str | None) -> NcclLog:
        """Returns what was taken in."""
        comms = self._communicators.records()
        warned = [
            Warned(str(text), where, int(count), str(host))
            for (where, _), (count, text, host) in self._warned.items()
        ]
        return NcclLog(
            path=path,
            versions=tuple(self._versions),
            cuda_versions=tuple(self._cuda),
            hosts=tuple(self._hosts),
            communicators=tuple(comms),
            connections=tuple(self._communicators.connections),
            networks=tuple(self._networks),
            nvls=self._nvls,
            environment={name: tuple(values) for name, values in self._environment.items()},
            warnings=tuple(sorted(warned, key=lambda one: -one.count)),
            choices=tuple(
                Choice(*key, calls, low, high, channels if channels > 0 else None)
                for key, (calls, low, high, channels) in self._choices.items()
            ),
            operations=tuple(
                Operation(op, kind, n if n > 0 else None, calls, nbytes)
                for (op, kind, n), (calls, nbytes) in self._operations.items()
            ),
            lines=self.lines,
            nccl_lines=self.nccl_lines,
            unreadable=self._kept.unreadable,
            unkept=self._kept.unkept,
            ends_early=ends_early,
            notes=tuple(self._notes(comms)),
        )

    def _notes(self, comms: list[Communicator]) -> Iterator[str]:
        if len(self._versions) > 1:
            yield f"ranks run different versions of NCCL: {', '.join(list(self._versions)[:4])}"
        differ = [(name, list(of)) for name, of in self._environment.items() if len(of) > 1]
        for name, values in differ[:MOST_DIFFERING]:
            said = ", ".join(value[:100] for value in values[:4])
            yield f"{name} is not the same on all ranks: {said}"
        if len(differ) > MOST_DIFFERING:
            yield f"{len(differ) - MOST_DIFFERING} more variables are not the same on all ranks"
        if not comms:
            yield "no communicator is in the log: NCCL_DEBUG=INFO with the subsystem INIT says so"
        if self._kept.unkept:
            yield f"{self._kept.unkept} communicators, connections and warnings are beyond the limits of what is kept, and not counted"


def _unpacked(line: str) -> list[str]:
    """Returns the lines in an object of JSON, as collectors of logs write them; any other line as it is."""
    if not line.lstrip().startswith("{"):
        return [line]
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    texts = [text for text in said.values() if isinstance(text, str) and "NCCL" in text]
    return [one for text in texts[:1] for one in text.splitlines()]
