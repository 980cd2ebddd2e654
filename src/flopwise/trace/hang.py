"""Where the ranks of a hung job parted, from the dumps of their flight recorders."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flopwise.trace.flight_records import P2P, Dump, Entry
from flopwise.trace.hang_groups import Members, State, groups_of, listed, standings, state_of
from flopwise.trace.stream import TraceError

#: Operations whose ranks may give, or get, different amounts. Source: pytorch/pytorch
#: torch/distributed/flight_recorder/components/types.py, `Op.match`.
_UNEVEN_IN = re.compile(r"scatter$|all_?to_?all|_v\b|allgatherv|coalesced|barrier")
_UNEVEN_OUT = re.compile(r"(?<!all_)(?<!all)gather$|all_?to_?all|_v\b|coalesced|barrier")
#: So much of a group's name, and so many sizes of a tensor, are said: characters, dimensions.
LONGEST_NAME, MOST_SIZES = 200, 8


@dataclass(frozen=True)
class Stuck:
    """The first call of a process group that did not end on all of its ranks."""

    group: str
    group_desc: str
    sequence: int  # its number in the group
    op: str
    #: "missing": ranks never called it | "mismatched": ranks called something else, or with other sizes or dtypes |
    #: "partial": it ended on ranks, and not on others | "unfinished": all that are known called it, and it did not end
    verdict: str
    waiting: tuple[int, ...]  # ranks that called it, and for which it did not end
    behind: dict[
        int, int | None
    ]  # rank -> the last number that it reached in this group, None: not known
    mismatched: dict[int, str]  # rank -> what it called instead
    no_dump: tuple[int, ...]  # members without a dump; known only where dumps name the members
    since_ns: int  # when the first rank called it, ns since 1970
    at: dict[int, str]  # where the ranks that are behind are: in another call, or in none
    where: dict[int, str]  # the user's line, of ranks that wait and of mismatched ones
    evidence: str
    ended: tuple[int, ...] = ()  # ranks on which it ended
    idle: tuple[int, ...] = ()  # ranks that the others wait for and that are in no call themselves

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks with which the hang began, as far as this call tells: the others wait for them, and they for none."""
        if self.mismatched:
            return tuple(self.mismatched)
        return self.waiting if self.verdict == "partial" else self.idle


def stuck(dumps: Sequence[Dump]) -> list[Stuck]:
    """Returns for each process group the first call that did not end on all its ranks, the earliest first.

    Ranks that are behind and in no call are where the hang began: the others wait for them. Older calls that the
    recorder of a rank no longer holds are not compared. Nothing is returned where all calls ended on all ranks.

    Raises:
        TraceError: a dump has no rank, or two have the same one.
    """
    by_rank: dict[int, Dump] = {}
    for dump in dumps:
        if dump.rank is None:
            raise TraceError(
                f"{dump.path}: whose dump it is cannot be told: end its name with the rank"
            )
        if dump.rank in by_rank:
            raise TraceError(
                f"{dump.path} and {by_rank[dump.rank].path} are both of rank {dump.rank}: leave one out"
            )
        by_rank[dump.rank] = dump
    groups = groups_of(by_rank)
    found = [one for group in groups if (one := _first_trouble(group, by_rank)) is not None]
    found += _unpaired(groups, by_rank)
    return sorted(found, key=lambda one: (one.since_ns, one.group, one.sequence))


def roots(found: Sequence[Stuck]) -> list[Stuck]:
    """Returns those of the calls that did not end with which the hang began, one for each rank that is at fault; all, where none is.

    A call that ranks mistook tells most, then one that a rank never came to, then one that ended on some of its ranks alone.
    """
    order = ("mismatched", "missing", "partial", "unfinished")
    kept: list[Stuck] = []
    named: set[int] = set()
    for one in sorted(found, key=lambda one: order.index(one.verdict)):
        if not named.issuperset(one.culprits):
            named.update(one.culprits)
            kept.append(one)
    return kept or list(found)


def _first_trouble(group: Members, by_rank: dict[int, Dump]) -> Stuck | None:
    numbers = {number for calls in group.calls.values() for number in calls}
    ranks = standings(group, by_rank)
    for number in sorted(numbers):
        state = state_of(group, number, ranks)
        other = _mismatched(state.called)
        if state.behind or other or state.waiting:
            return _told(group, number, state, other, by_rank)
    return None


def _signature(entry: Entry) -> tuple[Any, ...]:
    """Returns what must be alike on all ranks."""
    op = entry.op
    given = None if _UNEVEN_IN.search(op) else (entry.input_sizes, entry.input_dtypes)
    got = None if _UNEVEN_OUT.search(op) else (entry.output_sizes, entry.output_dtypes)
    return op, given, got


def _mismatched(called: dict[int, Entry]) -> dict[int, str]:
    """Returns the ranks whose call is not like that of most, in words; of a tie, those unlike the first rank."""
    if len(called) < 2:
        return {}
    signatures = {rank: _signature(entry) for rank, entry in sorted(called.items())}
    values = list(signatures.values())
    usual = max(values, key=values.count)
    return {rank: _words(called[rank]) for rank, one in signatures.items() if one != usual}


def _words(entry: Entry) -> str:
    sizes = entry.input_sizes or entry.output_sizes
    dtypes = entry.input_dtypes or entry.output_dtypes
    shown = ", ".join(map(_shape, sizes[:3]))
    more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
    kinds = "/".join(dict.fromkeys(dtypes[:8]))
    return " ".join(filter(None, (entry.op, shown + more, kinds)))


def _shape(sizes: Sequence[int]) -> str:
    more = "x…" if len(sizes) > MOST_SIZES else ""
    return "x".join(map(str, sizes[:MOST_SIZES])) + more or "scalar"


def _named(group: str) -> str:
    return repr(group if len(group) <= LONGEST_NAME else group[:LONGEST_NAME] + "…")


def _told(
    group: Members, number: int, state: State, other: dict[int, str], by_rank: dict[int, Dump]
) -> Stuck:
    called, behind, waiting = state.called, state.behind, state.waiting
    usual = next(
        (e for r, e in sorted(called.items()) if r not in other), next(iter(called.values()))
    )
    no_dump = tuple(r for r in group.ranks if r not in by_rank)
    at = {rank: _at(by_rank[rank]) for rank in behind}
    name = f"group {_named(group.name)}" + (f" ({group.desc[:LONGEST_NAME]})" if group.desc else "")
    said = [f"call {number} of {name}, {_words(usual)}"]
    if other:
        verdict = "mismatched"
        said += [f"rank {rank} called {words} instead" for rank, words in list(other.items())[:4]]
    elif behind:
        verdict = "missing"
        said += [_missed(rank, number, last, at[rank]) for rank, last in list(behind.items())[:4]]
    elif state.ended and waiting:
        verdict = "partial"
        said.append(f"it ended on {listed(state.ended)}")
    else:
        verdict = "unfinished"
        said.append(
            f"{len(called)} of {len(group.ranks)} ranks called it alike, and it did not end"
        )
    if waiting:
        said.append(f"{listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in it")
    if no_dump:
        said.append(f"{listed(no_dump)} {'has' if len(no_dump) == 1 else 'have'} no dump")
    return Stuck(
        group=group.name,
        group_desc=group.desc,
        sequence=number,
        op=usual.op,
        verdict=verdict,
        waiting=waiting,
        behind=behind,
        mismatched=other,
        no_dump=no_dump,
        since_ns=min(entry.time_created_ns for entry in called.values()),
        at=at,
        where={
            r: called[r].where for r in called if called[r].where and (r in waiting or r in other)
        },
        evidence="; ".join(said),
        ended=state.ended,
        idle=tuple(rank for rank in behind if not by_rank[rank].open),
    )


def _missed(rank: int, number: int, last: int | None, at: str) -> str:
    if last is None:
        return f"rank {rank} is {at}, and how far it came in this group its dump does not say"
    if last > number:
        return f"rank {rank} has later calls, to {last}, and not this one, and is {at}"
    return f"rank {rank} never called it: it reached {last}, and is {at}"


def _at(dump: Dump) -> str:
    """Returns where a rank is, as far as its dump tells."""
    if dump.open:
        first = dump.open[0]
        number = first.p2p_seq_id if first.is_p2p else first.collective_seq_id
        place = f" at {first.where}" if first.where else ""
        return f"in call {number} of group {_named(first.group)}, {_words(first)}{place}"
    if dump.entries and dump.entries[-1].where:
        return f"in no call; its last one was at {dump.entries[-1].where}"
    return "in no call"


def _unpaired(groups: Sequence[Members], by_rank: dict[int, Dump]) -> list[Stuck]:
    """Returns sends and receives that wait: of each pair of ranks and direction the first one."""
    members = {(g.name, rank): g for g in groups for rank in g.dumped}
    messages = {rank: _messages(dump) for rank, dump in by_rank.items()}
    found: dict[tuple[str, int, int, str], Stuck] = {}
    for rank, dump in sorted(by_rank.items()):
        for entry in dump.entries:
            match = P2P.match(entry.profiling_name)
            if match is None or entry.done:
                continue
            group = members.get((entry.group, rank))
            peer = _global(group, int(match["other"]))
            key = entry.group, rank, peer, match["kind"]
            if key in found:
                continue
            theirs = by_rank.get(peer)
            half = None
            if theirs is not None:
                exact = not any(one.truncated or one.only_open for one in (dump, theirs))
                half = _other_half(entry.group, match, messages[rank], messages[peer], exact)
            at = {peer: _at(theirs)} if theirs is not None and half is None else {}
            said = f"rank {rank} waits in {entry.op} of group {_named(entry.group)}; rank {peer} "
            if half is None:
                said += f"is {at[peer]}" if at else "has no dump"
            else:
                said += f"made the other half, {half.op}, " + (
                    "which ended there" if half.done else "and waits in it"
                )
            ended = (peer,) if half is not None and half.done else ()
            found[key] = Stuck(
                group=entry.group,
                group_desc=entry.group_desc,
                sequence=entry.p2p_seq_id,
                op=entry.op,
                verdict="partial" if ended else "unfinished",
                waiting=(rank,),
                behind={},
                mismatched={},
                no_dump=() if theirs is not None else (peer,),
                since_ns=entry.time_created_ns,
                at=at,
                where={rank: entry.where} if entry.where else {},
                evidence=said,
                ended=ended,
                idle=tuple(other for other in at if not by_rank[other].open),
            )
    return list(found.values())


#: Sends and receives of one dump by group, kind, own and other rank, in their order.
_Messages = dict[tuple[str, str, str, str], list[Entry]]


def _messages(dump: Dump) -> _Messages:
    found: _Messages = defaultdict(list)
    for entry in dump.entries:
        match = P2P.match(entry.profiling_name)
        if match is not None:
            found[entry.group, match["kind"], match["own"], match["other"]].append(entry)
    return found


def _other_half(
    group: str, match: re.Match[str], mine: _Messages, theirs: _Messages, exact: bool
) -> Entry | None:
    """Returns the call that the first message of a kind that waits meets on the other rank; None where that did not make it.

    Args:
        group: its name.
        match: the kind and the ranks of the message.
        mine: the messages of the rank that waits.
        theirs: those of the other rank.
        exact: both are all that were made, so that the first meets the first, and so on; else only one that waits, too, tells.
    """
    own, other = match["own"], match["other"]
    halves = theirs.get((group, "recv" if match["kind"] == "send" else "send", other, own), [])
    if not exact:
        return next((one for one in halves if not one.done), None)
    nth = next(i for i, one in enumerate(mine[group, match["kind"], own, other]) if not one.done)
    return halves[nth] if nth < len(halves) else None


def _global(group: Members | None, number: int) -> int:
    """Returns the rank in the job of a rank in its group; the same where the members are not known."""
    return group.ranks[number] if group is not None and number < len(group.ranks) else number
