"""`flopwise tune`: finds fixes that make a script faster, proves them, and writes a plan."""

from __future__ import annotations

import argparse

from flopwise.cli.launching import add_options, job_of, positive
from flopwise.errors import UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "tune",
        help="try fixes on a training script, keep what is proven faster, write a plan",
        description="Runs a training script several times: once as it is, once with fixes switched on and off "
        "between steps in randomised blocks, and then in fresh processes, with and without what was kept. No file of "
        "yours is edited, but what the script itself writes, it writes each time. With --nproc-per-node all ranks "
        "switch at the same steps.",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for everything (default: flopwise-runs/TIME-tune-NAME)"
    )
    parser.add_argument("--json", metavar="PATH", help="write the tune record there, too")
    parser.add_argument("--fixes", metavar="A,B", help="try only these, by code or name")
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=600.0,
        metavar="T",
        help="time for everything, the final proof included, e.g. 10m (default): the proof is "
        "reckoned with first, and trials get the rest",
    )
    parser.add_argument(
        "--per-fix",
        type=_seconds,
        default=30.0,
        metavar="T",
        help="time for comparing one fix, and as much for it to settle before (default: 30s)",
    )
    parser.add_argument(
        "--processes",
        type=_three,
        default=3,
        metavar="N",
        help="fresh processes an arm in the proof (default: 3)",
    )
    parser.add_argument(
        "--proof-steps",
        type=positive,
        default=40,
        metavar="N",
        help="steps timed in each (default: 40)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, also when nothing was proven faster."""
    from flopwise import api, tuning

    job = job_of(arguments)
    api.check_json(arguments.json)
    return tuning.tune_command(
        job,
        command=arguments.typed,
        out=arguments.out,
        json_path=arguments.json,
        codes=_codes(arguments.fixes),
        budget_s=arguments.budget,
        per_fix_s=arguments.per_fix,
        processes=arguments.processes,
        proof_steps=arguments.proof_steps,
        quiet=arguments.quiet,
    )


def _codes(text: str | None) -> tuple[str, ...]:
    from flopwise.plans import FIXES

    if text is None:
        return tuple(code for code, _ in FIXES)
    wanted = {word.strip().lower() for word in text.split(",") if word.strip()}
    known = {word.lower() for pair in FIXES for word in pair}
    if not wanted or wanted - known:
        names = ", ".join(f"{code} {name}" for code, name in FIXES)
        raise UsageError(f"--fixes {text}: known are {names}")
    return tuple(code for code, name in FIXES if {code.lower(), name.lower()} & wanted)


def _seconds(text: str) -> float:
    """Returns seconds from `90`, `90s`, `10m` or `1h`, for argparse."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    value = float(text[:-1]) * factor if factor else float(text)
    if not 1 <= value <= 30 * 24 * 3600:
        raise argparse.ArgumentTypeError("must be between 1s and 30 days")
    return value


def _three(text: str) -> int:
    value = int(text)
    if value < 3:
        raise argparse.ArgumentTypeError("fewer than 3 processes an arm prove nothing")
    return value
