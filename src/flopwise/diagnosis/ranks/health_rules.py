"""What can be wrong with the traces of a job, and which conclusions that makes wrong; docs/health.md has the same table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.records.job import CONCLUSIONS, Defect

#: What is said of one device's time.
TIMES = ("ledger", "mfu", "steps", "idle", "overlap")
#: What is said of calls across ranks.
CALLS = ("matching", "waits", "bandwidth", "stragglers")
#: A conclusion about the whole job is withheld where one rank's is. Of redundant traffic the other ranks still tell.
OF_THE_JOB_WHERE_OF_ONE = (*TIMES, *CALLS)


@dataclass(frozen=True)
class Rule:
    """One defect that is looked for."""

    code: str
    defect: str
    looked_for: str
    withholds: tuple[str, ...] = ()
    with_calls: tuple[str, ...] = ()  # these too, where collectives or point-to-point calls are hit
    counts: str = ""  # of what a defect says how many; "": it is one thing


RULES = {
    rule.code: rule
    for rule in (
        Rule(
            "H101",
            "unusable-work",
            "kernels and copies without a time, ending before they start, of no duration, of one that is no number, or longer "
            "than the trace",
            TIMES,
            CALLS,
            counts="kernels and copies",
        ),
        Rule(
            "H102",
            "outlasting-work",
            "work a hundred times as long as others of its name while its stream goes on, or over most of the trace",
            ("ledger", "mfu", "idle"),
            CALLS,
            counts="kernels and copies",
        ),
        Rule(
            "H103",
            "missing-work",
            "launches whose kernels are not in the trace",
            ("ledger", "mfu", "idle", "overlap"),
            CALLS,
            counts="launches",
        ),
        Rule(
            "H104",
            "missing-head",
            "steps at the head of the recording whose first kernels are missing",
            ("ledger", "mfu", "idle", "waits"),
            counts="launches",
        ),
        Rule(
            "H105",
            "truncated-file",
            "files that end before their end",
            (*TIMES, *CALLS, "redundancy"),
        ),
        Rule(
            "H106",
            "damaged-events",
            "events that cannot be read",
            TIMES,
            CALLS,
            counts="events",
        ),
        Rule(
            "H107",
            "not-utf8",
            "bytes that are no UTF-8",
            counts="events",
        ),
        Rule(
            "H108",
            "copied-starts",
            "device times that are those of the launch",
            TIMES,
            ("waits", "stragglers"),
            counts="kernels and copies",
        ),
        Rule(
            "H109",
            "overlapping-work",
            "work of one stream that overlaps by more than a few microseconds",
            TIMES,
            ("waits", "bandwidth", "stragglers"),
            counts="kernels and copies",
        ),
        Rule(
            "H110",
            "starts-before-launch",
            "work that starts before the call that launched it",
            ("ledger", "idle"),
            counts="kernels and copies",
        ),
        Rule(
            "H111",
            "impossible-host",
            "events of the host with impossible times",
            ("ledger", "idle"),
            counts="events of the host",
        ),
        Rule(
            "H112",
            "empty-steps",
            "steps without work on the device",
            ("ledger", "mfu", "steps", "idle"),
            CALLS,
            counts="steps",
        ),
        Rule("H113", "unmarked-steps", "steps that nothing marks", ("steps",)),
        Rule(
            "H114",
            "graph-replays",
            "graph replays, whose kernels have no operators",
            counts="kernels and copies",
        ),
        Rule(
            "H115",
            "unlabelled-communication",
            "communication that does not say what it moves",
            ("bandwidth", "redundancy"),
            counts="calls",
        ),
        Rule(
            "H116",
            "no-device-work",
            "traces without any usable work of a device",
            (*TIMES, *CALLS),
            counts="kernels and copies",
        ),
        Rule(
            "H117",
            "unreadable-file",
            "files that cannot be read at all",
            (*TIMES, "waits", "bandwidth", "stragglers", "redundancy"),
        ),
        Rule(
            "H201",
            "missing-ranks",
            "ranks of which there is no file",
            ("waits", "bandwidth", "stragglers"),
            counts="ranks",
        ),
        Rule(
            "H202",
            "rank-twice",
            "several files of one rank",
            CALLS,
            counts="files",
        ),
        Rule(
            "H203",
            "windows-differ",
            "windows that start at different collectives",
            counts="ranks",
        ),
        Rule(
            "H204",
            "clocks-apart",
            "clocks that are apart, by the ends of collectives",
            ("waits", "stragglers"),
        ),
        Rule(
            "H205",
            "steps-differ",
            "ranks with more or fewer steps than others",
            counts="ranks",
        ),
        Rule(
            "H206",
            "devices-differ",
            "ranks on different devices",
            counts="ranks",
        ),
        Rule(
            "H207",
            "jobs-differ",
            "files of different jobs",
            (*TIMES, *CALLS, "redundancy"),
            counts="files",
        ),
        Rule("H208", "misnamed-files", "names of files that are not those of the rank in them"),
        Rule(
            "H209",
            "rank-unknown",
            "files that do not say their rank",
            CALLS,
            counts="files",
        ),
        Rule(
            "H210",
            "unmatched-calls",
            "ranks whose calls are not those of the others",
            CALLS,
            counts="calls",
        ),
        Rule(
            "H211",
            "no-communication",
            "jobs of several ranks without a call between them",
            (*CALLS, "redundancy"),
        ),
    )
}


def defect(
    code: str,
    evidence: str,
    *,
    count: int,
    of: int | None = None,
    rank: int | None = None,
    path: str | None = None,
    matters: bool = True,
    times: bool = True,
    calls: bool = False,
    steps: Sequence[int] = (),
    what: str | None = None,
) -> Defect:
    """Returns a defect by its rule.

    Args:
        code: the rule's.
        evidence: what was seen, with its numbers.
        count: of events, calls or files that are so.
        of: how many there are; None where a share says nothing.
        rank: whose trace it is.
        path: its file.
        matters: whether it withholds anything; small ones are only said.
        times: whether more than calls between ranks are hit.
        calls: whether calls between ranks are hit.
        steps: for which alone it withholds, counted from 1; empty: for all.
        what: is counted; None: what the rule says.
    """
    rule = RULES[code]
    hit = {*(rule.withholds if times else ()), *(rule.with_calls if calls else ())}
    withheld = hit if matters else set()
    return Defect(
        code=code,
        defect=rule.defect,
        rank=rank,
        path=path,
        count=count,
        share_frac=count / of if of else None,
        evidence=evidence,
        withholds=[one for one in CONCLUSIONS if one in withheld],
        steps=list(steps),
        what=rule.counts if what is None else what,
    )
