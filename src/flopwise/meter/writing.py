"""Writing the rank record while the script goes on, in order, and saying what of ours has failed."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from flopwise.errors import NothingMeasuredError
from flopwise.meter import ending, finish
from flopwise.records.rank import RankRecord

if TYPE_CHECKING:
    from flopwise.meter.session import Session

#: A process that ends waits so long for each record that is being written, seconds.
PATIENCE_S = 20.0


class Writing:
    """The records of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._threads: list[threading.Thread] = []
        self._built: RankRecord | None = None  # the record of the timed steps
        self._complained = False

    def later(self, status: str) -> None:
        """Builds and writes the record on a thread of its own, once the device has passed the last event."""
        snapshot = finish.Snapshot.of(self._session, status)
        if self._session.config.folder is None:
            self._session.record = snapshot
        else:
            self._start(lambda: self._write(snapshot))

    def now(self, status: str) -> None:
        """Builds and writes the record, in the thread that calls."""
        try:
            self._write(finish.Snapshot.of(self._session, status))
        except Exception as error:
            self.complain(error)

    def profile(self) -> None:
        """Adds the profiled windows to the record of the timed steps, on a thread of its own."""
        profile = self._session.profiling.snapshot()

        def write() -> None:
            if self._built is not None:
                finish.write_record_of(self._built, self._session.config.folder, profile())

        self._start(write)

    def join(self) -> None:
        """Waits until what was to be written is."""
        for thread in self._threads:
            thread.join(timeout=PATIENCE_S)

    def complain(self, error: BaseException) -> None:
        """Says once, on stderr and in the run folder, what has failed."""
        if self._complained:
            return
        self._complained = True
        if isinstance(error, NothingMeasuredError):
            with contextlib.suppress(Exception):
                print(
                    f"flopwise: {error}. The script goes on unmeasured", file=sys.stderr, flush=True
                )
                finish.leave_message(self._session, str(error))
            return
        where = traceback.extract_tb(error.__traceback__)
        place = f"{os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else "?"
        with contextlib.suppress(Exception):
            print(
                f"flopwise: the meter failed ({type(error).__name__}: {error}; {place}) and has been taken out. "
                "The script goes on unmeasured",
                file=sys.stderr,
                flush=True,
            )
            finish.leave_message(self._session, f"{type(error).__name__}: {error} ({place})")

    def _start(self, write: Callable[[], None]) -> None:
        before = self._threads[-1] if self._threads else None

        def run() -> None:
            try:
                if before is not None:  # in order: an earlier record must not replace a later one
                    before.join()
                write()
            except Exception as error:
                self.complain(error)

        thread = threading.Thread(target=run, name="flopwise-record", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write(self, snapshot: finish.Snapshot) -> None:
        session = self._session
        self._built = finish.write(snapshot)
        if session.config.stop_after and session.enough and session.trainers.several is not None:
            ending.leave_sign(session.config.folder, "several threads train")
