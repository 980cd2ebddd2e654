"""The ranks of a job on trial: all of them switch the same fixes at the same steps, since they decide on the same facts.

What one rank sees for itself (a duration, a failure, whether a fix is eligible) is exchanged before anything is decided
on it, so the trials take the same way on every rank. The exchange has connections of its own (Gloo over a store of its
own), and leaves the script's process groups alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

#: Ranks wait for each other this long: a parity check or a compilation may take minutes on one of them.
PATIENCE_S = 900.0
#: Of a text that is exchanged, in bytes.
LONGEST_TEXT = 480


class RanksApartError(RuntimeError):
    """A rank does not answer: the trials cannot go on together."""


class Ranks:
    """One rank alone: what it sees is what there is."""

    world, rank = 1, 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the values of every rank, in the order of ranks; every rank calls it with as many."""
        return [list(values)]

    def texts(self, text: str | None) -> list[str | None]:
        """Returns the text of every rank, in the order of ranks."""
        return [text]

    def first(self, text: str | None) -> str | None:
        """Returns the first text that any rank has, None where none has: a reason not to go on."""
        found = [(rank, said) for rank, said in enumerate(self.texts(text)) if said is not None]
        if not found:
            return None
        rank, said = found[0]
        return said if len(found) == self.world or self.world == 1 else f"rank {rank}: {said}"

    def all(self, value: bool) -> bool:
        """Returns whether it holds on every rank."""
        return all(values[0] for values in self.gather([float(value)]))

    def mean(self, values: Sequence[float]) -> list[float]:
        """Returns the mean over the ranks of each value."""
        gathered = self.gather(values)
        return [sum(column) / len(gathered) for column in zip(*gathered, strict=True)]


class Connected(Ranks):
    """Several ranks, connected.

    Args:
        folder: the run folder, which all ranks see.

    Raises:
        RanksApartError: the others did not come.
    """

    def __init__(self, rank: int, world: int, folder: str, patience_s: float = PATIENCE_S) -> None:
        self.rank, self.world = rank, world
        try:
            self._group = _group(rank, world, Path(folder), timedelta(seconds=patience_s))
        except (RuntimeError, OSError, ValueError) as error:
            raise RanksApartError(f"the ranks could not be connected: {error}") from error

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(list(values), dtype=torch.float64)
        return [t.tolist() for t in self._exchange(mine)]

    def texts(self, text: str | None) -> list[str | None]:
        mine = torch.zeros(LONGEST_TEXT + 1, dtype=torch.uint8)
        if text is not None:
            # What is cut at the end must not end amid a character.
            data = text.encode()[:LONGEST_TEXT].decode(errors="ignore").encode()
            mine[0] = 1
            mine[1 : 1 + len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[
                : len(data)
            ]
        found: list[str | None] = []
        for theirs in self._exchange(mine):
            data = bytes(theirs[1:].tolist()).rstrip(b"\0")
            found.append(data.decode(errors="replace") if theirs[0] else None)
        return found

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        theirs = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            self._group.allgather([theirs], [mine]).wait()
        except RuntimeError as error:
            raise RanksApartError(f"a rank has left the trials: {str(error)[:200]}") from error
        return theirs


def ranks_of(rank: int, world: int, folder: str) -> Ranks:
    """Returns the ranks of a job: connected where there are several.

    Raises:
        RanksApartError: they could not be connected.
    """
    return Connected(rank, world, folder) if world > 1 else Ranks()


def _group(rank: int, world: int, folder: Path, patience: timedelta) -> Any:
    """Returns a Gloo group of its own; rank 0 leaves the port of its store in the run folder."""
    distributed: Any = torch.distributed
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    sign = folder / f"trials-port-{attempt}"
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if rank == 0:
        store = distributed.TCPStore(host, 0, world, True, timeout=patience, wait_for_workers=False)
        temporary = sign.with_suffix(".tmp")
        temporary.write_text(str(store.port), encoding="ascii")
        temporary.replace(sign)
    else:
        deadline = time.monotonic() + patience.total_seconds()
        while not sign.exists():
            if time.monotonic() > deadline:
                raise RanksApartError(
                    f"rank 0 did not come within {patience.total_seconds():.0f} s"
                )
            time.sleep(0.02)
        port = int(sign.read_text(encoding="ascii"))
        store = distributed.TCPStore(host, port, world, False, timeout=patience)
    return distributed.ProcessGroupGloo(store, rank, world, timeout=patience)
