"""`flopwise.step()`: the way to mark a step by hand, for loops whose optimizer torch does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwise.meter.session import Session

#: The session of this process, if the meter is attached.
current: Session | None = None


def step() -> None:
    """Marks the end of one training step. Does nothing when the script runs without the meter.

    After the first call only these marks end steps; optimizer events no longer do.
    """
    if current is not None:
        current.mark()
