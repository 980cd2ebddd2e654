"""Runs the small script of a case under the meter and gives what a user gets: the record and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flopwise.hardware.accelerators import Peak
from flopwise.meter import finish
from flopwise.meter.config import Config
from flopwise.meter.session import Session
from flopwise.records.finding import Finding
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord
from flopwise.reports.terminal import render
from flopwise.summary import Context, summarise


@dataclass
class Case:
    """What came out of one script."""

    rank: RankRecord
    record: RunRecord

    @property
    def report(self) -> str:
        """Returns the report for the terminal, without its line breaks."""
        return " ".join(render(self.record, width=120, color=False).split())

    def causes(self) -> list[str]:
        return [finding.cause for finding in self.record.findings]

    def finding(self, cause: str) -> Finding:
        found = [f for f in self.record.findings if f.cause == cause]
        assert len(found) == 1, self.record.findings
        shown = " ".join(found[0].evidence.split())
        assert shown in self.report  # what is found is said
        return found[0]


@pytest.fixture
def conclude() -> Callable[..., Case]:
    """Returns a function from a rank record to the case."""

    def run(rank: RankRecord, **context: Any) -> Case:
        return Case(rank, summarise([rank], Context(["train.py"], "train.py", 0, **context)))

    return run


@pytest.fixture
def run_case(conclude: Callable[..., Case]) -> Iterator[Callable[..., Case]]:
    """Returns a function that runs a training function under the meter; a peak of 1 TFLOP/s is given."""
    sessions: list[Session] = []

    def run(train: Callable[[], Any], **options: Any) -> Case:
        options.setdefault("stride", 1)
        peak = options.pop("peak", Peak(1e12, "fp32", "given by the test", "given"))
        session = Session(Config(**options))
        sessions.append(session)
        session.attach()
        try:
            train()
        finally:
            session.settle()
            session.detach()
        rank = finish.build(finish.Snapshot.of(session, "complete"))
        return conclude(rank, peak=peak)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield run
    for session in sessions:
        session.detach()
