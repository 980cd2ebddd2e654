"""A dry run: the script as it is, and what a tune would try on it and why. Nothing is applied."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path

from flopwise import plans
from flopwise._version import __version__
from flopwise.api import write_json
from flopwise.errors import NothingMeasuredError
from flopwise.launch import folder as folders
from flopwise.plans import FIXES, OPT_IN
from flopwise.records import preview as preview_records
from flopwise.records import run as run_records
from flopwise.records import store
from flopwise.records.preview import Preview, Prospect
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Side
from flopwise.reports.stream import look
from flopwise.reports.terminal import render_preview
from flopwise.tuning import BASELINE, measure_baseline
from flopwise.tuning.budget import Budget
from flopwise.tuning.process_trials import Answer, answers, ask
from flopwise.tuning.processes import Processes, output_of
from flopwise.tuning.state import Asked
from flopwise.tuning.trying import findings_of


def preview_command(
    asked: Asked, *, out: str | None, baseline: str | None, json_path: str | None, quiet: bool
) -> int:
    """Prints what a tune would try; returns 0.

    Raises:
        FlopwiseError: nothing to measure, or a folder that cannot be read or written.
    """
    record, folder = preview(asked, out=out, baseline=baseline, quiet=quiet)
    if json_path is not None:
        write_json(json_path, record)
    seen = look(sys.stdout)
    sys.stdout.write(
        render_preview(
            record,
            width=seen.width,
            color=seen.color,
            ascii_only=seen.ascii_only,
            saved=[str(folder / "preview.json")],
        )
    )
    return 0


def preview(
    asked: Asked, *, out: str | None, baseline: str | None, quiet: bool
) -> tuple[Preview, Path]:
    """Returns what a tune would try, stored as preview.json in the folder that it returns, too.

    Raises:
        NothingMeasuredError: the script has no step to measure.
        RecordError: the run folder holds no run that can be read.
        RunFolderError: the folder cannot be written, or went away.
    """
    taken = None
    if baseline is not None:
        taken = store.read(Path(baseline) / "run.json", RunRecord, run_records.SCHEMA)
    name = f"dry-run-{Path(asked.script).stem}"
    folder = folders.create(out, name, {"command": asked.argv, "kind": "dry run"})
    budget = Budget(asked.budget_s, asked.processes, asked.proof_steps)
    processes = Processes(asked.job(), folder, budget, quiet, asked.allowed)
    if taken is None:
        taken, wall_s = measure_baseline(processes)
        budget.learn(taken, wall_s)
        where = folder / BASELINE
    else:
        where = Path(baseline or "")
    found = findings_of(taken)
    said, notes = _asked_in_it(processes, found, asked)
    record = Preview(
        schema=preview_records.SCHEMA,
        flopwise=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=asked.command,
        script=asked.script,
        baseline_folder=str(where),
        baseline=Side(taken.step_s.mean, taken.mfu.value),
        fixes=[_prospect(code, said, asked, taken) for code, _ in FIXES],
        notes=notes,
    )
    store.write(folder / "preview.json", record)
    return record, folder


def _asked_in_it(
    processes: Processes, found: dict[str, float | None], asked: Asked
) -> tuple[dict[str, Answer], list[str]]:
    """Returns what all fixes say of the script, which runs for some steps more, and what is to be said about it."""
    measurement = ask(processes, [code for code, _ in FIXES], found)
    said = {answer.code: answer for answer in answers(measurement.folder)}
    if said:
        return said, []
    if measurement.overdue:
        raise NothingMeasuredError(
            f"--budget {asked.budget_s:.0f}s is too small: the script did not come to its first steps again"
        )
    how = measurement.ending() or "ended"
    return {}, [f"the script {how} before fixes could be asked; see {output_of(measurement)}"]


def _prospect(code: str, said: dict[str, Answer], asked: Asked, run: RunRecord) -> Prospect:
    answer = said.get(code)
    name = dict(FIXES)[code]
    if answer is None:
        return Prospect(
            code, name, "unknown", "it was not asked", None, [], code in OPT_IN, False, OPT_IN.get(code, "")
        )  # fmt: skip
    outcome = "would be tried" if answer.eligible else "declined"
    if answer.eligible and code not in asked.codes:
        outcome = "only if asked for" if code in OPT_IN else "not asked for"
    causes = {f.code: f.cause for f in run.findings}
    gain = answer.predicted_gain_frac
    return Prospect(
        code=code,
        name=name,
        outcome=outcome,
        reason=answer.reason,
        predicted_ratio=None if gain is None else 1 - gain,
        findings=[f"{one} {causes[one]}" for one in answer.findings if one in causes],
        opt_in=answer.opt_in,
        in_processes=code in plans.ENVIRONMENT,
        changes=OPT_IN.get(code, ""),
    )
