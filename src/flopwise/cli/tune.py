"""`flopwise tune`: finds fixes that make a script faster, proves them, and writes a plan."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from flopwise.cli.launching import add_options, job_of, positive
from flopwise.errors import UsageError

if TYPE_CHECKING:
    from flopwise.tuning import Tuning
    from flopwise.tuning.state import Asked

#: Time for everything, unless told otherwise.
BUDGET_S = 660.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "tune",
        help="try fixes on a training script, keep what is proven faster, write a plan",
        description="Runs a training script several times: once as it is, once with fixes switched on and off "
        "between steps in randomised blocks, and then in fresh processes, with and without what was kept. Each process "
        "writes into a folder of its own instead of over your files, and stays offline. With --nproc-per-node all "
        "ranks switch at the same steps.",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for everything (default: flopwise-runs/TIME-tune-NAME)"
    )
    parser.add_argument("--json", metavar="PATH", help="write the tune record there, too")
    parser.add_argument("--fixes", metavar="A,B", help="try only these, by code or name")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="A,B",
        help="try these opt-ins beside the others, by code or name (may be given several times): fixes that change more "
        "than time and rounding, such as the order of the data. --dry-run lists them; the plan and the report say "
        "what they change",
    )
    parser.add_argument(
        "--budget",
        type=_seconds,
        metavar="T",
        help="time for everything, the final proof included, e.g. 11m (default): the proof is "
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
    parser.add_argument(
        "--steps-remaining",
        type=positive,
        metavar="N",
        help="steps that the job still has: a fix whose compilation and warm-up do not pay back in them is not kept",
    )
    parser.add_argument(
        "--allow-writes",
        action="append",
        default=[],
        metavar="DIR",
        help="let the script write below this folder as ever (may be given several times; / for everywhere)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="try nothing: measure the script as it is, and list what would be tried and why",
    )
    parser.add_argument(
        "--baseline",
        metavar="DIR",
        help="with --dry-run: take the measurement of this run folder instead of measuring",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with the tune of this folder, which was cut off or ran out of time; --budget is then the time for "
        "the rest. The script need not be given again",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="resume although the script, torch or the device is another one",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, also when nothing was proven faster."""
    from flopwise import api, tuning

    api.check_json(arguments.json)
    if arguments.resume is not None:
        return tuning.tune_command(_resumed(arguments), json_path=arguments.json)
    for option in ("force", "baseline"):
        needed = {"force": "--resume", "baseline": "--dry-run"}[option]
        if getattr(arguments, option) and not (option == "baseline" and arguments.dry_run):
            raise UsageError(f"--{option} goes with {needed} only. Nothing was started")
    asked = _asked(arguments)
    if arguments.dry_run:
        from flopwise.tuning import preview

        return preview.preview_command(
            asked,
            out=arguments.out,
            baseline=arguments.baseline,
            json_path=arguments.json,
            quiet=arguments.quiet,
        )
    tune = tuning.begin(asked, out=arguments.out, quiet=arguments.quiet)
    return tuning.tune_command(tune, json_path=arguments.json)


def _asked(arguments: argparse.Namespace) -> Asked:
    """Returns what was asked for.

    Raises:
        UsageError: nothing to run, it cannot be found, or it spans several machines.
    """
    from flopwise.launch.machines import several
    from flopwise.plans import codes_of
    from flopwise.tuning.state import Asked

    job = job_of(arguments)
    machines = several(job)
    if machines is not None:
        raise UsageError(
            f"{machines}: a tune starts its processes on one machine, and fixes must be switched at the same step on all of "
            "them. Nothing was started. Tune on one machine with as many ranks as it has devices (--nproc-per-node N, without "
            "the options for several), then start the whole job with the plan: flopwise run --plan PLAN --nnodes ... SCRIPT. "
            "flopwise run measures on several machines as ever"
        )
    return Asked(
        command=arguments.typed,
        argv=job.argv,
        script=job.script,
        file=job.file,
        typed=job.typed,
        codes=list(codes_of(arguments.fixes, arguments.allow)),
        budget_s=BUDGET_S if arguments.budget is None else arguments.budget,
        per_fix_s=arguments.per_fix,
        processes=arguments.processes,
        proof_steps=arguments.proof_steps,
        steps_remaining=arguments.steps_remaining,
        allowed=[os.path.abspath(path) for path in arguments.allow_writes],
        cwd=os.getcwd(),
    )


def _resumed(arguments: argparse.Namespace) -> Tuning:
    """Returns the tune that is to go on.

    Raises:
        UsageError: another script was given, or an option that only a new tune has.
        FlopwiseError: it cannot go on.
    """
    from flopwise import tuning

    of_a_new_one = (
        "out",
        "fixes",
        "allow",
        "steps_remaining",
        "dry_run",
        "baseline",
        "allow_writes",
    )
    for option in of_a_new_one:
        if getattr(arguments, option):
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is of a new tune: --resume goes on as it was begun")
    tune = tuning.resume(
        Path(arguments.resume),
        budget_s=arguments.budget,
        force=arguments.force,
        quiet=arguments.quiet,
    )
    if arguments.split.job and job_of(arguments).argv != tune.state.asked.argv:
        was = shlex.join(tune.state.asked.typed)
        raise UsageError(
            f"that tune is of another command: {was}. Leave it out, or start a new tune. Nothing was started"
        )
    return tune


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
