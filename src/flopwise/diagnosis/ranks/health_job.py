"""What is wrong between the traces of a job: files that do not belong together, clocks and windows that differ."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import numpy as np

from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.records.job import Defect
from flopwise.trace.health import LONGEST_HOST_NS
from flopwise.units import duration

#: Clocks of ranks that are further apart than this are said to be.
APART_NS = 1_000_000
#: Ends of collectives that still differ by more than this once the clocks are aligned leave waiting unknown.
#: Source: aligned, the ends of the 56 collectives that 8 ranks of one host have in common differ by 188 us at most.
UNALIGNED_NS = 1_000_000
#: ... unless the ranks come to them much further apart: then waiting is known as well as the rest of this page, within a twentieth.
#: Four processes that share two cores leave a collective of Gloo milliseconds apart, where one of them comes 100 ms late.
UNALIGNED_FRAC = 0.05
#: Of a rank's calls so many must be found on the others, or they are other calls. Windows that start apart leave more.
MATCHED_FRAC = 0.5
#: So many of them may say that they are of a group without it, where single events are damaged.
STRANGE_FRAC = 0.01
#: Calls that take more than this share of all calls' time and do not say what they move leave bandwidth unknown.
UNLABELLED_FRAC = 0.1
SHOWN = 5  # ranks, files or kernels that are named

_RANK = re.compile(r"(?<![a-z0-9])rank[-_. ]?(\d{1,6})(?!\d)", re.IGNORECASE)


def across(
    summaries: Sequence[RankSummary],
    *,
    offsets: Mapping[int, tuple[float, float]] | None = None,
    matched: Mapping[int, float] | None = None,
    apart: Mapping[int | None, float] | None = None,
) -> list[Defect]:
    """Returns what is wrong between the ranks of a job.

    Args:
        summaries: one for each file.
        offsets: by rank, how far its clock is ahead of the first rank's and how far the ends of collectives still are from
            each other when that is taken away, both in ns; None: not looked at. A rank that is not in it has no calls by
            which it could be aligned.
        matched: by rank, the share of its calls that were found on all ranks of their group; None: not looked at.
        apart: by rank, how far apart the ranks came to its calls, mean, ns; None: not known.
    """
    found = [
        *_names(summaries),
        *_unknown(summaries),
        *_jobs(summaries),
        *_twice(summaries),
        *_strangers(summaries),
        *_missing(summaries),
        *_unlabelled(summaries),
        *_windows(summaries),
        *_steps(summaries),
        *_devices(summaries),
    ]
    if matched is not None:
        found += _matched(summaries, matched)
    if offsets is not None:
        found += _clocks(summaries, offsets, apart or {})
    return found


def named_rank(path: str) -> int | None:
    """Returns the rank that the name of a file, or of the folder it lies in, tells; None where it tells none."""
    for part in reversed(PurePath(path).parts[-2:]):
        found = _RANK.findall(part)
        if len(found) == 1:
            return int(found[0])
    return None


def _known(summaries: Sequence[RankSummary]) -> dict[int, RankSummary]:
    return {one.rank: one for one in summaries if one.rank is not None}


def _calling(summaries: Sequence[RankSummary]) -> dict[int, RankSummary]:
    """Returns those that have calls with other ranks."""
    return {rank: one for rank, one in _known(summaries).items() if one.calls.shared.any()}


def _world(summaries: Sequence[RankSummary]) -> int:
    """Returns how many ranks the job has, as far as its files say: in their headers, or by the largest group."""
    sizes = Counter(one.world_size for one in summaries if one.world_size)
    said = sizes.most_common(1)[0][0] if sizes else len(summaries)
    return max(said, *(int(one.calls.group_size.max(initial=0)) for one in summaries), 0)


def _names(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    ranks_in = Counter(one.path for one in summaries)
    for one in summaries:
        named = named_rank(one.path) if ranks_in[one.path] == 1 else None
        if named is not None and one.rank is not None and named != one.rank:
            yield defect(
                "H208",
                f"the file's name says rank {named}, the trace in it says {one.rank}: it is taken as rank {one.rank}",
                count=1,
                rank=one.rank,
                path=one.path,
            )


def _unknown(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    unknown = [one for one in summaries if one.rank is None]
    if unknown and len(summaries) > 1:
        yield defect(
            "H209",
            f"{len(unknown)} of {len(summaries)} files do not say which rank they are of ({_some(p.path for p in unknown)}): "
            "name them rank0, rank1 and so on",
            count=len(unknown),
            of=len(summaries),
        )


def _jobs(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    sizes = Counter(one.world_size for one in summaries if one.world_size)
    beyond = [
        one.rank
        for one in summaries
        if one.rank is not None and one.world_size and one.rank >= one.world_size
    ]
    if len(sizes) > 1 or beyond:
        said = ", ".join(f"{n} of a job of {size}" for size, n in sorted(sizes.items()))
        yield defect(
            "H207",
            f"the files are not of one job: {said}"
            + (f"; no such job has a rank {_some(beyond)}" if beyond else ""),
            count=sum(sizes.values()) - sizes.most_common(1)[0][1] or len(beyond),
            of=len(summaries),
        )


def _twice(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    files: dict[int, list[str]] = defaultdict(list)
    for one in summaries:
        if one.rank is not None:
            files[one.rank].append(one.path)
    for rank, paths in sorted(files.items()):
        if len(paths) > 1:
            yield defect(
                "H202",
                f"{len(paths)} files are of rank {rank}: {_some(paths)}. Which of them belongs to the other ranks' is not "
                "known: leave the others out",
                count=len(paths),
                rank=rank,
            )


def _strangers(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    """Ranks that make calls of groups whose members they are not: the file is of another rank."""
    for rank, one in sorted(_known(summaries).items()):
        foreign = Counter(m for m in one.calls.members if m and rank not in m)
        n = sum(foreign.values())
        if n:
            first = foreign.most_common(1)[0][0]
            yield defect(
                "H210",
                f"{n} of {len(one.calls)} calls of rank {rank} are of groups without it (ranks {_some(first)}): the file is of "
                "another rank",
                count=n,
                of=len(one.calls),
                rank=rank,
                path=one.path,
                matters=n > STRANGE_FRAC * len(one.calls),
            )


def _missing(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    world, known = _world(summaries), _known(summaries)
    absent = world - len(known)
    if absent <= 0 or not known:
        return
    missing = [rank for rank in range(min(world, len(known) + SHOWN + 1)) if rank not in known]
    alone, calls = _without(summaries, set(known))
    text = f"{len(known)} of {world} ranks were found; missing: {_some(missing, absent)}"
    if not alone:
        text += f". None of the {calls} calls needs them"
    else:
        text += f". They take part in {alone} of {calls} calls: for whom the others wait there, and for how long, cannot be judged"
    yield defect("H201", text, count=absent, of=world, matters=alone > 0 or not calls)


def _without(summaries: Sequence[RankSummary], known: set[int]) -> tuple[int, int]:
    """Returns how many calls need ranks that are not there, and how many there are."""
    alone = total = 0
    for one in summaries:
        total += len(one.calls)
        for members, n in Counter(one.calls.members).items():
            alone += 0 if members and known.issuperset(members) else n
    return alone, total


def _unlabelled(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    """Communication that does not say what it moves, beside such that does or not."""
    world = _world(summaries)
    if world > 1 and not any(one.calls.shared.any() for one in summaries):
        yield defect(
            "H211",
            f"no call between the ranks of a job of {world} was recognized: its kernels have names that are not known, or "
            "these steps make none",
            count=len(summaries),
        )
    for one in summaries:
        calls = one.calls
        dumb = ~calls.labelled & (calls.nbytes < 0) & (calls.step >= 0)
        if not dumb.any():
            continue
        each = calls.end_ns - calls.start_ns
        share = float(each[dumb].sum()) / max(1.0, float(each[calls.step >= 0].sum()))
        names = Counter(calls.kernel[i] for i in np.flatnonzero(dumb).tolist())
        yield defect(
            "H115",
            f"{int(dumb.sum())} of {int((calls.step >= 0).sum())} calls, {share:.1%} of their time, do not say what they move: "
            f"{_some(name[:60] for name, _ in names.most_common(SHOWN))}",
            count=int(dumb.sum()),
            of=int((calls.step >= 0).sum()),
            rank=one.rank,
            path=one.path,
            matters=share > UNLABELLED_FRAC,
        )


def _windows(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    """Recordings that have more or fewer calls of one group than others; who calls whom directly may differ."""
    counts: dict[tuple[str, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
    for rank, one in _known(summaries).items():
        calls = one.calls
        for group, members, peer in zip(calls.group, calls.members, calls.peer, strict=True):
            if peer < 0:
                counts[group, members][rank] += 1
    differ = [each for each in counts.values() if len({*each.values()}) > 1]
    if differ:
        each = max(differ, key=lambda each: max(each.values()) - min(each.values()))
        most = max(each.values())
        fewer = sum(n < most for n in each.values())
        yield defect(
            "H203",
            f"the recordings begin at different calls: {min(each.values())} to {most} of one group are in them. They are "
            "matched from the last one backwards, and the first ones of the longer recordings stay alone",
            count=fewer,
            of=len(each),
        )


def _steps(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    counts = {one.rank: max(0, len(one.bounds_ns) - 1) for one in summaries}
    if len({*counts.values()}) > 1:
        usual = Counter(counts.values()).most_common(1)[0][0]
        other = {rank: n for rank, n in counts.items() if n != usual}
        yield defect(
            "H205",
            f"the ranks have {min(counts.values())} to {max(counts.values())} steps that count; not {usual} have "
            f"{_some((f'rank {rank}: {n}' for rank, n in other.items()), len(other))}",
            count=len(other),
            of=len(counts),
        )


def _devices(summaries: Sequence[RankSummary]) -> Iterator[Defect]:
    names = Counter(one.device_name for one in summaries if one.device_name)
    if len(names) > 1:
        said = ", ".join(f"{n} on {name[:60]}" for name, n in names.most_common(SHOWN))
        yield defect(
            "H206",
            f"the ranks are on different devices: {said}. A rank on a slower one is waited for",
            count=sum(names.values()) - names.most_common(1)[0][1],
            of=sum(names.values()),
        )


def _matched(summaries: Sequence[RankSummary], matched: Mapping[int, float]) -> Iterator[Defect]:
    known = _calling(summaries)
    silent = [one for one in summaries if not one.calls.shared.any()]
    if known and silent:
        yield defect(
            "H210",
            f"{len(silent)} of {len(summaries)} ranks make no call, the others do: rank {_some(one.rank for one in silent)}",
            count=len(silent),
            of=len(summaries),
            what="ranks",
        )
    if len(known) < 2:
        return
    for rank, one in sorted(known.items()):
        share = matched.get(rank, 0.0)
        if share < MATCHED_FRAC:
            calls = int(one.calls.shared.sum())
            yield defect(
                "H210",
                f"{share:.0%} of the {calls} calls of rank {rank} were found on the other ranks: they are of another "
                "job, of another part of it, or incomplete",
                count=round((1 - share) * calls),
                of=calls,
                rank=rank,
                path=one.path,
            )


def _clocks(
    summaries: Sequence[RankSummary],
    offsets: Mapping[int, tuple[float, float]],
    apart: Mapping[int | None, float],
) -> Iterator[Defect]:
    known = _calling(summaries)
    if len(known) < 2:
        return
    for rank, one in sorted(known.items()):
        if rank not in offsets:
            yield defect(
                "H204",
                f"the clock of rank {rank} cannot be aligned: it has no call that the others have, too",
                count=1,
                rank=rank,
                path=one.path,
            )
            continue
        offset, error = offsets[rank]
        limit = max(UNALIGNED_NS, UNALIGNED_FRAC * apart.get(rank, 0.0))
        good = abs(offset) < LONGEST_HOST_NS and 0 <= error <= limit
        if abs(offset) > APART_NS or not good:
            yield defect(
                "H204",
                _apart(rank, offset, error),
                count=1,
                rank=rank,
                path=one.path,
                matters=not good,
            )


def _apart(rank: int, offset_ns: float, error_ns: float) -> str:
    """Returns how far a clock is off, and how well the ends of its collectives fall together once it is moved, in words."""
    if math.isnan(offset_ns) or math.isnan(error_ns):
        return f"the clock of rank {rank} cannot be aligned: the times of its calls cannot be true"
    left = duration(error_ns * 1e-9)
    if not 0 <= error_ns <= UNALIGNED_NS:
        return (
            f"however its clock is moved, the collectives of rank {rank} do not end when they end on the other ranks: half of them by "
            f"{left} or more apart (up to {duration(UNALIGNED_NS * 1e-9)} would do). Who waits for whom cannot be told by them"
        )
    which = "ahead of" if offset_ns > 0 else "behind"
    said = f"the clock of rank {rank} is {duration(abs(offset_ns) * 1e-9)} {which} the first rank's"
    if abs(offset_ns) >= LONGEST_HOST_NS:
        return f"{said}: they were not recorded together"
    return f"{said}: its times are moved by so much, and half of its collectives then end within {left} of the other ranks'"


def _some(values: object, n: int | None = None) -> str:
    """Returns the first few of some values, in words, of n that there are."""
    every = [str(one) for one in values]  # type: ignore[attr-defined]
    shown = every[:SHOWN]
    more = (len(every) if n is None else n) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
