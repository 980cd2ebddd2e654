"""Where rooms meet: the verbs of the command line, as functions. Runs in the parent; the job runs in its own process."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwise.errors import (
    FlopwiseError,
    NothingMeasuredError,
    RecordError,
    RunFolderError,
    UsageError,
)
from flopwise.hardware.accelerators import Peak, parse_peak
from flopwise.launch import folder as folders
from flopwise.launch import process
from flopwise.launch.command import Job, environment
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.ceilings import CeilingsRecord
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord

#: A job that is still being measured gets a first report after this long.
FIRST_REPORT_S = 60.0


@dataclass
class Measurement:
    """One job being run and measured."""

    job: Job
    folder: Path
    options: dict[str, Any]
    peak: Peak | None = None
    price_usd_per_hour: float | None = None
    quiet: bool = False
    exit_code: int | None = None
    record: RunRecord | None = None
    notes: list[str] = field(default_factory=list)
    created: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    _printed: RunRecord | None = None
    _started: float = field(default_factory=time.monotonic)
    _seen: float = 0.0

    def run(
        self,
        *,
        timeout_s: float | None = None,
        output: Any = None,
        env: dict[str, str] | None = None,
    ) -> int:
        """Runs the job to its end; returns its exit code. A complete measurement is reported while it still runs."""
        self.exit_code = process.run(
            self.job.argv,
            environment(self.folder, env),
            watch=self._watch,
            timeout_s=timeout_s,
            output=output,
        )
        return self.exit_code

    def conclude(self) -> RunRecord:
        """Returns the run record and stores it as run.json in the run folder.

        Raises:
            NothingMeasuredError: no training step was timed.
            RunFolderError: the record cannot be written.
        """
        self.record = self._summarise(final=True)
        store.write(self.folder / "run.json", self.record)
        return self.record

    def report(self, record: RunRecord) -> None:
        """Prints the report to stderr, unless this very measurement has been printed already."""
        if self.quiet:
            return
        before = self._printed
        if (
            before is not None
            and before.complete
            and replace(before, exit_code=record.exit_code) == record
        ):
            print(f"flopwise: report above; saved {_short(self.folder)}", file=sys.stderr)
            return
        self._printed = record
        from flopwise.reports.stream import look
        from flopwise.reports.terminal import render_run

        seen = look(sys.stderr)
        words = shlex.join(
            record.command[2:] if record.command[:2] == ["flopwise", "run"] else record.command
        )
        text = render_run(
            record,
            width=seen.width,
            color=seen.color,
            ascii_only=seen.ascii_only,
            next_command=f"flopwise tune {words}" if record.plan is None else None,
            saved=[_short(self.folder / "run.json")] if (self.folder / "run.json").exists() else [],
        )
        sys.stderr.write(text)
        sys.stderr.flush()

    def ranks(self) -> list[RankRecord]:
        """Returns the rank records written so far; a damaged one is left out and said."""
        found = []
        for path in sorted((self.folder / "ranks").glob("*.json")):
            try:
                found.append(store.read(path, RankRecord, rank_records.SCHEMA))
            except RecordError as error:
                if str(error) not in self.notes:
                    self.notes.append(str(error))
        return found

    def _watch(self) -> None:
        now = time.monotonic()
        if (
            self.quiet
            or (self._printed is not None and self._printed.complete)
            or now - self._seen < 1.0
        ):
            return
        self._seen = now
        with contextlib.suppress(FlopwiseError, OSError):
            ranks = self.ranks()
            if not ranks:
                return
            complete = (
                all(r.status == "complete" for r in ranks) and len(ranks) >= ranks[0].world_size
            )
            late = now - self._started > FIRST_REPORT_S and self._printed is None
            if complete or late:
                record = self._summarise(final=False)
                store.write(self.folder / "run.json", record)
                self.report(record)

    def _summarise(self, *, final: bool) -> RunRecord:
        from flopwise import summary

        ranks = self.ranks()
        if not ranks:
            raise NothingMeasuredError(self._why_nothing())
        notes = list(self.notes)
        lead = summary.one_per_rank(ranks)[0]
        measured = _ceilings(lead, notes, may_measure=final and self.peak is None)
        return summary.summarise(
            ranks,
            summary.Context(
                command=self.options["command"],
                script=self.job.script,
                exit_code=self.exit_code,
                peak=self.peak,
                price_usd_per_hour=self.price_usd_per_hour,
                ceilings=measured,
                plan=self.options.get("plan"),
                notes=notes,
                created=self.created,
            ),
        )

    def _why_nothing(self) -> str:
        failed = sorted(self.folder.glob("failed-*.txt"))
        if failed:
            return f"nothing was measured: {failed[0].read_text(encoding='utf-8').strip()[:500]}"
        attached = len(list(self.folder.glob("attached-*")))
        if os.environ.get("FLOPWISE_DISABLE", "") not in ("", "0"):
            return "nothing was measured: FLOPWISE_DISABLE is set"
        if attached:
            return (
                f"no training step was seen: torch was imported in {attached} process{'es' if attached > 1 else ''}, "
                "but no optimizer stepped and no backward ran. If the loop has an optimizer of its own, mark its "
                "steps with flopwise.step()"
            )
        return (
            "no training step was seen: no Python process below this one imported torch where the meter could "
            "attach (python -I, -E and -S shut it out, and so does a container or a remote host)"
        )


def run_command(
    job: Job,
    *,
    steps: int | None = None,
    warmup: int | None = None,
    stop_after: bool = False,
    out: str | None = None,
    json_path: str | None = None,
    peak: str | None = None,
    price: float | None = None,
    plan: str | None = None,
    force_plan: bool = False,
    quiet: bool = False,
) -> int:
    """Runs and measures a job, prints the report to stderr, and returns the job's own exit code.

    Raises:
        FlopwiseError: before the job has started; afterwards whatever goes wrong is a message.
    """
    given_peak = parse_peak(peak) if peak is not None else None
    _check_price(price)
    check_json(json_path)
    options: dict[str, Any] = {
        "command": ["flopwise", "run", *_shown(job)],
        "steps": steps,
        "warmup": warmup,
        "stop_after": stop_after,
    }
    if plan is not None:
        from flopwise import plans

        loaded = plans.load(Path(plan))
        plans.check(loaded, job, force=force_plan)
        options["apply"] = plans.to_apply(loaded)
        options["plan"] = os.path.abspath(plan)
    folder = folders.create(out, job.script, options)
    measurement = Measurement(job, folder, options, given_peak, price, quiet)
    if not quiet:
        print(
            f"flopwise: measuring {job.script} (run folder {_short(folder)})",
            file=sys.stderr,
            flush=True,
        )
    code = measurement.run()
    try:
        record = measurement.conclude()
        if json_path is not None:
            store.write_text(Path(json_path), store.encode(record))
        measurement.report(record)
    except FlopwiseError as error:
        print(f"flopwise run: {error}", file=sys.stderr)
    return code


def _ceilings(lead: RankRecord, notes: list[str], *, may_measure: bool) -> CeilingsRecord | None:
    """Returns the measured ceilings of the device a rank ran on, from the cache, or measured now.

    A CPU's peak is always the measured one. Of a GPU they are only looked up, unless nothing else is known of it.
    """
    from flopwise.hardware import accelerators, ceilings

    if lead.device_type == "cuda":
        key = ceilings.Key("cuda", lead.device_name or "", 0, 0, lead.torch)
        known = accelerators.reference_peak(accelerators.lookup(lead.device_name or "")) is not None
        may_measure = may_measure and not known and lead.world_size == 1
    else:
        key = ceilings.cpu_key(lead.cpu_threads, lead.torch)
    record, note = ceilings.load(key)
    if record is None and may_measure:
        try:
            record, note = ceilings.obtain(
                lead.cpu_threads if lead.device_type == "cpu" else None, key=key
            )
        except FlopwiseError as error:
            note = f"the ceilings of this device could not be measured: {error}"
    if note and not note.startswith("from the cache"):
        notes.append(note)
    return record


def _check_price(price: float | None) -> None:
    if price is not None and not (math.isfinite(price) and 0 < price < 1e6):
        raise UsageError(
            f"--price {price}: must be US dollars per device-hour, above 0. Nothing was started"
        )


def check_json(json_path: str | None) -> None:
    """Checks, before anything is started, that --json can be written.

    Raises:
        RunFolderError: it cannot.
    """
    if json_path is None:
        return
    path = Path(json_path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunFolderError(f"--json {json_path}: cannot be written there. Nothing was started")


def _shown(job: Job) -> list[str]:
    """Returns the job's words as they are typed after `flopwise run`."""
    words = job.argv
    if words and words[0] == sys.executable:
        words = words[1:]
        if words[:2] == ["-m", "torch.distributed.run"]:
            words = words[2:]
        return words
    return ["--", *words]


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
