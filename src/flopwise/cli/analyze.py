"""`flopwise analyze PATH...`: the ledger of a trace that a profiler recorded, or of a job by the traces of its ranks.

Needs no torch and no device.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.cli.arguments import is_file_or_new, width_of
from flopwise.cli.progress import Progress, Ranks
from flopwise.errors import UsageError

if TYPE_CHECKING:
    from flopwise.diagnosis.ledger.build import Taken
    from flopwise.diagnosis.ranks.summary import RankSummary
    from flopwise.hardware.accelerators import Peak
    from flopwise.records.ledger import LedgerRecord
    from flopwise.trace.chrome import Trace
    from flopwise.trace.source import Source, Sources

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


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
        type=width_of,
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
    ranks = _of_device(sources, args.device)
    if [one.kind for one in ranks] in ([], ["kineto"], ["nsys"]):
        return _one(args, peak, ranks[0] if ranks else None)
    return _several(args, peak, sources)


def _of_device(sources: Sources, device: int | None) -> Sequence[Source]:
    """Returns the sources, of an export with several ranks the one of the device that is asked for.

    Raises:
        UsageError: no rank of it, or several, ran on that device.
    """
    of = [one.process.device for one in sources if one.process is not None]
    if device is None or not of or len(of) < len(sources):
        return sources
    if of.count(device) != 1:
        raise UsageError(
            f"--device {device}: of the {len(of)} ranks in {sources[0].path} {of.count(device) or 'none'} ran on it. They ran on "
            f"{', '.join(map(str, sorted(of)))}"
        )
    return [one for one in sources if one.process is not None and one.process.device == device]


def _one(args: argparse.Namespace, peak: Peak | None, source: Source | None = None) -> int:
    """Reports the trace of one process, as the PyTorch profiler writes it or as an export of Nsight Systems."""
    from flopwise.diagnosis.ledger.build import Given, take
    from flopwise.diagnosis.ranks.collect import Wanted, summary_of_taken
    from flopwise.diagnosis.ranks.job import job_of
    from flopwise.errors import FlopwiseError
    from flopwise.records import store
    from flopwise.reports.terminal import render
    from flopwise.trace.chrome import read
    from flopwise.trace.nsys import notes_of, read_nsys

    path = args.path[0]
    export = source is not None and source.kind == "nsys"
    key = None if source is None or source.process is None else source.process.key
    if export and args.perfetto is not None:
        raise UsageError(
            f"--perfetto copies traces of the PyTorch profiler: {path} is an export of Nsight Systems, which nsys-ui shows"
        )
    progress = Progress(path.name) if sys.stderr.isatty() else None
    try:
        trace = read_nsys(path, progress, key) if export else read(path, progress)
    finally:
        if progress is not None:
            progress.end()
    given = Given(peak=peak)
    taken = take(trace, args.device, given)
    found = summary_of_taken(trace, taken, Wanted(str(path), None, None, args.device, given))
    if found.ledger is None:
        raise FlopwiseError(found.reason or f"{path}: there is no ledger")
    record = found.ledger
    record.notes.extend(notes_of(trace))
    written = []
    if args.perfetto is not None:
        written.append(_perfetto(args, taken, record))
    if args.tables is not None:
        written += _tables(args, [found], trace)

    def text() -> str:
        return store.encode_together(record, job_of([found]))

    def page() -> str:
        from flopwise.reports.html import render_ledger_html

        return render_ledger_html(record)

    def shown(**how: Any) -> str:
        return render(record, **how)

    return _put(args, text, page, shown, written, partial=trace.damage.ends_early is not None)


def _perfetto(args: argparse.Namespace, taken: Taken, record: LedgerRecord) -> str:
    """Writes the copy with tracks; returns its path."""
    from flopwise.diagnosis.ledger.build import tracks_of
    from flopwise.reports.perfetto import annotated

    bounds, lines, idle = tracks_of(taken)
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
    from flopwise.reports.terminal import render

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
        return render(record, **how)

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
        if target is None or str(target) == "-" or not is_file_or_new(target):
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
