"""Options that `run` and `tune` share: what to start, and how."""

from __future__ import annotations

import argparse

from flopwise.errors import UsageError
from flopwise.launch.command import Job, job

#: torchrun's options that take a value and are handed through.
TORCHRUN_VALUES = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--master-addr",
    "--master-port",
    "--max-restarts",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the ways to start a job to a parser."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the first word is a module, as in python -m"
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS]",
        help="the script and its arguments; everything from the script on is the script's own. "
        "After -- any command, e.g. -- torchrun ... or -- bash train.sh",
    )
    group = parser.add_argument_group("torchrun (starts the script with torch.distributed.run)")
    for option in TORCHRUN_VALUES:
        group.add_argument(option, metavar="X", default=None)
    group.add_argument("--standalone", action="store_true")


def job_of(arguments: argparse.Namespace) -> Job:
    """Returns the job that was asked for.

    Raises:
        UsageError: nothing to run, or it cannot be found.
    """
    words = list(arguments.words)
    raw = bool(words) and words[0] == "--"
    if raw:
        words = words[1:]
    torchrun = [
        f"{option}={value}"
        for option in TORCHRUN_VALUES
        if (value := getattr(arguments, option[2:].replace("-", "_"))) is not None
    ]
    if arguments.standalone:
        torchrun.append("--standalone")
    if raw and arguments.module:
        raise UsageError("-m and -- COMMAND exclude each other")
    return job(words, module=arguments.module, raw=raw, torchrun=torchrun)


def positive(text: str) -> int:
    """Returns a positive whole number, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def not_negative(text: str) -> int:
    """Returns a whole number that is not negative, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
