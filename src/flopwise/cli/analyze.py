"""`flopwise analyze TRACE`: the ledger of a trace that a profiler recorded. Needs no torch and no device."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flopwise.cli.report import _width
from flopwise.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

QUIET_S = 2.0  # reading that takes longer says how far it is
EVERY_S = 0.5


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `analyze` command."""
    parser = subparsers.add_parser(
        "analyze",
        help="where the time of a recorded trace goes",
        description="Reads a trace of the PyTorch profiler (.json or .json.gz) and divides the steps of one device "
        "into lines that sum to them. Needs neither torch nor a device.",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the file of one process")
    parser.add_argument(
        "--device", metavar="N", type=int, help="device in the trace (default: the busiest)"
    )
    parser.add_argument(
        "--peak",
        metavar="RATE",
        help="peak FLOP/s of the device, e.g. 989.5T or bf16=989.5T (default: by its exact name)",
    )
    parser.add_argument(
        "--json", metavar="PATH", type=Path, help="write the ledger as JSON, too (- for stdout)"
    )
    parser.add_argument("--html", metavar="PATH", help="write the report as one HTML file, too")
    parser.add_argument(
        "--width",
        metavar="N",
        type=_width,
        help="columns, 40 to 200 (default: those of the terminal, 100 when piped)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 after printing the ledger, 1 where the file was read in part only.

    Raises:
        TraceError: the file cannot be read, or is no trace.
        LedgerError: it has no work of a device.
        RunFolderError: the ledger or its report cannot be written.
        UsageError: the peak is no rate, or what is written would replace the trace.
    """
    from flopwise.diagnosis.ledger.build import Given, ledger
    from flopwise.hardware.accelerators import parse_peak
    from flopwise.records import store
    from flopwise.reports.stream import look, write
    from flopwise.reports.terminal import render_ledger
    from flopwise.trace.chrome import read

    peak = parse_peak(args.peak) if args.peak is not None else None
    _check_targets(args)
    progress = Progress(args.trace.name) if sys.stderr.isatty() else None
    try:
        trace = read(args.trace, progress)
    finally:
        if progress is not None:
            progress.end()
    record = ledger(trace, args.device, Given(peak=peak))
    partial = trace.damage.ends_early is not None
    saved = []
    if args.html is not None:
        from flopwise.reports.html import render_ledger_html

        store.put_text("--html", args.html, render_ledger_html(record))
        saved.append(args.html)
    if str(args.json) == "-":
        write(sys.stdout, store.encode(record))
        return int(partial)
    if args.json is not None:
        store.put_text("--json", str(args.json), store.encode(record))
        saved.append(str(args.json))
    seen = look(sys.stdout, width=args.width)
    text = render_ledger(
        record, width=seen.width, color=seen.color, ascii_only=seen.ascii_only, saved=saved
    )
    write(sys.stdout, text)
    return int(partial)


def _check_targets(args: argparse.Namespace) -> None:
    """Checks that nothing is written over the trace, nor twice to one file.

    Raises:
        UsageError: it would be.
    """
    taken = {os.path.realpath(args.trace): "the trace itself"}
    for option, target in (("--json", args.json), ("--html", args.html)):
        if target is None or str(target) == "-" or not _is_file_or_new(target):
            continue
        path = os.path.realpath(target)
        if path in taken:
            raise UsageError(f"{option} {target}: that is {taken[path]}. Nothing was written")
        taken[path] = f"what {option} names"


def _is_file_or_new(target: str | Path) -> bool:
    return os.path.isfile(target) or not os.path.exists(target)


class Progress:
    """Tells on standard error how far reading is, once it takes long."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = self._told = time.monotonic()
        self._shown = False

    def __call__(self, n_bytes: int) -> None:
        """Says how many bytes were read so far, unless it was said just now."""
        now = time.monotonic()
        if now - self._began <= QUIET_S or now - self._told <= EVERY_S:
            return
        self._told, self._shown = now, True
        rate = n_bytes / (now - self._began) / 1e6
        from flopwise.reports.screen import visible

        text = f"\r{visible(self._name, ascii_only=True)}: {n_bytes / 1e6:.0f} MB read, {rate:.0f} MB/s "
        print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._shown:
            print(file=sys.stderr, flush=True)
