"""`flopwise run`: runs a training script as it is, and measures it."""

from __future__ import annotations

import argparse

from flopwise.cli.launching import add_options, job_of, not_negative, positive


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a training script unmodified and measure it",
        description="Runs a training script unmodified and measures MFU, step time, memory and energy. The report "
        "goes to stderr and the run folder; the script's own output and exit code stay what they are.",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="time exactly N steps (default: 50 over at least 5 s)",
    )
    parser.add_argument(
        "--warmup",
        type=not_negative,
        metavar="N",
        help="drop the first N steps, and those until the FLOPs are counted (default: by rule)",
    )
    parser.add_argument(
        "--stop-after", action="store_true", help="end the script cleanly once it is measured"
    )
    parser.add_argument(
        "--no-profile",
        action="store_true",
        help="time the steps only: no profiled windows after them, and so no ledger",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="run folder (default: flopwise-runs/TIME-NAME)"
    )
    parser.add_argument("--json", metavar="PATH", help="write the run record there, too")
    parser.add_argument(
        "--html", metavar="PATH", help="write the HTML report there, too (it is in the run folder)"
    )
    parser.add_argument(
        "--peak", metavar="RATE", help="peak FLOP/s of one device, e.g. 989.5T or bf16=989.5T"
    )
    parser.add_argument("--price", type=float, metavar="USD", help="price of one device-hour")
    parser.add_argument("--plan", metavar="FILE", help="apply the fixes of a plan.toml")
    parser.add_argument(
        "--force-plan",
        action="store_true",
        help="apply the plan although script, torch or device changed",
    )
    parser.add_argument("--quiet", action="store_true", help="print no report")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the script's own exit code, or ends by the signal that ended the script."""
    from flopwise import api
    from flopwise.launch.process import end_like

    code = api.run_command(
        job_of(arguments),
        command=arguments.typed,
        steps=arguments.steps,
        warmup=arguments.warmup,
        stop_after=arguments.stop_after,
        out=arguments.out,
        json_path=arguments.json,
        html_path=arguments.html,
        peak=arguments.peak,
        price=arguments.price,
        plan=arguments.plan,
        force_plan=arguments.force_plan,
        quiet=arguments.quiet,
        profile=not arguments.no_profile,
    )
    return end_like(code)
