"""The command line: one file per command, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from flopwise._version import __version__
from flopwise.errors import FlopwiseError

#: The commands, in the order of the help. Each is a module of this package.
COMMANDS = ("run", "tune", "report", "ceilings", "env")


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """Returns the parser of the whole command line, and the module of each command by its name."""
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
    return parser, modules


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors that are the user's to solve are one message, exit code 2."""
    parser, modules = build_parser()
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
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
