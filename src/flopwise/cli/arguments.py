"""What several commands take: a number of columns, and files to be written that replace nothing."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def width_of(text: str) -> int:
    """Returns the number of columns of a report.

    Raises:
        argparse.ArgumentTypeError: it is no number from 40 to 200.
    """
    if not (text.isascii() and text.isdigit() and 40 <= int(text) <= 200):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of columns from 40 to 200")
    return int(text)


def is_file_or_new(target: str | Path) -> bool:
    """Whether a path to be written is a file or not there yet: no device, pipe or folder."""
    return os.path.isfile(target) or not os.path.exists(target)
