"""Which calls of the ranks are one: by their sequence numbers where they are recorded, else by what they say, from the end.

A profiler starts on each rank at another call, and stops on all behind the same one. So the calls of a group are laid on one
another from the end, and moved by a few where the ends of the calls then fall together better: a step may be one more on one
rank, and all steps look alike. Calls between two ranks are matched by pair and direction in the same way.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.summary import Calls, RankSummary

Ints = npt.NDArray[np.int64]
ALL = ""  # the group of a call that does not name one
#: Two ranks' windows may begin and end so many calls apart.
MOST_SHIFT = 512
#: Of alignments in which the calls' ends scatter by no more than this factor of the least, and this time beyond it, ...
CLEARLY, ALIKE_NS = 2.0, 10_000
#: ... the one is taken in which both clocks agree within this: they are those of one machine, or well kept. Else the one that moves
#: the calls the least.
ONE_CLOCK_NS = 1_000_000
#: Fewer calls that fit are a chance.
FEWEST = 2

Key = tuple[str, tuple[int, ...], str]  # name and ranks of the group, lane


@dataclass(frozen=True)
class Matched:
    """One call on several ranks."""

    ranks: tuple[int, ...]  # positions in the list of summaries
    calls: tuple[int, ...]  # of each, the number of its call


@dataclass(frozen=True)
class Matching:
    """All calls that were found on the ranks that belong to them."""

    matched: list[Matched] = field(default_factory=list)
    shares: dict[int, float] = field(
        default_factory=dict
    )  # position -> of its calls of two ranks and more, matched
    #: Position -> how far the ends of its calls lie from the middle of their ranks', median, once its clock is corrected by the median.
    scatter_ns: dict[int, float] = field(default_factory=dict)
    #: Position -> how far apart in time the ranks of its calls came to them, mean.
    apart_ns: dict[int, float] = field(default_factory=dict)


def match(ranks: Sequence[RankSummary]) -> Matching:
    """Returns the calls that belong together; ranks of which only one was read have none."""
    lanes: dict[Key, dict[int, list[int]]] = defaultdict(dict)
    for position, rank in enumerate(ranks):
        for key, numbers in _lanes(rank):
            lanes[key][position] = numbers
    lanes = _joined(lanes)
    matched: list[Matched] = []
    for (_, members, lane), numbers_of in lanes.items():
        if len(numbers_of) < 2 or (not members and _several_groups(numbers_of, ranks)):
            continue
        # Calls between two ranks are counted by each of them with those to all others.
        found = None if lane else _by_sequence(numbers_of, ranks)
        matched += _by_content(numbers_of, ranks) if found is None else found
    matched.sort(key=lambda one: int(ranks[one.ranks[0]].calls.start_ns[one.calls[0]]))
    had: dict[int, int] = defaultdict(int)
    for one in matched:
        for position in one.ranks:
            had[position] += 1
    of = {p: int(rank.calls.shared.sum()) for p, rank in enumerate(ranks)}
    shares = {p: had[p] / n for p, n in of.items() if n}
    return Matching(matched, shares, _scatter(matched, ranks), _come_apart(matched, ranks))


def _lanes(one: RankSummary) -> Iterator[tuple[Key, list[int]]]:
    """Yields the calls of a rank by what they are matched within: the group, or the pair and direction."""
    found: dict[Key, list[int]] = defaultdict(list)
    calls = one.calls
    for i in np.flatnonzero(calls.shared).tolist():
        members, name, lane = calls.members[i], calls.group[i], ""
        if calls.op[i] in ("send", "recv") and calls.peer[i] >= 0 and one.rank is not None:
            peer = int(calls.peer[i])
            pair = (one.rank, peer) if calls.op[i] == "send" else (peer, one.rank)
            found[name, pair, "point to point"].append(i)
            continue
        if not calls.labelled[i]:
            name, members = ALL, ()
        found[name, members, lane].append(i)
    yield from found.items()


def _joined(
    lanes: dict[Key, dict[int, list[int]]],
) -> dict[Key, dict[int, list[int]]]:
    """Returns them with the calls that do not name a group put to the one group that a rank has, in their order."""
    joined = {key: dict(of) for key, of in lanes.items() if key != (ALL, (), "")}
    for position, numbers in lanes.get((ALL, (), ""), {}).items():
        # The profiler of today leaves the first calls of its window without words: those of the only group.
        mine = [key for key, of in joined.items() if position in of and key[2] == ""]
        key = mine[0] if len(mine) == 1 else (ALL, (), "")
        had = joined.setdefault(key, {}).get(position, [])
        joined[key][position] = sorted([*had, *numbers])
    return joined


def _several_groups(numbers_of: dict[int, list[int]], ranks: Sequence[RankSummary]) -> bool:
    """Whether a group has fewer members than ranks that name it: which of them belong together is not known."""
    sizes = {int(n) for p, i in numbers_of.items() for n in ranks[p].calls.group_size[i] if n > 0}
    return bool(sizes) and min(sizes) < len(numbers_of)


def _by_sequence(
    numbers_of: dict[int, list[int]], ranks: Sequence[RankSummary]
) -> list[Matched] | None:
    """Returns the calls of a group by their sequence numbers; None where they are not recorded, or not once each."""
    where: dict[int, dict[int, int]] = defaultdict(dict)
    for position, numbers in numbers_of.items():
        sequence = ranks[position].calls.sequence[numbers]
        if (sequence < 0).any() or len(np.unique(sequence)) < len(sequence):
            return None
        for number, value in zip(numbers, sequence.tolist(), strict=True):
            where[value][position] = number
    return [_matched(of) for _, of in sorted(where.items()) if len(of) == len(numbers_of)]


def _by_content(numbers_of: dict[int, list[int]], ranks: Sequence[RankSummary]) -> list[Matched]:
    """Returns the calls of a group laid on one another from the end."""
    reference = min(numbers_of, key=lambda p: (len(numbers_of[p]), p))
    base = numbers_of[reference]
    of_base: dict[int, dict[int, int]] = {i: {reference: i} for i in base}
    for position, numbers in numbers_of.items():
        if position == reference:
            continue
        for mine, theirs in _aligned(ranks[reference].calls, base, ranks[position].calls, numbers):
            of_base[mine][position] = theirs
    return [_matched(of) for of in of_base.values() if len(of) == len(numbers_of)]


def _matched(of: dict[int, int]) -> Matched:
    ranks = tuple(sorted(of))
    return Matched(ranks, tuple(of[p] for p in ranks))


def _aligned(one: Calls, mine: list[int], other: Calls, theirs: list[int]) -> list[tuple[int, int]]:
    """Returns the pairs of calls of two ranks that are one call."""
    fewest = max(FEWEST, -(-min(len(mine), len(theirs)) // 2))
    most = min(MOST_SHIFT, max(len(mine), len(theirs)) - fewest)
    words = _words(one, mine), _words(other, theirs)
    found: list[tuple[float, float, list[tuple[int, int]]]] = []  # scatter, offset, pairs
    for shift in sorted(range(-most, most + 1), key=abs):
        a, b = _positions(len(mine), len(theirs), shift)
        if len(a) < fewest or not _fit(words[0][a], words[1][b]).all():
            continue
        both = [(mine[x], theirs[y]) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        found.append((*_apart(one, other, both), both))
    if found:
        least = min(scatter for scatter, _, _ in found)
        good = [f for f in found if f[0] <= CLEARLY * least + ALIKE_NS]
        nearest = min(good, key=lambda f: abs(f[1]))
        return nearest[2] if abs(nearest[1]) <= ONE_CLOCK_NS else good[0][2]
    return _common(mine, theirs, words)


def _positions(n: int, m: int, shift: int) -> tuple[Ints, Ints]:
    """Returns the positions that lie on one another, from the end, one list moved by some places, the last pair first."""
    a, b = n - 1 - max(0, shift), m - 1 - max(0, -shift)
    back = np.arange(max(0, min(a, b) + 1))
    return a - back, b - back


def _words(calls: Calls, numbers: list[int]) -> Ints:
    """Returns what calls say of themselves as numbers: operation, dtype and bytes, shape (n, 3); -1: not said.

    The two ends of a point-to-point call have one number.
    """
    codes = [
        (
            _code("send" if calls.op[i] == "recv" else calls.op[i]),
            _code(calls.dtype[i]) if calls.dtype[i] else -1,
            int(calls.nbytes[i]),
        )
        for i in numbers
    ]
    return np.asarray(codes, np.int64).reshape(-1, 3)


def _code(word: str) -> int:
    return zlib.crc32(word.encode())


def _fit(one: Ints, other: Ints) -> npt.NDArray[np.bool_]:
    """Returns which calls can be one, row by row: what both say is the same."""
    same: npt.NDArray[np.bool_] = ((one == other) | (one < 0) | (other < 0)).all(axis=-1)
    return same


def _apart(one: Calls, other: Calls, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """Returns how far the differences of the calls' ends lie from their median, median, and that median."""
    a, b = (np.asarray(part, np.int64) for part in zip(*pairs, strict=True))
    apart = other.end_ns[b] - one.end_ns[a]
    middle = float(np.median(apart - apart[0])) + float(apart[0])
    return float(np.median(np.abs(apart - apart[0] - (middle - float(apart[0]))))), middle


def _common(
    mine: list[int],
    theirs: list[int],
    words: tuple[Ints, Ints],
) -> list[tuple[int, int]]:
    """Returns the pairs of calls in runs that both ranks have, from the end: where one of them has calls of its own."""
    pairs: list[tuple[int, int]] = []
    a, b = len(mine) - 1, len(theirs) - 1
    while a >= 0 and b >= 0:
        if _fit(words[0][a], words[1][b]):
            pairs.append((mine[a], theirs[b]))
            a, b = a - 1, b - 1
            continue
        step = _next(words, a, b)
        if step is None:
            break
        a, b = step
    return pairs if len(pairs) >= FEWEST else []


def _next(words: tuple[Ints, Ints], a: int, b: int) -> tuple[int, int] | None:
    """Returns the nearest positions before these at which three calls in a row fit again."""
    for away in range(1, 65):
        for back in range(away + 1):
            i, j = a - back, b - (away - back)
            run = [(i - k, j - k) for k in range(3)]
            if all(x >= 0 and y >= 0 and _fit(words[0][x], words[1][y]) for x, y in run):
                return i, j
    return None


def _come_apart(matched: Sequence[Matched], ranks: Sequence[RankSummary]) -> dict[int, float]:
    """Returns, by position, how far apart the first and the last rank came to each of its calls, mean over them, ns."""
    apart: dict[int, list[int]] = defaultdict(list)
    for one in matched:
        starts = [
            int(ranks[p].calls.start_ns[i]) for p, i in zip(one.ranks, one.calls, strict=True)
        ]
        for p in one.ranks:
            apart[p].append(max(starts) - min(starts))
    return {p: float(np.mean(values)) for p, values in apart.items()}


def _scatter(matched: Sequence[Matched], ranks: Sequence[RankSummary]) -> dict[int, float]:
    """Returns how far each rank's ends lie from the middle of their calls, median, once their own median is taken away."""
    off: dict[int, list[float]] = defaultdict(list)
    for one in matched:
        row = np.asarray(
            [int(ranks[p].calls.end_ns[i]) for p, i in zip(one.ranks, one.calls, strict=True)],
            np.int64,
        )
        row -= row[0]  # ns since 1970 are too many for a float
        middle = float(np.median(row))
        for p, end in zip(one.ranks, row.tolist(), strict=True):
            off[p].append(end - middle)
    return {p: float(np.median(np.abs(np.asarray(of) - np.median(of)))) for p, of in off.items()}
