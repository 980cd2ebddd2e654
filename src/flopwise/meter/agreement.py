"""How the ranks of a job agree on a step, by files in the run folder: to profile from it on, or to end there together."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from flopwise.meter import finish

if TYPE_CHECKING:
    from flopwise.meter.session import Session

STOP, PROFILE = "stop", "profile"
#: The step of what is not to be.
NEVER = -1
#: A rank that is to end waits this long at most for the others to come to the same step.
LEAVING_S = 30.0


class Agreed(NamedTuple):
    """What rank 0 has decided."""

    step: int  # NEVER: another rank cannot
    text: str = ""  # what else it said


def begin(session: Session) -> None:
    """Takes away what an earlier job with the same run folder has said for this rank, before anybody looks."""
    rank, world, _ = finish.identity()
    for purpose in (STOP, PROFILE):
        folder = _folder(session, purpose) if world > 1 else None
        if folder is not None:
            for name in (f"rank-{rank}", f"refused-{rank}", f"left-{rank}", *["step"][rank:]):
                (folder / name).unlink(missing_ok=True)


def agree(session: Session, purpose: str, say: Callable[[], str] = lambda: "") -> Agreed | None:
    """Returns the step that all ranks agree on, or None while that is not decided.

    Each rank says in the run folder that it is ready. Rank 0 decides once all of them are: on a step that lies ahead,
    since the others only look there once a step. `say` makes what it tells the others besides.
    """
    rank, world, _ = finish.identity()
    folder = _folder(session, purpose)
    if world == 1 or folder is None:
        return Agreed(session.boundaries.total, say())
    if purpose == STOP and session.device.type == "cuda":
        # The host runs ahead of the device, of a small model by more steps than the decision lies ahead. Where every
        # step has a collective, ranks that wait for their devices are never more than a step apart.
        torch.cuda.synchronize(session.device)
    decision = folder / "step"
    if rank == 0:
        if any((folder / f"refused-{other}").exists() for other in range(1, world)):
            _write_whole(decision, str(NEVER))
            return Agreed(NEVER)
        if all((folder / f"rank-{other}").exists() for other in range(1, world)):
            agreed = Agreed(session.boundaries.total + _steps_ahead(session), say())
            _write_whole(decision, f"{agreed.step} {agreed.text}")
            return agreed
    else:
        mine = folder / f"rank-{rank}"
        if not mine.exists():
            _write_whole(mine, "")
        with contextlib.suppress(OSError, ValueError):
            step, _, text = decision.read_text(encoding="ascii").partition(" ")
            return Agreed(int(step), text)
    return None


def refuse(session: Session, purpose: str) -> None:
    """Tells the other ranks that this one cannot do it with them: its meter has failed, or gives up."""
    rank, world, _ = finish.identity()
    folder = _folder(session, purpose)
    if world > 1 and folder is not None:
        _write_whole(folder / f"refused-{rank}", "")
        if rank == 0 and not (folder / "step").exists():
            _write_whole(folder / "step", str(NEVER))


def refused(session: Session, purpose: str) -> bool:
    """Returns whether a rank cannot do it meanwhile: it would wait for ever for the ranks that leave."""
    folder = _folder(session, purpose)
    return folder is not None and folder.is_dir() and any(folder.glob("refused-*"))


def leave_together(session: Session) -> None:
    """Waits until every rank has come to the step at which they end, and has the process group end with the process.

    The first to exit closes connections over which another may still be finishing the last collective of that step;
    and a process group that nobody destroys can abort the process at its exit (seen with Gloo).
    """
    rank, world, _ = finish.identity()
    folder = _folder(session, STOP)
    if world == 1 or folder is None:
        return
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    deadline = time.monotonic() + LEAVING_S
    with contextlib.suppress(OSError):
        _write_whole(folder / f"left-{rank}", "")
        while not all((folder / f"left-{other}").exists() for other in range(world)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    with contextlib.suppress(Exception):
        if torch.distributed.is_initialized():  # the script may have done it while it unwound
            torch.distributed.destroy_process_group()


def _folder(session: Session, purpose: str) -> Path | None:
    if session.config.folder is None:
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = Path(session.config.folder) / f"{purpose}-{attempt}"
    if finish.identity()[1] > 1:
        folder.mkdir(exist_ok=True)
    return folder


def _steps_ahead(session: Session) -> int:
    """Returns how many steps ahead it lies: over a network a new file may stay unseen for a minute."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or finish.identity()[1])
    if local >= finish.identity()[1] or len(session.rows) < 2:
        return 5
    rows = session.rows
    step_s = (rows[-1].end_ns - rows[0].end_ns) * 1e-9 / (len(rows) - 1)
    return max(5, math.ceil(60 / max(step_s, 1e-3)))


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="ascii")
    temporary.replace(path)
