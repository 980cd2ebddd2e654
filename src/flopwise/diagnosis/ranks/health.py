"""The certificate of a job's traces: what was looked for, what was found, and which conclusions are withheld for it.

A conclusion about one rank is withheld where a defect of that rank makes it wrong. A conclusion about the job is withheld where a
defect between the ranks makes it wrong, or where it is withheld for a rank that takes part: a mean over the ranks without one of
them is another mean, and a call without one of its ranks may have waited for that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flopwise.diagnosis.ranks.health_job import across, named_rank
from flopwise.diagnosis.ranks.health_rank import defects_of, rank_of, unreadable
from flopwise.diagnosis.ranks.health_rules import (
    CALLS,
    OF_THE_JOB_WHERE_OF_ONE,
    RULES,
    TIMES,
    Rule,
)
from flopwise.records.job import CONCLUSIONS, Defect, Health

__all__ = [
    "CALLS",
    "OF_THE_JOB_WHERE_OF_ONE",
    "RULES",
    "TIMES",
    "Rule",
    "across",
    "certificate",
    "defects_of",
    "named_rank",
    "rank_of",
    "unreadable",
    "withheld_for",
]


def certificate(
    per_rank: Iterable[Defect], between: Iterable[Defect], ranks: Sequence[int | None]
) -> Health:
    """Returns whether the traces of a job can be believed.

    Args:
        per_rank: the defects of single files.
        between: the defects between them.
        ranks: those of the job that were read.
    """
    defects = sorted(
        [*per_rank, *between],
        key=lambda one: (
            -len(one.withholds),
            bool(one.steps),
            one.code,
            -1 if one.rank is None else one.rank,
            one.path or "",
        ),
    )
    return Health(
        clean=not any(one.withholds for one in defects),
        checked=[rule.looked_for for rule in RULES.values()],
        defects=defects,
        withheld=_of_the_job(defects, ranks),
    )


def withheld_for(
    rank: int | None, defects: Iterable[Defect], path: str | None = None
) -> dict[str, list[str]]:
    """Returns which conclusions about one rank are withheld, and the codes of the defects that withhold them.

    Defects between the ranks withhold what is said of calls; what is said of a rank's own time stands. With `path`, of several
    files of a rank only that one's defects count, and of several ranks in a file only that one's.
    """
    codes: dict[str, list[str]] = defaultdict(list)
    for one in defects:
        if one.steps:
            continue
        between = one.rank is None and one.path is None
        mine = (one.rank == rank and rank is not None) or (path is not None and one.path == path)
        if path is not None and one.path is not None:
            mine = one.path == path and (one.rank == rank or None in (one.rank, rank))
        for what in one.withholds:
            if (mine or (between and what not in TIMES)) and one.code not in codes[what]:
                codes[what].append(one.code)
    return _in_order(codes)


def _of_the_job(defects: Sequence[Defect], ranks: Sequence[int | None]) -> dict[str, list[str]]:
    codes: dict[str, list[str]] = defaultdict(list)
    hit: dict[str, set[int | None]] = defaultdict(set)
    whole: set[str] = {*OF_THE_JOB_WHERE_OF_ONE}
    for one in defects:
        if one.steps:
            continue
        if one.rank is None and one.path is None:
            whole |= {*one.withholds}
        for what in one.withholds:
            hit[what].add(one.rank)
            if one.code not in codes[what]:
                codes[what].append(one.code)
    return _in_order(
        {
            what: found
            for what, found in codes.items()
            if what in whole or hit[what].issuperset(ranks)
        }
    )


def _in_order(codes: dict[str, list[str]]) -> dict[str, list[str]]:
    return {what: sorted(codes[what]) for what in CONCLUSIONS if codes.get(what)}
