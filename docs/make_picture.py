"""Draws a stored run as an SVG picture for the documents.

python docs/make_picture.py runs/2026-11-30-1412/run.json docs/images/run.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.records import store
from flopwise.records.run import SCHEMA, RunRecord
from flopwise.reports.picture import render_svg


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 when the record cannot be read or the picture cannot be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path, help="a run.json")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--width", type=int, default=100, help="cells (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        record = store.read(args.record, RunRecord, SCHEMA)
        store.write_text(args.picture, render_svg(record, width=args.width))
    except FlopwiseError as error:
        print(f"make_picture: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
