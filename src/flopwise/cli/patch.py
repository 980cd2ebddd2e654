"""`flopwise patch`: a plan as a unified diff of the script."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flopwise.errors import RunFolderError, UsageError

if TYPE_CHECKING:
    from flopwise.patching import Patch
    from flopwise.patching.outcome import Outcome


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "patch",
        help="write a plan's fixes as a diff of the script",
        description="Prints a unified diff that writes the fixes of a plan into the script: loader arguments, optimizer "
        "flags, precision, layout, compilation. The script is not touched: apply the diff with patch -p1 or git apply. "
        "What cannot be placed for certain is named on stderr, with the lines to add by hand. Needs libcst: "
        "pip install 'flopwise[patch]'.",
    )
    parser.add_argument("plan", metavar="PLAN", type=Path, help="plan.toml of a tune")
    parser.add_argument("script", metavar="SCRIPT", help="the script that was tuned")
    parser.add_argument(
        "--out", metavar="FILE", help="write the diff there (default: to standard output)"
    )
    parser.add_argument(
        "--force-plan",
        action="store_true",
        help="go on although the plan was made for another script, or for this one before it changed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 once the diff is written, also where it is empty.

    Raises:
        UsageError: libcst is not installed, or --out is the script or the plan.
        PlanError: the plan cannot be read, or is another script's.
        PatchError: the script cannot be read, or is not Python.
    """
    from flopwise import plans

    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "this command needs libcst, which is not installed here. Install it with: pip install 'flopwise[patch]'. "
            "flopwise run --plan applies a plan without it. Nothing was written"
        ) from error
    from flopwise.patching import patch

    plan = plans.load(arguments.plan)
    if arguments.out is not None:
        for option, path in (("the script", arguments.script), ("the plan", arguments.plan)):
            if os.path.realpath(arguments.out) == os.path.realpath(path):
                raise UsageError(f"--out {arguments.out}: that is {option}. Nothing was written")
    made = patch(plan, arguments.script, force=arguments.force_plan)
    _write(arguments.out, made.diff)
    print(said(made, arguments.script), file=sys.stderr)
    return 0


def said(made: Patch, script: str) -> str:
    """Returns what became of each fix, in words."""
    lines = [*made.notes]
    for outcome in made.outcomes:
        lines += _of(outcome, script)
    written = sum(o.written for o in made.outcomes)
    lines.append(
        f"{written} of {len(made.outcomes)} fixes written. Apply the diff with: patch -p1 < FILE, or git apply FILE"
        if written
        else "No fix of this plan can be written into the script for certain; the diff is empty"
    )
    return "\n".join(lines)


def _of(outcome: Outcome, script: str) -> list[str]:
    head = f"{outcome.code} {outcome.name}:"
    if not outcome.written:
        return [
            f"{head} not written: {outcome.note}",
            *(f"    by hand: {line}" for line in outcome.by_hand),
        ]
    where = ", ".join(str(line) for line in outcome.lines)
    place = f"{script}, line{'s' if len(outcome.lines) > 1 else ''} {where}" if where else script
    return [f"{head} written ({place})" + (f"; {outcome.note}" if outcome.note else "")]


def _write(out: str | None, diff: bytes) -> None:
    """Writes the diff byte by byte: it has the script's encoding and line endings."""
    if out is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(diff)
        sys.stdout.buffer.flush()
        return
    try:
        Path(out).write_bytes(diff)
    except OSError as error:
        raise RunFolderError(
            f"--out {out}: cannot be written ({error.strerror or error})"
        ) from error
