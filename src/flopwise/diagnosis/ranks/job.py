"""The job: its ranks together. Health comes first; what a defect would make wrong is withheld, and the rest stands."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flopwise._version import __version__
from flopwise.diagnosis.ledger.build import families_of
from flopwise.diagnosis.ranks import health
from flopwise.diagnosis.ranks.clocks import Clocks, align
from flopwise.diagnosis.ranks.jobfindings import findings_of
from flopwise.diagnosis.ranks.matching import Matching, match
from flopwise.diagnosis.ranks.stragglers import caused, named
from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.diagnosis.ranks.traffic import kinds, links, redundant, step_s_of, steps_of
from flopwise.diagnosis.ranks.waits import Parts, Waits, parts_of, waits
from flopwise.hardware import accelerators
from flopwise.records.job import SCHEMA, Health, JobRecord, RankRecord, Straggler
from flopwise.records.ledger import FAMILIES, LedgerRecord, Line

#: Numbers in a sentence: reasons that differ in them alone are one.
_DIGITS = re.compile(r"[\d.,]+")


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
        read,
        offsets=offsets if several else None,
        matched=matched if several else None,
        apart={ranks[p].rank: ns for p, ns in matching.apart_ns.items()},
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
    recorded = [step_s_of(ranks[p]) for p, one in enumerate(records) if one.step_s]
    names = {one.device_name for one in ranks if one.device_name}
    record = JobRecord(
        schema=SCHEMA,
        flopwise=__version__,
        sources=list(dict.fromkeys(one.path for one in ranks)),
        world_size=max((one.world_size for one in ranks if one.world_size), default=None),
        device_name=names.pop() if len(names) == 1 else None,
        step_s=float(np.mean(lengths)) if lengths and not withheld.all_of("steps") else None,
        steps=min((steps_of(one) for one in ranks), default=0),
        ranks=records,
        lines=lines,
        families=families_of(lines),
        lines_reason=lines_reason,
        health=withheld.health,
        collectives=collectives,
        links=links(ranks, collectives, None if withheld.all_of("bandwidth") else row),
        redundant=redundants,
        redundant_bytes_frac=frac,
        stragglers=stragglers,
        stragglers_reason=reason,
        findings=[],
        notes=[*notes, *_notes(ranks)],
        profiled=any(one.ledger is None or one.ledger.profiled for one in ranks),
        untrusted_because=_untrusted(records),
        **_mfu(records, withheld),
        recorded_step_s=float(np.mean(recorded)) if recorded else None,
    )
    return dataclasses.replace(record, findings=findings_of(record))


def _mfu(records: Sequence[RankRecord], withheld: Withheld) -> dict[str, Any]:
    """Returns the MFU of the job, the mean over its ranks, or why there is none."""
    if withheld.all_of("mfu"):
        return {"mfu": None, "mfu_reason": f"withheld: {withheld.why('mfu')}"}
    for one in records:
        if one.ledger is None:
            return {
                "mfu": None,
                "mfu_reason": f"rank {one.rank} has no ledger: {one.ledger_reason}",
            }
        if one.ledger.mfu is None:
            return {"mfu": None, "mfu_reason": f"rank {one.rank}: {one.ledger.mfu_reason}"}
    values = [
        one.ledger.mfu for one in records if one.ledger is not None and one.ledger.mfu is not None
    ]
    return {"mfu": float(np.mean(values)) if values else None, "mfu_reason": None}


def _untrusted(records: Sequence[RankRecord]) -> list[str]:
    """Returns why the ranks' ledgers are not to be trusted, each reason once: that of the first rank that has it."""
    found: dict[str, list[tuple[int, str]]] = {}
    for one in records:
        for doubt in one.ledger.untrusted_because if one.ledger is not None else ():
            found.setdefault(_DIGITS.sub("", doubt), []).append((one.rank, doubt))
    return [
        f"rank {of[0][0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {of[0][1]}"
        for of in found.values()
    ]


def _row(ranks: Sequence[RankSummary]) -> accelerators.Accelerator | None:
    for one in ranks:
        if one.device_name:
            return accelerators.lookup(one.device_name).row
    return None


def _notes(ranks: Sequence[RankSummary]) -> list[str]:
    """Returns what is said of single ranks; what is the same of all ranks in one file is said once."""
    of_file = Counter(one.path for one in ranks)
    said: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for one in ranks:
        for note in one.notes:
            said[one.path, note].append(one.rank)
    return [
        f"{path}: {note}"
        if len(of) == of_file[path]
        else f"{path}, rank {', '.join(map(str, of))}: {note}"
        for (path, note), of in said.items()
    ]


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
    if withheld.all_of("steps"):
        found = [dataclasses.replace(one, per_step_s=None, per_step_ci95=None) for one in found]
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
    each = 1e-9 / n if n else 0.0
    mine = None if waited is None or withheld.of(p, "waits") else waited.wait_ns[p]
    every, exposed = (parts_of(calls, mine, exposed=only) for only in (False, True))
    wait = wait_frac = None
    if waited is not None and mine is not None:
        wait_frac = waited.share_of(p, calls.end_ns - calls.start_ns)
        with_twins = len(np.unique(calls.step[(calls.step >= 0) & (mine >= 0)]))
        wait = every.wait_ns * 1e-9 / with_twins if with_twins else None
    clock = clocks.from_first(p)
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
        communication_s=every.total_ns * each if n else None,
        exposed_s=exposed.total_ns * each if n and not withheld.of(p, "overlap") else None,
        wait_s=wait,
        clock_offset_s=None if clock is None else clock[0] * 1e-9,
        clock_error_s=None if clock is None else clock[1] * 1e-9,
        notes=list(one.notes),
        wait_frac=wait_frac,
    )


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
    parts = parts_of(one.calls, waited.wait_ns[p], exposed=True)
    if parts.unsplit_ns == parts.total_ns:
        return ledger
    lines: list[Line] = []
    for line in ledger.lines:
        lines += _split(line, parts) if line.name == "comm_unsplit" else [line]
    return dataclasses.replace(ledger, lines=lines, families=families_of(lines))


def _split(line: Line, parts: Parts) -> list[Line]:
    """Returns a line of exposed communication as the lines of its parts, which sum to it."""
    of = {
        "comm_transfer": parts.transfer_ns,
        "comm_wait": parts.wait_ns,
        "comm_unsplit": parts.unsplit_ns,
    }
    found = []
    for name, ns in of.items():
        if ns:
            share = ns / parts.total_ns
            low, high = line.ci95
            found.append(
                Line(
                    name,
                    FAMILIES[name],
                    line.s * share,
                    (low * share, high * share),
                    line.share_frac * share,
                    line.mfu_points * share,
                )
            )
    return found


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
        low = None
        if name == "idle_launch" and any(one.profiled for one in ledgers if one):
            low = 0.0  # without the profiler the host might not have been late at all
        half = [(of[name].ci95[1] - of[name].ci95[0]) / 2 if name in of else 0.0 for of in by_rank]
        mean = float(values.mean())
        error = float(np.sqrt(np.sum(np.square(half)))) / len(by_rank)
        share = mean / step if step else 0.0
        lines.append(
            Line(
                name,
                family,
                mean,
                (mean - error if low is None else low, mean + error),
                share,
                100 * share,
            )
        )
    return lines, None
