"""Who has which slot of a pool, written where every process sees it."""

from __future__ import annotations

import os
from typing import Any

from flopwise.kit.input.shared_block import SharedBlock

#: Bytes of a slot's row: its state, the process that filled it last, its ticket, and one word to spare.
ROW_BYTES = 32
_WORDS = ROW_BYTES // 8
_FREE, _FILLING, _FILLED = 0, 1, 2
_STATE, _OWNER, _TICKET = 0, 1, 2


class SlotTable:
    """Rows of words in a shared block, one a slot; each word is written by one process at a time, so there is no lock.

    The ticket counts how often a slot was taken: a batch whose ticket is old has lost its slot.
    """

    def __init__(self, block: SharedBlock, offset: int, slots: int) -> None:
        self._block, self._offset, self._slots = block, offset, slots
        self._rows: Any = None
        self._rows_of = -1

    def filling(self, slot: int) -> None:
        """Notes that this process has taken a slot."""
        words, row = self._words(), slot * _WORDS
        words[row + _OWNER] = os.getpid()
        words[row + _TICKET] += 1
        words[row + _STATE] = _FILLING

    def filled(self, slot: int) -> int:
        """Notes that a slot is full; returns its ticket."""
        words, row = self._words(), slot * _WORDS
        words[row + _STATE] = _FILLED
        return int(words[row + _TICKET])

    def freed(self, slot: int) -> None:
        """Notes that a slot is free."""
        self._words()[slot * _WORDS + _STATE] = _FREE

    def ticket(self, slot: int) -> int:
        """Returns the ticket of whoever took the slot last."""
        return int(self._words()[slot * _WORDS + _TICKET])

    def take_back(self, slot: int) -> bool:
        """Returns whether a slot was in the hands of a process that is gone; it is free then, and its batch void."""
        words, row = self._words(), slot * _WORDS
        if words[row + _STATE] == _FREE or _is_alive(words[row + _OWNER]):
            return False
        words[row + _TICKET] += 1
        words[row + _STATE] = _FREE
        return True

    def close(self) -> None:
        """Lets go of the block."""
        self._rows = None

    def _words(self) -> Any:
        if self._rows is None or self._rows_of != os.getpid():  # a fork maps the block anew
            end = self._offset + self._slots * ROW_BYTES
            self._rows = memoryview(self._block.map())[self._offset : end].cast("q")
            self._rows_of = os.getpid()
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {"_block": self._block, "_offset": self._offset, "_slots": self._slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows, self._rows_of = None, -1


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
