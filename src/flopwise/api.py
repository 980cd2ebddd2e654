"""Where rooms meet: the verbs of the command line, as functions. Runs in the parent; the job runs in its own process."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import socket
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
from flopwise.launch import command as commands
from flopwise.launch import folder as folders
from flopwise.launch import process
from flopwise.launch.command import Job
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.ceilings import CeilingsRecord
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord

#: A job that is still being measured gets a first report after this long.
FIRST_REPORT_S = 60.0
#: A running job's folder is looked at this often.
LOOK_S = 1.0


@dataclass
class Measurement:
    """One job being run and measured."""

    job: Job
    folder: Path
    options: dict[str, Any]
    peak: Peak | None = None
    price_usd_per_hour: float | None = None
    quiet: bool = False
    first_report_s: float = FIRST_REPORT_S
    exit_code: int | None = None  # as a shell shows it
    record: RunRecord | None = None
    notes: list[str] = field(default_factory=list)
    created: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    _ended_by: int | None = None  # the signal that ended the job
    _printed: RunRecord | None = None
    _started: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _seen: list[tuple[str, int, int]] = field(default_factory=list)
    _complete: bool = False

    def run(
        self,
        *,
        timeout_s: float | None = None,
        output: Any = None,
        env: dict[str, str] | None = None,
    ) -> int:
        """Runs the job to its end; returns its exit code, -n if signal n ended it.

        A complete measurement is reported while the job still runs, unless it has a time limit.

        Raises:
            UsageError: it cannot be started.
        """
        try:
            code = process.run(
                self.job.argv,
                commands.environment(self.folder, env),
                watch=self._watch if timeout_s is None else None,
                timeout_s=timeout_s,
                output=output,
            )
        except OSError as error:
            raise UsageError(
                f"{self.job.argv[0]} cannot be started ({error.strerror or error})"
            ) from error
        self._ended_by = -code if code < 0 else None
        self.exit_code = process.shell_code(code)
        return code

    def conclude(self) -> RunRecord:
        """Returns the run record and stores it as run.json in the run folder.

        Raises:
            NothingMeasuredError: no training step was timed.
            RunFolderError: the record cannot be written; `record` has it all the same.
        """
        self.record = self._summarise(final=True)
        store.write(self.folder / "run.json", self.record)
        return self.record

    def report(self, record: RunRecord) -> None:
        """Prints the report to stderr, unless this very measurement has been printed already."""
        if self.quiet:
            return
        before = self._printed
        complete = before is not None and before.complete
        if before and complete and replace(before, exit_code=record.exit_code) == record:
            say(f"flopwise: report above; saved {_short(self.folder)}")
            return
        self._printed = record
        from flopwise.reports.stream import look
        from flopwise.reports.terminal import render_run

        seen = look(sys.stderr)
        text = render_run(
            record,
            width=seen.width,
            color=seen.color,
            ascii_only=seen.ascii_only,
            next_command=f"flopwise tune {shlex.join(self.job.typed)}"
            if record.plan is None
            else None,
            saved=[_short(self.folder / "run.json")] if (self.folder / "run.json").exists() else [],
        )
        say(text.removesuffix("\n"))

    def ranks(self) -> list[RankRecord]:
        """Returns the rank records written so far; a damaged one is left out and said."""
        found = []
        for path in sorted((self.folder / folders.RANKS).glob("*.json")):
            try:
                found.append(store.read(path, RankRecord, rank_records.SCHEMA))
            except RecordError as error:
                if str(error) not in self.notes:
                    self.notes.append(str(error))
        return found

    def _watch(self) -> None:
        """Looks after a job that is still running. Whatever goes wrong here must not reach the job."""
        now = time.monotonic()
        if (self._printed is not None and self._printed.complete) or now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            self._look(late=now - self._started > self.first_report_s and self._printed is None)
        except (FlopwiseError, OSError):
            return  # it is tried again
        except Exception as error:
            self._looked = float("inf")
            self.notes.append(f"no report while it ran: {type(error).__name__}: {error}")

    def _look(self, *, late: bool) -> None:
        """Stores and reports a measurement that is complete, if the job is still there at the next look."""
        paths = sorted((self.folder / folders.RANKS).glob("*.json"))
        seen = [(p.name, (s := p.stat()).st_mtime_ns, s.st_size) for p in paths]
        if seen != self._seen:
            self._seen = seen
            self._complete = self._is_complete()
            if not late:
                return
        if seen and (late or self._complete):
            record = self._summarise(final=False)
            store.write(self.folder / "run.json", record)
            self.report(record)
            self._printed = record

    def _is_complete(self) -> bool:
        from flopwise import summary

        ranks = self.ranks()
        if not ranks:
            return False
        ranks = summary.one_per_rank(ranks)
        return len(ranks) >= ranks[0].world_size and all(r.status == "complete" for r in ranks)

    def _summarise(self, *, final: bool) -> RunRecord:
        from flopwise import summary

        ranks = self.ranks()
        if not ranks:
            raise NothingMeasuredError(self._why_nothing())
        notes = list(self.notes)
        lead = summary.one_per_rank(ranks)[0]
        # Whoever has interrupted a job does not want to wait for ours.
        may_measure = final and self.peak is None and self._interrupted() is None
        return summary.summarise(
            ranks,
            summary.Context(
                command=self.options["command"],
                script=self.job.script,
                exit_code=self.exit_code,
                peak=self.peak,
                price_usd_per_hour=self.price_usd_per_hour,
                ceilings=_ceilings(lead, notes, may_measure=may_measure, quiet=self.quiet),
                plan=self.options.get("plan"),
                notes=notes,
                created=self.created,
            ),
        )

    def _interrupted(self) -> str | None:
        """Returns the name of the signal that ended the job, if one did."""
        number = self._ended_by or (self.exit_code or 0) - 128
        try:
            return signal.Signals(number).name
        except ValueError:
            return None

    def _why_nothing(self) -> str:
        failed = [
            text for path in sorted(self.folder.glob("failed-*.txt")) if (text := _start_of(path))
        ]
        if failed:
            return f"nothing was measured: {failed[0]}"
        if self.notes:
            return f"nothing was measured: {self.notes[0]}"
        if _full(self.folder):
            return f"nothing was measured: the disk of {self.folder} is full. Give --out on another"
        inner = sorted(self.folder.glob("nested-*.txt"))
        if inner:
            return f"measured by another flopwise run inside this one: {_start_of(inner[0])}"
        attached = len(list(self.folder.glob("attached-*")))
        by_signal = self._interrupted()
        if attached and by_signal:
            return (
                f"no training step was stored: {by_signal} ended the script before enough of them were timed. "
                "A first record is written after ten"
            )
        how = f" The script ended with exit code {self.exit_code}" if self.exit_code else ""
        if attached:
            return (
                f"no training step was seen: torch was imported in {attached} process{'es' if attached > 1 else ''}, "
                "but no optimizer stepped and no backward ran. If the loop has an optimizer of its own, mark its "
                f"steps with flopwise.step().{how}"
            )
        return (
            "no training step was seen: no Python process below this one imported torch where the meter could "
            "attach (python -I, -E and -S shut it out, and so does a container or a remote host)."
            f"{how}"
        )


def run_command(
    job: Job,
    *,
    command: list[str] | None = None,
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
    first_report_s: float = FIRST_REPORT_S,
) -> int:
    """Runs and measures a job, prints the report to stderr, and returns the job's own exit code, -n for signal n.

    `command` is what was typed, for the record.

    Raises:
        FlopwiseError: before the job has started; afterwards whatever goes wrong is a message.
    """
    if commands.disabled():
        if not quiet:
            say(f"flopwise: {commands.DISABLE} is set: {job.script} runs unmeasured")
        return process.run(job.argv, dict(os.environ))
    given_peak = parse_peak(peak) if peak is not None else None
    _check_price(price)
    check_json(json_path)
    options: dict[str, Any] = {
        "command": command or ["flopwise", "run", *job.typed],
        "steps": steps,
        "warmup": warmup,
        "stop_after": stop_after,
    }
    notes = _apply(plan, job, options, force=force_plan) if plan is not None else []
    folder = folders.create(out, job.script, options)
    measurement = Measurement(
        job, folder, options, given_peak, price, quiet, first_report_s, notes=notes
    )
    _tell_outer_run(folder)
    if not quiet:
        say(f"flopwise: measuring {job.script} (run folder {_short(folder)})")
    try:
        code = measurement.run()
    except UsageError:
        folders.discard(folder)
        raise
    _finish(measurement, json_path)
    return code


def _apply(plan: str, job: Job, options: dict[str, Any], *, force: bool) -> list[str]:
    """Puts a plan's fixes into the options of the launch; returns what is to be said about it.

    Raises:
        PlanError: it cannot be read, or does not fit.
    """
    from flopwise import plans

    loaded = plans.load(Path(plan))
    differences = plans.check(loaded, job, force=force)
    options["apply"] = plans.to_apply(loaded)
    options["plan"] = os.path.abspath(plan)
    return [f"the plan was applied by force: {difference}" for difference in differences]


def _finish(measurement: Measurement, json_path: str | None) -> None:
    """Concludes, stores and reports. The job has ended: nothing that goes wrong here may change its exit code."""
    problems: list[str] = []
    try:
        try:
            measurement.conclude()
        except FlopwiseError as error:
            problems.append(str(error))
        if measurement.record is not None:
            if json_path is not None:
                try:
                    write_json(json_path, measurement.record)
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
        say(f"flopwise run: {problem}")


def _tell_outer_run(folder: Path) -> None:
    """Leaves a word in the run folder of a `flopwise run` that has started this one: we measure in its place."""
    outer = os.environ.get(commands.RUN)
    if outer:
        with contextlib.suppress(OSError):
            path = Path(outer) / f"nested-{os.getpid()}.txt"
            path.write_text(f"see {folder}\n", encoding="utf-8")


def _ceilings(
    lead: RankRecord, notes: list[str], *, may_measure: bool, quiet: bool
) -> CeilingsRecord | None:
    """Returns the measured ceilings of the device a rank ran on, from the cache, or measured now.

    A CPU's peak is always the measured one. Of a GPU they are only looked up, unless nothing else is known of it.
    """
    from flopwise import plans, summary
    from flopwise.hardware import accelerators, ceilings

    threads = None
    if lead.host != socket.gethostname():
        return None  # the cache, and whatever could be measured, is this host's
    if lead.device_type == "cuda":
        key = ceilings.Key("cuda", lead.device_name or "", 0, 0, lead.torch)
        known = accelerators.reference_peak(summary.device_match(lead)) is not None
        may_measure = may_measure and not known and lead.world_size == 1
    elif lead.device_type == "cpu":
        threads = lead.cpu_threads
        key = ceilings.cpu_key(threads, lead.torch)
    else:
        return None
    record, note = ceilings.load(key)
    if record is None and may_measure:
        own = plans.torch_version()
        if own is not None and own != lead.torch:
            key = replace(key, torch=own)
            notes.append(f"ceilings are measured with torch {own}; the script used {lead.torch}")
        if not quiet:
            say("flopwise: measuring what this device reaches; the result is kept")
        try:
            record, note = ceilings.obtain(threads, key=key)
        except FlopwiseError as error:
            note = f"the ceilings of this device could not be measured: {error}"
        except KeyboardInterrupt:
            note = "the ceilings of this device were not measured: interrupted"
    if note and not note.startswith("from the cache"):
        notes.append(note)
    if record is not None and lead.device_type == "cuda":
        other = _of_another_device(record, lead)
        if other:
            notes.append(f"the cached ceilings are left out: they were measured with {other}")
            return None
    return record


def _of_another_device(record: CeilingsRecord, lead: RankRecord) -> str | None:
    """Returns by what a GPU of the same name differs from the one that the ceilings were measured on."""
    telemetry = lead.telemetry
    for what, theirs, ours, slack in (
        ("bytes of memory", record.memory_bytes, lead.device_total_bytes, 0.0),
        ("SMs", record.sm_count, telemetry.sm_count, 0.0),
        ("W power limit", record.power_limit_w, telemetry.power_limit_w, 1.0),
    ):
        if theirs is not None and ours is not None and abs(theirs - ours) > slack:
            return f"{theirs:g} {what}, this device has {ours:g}"
    if record.mig != telemetry.mig and telemetry.name is not None:
        return "MIG on, it is off here" if record.mig else "MIG off, it is on here"
    return None


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


def write_json(json_path: str, record: Any) -> None:
    """Writes a record where --json says; a pipe or a device is written to, never replaced by a file.

    Raises:
        RunFolderError: it cannot be written.
    """
    path = Path(os.path.realpath(json_path))
    text = store.encode(record)
    if not path.exists() or path.is_file():
        store.write_text(path, text)
        return
    try:
        with open(json_path, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise RunFolderError(
            f"--json {json_path}: cannot be written ({error.strerror or error})"
        ) from error


def say(text: str) -> None:
    """Writes to stderr, if anybody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _full(folder: Path) -> bool:
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False


def _start_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()[:500]
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
