"""`flopwise report RUN`: prints a stored run again. Needs no torch and no device."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.cli.arguments import width_of
from flopwise.errors import RecordError, RunFolderError, UsageError
from flopwise.records import rank, store, verdict
from flopwise.records import run as run_record

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FILES = (
    "tune.json",
    "run.json",
)  # what makes a folder a run; the first one that is there is printed
SCHEMAS: dict[str, type] = {
    run_record.SCHEMA: run_record.RunRecord,
    verdict.SCHEMA: verdict.TuneRecord,
}
LISTED = 8  # runs or ranks that an error names


def add_parser(subparsers: Subparsers) -> None:
    """Adds the `report` command."""
    parser = subparsers.add_parser(
        "report",
        help="print a stored run again",
        description="Prints a stored run again. Needs neither torch nor a device.",
    )
    parser.add_argument(
        "record",
        metavar="RUN",
        type=Path,
        help="folder of a run (it holds run.json or tune.json), or such a file",
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument(
        "--html", metavar="PATH", help="write the report of a run as one HTML file, too"
    )
    parser.add_argument(
        "--width",
        metavar="N",
        type=width_of,
        help="columns, 40 to 200 (default: those of the terminal, 100 when piped)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 after printing the stored run to standard output.

    Raises:
        RunFolderError: there is no run at the path, or standard output cannot be written.
        RecordError: the record is damaged, of another version, or of another kind.
        UsageError: --html of a tune, or onto the record.
    """
    from flopwise.reports.stream import look, write
    from flopwise.reports.terminal import render_run, render_tune

    record = load(args.record)
    try:
        if args.html is not None:
            _write_page(args.record, record, args.html)
        if args.json:
            text = store.encode(record)
        else:
            seen = look(sys.stdout, width=args.width)
            render: Any = render_run if isinstance(record, run_record.RunRecord) else render_tune
            text = render(record, width=seen.width, color=seen.color, ascii_only=seen.ascii_only)
    except ArithmeticError as error:
        raise RecordError(
            f"{args.record}: holds a number that no run writes ({error}). It may have been edited; run again to "
            "replace it"
        ) from error
    write(sys.stdout, text)
    return 0


def _write_page(path: Path, record: run_record.RunRecord | verdict.TuneRecord, html: str) -> None:
    from flopwise.reports.html import render_html

    if not isinstance(record, run_record.RunRecord):
        raise UsageError(
            f"{path}: --html draws runs, and this is a tune. Give a run.json; nothing was written"
        )
    stored = path / "run.json" if os.path.isdir(path) else path
    if os.path.realpath(html) == os.path.realpath(stored):
        raise UsageError(f"--html {html}: that is the record itself. Nothing was written")
    store.put_text("--html", html, render_html(record))


def load(path: Path) -> run_record.RunRecord | verdict.TuneRecord:
    """Returns the record of a run folder or of a JSON file.

    Raises:
        RunFolderError: there is no run at the path.
        RecordError: the record is damaged, of another version, or of another kind.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            path = _file_in(path)
        elif not stat.S_ISREG(mode):
            raise RunFolderError(f"{path}: neither a folder nor a regular file")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunFolderError(
            f"{path}: there is no such file or folder. Give the folder that `flopwise run` named "
            "when it ended, or the run.json in it"
        ) from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error})") from error
    schema = store.schema_of(data, str(path))
    if schema not in SCHEMAS:
        raise RecordError(f"{path}: {_other(schema)}")
    record: run_record.RunRecord | verdict.TuneRecord = store.decode(
        data, SCHEMAS[schema], schema, str(path)
    )
    return record


def _other(schema: str) -> str:
    """Returns what a file of another schema is, and what to do with it."""
    kind, _, version = schema.rpartition("/")
    for known in SCHEMAS:
        if kind == known.rpartition("/")[0]:
            return (
                f"written as {kind}/{version[:20]}, and this flopwise reads {known}. "
                "Read it with the flopwise that wrote it, or update this one"
            )
    if kind == rank.SCHEMA.rpartition("/")[0]:
        return "the record of one process, not of a run. Give the folder of the run"
    return f"not a record of flopwise (schema {schema[:60]!r}). Give a run.json or a tune.json"


def _file_in(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    names = " or ".join(reversed(FILES))
    runs = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and any((path / name).is_file() for name in FILES)
    )
    if runs:
        raise RunFolderError(
            f"{folder}: no {names}, but runs inside: {_some(runs)}. Give one of them"
        )
    ranks = _ranks_in(folder)
    if ranks:
        raise RunFolderError(
            f"{folder}: no {names}, so this run ended before its ranks were put together. "
            f"There is: {_some(ranks)}. These files can be read one by one; for a report, run again"
        )
    raise RunFolderError(f"{folder}: no {names}, and no record of a rank: not the folder of a run")


def _ranks_in(folder: Path) -> list[str]:
    """Returns one phrase for each record of a rank in the folder, or one folder below."""
    found: list[tuple[int, str]] = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            record = store.read(path, rank.RankRecord, rank.SCHEMA)
        except RecordError:
            continue
        timed = sum(row.kind == "timed" for row in record.rows)
        where = path.relative_to(folder)
        found.append(
            (
                record.rank,
                f"rank {record.rank} of {record.world_size}, {record.status}, "
                f"{timed} timed steps ({where})",
            )
        )
    return [phrase for _, phrase in sorted(found)]


def _some(phrases: list[str]) -> str:
    rest = len(phrases) - LISTED
    return "; ".join(phrases[:LISTED]) + (f"; and {rest} more" if rest > 0 else "")
