"""The command line: one file per command, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from flopwise._version import __version__
from flopwise.errors import FlopwiseError

#: The commands, in the order of the help. Each is a module of this package.
COMMANDS = ("run", "tune", "report", "ceilings", "env")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors that are the user's to solve are one message, exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="flopwise",
        description="Measures and raises the MFU (Model FLOPs Utilization) of PyTorch training, and proves the gain.",
    )
    parser.add_argument("--version", action="version", version=f"flopwise {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {}
    for name in COMMANDS:
        modules[name] = importlib.import_module(f"flopwise.cli.{name}")
        modules[name].add_parser(subparsers)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return int(modules[arguments.command].run(arguments))
    except FlopwiseError as error:
        print(f"flopwise {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
