"""The command line: one file per command, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from flopwise._version import __version__
from flopwise.cli.launching import split
from flopwise.errors import FlopwiseError

#: The commands, in the order of the help. Each is a module of this package.
COMMANDS = ("run", "tune", "patch", "report", "analyze", "compare", "ceilings", "env")
#: Those that start a job: the words of the job are taken off before argparse reads the rest.
STARTING = ("run", "tune")


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """Returns the parser of the whole command line, and the module of each command by its name."""
    parser, _, modules = _parsers()
    return parser, modules


def _parsers() -> tuple[
    argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser], dict[str, ModuleType]
]:
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
    return parser, subparsers.choices, modules


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors that are the user's to solve are one message, exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, subparsers, modules = _parsers()
    job = split(words[1:], subparsers[words[0]]) if words[:1] and words[0] in STARTING else None
    arguments = parser.parse_args(words if job is None else [words[0], *job.ours])
    if arguments.command is None:
        parser.print_help()
        return 0
    arguments.split, arguments.typed = job, ["flopwise", *words]
    try:
        code = int(modules[arguments.command].run(arguments))
        sys.stdout.flush()
        return code
    except FlopwiseError as error:
        from flopwise.measurement.words import line

        print(line(f"flopwise {arguments.command}: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone: Python's own flush at exit must not fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
