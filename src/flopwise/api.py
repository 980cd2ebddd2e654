"""Where rooms meet: the verbs of the command line, as functions. Runs in the parent; the job runs in its own process."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

from flopwise.errors import FlopwiseError, RunFolderError, UsageError
from flopwise.hardware.accelerators import parse_peak
from flopwise.launch import command as commands
from flopwise.launch import folder as folders
from flopwise.launch import process
from flopwise.launch.command import Job
from flopwise.measurement import FIRST_REPORT_S, Measurement
from flopwise.measurement.words import line, say, short
from flopwise.records import store
from flopwise.records.run import RunRecord


def run_command(
    job: Job,
    *,
    command: list[str] | None = None,
    steps: int | None = None,
    warmup: int | None = None,
    stop_after: bool = False,
    out: str | None = None,
    json_path: str | None = None,
    html_path: str | None = None,
    peak: str | None = None,
    price: float | None = None,
    plan: str | None = None,
    force_plan: bool = False,
    quiet: bool = False,
    first_report_s: float = FIRST_REPORT_S,
    profile: bool = True,
) -> int:
    """Runs and measures a job, prints the report to stderr, and returns the job's own exit code, -n for signal n.

    `command` is what was typed, for the record.

    Raises:
        FlopwiseError: before the job has started; afterwards whatever goes wrong is a message.
    """
    if commands.disabled():
        if not quiet:
            say(line(f"flopwise: {commands.DISABLE} is set: {job.script} runs unmeasured"))
        return process.run(job.argv, dict(os.environ))
    given_peak = parse_peak(peak) if peak is not None else None
    _check_price(price)
    check_json(json_path)
    _check_target("--html", html_path)
    options: dict[str, Any] = {
        "command": command or ["flopwise", "run", *job.typed],
        "steps": steps,
        "warmup": warmup,
        "stop_after": stop_after,
        "profile": profile,
    }
    notes, env = _apply(plan, job, options, force=force_plan) if plan is not None else ([], None)
    folder = folders.create(out, job.script, options)
    measurement = Measurement(
        job, folder, options, given_peak, price, quiet, first_report_s, notes=notes
    )
    _tell_outer_run(folder)
    if not quiet:
        say(line(f"flopwise: measuring {job.script} (run folder {short(folder)})"))
    try:
        code = measurement.run(env=env)
    except UsageError:
        folders.discard(folder)
        raise
    _finish(measurement, json_path, html_path)
    return code


def _apply(
    plan: str, job: Job, options: dict[str, Any], *, force: bool
) -> tuple[list[str], dict[str, str]]:
    """Puts a plan's fixes into the options of the launch; returns what is to be said about it, and the environment.

    Raises:
        PlanError: it cannot be read, or does not fit.
    """
    from flopwise import plans

    loaded = plans.load(Path(plan))
    differences = plans.check(loaded, job, force=force)
    options["apply"] = plans.to_apply(loaded)
    options["plan"] = os.path.abspath(plan)
    options["expected"] = {"step_s": loaded.step_s, "bare_step_s": loaded.bare_step_s}
    env = {**os.environ, **plans.environment(loaded.fixes)}
    forced = [f"the plan was applied by force: {difference}" for difference in differences]
    return [*forced, *plans.changes(loaded.fixes)], env


def _finish(measurement: Measurement, json_path: str | None, html_path: str | None) -> None:
    """Concludes, stores and reports. The job has ended: nothing that goes wrong here may change its exit code."""
    problems: list[str] = []
    try:
        try:
            measurement.conclude()
        except FlopwiseError as error:
            problems.append(str(error))
        if measurement.record is not None:
            for write, path in ((write_json, json_path), (write_html, html_path)):
                try:
                    if path is not None:
                        write(path, measurement.record)
                except FlopwiseError as error:
                    problems.append(str(error))
            measurement.report(measurement.record)
    except KeyboardInterrupt:
        problems.append(
            f"interrupted; what was measured is in {measurement.folder / folders.RANKS}"
        )
    except Exception as error:
        problems.append(
            f"the report failed ({type(error).__name__}: {error}). The script's result is untouched; what was "
            f"measured is in {measurement.folder / folders.RANKS}"
        )
    for problem in problems:
        say(line(f"flopwise run: {problem}"))


def _tell_outer_run(folder: Path) -> None:
    """Leaves a word in the run folder of a `flopwise run` that has started this one: we measure in its place."""
    outer = os.environ.get(commands.RUN)
    if outer:
        with contextlib.suppress(OSError):
            path = Path(outer) / f"nested-{os.getpid()}.txt"
            path.write_text(f"see {folder}\n", encoding="utf-8")


def _check_price(price: float | None) -> None:
    if price is not None and not (math.isfinite(price) and 0 < price < 1e6):
        raise UsageError(
            f"--price {price}: must be US dollars per device-hour, above 0. Nothing was started"
        )


def check_json(json_path: str | None) -> None:
    """Checks, before anything is started, that --json can be written.

    Raises:
        RunFolderError: it cannot.
        UsageError: it is "-".
    """
    _check_target("--json", json_path)


def _check_target(option: str, target: str | None) -> None:
    if target is None:
        return
    if target == "-":
        raise UsageError(
            f"{option} -: give a path; standard output is the script's. Nothing was started"
        )
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunFolderError(f"{option} {target}: cannot be written there. Nothing was started")


def write_json(json_path: str, record: Any) -> None:
    """Writes a record where --json says; a pipe or a device is written to, never replaced by a file.

    Raises:
        RunFolderError: it cannot be written.
    """
    store.put_text("--json", json_path, store.encode(record))


def write_html(html_path: str, record: RunRecord) -> None:
    """Writes the report of a run where --html says, as one HTML file.

    Raises:
        RunFolderError: it cannot be written.
    """
    from flopwise.reports.html import render_html

    store.put_text("--html", html_path, render_html(record))
