"""`flopwise analyze PATH...`: the ledger of a trace that a profiler recorded, or of a job by the traces of its ranks.

Needs no torch and no device.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.cli.report import _width
from flopwise.errors import UsageError

if TYPE_CHECKING:
    from flopwise.diagnosis.ledger.build import Given
    from flopwise.diagnosis.ranks.summary import RankSummary
    from flopwise.hardware.accelerators import Peak
    from flopwise.records.ledger import LedgerRecord
    from flopwise.trace.chrome import Trace
    from flopwise.trace.sources import Sources

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

QUIET_S = 2.0  # reading that takes longer says how far it is
EVERY_S = 0.5


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `analyze` command."""
    parser = subparsers.add_parser(
        "analyze",
        help="where the time of recorded traces goes",
        description="Reads the traces of a job: of the PyTorch profiler (.json or .json.gz), of Nsight Systems (SQLite exports), or "
        "a run folder of flopwise. Of one file it divides the steps of one device into lines that sum to them; of a folder, or of "
        "several files, it also lays the ranks on one another: health, collectives, waiting, stragglers. Needs neither torch nor a "
        "device.",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        nargs="+",
        help="the trace of one process, several of them, or a folder of them",
    )
    parser.add_argument(
        "--device", metavar="N", type=int, help="device in the trace (default: the busiest)"
    )
    parser.add_argument(
        "--peak",
        metavar="RATE",
        help="peak FLOP/s of the device, e.g. 989.5T or bf16=989.5T (default: by its exact name)",
    )
    parser.add_argument(
        "--no-ledger",
        action="store_true",
        help="of several ranks: health, collectives, waiting and stragglers alone, in less than half the time",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="read the ranks on a Ray cluster that sees the same files: HOST:PORT, auto, or local (needs flopwise[ray])",
    )
    parser.add_argument(
        "--json", metavar="PATH", type=Path, help="write what was found as JSON, too (- for stdout)"
    )
    parser.add_argument("--html", metavar="PATH", help="write the report as one HTML file, too")
    parser.add_argument(
        "--perfetto",
        metavar="PATH",
        type=Path,
        help="write a copy of the trace with steps, lines, idle time and findings as tracks for ui.perfetto.dev (one trace; .gz: "
        "compressed)",
    )
    parser.add_argument(
        "--tables",
        metavar="FOLDER",
        type=Path,
        help="write events (of one trace), the ledger's lines by step and the calls as Parquet files (needs flopwise[tables])",
    )
    parser.add_argument(
        "--width",
        metavar="N",
        type=_width,
        help="columns, 40 to 200 (default: those of the terminal, 100 when piped)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 after printing what was found, 1 where a file was read in part only.

    Raises:
        TraceError: the file cannot be read, or is no trace.
        LedgerError: it has no work of a device.
        SourceError: there is nothing to be read, or two files are of one rank.
        RunFolderError: the ledger or its report cannot be written.
        UsageError: the peak is no rate, or what is written would replace a trace.
    """
    from flopwise.hardware.accelerators import parse_peak
    from flopwise.trace.sources import SourceError, find

    peak = parse_peak(args.peak) if args.peak is not None else None
    _check_targets(args)
    if len(args.path) > 1 or os.path.isdir(args.path[0]) or args.no_ledger or args.ray is not None:
        return _several(args, peak, find(args.path))
    try:
        sources = find(args.path)
    except SourceError:
        return _one(args, peak)  # whose reader says best what is wrong with it
    if [one.kind for one in sources] in ([], ["kineto"]):
        return _one(args, peak)
    return _several(args, peak, sources)


def _one(args: argparse.Namespace, peak: Peak | None) -> int:
    """Reports the trace of one process."""
    from flopwise.diagnosis.ledger.build import Given
    from flopwise.diagnosis.ranks.collect import Wanted, summary_of
    from flopwise.diagnosis.ranks.job import job_of
    from flopwise.errors import FlopwiseError
    from flopwise.records import store
    from flopwise.reports.terminal import render_ledger
    from flopwise.trace.chrome import read

    path = args.path[0]
    progress = Progress(path.name) if sys.stderr.isatty() else None
    try:
        trace = read(path, progress)
    finally:
        if progress is not None:
            progress.end()
    given = Given(peak=peak)
    found = summary_of(trace, Wanted(str(path), None, None, args.device, given))
    if found.ledger is None:
        raise FlopwiseError(found.reason or f"{path}: there is no ledger")
    record = found.ledger
    written = []
    if args.perfetto is not None:
        written.append(_perfetto(args, trace, given, record))
    if args.tables is not None:
        written += _tables(args, [found], trace)

    def text() -> str:
        return store.encode_together(record, job_of([found]))

    def page() -> str:
        from flopwise.reports.html import render_ledger_html

        return render_ledger_html(record)

    def shown(**how: Any) -> str:
        return render_ledger(record, **how)

    return _put(args, text, page, shown, written, partial=trace.damage.ends_early is not None)


def _perfetto(args: argparse.Namespace, trace: Trace, given: Given, record: LedgerRecord) -> str:
    """Writes the copy with tracks; returns its path."""
    from flopwise.diagnosis.ledger.build import take, tracks_of
    from flopwise.reports.perfetto import annotated

    bounds, lines, idle = tracks_of(take(trace, args.device, given))
    annotated(
        args.path[0],
        args.perfetto,
        bounds_ns=bounds,
        lines=lines,
        findings=record.findings,
        idle=idle,
    )
    return str(args.perfetto)


def _tables(
    args: argparse.Namespace, ranks: Sequence[RankSummary], trace: Trace | None
) -> list[str]:
    """Writes the Parquet files; returns their paths."""
    from flopwise.diagnosis.ranks.columns import calls, lines
    from flopwise.reports.tables import write_tables

    written = write_tables(
        args.tables,
        events=None if trace is None else trace.events,
        lines=lines(ranks),
        calls=calls(ranks),
    )
    return [str(path) for path in written]


def _several(args: argparse.Namespace, peak: Peak | None, sources: Sources) -> int:
    """Reports a job by the traces of its ranks."""
    from flopwise.errors import FlopwiseError
    from flopwise.measurement.jobs import conclude, read_ranks
    from flopwise.records import store
    from flopwise.reports.terminal import render_job

    _check_one(args, sources)
    told = Ranks() if sys.stderr.isatty() else None
    with contextlib.ExitStack() as stack:
        if told is not None:
            stack.callback(told.end)
        executor = None
        if args.ray is not None:
            from flopwise.measurement.cluster import Ray

            executor = stack.enter_context(Ray(args.ray))
        ranks = read_ranks(
            sources,
            device=args.device,
            peak=peak,
            ledgers=not args.no_ledger,
            executor=executor,
            told=told,
        )
        if args.device is not None and ranks and ranks[0].device is None:
            raise FlopwiseError(f"--device {args.device}: {ranks[0].reason}")
        record = conclude(sources, ranks)

    def text() -> str:
        return store.encode(record)

    def page() -> str:
        from flopwise.reports.html import render_job_html

        return render_job_html(record)

    def shown(**how: Any) -> str:
        return render_job(record, **how)

    written = [] if args.tables is None else _tables(args, ranks, None)
    partial = not args.no_ledger and any(one.ledger is None for one in record.ranks)
    return _put(args, text, page, shown, written, partial=partial)


def _check_one(args: argparse.Namespace, sources: Sources) -> None:
    """Checks the options that ask something of one trace alone.

    Raises:
        UsageError: that is not what there is.
    """
    from flopwise.measurement.jobs import TRACES

    kinds = [one.kind for one in sources if one.kind in TRACES]
    if args.device is not None:
        if len(kinds) > 1:
            raise UsageError("--device chooses in one trace: give the file of one rank")
        if kinds == ["run"]:
            raise UsageError("--device chooses in a trace: a run folder has one device a rank")
    if args.perfetto is not None:
        if len(kinds) > 1:
            raise UsageError("--perfetto copies one trace: give the file of one rank")
        if args.no_ledger:
            raise UsageError("--perfetto draws the ledger's lines: leave out --no-ledger")
        raise UsageError(
            "--perfetto copies the file of one trace of the PyTorch profiler: give that"
        )


def _put(
    args: argparse.Namespace,
    text: Callable[[], str],
    page: Callable[[], str],
    shown: Callable[..., str],
    written: list[str],
    *,
    partial: bool,
) -> int:
    """Writes what --json and --html ask for, and prints the report; returns the exit code."""
    from flopwise.records import store
    from flopwise.reports.stream import look, write

    saved = [*written]
    if args.html is not None:
        store.put_text("--html", args.html, page())
        saved.append(args.html)
    if str(args.json) == "-":
        write(sys.stdout, text())
        return int(partial)
    if args.json is not None:
        store.put_text("--json", str(args.json), text())
        saved.append(str(args.json))
    seen = look(sys.stdout, width=args.width)
    how = {"width": seen.width, "color": seen.color, "ascii_only": seen.ascii_only}
    write(sys.stdout, shown(**how, saved=saved))
    return int(partial)


def _check_targets(args: argparse.Namespace) -> None:
    """Checks that nothing is written over a trace, nor twice to one file.

    Raises:
        UsageError: it would be.
    """
    taken = {os.path.realpath(path): "the trace itself" for path in args.path}
    folders = [os.path.realpath(path) for path in args.path if os.path.isdir(path)]
    options = (("--json", args.json), ("--html", args.html), ("--perfetto", args.perfetto))
    for option, target in options:
        if target is None or str(target) == "-" or not _is_file_or_new(target):
            continue
        path = os.path.realpath(target)
        if path in taken:
            raise UsageError(f"{option} {target}: that is {taken[path]}. Nothing was written")
        if os.path.exists(path) and any(path.startswith(folder + os.sep) for folder in folders):
            raise UsageError(
                f"{option} {target}: that file lies among the traces, and would be replaced. Give another path; nothing was "
                "written"
            )
        taken[path] = f"what {option} names"


def _is_file_or_new(target: str | Path) -> bool:
    return os.path.isfile(target) or not os.path.exists(target)


class _Told:
    """A line on standard error that says how far something is, once it takes long."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._shown = False

    def _due(self, *, last: bool = False) -> bool:
        """Whether it is time to say it: not at first, and not where it was said just now, but for the last time."""
        now = time.monotonic()
        if now - self._began <= QUIET_S or (now - self._told <= EVERY_S and not last):
            return False
        self._told, self._shown = now, True
        return True

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._shown:
            print(file=sys.stderr, flush=True)


class Progress(_Told):
    """Tells how many bytes of a file were read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __call__(self, n_bytes: int) -> None:
        """Says how many bytes were read so far, unless it was said just now."""
        if not self._due():
            return
        rate = n_bytes / (self._told - self._began) / 1e6
        from flopwise.reports.screen import visible

        text = f"\r{visible(self._name, ascii_only=True)}: {n_bytes / 1e6:.0f} MB read, {rate:.0f} MB/s "
        print(text, end="", file=sys.stderr, flush=True)


class Ranks(_Told):
    """Tells how many ranks were read."""

    def __call__(self, done: int, of: int) -> None:
        """Says how many are done, unless it was said just now."""
        if self._due(last=done == of):
            print(f"\r{done} of {of} ranks read ", end="", file=sys.stderr, flush=True)
