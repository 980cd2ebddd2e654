"""What the causes look at: the records of the ranks, and the run record made of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flopwise.records.rank import RankRecord, StepRow
from flopwise.records.run import RunRecord
from flopwise.records.surroundings import HostRead, LoaderFacts, Surroundings

MEASURED, COUNTED, SEEN = "measured", "counted", "seen"


@dataclass(frozen=True)
class Evidence:
    """The records of one run. `lead` is the first rank that timed a step."""

    ranks: Sequence[RankRecord]
    run: RunRecord

    @cached_property
    def lead(self) -> RankRecord:
        """Returns the rank whose rows and surroundings stand for the run."""
        return next(r for r in self.ranks if any(row.kind == "timed" for row in r.rows))

    @property
    def surroundings(self) -> Surroundings | None:
        """Returns the lead rank's surroundings."""
        return self.lead.surroundings

    @cached_property
    def timed(self) -> list[StepRow]:
        """Returns the timed rows of the lead rank."""
        return [row for row in self.lead.rows if row.kind == "timed"]

    @cached_property
    def steady(self) -> list[StepRow]:
        """Returns the longest run of timed rows of the lead rank that follow each other."""
        best: list[StepRow] = []
        current: list[StepRow] = []
        for row in self.lead.rows:
            current = [*current, row] if row.kind == "timed" else []
            best = current if len(current) > len(best) else best
        return best

    @cached_property
    def host_s(self) -> float:
        """Returns the mean host time of a timed step of the lead rank."""
        return statistics.fmean(row.host_ns for row in self.timed) * 1e-9

    @cached_property
    def wait_s(self) -> float:
        """Returns the mean wait for data in it."""
        return statistics.fmean(row.data_ns for row in self.timed) * 1e-9

    @property
    def data_frac(self) -> float:
        """Returns the share of a step that waits for data."""
        return self.run.phases.data_frac or 0.0

    @property
    def input_wait_frac(self) -> float:
        """Returns the share of a step that waits for data with nothing left for the device to do."""
        dry = self.run.phases.device_idle_at_data_frac
        return self.data_frac * (1.0 if dry is None else dry)

    @property
    def loader(self) -> LoaderFacts | None:
        """Returns the loader that delivered most, None if none was seen."""
        loaders = self.surroundings.loaders if self.surroundings else []
        return max(loaders, key=lambda f: f.starts * (f.batches or 1), default=None)

    @property
    def on_cpu(self) -> bool:
        """Returns whether the job ran on the CPU alone."""
        return self.lead.device_type == "cpu"

    @cached_property
    def ranks_here(self) -> list[RankRecord]:
        """Returns the ranks on the machine of the lead rank."""
        return [r for r in self.ranks if r.host == self.lead.host]

    @cached_property
    def cores(self) -> int:
        """Returns the cores that the ranks on this machine may use together."""
        facts = [r.surroundings for r in self.ranks_here if r.surroundings is not None]
        if not facts:
            return self.lead.cpu_cores
        union = {core for f in facts for mask in f.masks[-1:] for core in mask.cores}
        quota = any(f.masks and f.usable_cores < len(f.masks[-1].cores) for f in facts)
        return max(f.usable_cores for f in facts) if quota or not union else len(union)

    def reads(self) -> list[HostRead]:
        """Returns the host reads of the lead rank that would wait for a device."""
        facts = self.surroundings
        return [read for read in facts.reads if not read.on_host] if facts else []

    def a_step(self, read: HostRead) -> float:
        """Returns how often a read comes in a step, over the steps that were looked at."""
        facts = self.surroundings
        return read.count / max(1, facts.read_steps if facts else 1)

    @property
    def read_basis(self) -> str:
        """Returns in words what the counts of reads stand on, and what they cannot tell."""
        steps = self.surroundings.read_steps if self.surroundings else 0
        looked = "one step was" if steps == 1 else f"{steps} steps were"
        cost = (
            "what a read costs needs a GPU to be measured" if self.on_cpu else "cost not measured"
        )
        return f"{looked} looked at; {cost}"


def places(read: HostRead) -> list[str]:
    """Returns where a read is: the script's own line first."""
    return [place for place in (read.caller, read.where) if place]


def short(read: HostRead) -> str:
    """Returns where a read is, in few letters: `train.py:12`."""
    found = places(read)
    return found[0].rpartition("/")[2] if found else "the backward pass"


def all_places(reads: Sequence[HostRead]) -> list[str]:
    """Returns where several reads are, each place once."""
    return list(dict.fromkeys(place for read in reads for place in places(read)))


def times(per_step: float, noun: str, plural: str | None = None) -> str:
    """Returns a count a step: `1 scalar read`, `2.5 mask reads`."""
    shown = f"{per_step:.0f}" if per_step == int(per_step) else f"{per_step:.1f}"
    return f"{shown} {noun if shown == '1' else plural or noun + 's'}"
