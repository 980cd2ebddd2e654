"""`flopwise compare OLD NEW`: two measurements held against each other. Needs no torch and no device."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flopwise.cli.arguments import is_file_or_new, width_of
from flopwise.cli.progress import Progress
from flopwise.errors import UsageError

if TYPE_CHECKING:
    from flopwise.diagnosis.comparison.sides import Measured
    from flopwise.hardware.accelerators import Peak

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `compare` command."""
    parser = subparsers.add_parser(
        "compare",
        help="what became of a step from one measurement to another",
        description="Holds two measurements of a training step against each other, line by line, with what so few steps can "
        "show. Each is a trace of the PyTorch profiler (.json or .json.gz) or of Nsight Systems (a SQLite export), a folder of "
        "the traces of a job, the folder of a run, or a record that --json of run or analyze wrote. Returns 1 where a limit of --fail-above was passed. Needs neither torch nor a device.",
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="what it was before")
    parser.add_argument("new", metavar="NEW", type=Path, help="what it is now")
    parser.add_argument(
        "--fail-above",
        metavar="LIMIT",
        action="append",
        default=[],
        help="return 1 if the step got longer by more than that, as its whole interval says: 5%% or 2ms. Or a line of "
        "the ledger: idle_input=10%%, gemm_excess=0.5ms. May be given several times",
    )
    parser.add_argument(
        "--fail-unclear",
        action="store_true",
        help="return 1 also where these steps cannot tell whether a limit was passed",
    )
    parser.add_argument(
        "--peak",
        metavar="RATE",
        help="peak FLOP/s of the device of a trace, e.g. 989.5T or bf16=989.5T (default: by its exact name)",
    )
    parser.add_argument(
        "--json", metavar="PATH", type=Path, help="write the comparison as JSON, too (- for stdout)"
    )
    parser.add_argument("--html", metavar="PATH", help="write the report as one HTML file, too")
    parser.add_argument(
        "--width",
        metavar="N",
        type=width_of,
        help="columns, 40 to 200 (default: those of the terminal, 100 when piped)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 after printing the comparison, 1 where a limit was passed.

    Raises:
        ComparisonError: there is nothing to compare at a path.
        RecordError, TraceError, LedgerError: what is there cannot be read.
        RunFolderError: the comparison or its report cannot be written.
        UsageError: a limit or the peak is none, or what is written would replace a side.
    """
    from flopwise.diagnosis.comparison.compare import compare
    from flopwise.diagnosis.comparison.gates import parse_gate
    from flopwise.diagnosis.comparison.sides import ComparisonError
    from flopwise.hardware.accelerators import parse_peak
    from flopwise.records import store
    from flopwise.reports.html import render_comparison_html
    from flopwise.reports.stream import look, write
    from flopwise.reports.terminal import render

    gates = [parse_gate(text) for text in args.fail_above]
    if args.fail_unclear and not gates:
        raise UsageError("--fail-unclear: of what? Give a limit with --fail-above")
    peak = parse_peak(args.peak) if args.peak is not None else None
    _check_targets(args)
    try:
        sides = [_measured(path, peak) for path in (args.old, args.new)]
        record = compare(sides[0], sides[1], gates, fail_unclear=args.fail_unclear)
        text = store.encode(record)
        seen = look(sys.stdout, width=args.width)
        page = render_comparison_html(record) if args.html is not None else ""
        saved = [args.html] if args.html is not None else []
        saved += [str(args.json)] if args.json is not None else []
        report = render(
            record, width=seen.width, color=seen.color, ascii_only=seen.ascii_only, saved=saved
        )
    except (ArithmeticError, ValueError) as error:
        raise ComparisonError(
            f"{args.old} and {args.new}: hold numbers that no measurement gives ({error}). One may have been edited"
        ) from error
    if args.html is not None:
        store.put_text("--html", args.html, page)
    if str(args.json) == "-":
        write(sys.stdout, text)
        return int(record.failed)
    if args.json is not None:
        store.put_text("--json", str(args.json), text)
    write(sys.stdout, report)
    return int(record.failed)


def _measured(path: Path, peak: Peak | None) -> Measured:
    from flopwise.diagnosis.comparison.sides import measured, of_job
    from flopwise.trace.source_search import ranks_of_export

    if _is_a_job(path) or ranks_of_export(path):
        from flopwise.measurement.jobs import conclude, read_ranks
        from flopwise.trace.sources import find

        sources = find([path])
        return of_job(conclude(sources, read_ranks(sources, peak=peak)), str(path))
    progress = Progress(path.name) if sys.stderr.isatty() else None
    try:
        return measured(path, peak, progress)
    finally:
        if progress is not None:
            progress.end()


def _is_a_job(path: Path) -> bool:
    """Whether a path is a folder that can be one of ranks' traces: neither a run nor a tune, nor a folder of runs."""
    try:
        return (
            path.is_dir()
            and not any((path / name).is_file() for name in ("run.json", "tune.json"))
            and not any(path.glob("*/run.json"))
        )
    except OSError:
        return False


def _check_targets(args: argparse.Namespace) -> None:
    """Checks that nothing is written over what is compared, nor twice to one file.

    Raises:
        UsageError: it would be.
    """
    from flopwise.records.rank import PROFILE_FOLDER

    taken = {}
    folders: list[str] = []  # whose files are what is compared: of a run its report may be replaced
    for path in (args.old, args.new):
        record = path / "run.json" if os.path.isdir(path) else path
        taken[os.path.realpath(record)] = f"{path} itself"
        kept = (path,) if _is_a_job(path) else (path / "ranks", path / PROFILE_FOLDER)
        folders += [os.path.realpath(one) for one in kept]
    for option, target in (("--json", args.json), ("--html", args.html)):
        if target is None or str(target) == "-" or not is_file_or_new(target):
            continue
        written = os.path.realpath(target)
        if written in taken:
            raise UsageError(f"{option} {target}: that is {taken[written]}. Nothing was written")
        if os.path.exists(written) and any(
            written.startswith(folder + os.sep) for folder in folders
        ):
            raise UsageError(
                f"{option} {target}: that file lies among what is compared, and would be replaced. Give another path; nothing "
                "was written"
            )
        taken[written] = f"what {option} names"
