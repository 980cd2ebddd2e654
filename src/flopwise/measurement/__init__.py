"""One job being run and measured: it is watched, reported as soon as it is known, and concluded. Runs in the parent."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
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
from flopwise.hardware.accelerators import Peak
from flopwise.launch import command as commands
from flopwise.launch import folder as folders
from flopwise.launch import process
from flopwise.launch.command import Job
from flopwise.measurement import ceilings
from flopwise.measurement.words import line, say, short
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.ledger import LedgerRecord
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord
from flopwise.units import size

#: A job that is still being measured gets a first report after this long.
FIRST_REPORT_S = 60.0
#: A running job's folder is looked at this often.
LOOK_S = 1.0
#: Windows of so many bytes take seconds to read, so that it is said.
SAID_BYTES = 100_000_000


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
    exit_code: int | None = None  # as a shell shows it; None: it runs, or we ended it once measured
    record: RunRecord | None = None
    notes: list[str] = field(default_factory=list)
    created: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    look: Callable[[], None] | None = None  # called again and again while a job of ours runs
    _told: int = 0  # how many of the notes were there before the job started
    _ended_by: int | None = None  # the signal that ended the job
    _overdue_s: float | None = None  # the time limit of ours that ended it
    _went_on: bool = False  # it was to end once measured, and we ended it
    _printed: RunRecord | None = None
    _started: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _seen: list[tuple[str, int, int]] = field(default_factory=list)
    _complete: bool = False
    _ledger: tuple[Any, LedgerRecord | None, str | None] | None = None  # made of what, and how
    _known: list[RankRecord] = field(default_factory=list)  # as last read

    def __post_init__(self) -> None:
        self._told = len(self.notes)

    def run(
        self,
        *,
        timeout_s: float | None = None,
        output: Any = None,
        env: dict[str, str] | None = None,
        first: Callable[[], None] | None = None,
    ) -> int:
        """Runs the job to its end; returns its exit code, -n if signal n ended it.

        A complete measurement is reported while the job still runs, unless it has a time limit: then the job is ours,
        and is ended where it has left a sign that it goes on after it should have ended.

        Raises:
            UsageError: it cannot be started.
        """
        try:
            code = process.run(
                self.job.argv,
                commands.environment(self.folder, env),
                watch=self._watch if timeout_s is None else self._goes_on,
                timeout_s=timeout_s,
                on_timeout=lambda: setattr(self, "_overdue_s", timeout_s),
                output=output,
                first=first,
            )
        except OSError as error:
            raise UsageError(
                f"{self.job.argv[0]} cannot be started ({error.strerror or error})"
            ) from error
        if not self._went_on:
            self._ended_by = -code if code < 0 else None
            self.exit_code = process.shell_code(code)
        return code

    def conclude(self) -> RunRecord:
        """Returns the run record and stores it as run.json in the run folder, with report.html beside it.

        Raises:
            NothingMeasuredError: no training step was timed.
            RunFolderError: the record cannot be written, or the folder went away; `record` has it all the same.
        """
        self.record = self._summarise(final=True)
        if folders.gone(self.folder):
            raise RunFolderError(
                f"the run folder {self.folder} went away while the script ran, so nothing is stored there; the report "
                "is of what had been read before. Give --out a folder that the script leaves alone"
            )
        self._pack()
        store.write(self.folder / "run.json", self.record)
        _write_page(self.folder / "report.html", self.record)
        return self.record

    def _pack(self) -> None:
        """Compresses the windows' traces; that they stay as they are costs nothing but room."""
        from flopwise.measurement import ledgers

        with contextlib.suppress(OSError):
            ledgers.pack(self.folder, self.ranks())

    @property
    def overdue(self) -> bool:
        """Whether our own time limit ended the job."""
        return self._overdue_s is not None

    def ending(self) -> str | None:
        """Returns in words how a job ended that did not end well, None for one that did."""
        if self._overdue_s is not None:
            return f"was ended by flopwise at its time limit of {self._overdue_s:.0f} s"
        name = self._interrupted()
        if self._ended_by is not None:
            return f"was ended by {name or f'signal {self._ended_by}'}"
        if self.exit_code:
            as_after = f" (as after {name})" if name else ""
            return f"ended with exit code {self.exit_code}{as_after}"
        return None

    def report(self, record: RunRecord) -> None:
        """Prints the report to stderr, unless this very measurement has been printed already."""
        if self.quiet:
            return
        before = self._printed
        complete = before is not None and before.complete
        if before and complete and replace(before, exit_code=record.exit_code) == record:
            stored = "" if folders.gone(self.folder) else f"; saved {short(self.folder)}"
            say(f"flopwise: report above{stored}")
            return
        self._printed = record
        from flopwise.reports.stream import look
        from flopwise.reports.terminal import render

        seen = look(sys.stderr)
        text = render(
            record,
            width=seen.width,
            color=seen.color,
            ascii_only=seen.ascii_only,
            next_command=self._next_command(record),
            saved=[
                short(self.folder / name)
                for name in ("run.json", "report.html")
                if (self.folder / name).exists()
            ],
        )
        say(text.removesuffix("\n"))

    def ranks(self) -> list[RankRecord]:
        """Returns the rank records written so far; a damaged one is left out and said.

        Of a run folder that has gone it returns those that were read before.
        """
        found = []
        for path in sorted((self.folder / folders.RANKS).glob("*.json")):
            try:
                found.append(store.read(path, RankRecord, rank_records.SCHEMA))
            except RecordError as error:
                if str(error) not in self.notes:
                    self.notes.append(str(error))
        if found or not folders.gone(self.folder):
            self._known = found
        return self._known

    def _goes_on(self) -> bool:
        """Returns whether the script goes on though it was to end once measured."""
        if self.look is not None:
            self.look()
        self._went_on = any(self.folder.glob(folders.GOES_ON))
        return self._went_on

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
            _write_page(self.folder / "report.html", record)
            self.report(record)
            self._printed = record

    def _next_command(self, record: RunRecord) -> str | None:
        """Returns what to type next: tune works on one process, and not where a plan was tried already; of several, who waits for whom
        shows in all of their traces together.
        """
        if any(rank.world_size > 1 for rank in self.ranks()):
            if folders.gone(self.folder) or record.ledger is None:
                return None
            return f"flopwise analyze {shlex.quote(short(self.folder))}"
        if record.plan is not None:
            return None
        return f"flopwise tune {shlex.join(self.job.typed)}"

    def _is_complete(self) -> bool:
        from flopwise import summary

        ranks = self.ranks()
        if not ranks:
            return False
        ranks = summary.one_per_rank(ranks)
        return len(ranks) >= ranks[0].world_size and all(map(_is_done, ranks))

    def _summarise(self, *, final: bool) -> RunRecord:
        from flopwise import summary

        ranks = self.ranks()
        if not ranks:
            raise NothingMeasuredError(self._why_nothing())
        notes = list(self.notes)
        lead = summary.one_per_rank(ranks)[0]
        # Whoever has interrupted a job does not want to wait for ours.
        may_measure = final and self.peak is None and self._interrupted() is None
        measured = ceilings.of_rank(lead, notes, may_measure=may_measure, quiet=self.quiet)
        context = summary.Context(
            command=self.options["command"],
            script=self.job.script,
            exit_code=self.exit_code,
            peak=self.peak,
            price_usd_per_hour=self.price_usd_per_hour,
            ceilings=measured,
            plan=self.options.get("plan"),
            notes=list(notes),
            created=self.created,
        )
        record = summary.summarise(ranks, context)
        if may_measure and measured is not None and ceilings.passed(record, measured):
            higher = ceilings.again(measured, notes, quiet=self.quiet)
            if higher is not None:
                context = replace(context, ceilings=higher, notes=notes)
                record = summary.summarise(ranks, context)
        if not any(rank.profile is not None for rank in ranks):
            return replace(record, ledger_reason="no windows were profiled (--no-profile)")
        from flopwise.measurement import ledgers

        ranks = summary.one_per_rank(ranks)
        key = [rank.profile for rank in ranks], record.step_s, context.ceilings
        if self._ledger is None or self._ledger[0] != key:
            n_bytes = ledgers.window_bytes(ranks)
            if n_bytes > SAID_BYTES and not self.quiet:
                say(f"flopwise: reading {size(n_bytes)} of profiled windows")
            self._ledger = key, *ledgers.ledger_or_reason(record, ranks, self.folder, context)
        return ledgers.with_ledger(record, *self._ledger[1:])

    def _interrupted(self) -> str | None:
        """Returns the name of the signal that ended the job, if one did."""
        number = self._ended_by or (self.exit_code or 0) - 128
        try:
            return signal.Signals(number).name
        except ValueError:
            return None

    def _why_nothing(self) -> str:
        """Returns why no step was measured: our own failures first, then how the script ended."""
        failed = [
            text for path in sorted(self.folder.glob("failed-*.txt")) if (text := _start_of(path))
        ]
        if failed:
            return f"nothing was measured: {failed[0]}"
        problems = self.notes[self._told :]
        if problems:
            return f"nothing was measured: {problems[0]}"
        ending = self.ending()
        if folders.gone(self.folder):
            how = f" The script {ending}." if ending else ""
            return (
                f"nothing was measured: the run folder {self.folder} went away while the script ran, and what was "
                f"stored with it.{how} Give --out a folder that the script leaves alone"
            )
        if _full(self.folder):
            return f"nothing was measured: the disk of {self.folder} is full. Give --out on another"
        inner = sorted(self.folder.glob("nested-*.txt"))
        if inner:
            return f"measured by another flopwise run inside this one: {_start_of(inner[0])}"
        if ending and (self.overdue or self._interrupted()) and not self._attached():
            return (
                f"no training step was seen: the script {ending} before it had imported torch where the meter could "
                "attach"
            )
        return _no_step(self._attached(), ending)

    def _attached(self) -> int:
        """Returns in how many processes torch was imported and the meter attached."""
        return len(list(self.folder.glob("attached-*")))


def _is_done(rank: RankRecord) -> bool:
    """Returns whether a rank has nothing more to add."""
    pending = rank.profile is not None and rank.profile.state == "pending"
    return rank.status == "complete" and not pending


def _write_page(path: Path, record: RunRecord) -> None:
    """Writes the report of a record that is stored already: what goes wrong here is said, and costs nothing else."""
    from flopwise.reports.html import render_html

    try:
        store.write_text(path, render_html(record))
    except Exception as error:
        say(line(f"flopwise: no {path.name}: {error}"))


def _no_step(attached: int, ending: str | None) -> str:
    """Returns why there is no step, given the processes that imported torch and how the job ended, if not well."""
    torch_in = f"torch was imported in {attached} process{'es' if attached > 1 else ''}"
    own = "an optimizer of its own, mark its steps with flopwise.step()"
    if attached and ending:
        return (
            f"no training step was stored: the script {ending} before enough of them were timed. {torch_in}; a first "
            f"record is written after ten timed steps. If its loop has {own}"
        )
    if attached:
        return (
            f"no training step was seen: {torch_in}, but no optimizer stepped and no backward ran. If the loop has "
            f"{own}"
        )
    lead = f"the script {ending}; " if ending else ""
    return (
        f"no training step was seen: {lead}no Python process below this one imported torch where the meter could "
        "attach (python -I, -E and -S shut it out, and so does a container or a remote host)"
    )


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
