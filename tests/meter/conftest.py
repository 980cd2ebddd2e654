"""Runs a training function under the meter, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flopwise.meter import finish
from flopwise.meter.config import Config
from flopwise.meter.session import Session
from flopwise.records.rank import RankRecord


@dataclass
class Measured:
    """What came out."""

    session: Session
    record: RankRecord

    def kinds(self) -> list[str]:
        return [row.kind for row in self.record.rows]


@pytest.fixture
def measure() -> Iterator[Callable[..., Measured]]:
    sessions = []

    def run(train: Callable[[], Any], **options: Any) -> Measured:
        options.setdefault("count", False)
        options.setdefault("stride", 1)
        session = Session(Config(**options))
        sessions.append(session)
        session.attach()
        try:
            train()
        finally:
            session.settle()
            session.detach()
        return Measured(session, finish.build(finish.Snapshot.of(session, "complete")))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield run
    for session in sessions:
        session.detach()
