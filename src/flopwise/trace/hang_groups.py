"""The process groups of a hung job over the dumps of its ranks, and what became of a call on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flopwise.trace.flight_records import Counts, Dump, Entry


@dataclass(frozen=True)
class Members:
    """One process group over the ranks that dumped."""

    name: str
    desc: str
    ranks: tuple[int, ...]  # all that it has, as far as they are known
    dumped: tuple[int, ...]
    calls: dict[int, dict[int, Entry]] = field(default_factory=dict)  # rank -> sequence -> entry
    numbers: dict[int, str] = field(default_factory=dict)  # rank -> its own number of the group
    messages: bool = False  # sends and receives are among the calls: they are counted otherwise


@dataclass(frozen=True)
class Standing:
    """What the dump of one rank holds of a group."""

    first: int | None  # the numbers of its calls, None where it holds none
    last: int | None
    counts: Counts | None  # how far it says that it came, None where that cannot be told
    nothing: bool  # the dump holds no call of any group
    whole: bool  # neither older calls nor those that ended are left out


@dataclass(frozen=True)
class State:
    """What became of one call on the ranks of its group; ranks of which that cannot be told are in none of these."""

    called: dict[int, Entry]
    behind: dict[
        int, int | None
    ]  # never called it -> the last number that they reached, None: not known
    ended: tuple[int, ...]

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that are in it."""
        return tuple(rank for rank, entry in sorted(self.called.items()) if not entry.done)


def groups_of(by_rank: Mapping[int, Dump]) -> list[Members]:
    """Returns the process groups; groups of one name with other members are other groups."""
    found: dict[tuple[str, tuple[int, ...]], Members] = {}
    for rank, dump in sorted(by_rank.items()):
        members = {group.name: group.ranks for group in dump.groups}
        for entry in dump.entries:
            key = entry.group, members.get(entry.group, ())
            if key not in found:
                found[key] = Members(entry.group, entry.group_desc, key[1], ())
            calls = found[key].calls.setdefault(rank, {})
            found[key].numbers[rank] = str(entry.pg_id)
            if entry.is_p2p:
                found[key] = replace(found[key], messages=True)
            elif entry.collective_seq_id >= 0:
                calls.setdefault(entry.collective_seq_id, entry)
        for known in dump.groups:  # in which this rank may have called nothing yet
            key = known.name, known.ranks
            if rank in known.ranks and key in found:
                found[key].calls.setdefault(rank, {})
    done = []
    for group in found.values():
        dumped = tuple(sorted(r for r in by_rank if r in group.calls or r in group.ranks))
        if group.ranks == () and group.desc == "default_pg":
            dumped = tuple(sorted(by_rank))
        done.append(replace(group, dumped=dumped, ranks=group.ranks or dumped))
    return done


def standings(group: Members, by_rank: Mapping[int, Dump]) -> dict[int, Standing]:
    """Returns what the dumps of a group's ranks hold of it."""
    found = {}
    for rank in group.dumped:
        calls, dump = group.calls.get(rank, {}), by_rank[rank]
        last = max(calls, default=None)
        found[rank] = Standing(
            first=min(calls, default=None),
            last=last,
            counts=_counts(group, rank, last, dump),
            nothing=not dump.entries,
            whole=not dump.truncated and not dump.only_open,
        )
    return found


def state_of(group: Members, number: int, ranks: Mapping[int, Standing]) -> State:
    """Returns what became of a call of a group, by its number."""
    called = {r: calls[number] for r, calls in group.calls.items() if number in calls}
    behind: dict[int, int | None] = {}
    ended = {rank for rank, entry in called.items() if entry.done}
    for rank, of in ranks.items():
        if rank in called:
            continue
        made = of.counts.enqueued if of.counts is not None else None
        if of.last is not None and of.last < number:  # the newest calls are in every dump
            behind[rank] = of.last
        elif of.counts is not None and (of.counts.completed or 0) >= number:
            ended.add(rank)
        elif of.last is None and made == number - 1:
            behind[rank] = made
        elif of.whole:
            behind[rank] = of.last or 0
        elif of.nothing:  # it is in no call, while others are in this one
            behind[rank] = None
        # Else it called it, and whether it ended is not known; or the dump no longer tells.
    return State(called, dict(sorted(behind.items())), tuple(sorted(ended)))


def _counts(group: Members, rank: int, last: int | None, dump: Dump) -> Counts | None:
    """Returns how many collectives of a group a rank says it made, None where that cannot be told.

    Which of its groups it says that of, its calls tell. Where none of them is in the dump, it is taken to be the others' number of
    the group, if that is the same on all of them and the rank would not have made calls there that none of the others has.
    """
    if group.messages:
        return None
    own = group.numbers.get(rank)
    if own is None and len(group.numbers) > 1:
        others = set(group.numbers.values())
        own = others.pop() if len(others) == 1 else None
    counts = dump.counts.get(own) if own is not None else None
    if counts is None or counts.enqueued is None:
        return None
    if last is None:
        most = max((max(calls, default=0) for calls in group.calls.values()), default=0)
        return counts if counts.enqueued <= most else None
    return counts if counts.enqueued == last else None


def listed(ranks: Sequence[int]) -> str:
    """Returns ranks in words, the first eight by number: "ranks 0, 3"."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) != 1)} " + ", ".join(map(str, ranks[:8])) + more
