"""The job: its ranks together. Health comes first; what a defect would make wrong is withheld, and the rest stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise._version import __version__
from flopwise.diagnosis.ledger.build import families_of
from flopwise.diagnosis.ranks import health
from flopwise.diagnosis.ranks.clocks import Clocks, align
from flopwise.diagnosis.ranks.jobfindings import findings_of
from flopwise.diagnosis.ranks.matching import Matching, match
from flopwise.diagnosis.ranks.stragglers import caused, named
from flopwise.diagnosis.ranks.summary import Calls, RankSummary
from flopwise.diagnosis.ranks.traffic import kinds, links, redundant, step_s_of, steps_of
from flopwise.diagnosis.ranks.waits import Waits, waits
from flopwise.hardware import accelerators
from flopwise.records.job import SCHEMA, Health, JobRecord, RankRecord, Straggler
from flopwise.records.ledger import FAMILIES, LedgerRecord, Line
from flopwise.trace.intervals import Spans, union


@dataclass(frozen=True)
class Withheld:
    """What is not said: of the job, and of single ranks."""

    health: Health
    of_rank: dict[int, dict[str, list[str]]]  # position -> conclusion -> codes of defects

    def all_of(self, conclusion: str) -> bool:
        """Whether a conclusion is withheld for the whole job."""
        return conclusion in self.health.withheld

    def of(self, position: int, conclusion: str) -> bool:
        """Whether a conclusion is withheld for a rank."""
        return conclusion in self.of_rank.get(position, {})

    def why(self, conclusion: str) -> str:
        """Returns which defects withhold a conclusion for the job."""
        return self._words(self.health.withheld.get(conclusion, []))

    def why_of(self, position: int, conclusion: str) -> str:
        """Returns which defects withhold a conclusion for a rank."""
        return self._words(self.of_rank.get(position, {}).get(conclusion, []))

    def _words(self, codes: list[str]) -> str:
        said = [one.defect for one in self.health.defects if one.code in codes]
        return ", ".join(dict.fromkeys(said)) or "a defect of the traces"


def _withheld(ranks: Sequence[RankSummary], matching: Matching, clocks: Clocks) -> Withheld:
    """Returns what is withheld: by what is wrong with each file, and between them."""
    matched = {
        one.rank: matching.shares[p]
        for p, one in enumerate(ranks)
        if one.rank is not None and p in matching.shares
    }
    first = next((clocks.of(p) for p in sorted(clocks.offset_ns)), 0)
    offsets = {
        one.rank: (float(clocks.of(p) - first), matching.scatter_ns.get(p, 0.0))
        for p, one in enumerate(ranks)
        if one.rank is not None and p in clocks.offset_ns
    }
    several = len(ranks) > 1
    read = [
        one for one in ranks if one.events or one.device is not None
    ]  # as if without the others
    between = health.across(
        read, offsets=offsets if several else None, matched=matched if several else None
    )
    certificate = health.certificate(
        (defect for one in ranks for defect in one.defects), between, [one.rank for one in ranks]
    )
    of_rank = {
        p: health.withheld_for(one.rank, certificate.defects, one.path)
        for p, one in enumerate(ranks)
    }
    return Withheld(certificate, of_rank)


def job_of(found: Sequence[RankSummary], notes: Sequence[str] = ()) -> JobRecord:
    """Returns what is said of a job.

    Args:
        found: one summary a rank, no rank twice.
        notes: what else is to be said, of files that were left out.
    """
    ranks = sorted(found, key=lambda one: (one.rank is None, one.rank, one.path))
    matching = match(ranks)
    clocks = align(matching.matched, ranks)
    withheld = _withheld(ranks, matching, clocks)
    waited = None
    if matching.matched and not withheld.all_of("waits"):
        waited = waits(matching.matched, ranks, clocks)
    row = _row(ranks)
    redundants, frac, of_calls = redundant(ranks, waited)
    if withheld.all_of("redundancy"):
        redundants, frac, of_calls = [], None, {}
    speed = row.link_gb_per_s * 1e9 if row is not None and row.link_gb_per_s else None
    known = None if withheld.all_of("bandwidth") else waited
    collectives = kinds(ranks, known, speed, of_calls)
    stragglers, reason = _stragglers(ranks, matching, waited, withheld)
    lines, lines_reason = _lines(ranks, waited, withheld)
    records = [_rank(p, one, waited, matching, clocks, withheld) for p, one in enumerate(ranks)]
    lengths = [one.step_s for one in records if one.step_s]
    names = {one.device_name for one in ranks if one.device_name}
    record = JobRecord(
        schema=SCHEMA,
        flopwise=__version__,
        sources=[one.path for one in ranks],
        world_size=max((one.world_size for one in ranks if one.world_size), default=None),
        device_name=names.pop() if len(names) == 1 else None,
        step_s=float(np.mean(lengths)) if lengths else None,
        steps=min((steps_of(one) for one in ranks), default=0),
        ranks=records,
        lines=lines,
        families=families_of(lines),
        lines_reason=lines_reason,
        health=withheld.health,
        collectives=collectives,
        links=links(ranks, collectives, row),
        redundant=redundants,
        redundant_bytes_frac=frac,
        stragglers=stragglers,
        stragglers_reason=reason,
        findings=[],
        notes=[*notes, *_notes(ranks)],
    )
    return dataclasses.replace(record, findings=findings_of(record))


def _row(ranks: Sequence[RankSummary]) -> accelerators.Accelerator | None:
    for one in ranks:
        if one.device_name:
            return accelerators.lookup(one.device_name).row
    return None


def _notes(ranks: Sequence[RankSummary]) -> list[str]:
    return [f"{one.path}: {note}" for one in ranks for note in one.notes]


def _stragglers(
    ranks: Sequence[RankSummary], matching: Matching, waited: Waits | None, withheld: Withheld
) -> tuple[list[Straggler], str | None]:
    """Returns the stragglers, or why none can be named."""
    world = max((one.world_size for one in ranks if one.world_size), default=len(ranks))
    if not ranks:
        return [], "no trace was given"
    if len(ranks) < 2:
        alone = f"one rank of {world} was read: who comes last shows in all of them"
        return [], alone if world > 1 else "there is one rank"
    if withheld.all_of("stragglers"):
        return [], f"withheld: {withheld.why('stragglers')}"
    if waited is None:
        return [], "no call was found on two ranks"
    found = named(caused(matching.matched, ranks, waited), ranks, _span_ns(ranks, matching))
    return found, None if found else "no rank causes clearly more than its share of the waiting"


def _span_ns(ranks: Sequence[RankSummary], matching: Matching) -> float:
    """Returns how long the matched calls span, on the first rank of the first of them."""
    p = matching.matched[0].ranks[0]
    mine = [one.calls[one.ranks.index(p)] for one in matching.matched if p in one.ranks]
    calls = ranks[p].calls
    return float(calls.end_ns[mine].max() - calls.start_ns[mine].min())


def _rank(
    p: int,
    one: RankSummary,
    waited: Waits | None,
    matching: Matching,
    clocks: Clocks,
    withheld: Withheld,
) -> RankRecord:
    n = steps_of(one)
    calls = one.calls
    inside = calls.step >= 0
    each = 1e-9 / n if n else 0.0
    ns = calls.end_ns - calls.start_ns
    talking = union(calls.start_ns[inside], calls.end_ns[inside])
    wait = wait_frac = None
    if waited is not None and not withheld.of(p, "waits"):
        wait_frac = waited.share_of(p, ns)
        mine = waited.wait_ns[p]
        if (mine[inside] >= 0).any():
            known = inside & (mine >= 0)
            waiting = union(calls.start_ns[known], calls.start_ns[known] + mine[known])
            matched = union(calls.start_ns[known], calls.end_ns[known])
            # In several calls at once it waits once; calls that the others' recordings lack wait as those that they have.
            wait = waiting.total_ns / max(1, matched.total_ns) * talking.total_ns * each
    ledger, reason = one.ledger, one.reason
    if ledger is not None and withheld.of(p, "ledger"):
        ledger, reason = None, f"withheld: {withheld.why_of(p, 'ledger')}"
    elif ledger is not None:
        ledger = split(one, p, waited, withheld)
        ledger = dataclasses.replace(ledger, heat=None) if ledger is not None else None
    return RankRecord(
        rank=p if one.rank is None else one.rank,
        path=one.path,
        device_name=one.device_name,
        step_s=None if withheld.of(p, "steps") or not n else _length_s(one),
        steps=n,
        ledger=ledger,
        ledger_reason=reason,
        calls=len(calls),
        matched=sum(p in m.ranks for m in matching.matched),
        communication_s=talking.total_ns * each if n else None,
        exposed_s=(talking.total_ns - _hidden(calls, inside).total_ns) * each
        if n and not withheld.of(p, "overlap")
        else None,
        wait_s=wait,
        clock_offset_s=clocks.offset_ns[p] * 1e-9 if p in clocks.offset_ns else None,
        clock_error_s=float(clocks.error_ns[p]) * 1e-9 if p in clocks.error_ns else None,
        notes=list(one.notes),
        wait_frac=wait_frac,
    )


def _hidden(calls: Calls, chosen: npt.NDArray[np.bool_]) -> Spans:
    """Returns when compute ran beside some of a rank's calls."""
    of = np.repeat(np.arange(len(calls)), np.diff(calls.covered_from))
    kept = chosen[of]
    begin = calls.start_ns[of][kept]
    return union(begin + calls.covered[kept, 0], begin + calls.covered[kept, 1])


def _length_s(one: RankSummary) -> float:
    """Returns the mean step: the undisturbed one where there is one."""
    return step_s_of(one) if one.ledger is None else one.ledger.step_s


def split(
    one: RankSummary, p: int, waited: Waits | None, withheld: Withheld
) -> LedgerRecord | None:
    """Returns a rank's ledger whose exposed communication is waiting and transferring, as far as its calls were matched."""
    ledger = one.ledger
    if ledger is None or waited is None or withheld.of(p, "waits"):
        return ledger
    inside = one.calls.step >= 0
    exposed = one.calls.exposed_ns[inside].astype(float)
    mine = waited.exposed_ns[p][inside]
    known = mine >= 0
    total = float(exposed.sum())
    old = next((line for line in ledger.lines if line.name == "comm_unsplit"), None)
    if old is None or not total or not known.any():
        return ledger
    shares = {
        "comm_wait": float(mine[known].sum()) / total,
        "comm_unsplit": float(exposed[~known].sum()) / total,
    }
    shares["comm_transfer"] = 1 - sum(shares.values())
    lines = []
    for line in ledger.lines:
        if line.name != "comm_unsplit":
            lines.append(line)
            continue
        lines += [
            _part(line, name, shares[name])
            for name in ("comm_transfer", "comm_wait", "comm_unsplit")
            if shares[name]
        ]
    return dataclasses.replace(ledger, lines=lines, families=families_of(lines))


def _part(line: Line, name: str, share: float) -> Line:
    low, high = line.ci95
    return Line(
        name,
        FAMILIES[name],
        line.s * share,
        (low * share, high * share),
        line.share_frac * share,
        line.mfu_points * share,
    )


def _lines(
    ranks: Sequence[RankSummary], waited: Waits | None, withheld: Withheld
) -> tuple[list[Line], str | None]:
    """Returns the lines of the job, the mean over ranks, or why there are none."""
    if withheld.all_of("ledger"):
        return [], f"withheld: {withheld.why('ledger')}"
    ledgers = [
        split(one, p, waited, withheld)
        for p, one in enumerate(ranks)
        if one.ledger is not None and not withheld.of(p, "ledger")
    ]
    if not ranks:
        return [], "no trace was given"
    if len(ledgers) < len(ranks):
        return [], f"{len(ranks) - len(ledgers)} of {len(ranks)} ranks have no ledger"
    by_rank = [{line.name: line for line in ledger.lines} for ledger in ledgers if ledger]
    step = float(np.mean([ledger.step_s for ledger in ledgers if ledger]))
    lines = []
    for name, family in FAMILIES.items():
        values = np.asarray([of[name].s if name in of else 0.0 for of in by_rank])
        if not values.any():
            continue
        half = [(of[name].ci95[1] - of[name].ci95[0]) / 2 if name in of else 0.0 for of in by_rank]
        mean = float(values.mean())
        error = float(np.sqrt(np.sum(np.square(half)))) / len(by_rank)
        share = mean / step if step else 0.0
        lines.append(Line(name, family, mean, (mean - error, mean + error), share, 100 * share))
    return lines, None
