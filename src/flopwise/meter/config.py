"""What a session is to measure, and how it ends a script that is to be stopped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """What to measure."""

    folder: str | None = None  # the run folder; None: keep the record in memory (`Session.record`)
    steps: int | None = (
        None  # time exactly this many; None: 50 or more over at least 5 s, at most 60 s
    )
    warmup: int | None = None  # drop exactly this many; None: by rule
    stop_after: bool = False  # end the script once measured
    count: bool = True
    telemetry: bool = True
    profile: bool = False  # profiled windows after the timed steps
    stride: int | None = None  # look closely at every n-th timed step; None: by rule
    default_steps: int = 50
    min_window_s: float = 5.0
    max_window_s: float = 60.0


class StopTraining(SystemExit):
    """Ends a script after its measurement: an exit with code 0, so that its own clean-up runs."""

    def __init__(self) -> None:
        super().__init__(0)
