"""A line on standard error that says how far reading is, once it takes long."""

from __future__ import annotations

import sys
import time

QUIET_S = 2.0  # reading that takes longer says how far it is
EVERY_S = 0.5


class _Told:
    """A line on standard error that says how far something is, once it takes long."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._shown = False

    def _due(self, *, last: bool = False) -> bool:
        """Whether it is time to say it: not at first, and not where it was said just now, but for the last time."""
        now = time.monotonic()
        if now - self._began <= QUIET_S or (now - self._told <= EVERY_S and not last):
            return False
        self._told, self._shown = now, True
        return True

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._shown:
            print(file=sys.stderr, flush=True)


class Progress(_Told):
    """Tells how many bytes of a file were read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __call__(self, n_bytes: int) -> None:
        """Says how many bytes were read so far, unless it was said just now."""
        if not self._due():
            return
        rate = n_bytes / (self._told - self._began) / 1e6
        from flopwise.reports.screen import visible

        text = f"\r{visible(self._name, ascii_only=True)}: {n_bytes / 1e6:.0f} MB read, {rate:.0f} MB/s "
        print(text, end="", file=sys.stderr, flush=True)


class Ranks(_Told):
    """Tells how many ranks were read."""

    def __call__(self, done: int, of: int) -> None:
        """Says how many are done, unless it was said just now."""
        if self._due(last=done == of):
            print(f"\r{done} of {of} ranks read ", end="", file=sys.stderr, flush=True)
