"""Where the ranks of a hung job parted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from flopwise.trace.flight_records import Counts, Dump, Entry, Frame, Group
from flopwise.trace.hang import roots, stuck
from flopwise.trace.stream import TraceError

WORLD = (0, 1, 2, 3)
NOW = 1_700_000_000_000_000_000
CALL = Entry(
    record_id=0, group="0", group_desc="default_pg", pg_id=0, collective_seq_id=1, p2p_seq_id=0, op_id=1,
    profiling_name="nccl:all_reduce", input_sizes=((16, 4),), output_sizes=((16, 4),), input_dtypes=("Float",),
    output_dtypes=("Float",), state="completed", time_created_ns=NOW, time_discovered_started_ns=None,
    time_discovered_completed_ns=None, duration_ms=None, retired=True, timeout_ms=None, is_p2p=False,
)  # fmt: skip


def call(number: int, *, done: bool = True, **more: Any) -> Entry:
    fields = {"record_id": number - 1, "collective_seq_id": number, "time_created_ns": NOW + number}
    state = {} if done else {"state": "scheduled", "retired": False}
    return Entry(**{**CALL.__dict__, **fields, **state, **more})


def dump(rank: int, entries: Iterable[Entry], ranks: tuple[int, ...] = WORLD, **more: Any) -> Dump:
    groups = more.pop("groups", (Group("0", "default_pg", ranks),))
    return Dump(f"fr_{rank}", rank, "2.10", "", groups, tuple(entries))


def test_a_job_that_ended_has_no_trouble() -> None:
    assert stuck([dump(r, map(call, range(1, 6))) for r in WORLD]) == []
    assert stuck([]) == []


def test_the_rank_that_never_came_is_named() -> None:
    dumps = [dump(r, [*map(call, range(1, 5)), call(5, done=False)]) for r in (0, 1, 3)]
    frame = Frame("load", "train.py", 40)
    dumps.append(dump(2, [*map(call, range(1, 4)), call(4, frames=(frame,))]))
    (found,) = stuck(dumps)
    assert (found.verdict, found.group, found.sequence, found.op) == ("missing", "0", 5, "all_reduce")  # fmt: skip
    assert (found.waiting, found.behind) == ((0, 1, 3), {2: 4})
    assert found.at == {2: "in no call; its last one was at train.py:40 (load)"}
    assert found.since_ns == NOW + 5
    assert found.evidence == (
        "call 5 of group '0' (default_pg), all_reduce 16x4 Float; rank 2 never called it: it reached 4, and is in no call; "
        "its last one was at train.py:40 (load); ranks 0, 1, 3 wait in it"
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"profiling_name": "nccl:broadcast"}, "broadcast 16x4 Float"),
        ({"input_sizes": ((8,),), "output_sizes": ((8,),)}, "all_reduce 8 Float"),
        ({"input_dtypes": ("Half",)}, "all_reduce 16x4 Half"),
    ],
)
def test_a_rank_that_called_something_else_is_named(other: dict[str, Any], words: str) -> None:
    dumps = [dump(r, [call(1), call(2, done=False)]) for r in (0, 1, 3)]
    dumps.append(dump(2, [call(1), call(2, done=False, **other)]))
    (found,) = stuck(dumps)
    assert (found.verdict, found.sequence, found.mismatched) == ("mismatched", 2, {2: words})
    assert f"rank 2 called {words} instead" in found.evidence


@pytest.mark.parametrize(
    ("op", "field"),
    [
        ("all_to_all", "input_sizes"), ("all_to_all", "output_sizes"), ("scatter", "input_sizes"),
        ("gather", "output_sizes"), ("all_to_all_v_single", "output_sizes"),
    ],
)  # fmt: skip
def test_amounts_that_may_differ(op: str, field: str) -> None:
    sizes = [((8,),), ((9,),), ((8,),), ((8,),)]
    dumps = [dump(r, [call(1, profiling_name=f"nccl:{op}", **{field: sizes[r]})]) for r in WORLD]
    assert stuck(dumps) == []


@pytest.mark.parametrize(
    ("op", "field"),
    [("all_gather", "output_sizes"), ("_allgather_base", "output_sizes"), ("reduce_scatter", "output_sizes"), ("scatter", "output_sizes"), ("gather", "input_sizes")],
)  # fmt: skip
def test_amounts_that_may_not_differ(op: str, field: str) -> None:
    sizes = [((8,),), ((9,),), ((8,),), ((8,),)]
    dumps = [dump(r, [call(1, profiling_name=f"nccl:{op}", **{field: sizes[r]})]) for r in WORLD]
    (found,) = stuck(dumps)
    assert (found.verdict, list(found.mismatched)) == ("mismatched", [1])


def test_a_call_that_all_made_and_that_did_not_end() -> None:
    (found,) = stuck([dump(r, [call(1), call(2, done=False), call(3, done=False)]) for r in WORLD])
    assert (found.verdict, found.sequence, found.waiting) == ("unfinished", 2, WORLD)
    assert "4 of 4 ranks called it alike, and it did not end" in found.evidence


def test_ranks_without_a_dump_are_named() -> None:
    (found,) = stuck([dump(r, [call(1), call(2, done=False)]) for r in (0, 1)])
    assert (found.verdict, found.no_dump) == ("unfinished", (2, 3))
    assert "ranks 2, 3 have no dump" in found.evidence


def test_older_calls_that_a_recorder_lost_are_not_missed() -> None:
    dumps = [dump(0, map(call, range(1, 10))), dump(1, map(call, range(6, 10)))]
    dumps += [dump(r, map(call, range(3, 10))) for r in (2, 3)]
    assert stuck(dumps) == []
    dumps[1] = dump(1, map(call, range(6, 9)))
    (found,) = stuck(dumps)
    assert (found.sequence, found.behind) == (9, {1: 8})


def test_of_two_groups_the_first_trouble_comes_first_and_says_where_the_rank_is() -> None:
    """Rank 1 waits for rank 0 in its own group, so that the whole group waits for rank 1."""
    groups = (Group("0", "default_pg", (0, 1, 2)), Group("7", "tp", (0, 1)))
    tp = call(1, done=False, group="7", group_desc="tp", record_id=1, time_created_ns=NOW + 50)
    dumps = [
        dump(0, [call(1)], groups=groups),
        dump(1, [call(1), tp], groups=groups),
        dump(2, [call(1), call(2, done=False, time_created_ns=NOW + 90)], groups=groups),
    ]
    tensor, world = stuck(dumps)
    assert (tensor.group, tensor.behind, tensor.at) == ("7", {0: 0}, {0: "in no call"})
    assert (world.group, sorted(world.behind)) == ("0", [0, 1])
    assert world.at[1] == "in call 1 of group '7', all_reduce 16x4 Float"


def open_only(rank: int, first: int, n: int, counts: tuple[int, int] | None, **more: Any) -> Dump:
    """A dump without the calls that ended, as programs can ask for it; the rank calls the group number 5."""
    entries = [
        call(k, done=False, pg_id=5, record_id=3 * k, **more) for k in range(first, first + n)
    ]
    known = {} if counts is None else {"5": Counts(counts[0], None, counts[1])}
    return Dump(f"fr_{rank}", rank, "2.9", "", (Group("0", "default_pg", WORLD),), tuple(entries), (), {"0": Counts(90, None, 90), **known})  # fmt: skip


def test_a_call_that_ended_on_all_but_one_rank_is_about_its_device() -> None:
    """Dumps of open calls alone: the others went on, and their counts say that it ended there."""
    dumps = [open_only(r, 9, 2, (10, 8)) for r in (0, 1, 3)] + [open_only(2, 6, 4, (9, 5))]
    (found,) = stuck(dumps)
    assert (found.verdict, found.sequence, found.waiting, found.ended) == ("partial", 6, (2,), (0, 1, 3))  # fmt: skip
    assert found.culprits == (2,)
    assert found.evidence == "call 6 of group '0' (default_pg), all_reduce 16x4 Float; it ended on ranks 0, 1, 3; rank 2 waits in it"  # fmt: skip


def test_a_call_may_have_ended_where_it_is_not_known() -> None:
    dumps = [open_only(r, 9, 2, None) for r in (0, 1, 3)] + [open_only(2, 6, 4, None)]
    (found,) = stuck(dumps)
    assert (found.verdict, found.sequence, found.waiting, found.culprits) == ("unfinished", 6, (2,), ())  # fmt: skip
    wrong = [open_only(r, 9, 2, (77, 76)) for r in (0, 1, 3)] + [open_only(2, 6, 4, None)]
    assert stuck(wrong)[0].ended == ()  # counts that are not of these calls


@pytest.mark.parametrize(
    ("counts", "reached", "said"),
    [
        ((8, 8), 8, "rank 2 never called it: it reached 8, and is in no call"),
        (None, None, "rank 2 is in no call, and how far it came in this group its dump does not say"),
        ((3, 3), None, "rank 2 is in no call, and how far it came in this group its dump does not say"),
        ((11, 11), None, "rank 2 is in no call, and how far it came in this group its dump does not say"),
    ],
)  # fmt: skip
def test_a_rank_without_open_calls_is_behind(counts: tuple[int, int] | None, reached: int | None, said: str) -> None:  # fmt: skip
    dumps = [open_only(r, 9, 2, (10, 8)) for r in (0, 1, 3)] + [open_only(2, 0, 0, counts)]
    (found,) = stuck(dumps)
    assert (found.verdict, found.sequence, found.behind, found.culprits) == ("missing", 9, {2: reached}, (2,))  # fmt: skip
    assert said in found.evidence


def test_a_rank_without_open_calls_may_have_ended_what_the_others_wait_in() -> None:
    dumps = [open_only(r, 9, 2, (10, 8)) for r in (0, 1, 3)] + [open_only(2, 0, 0, (10, 10))]
    (found,) = stuck(dumps)
    assert (found.verdict, found.sequence, found.ended, found.waiting) == ("partial", 9, (2,), (0, 1, 3))  # fmt: skip


def test_counts_tell_nothing_where_messages_are_counted_with_the_calls() -> None:
    send = call(0, done=False, pg_id=5, record_id=50, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=10)  # fmt: skip
    ahead = open_only(0, 9, 2, (10, 8))
    ahead = dataclasses.replace(ahead, entries=(*ahead.entries, send))
    found = stuck([ahead, open_only(2, 6, 4, (9, 5)), open_only(1, 9, 2, (10, 8))])
    assert [one.verdict for one in found if one.sequence == 6] == ["unfinished"]


def test_of_many_calls_that_wait_those_stand_first_with_which_it_began() -> None:
    """Rank 2 is in no call; the groups of the others wait for it, and for one another."""
    groups = tuple(Group(name, "", ranks) for name, ranks in (("0", WORLD), ("a", (0, 1)), ("b", (2, 3))))  # fmt: skip
    of_a = call(1, done=False, group="a", time_created_ns=NOW - 50)
    of_b = call(1, done=False, group="b", time_created_ns=NOW - 10)
    last = call(2, done=False, time_created_ns=NOW + 2)
    send = call(3, done=False, profiling_name="nccl:send 1->2", is_p2p=True, time_created_ns=NOW - 90)  # fmt: skip
    dumps = [
        dump(0, [call(1), of_a], groups=groups),
        dump(1, [call(1), send, of_a], groups=groups),
        dump(2, [call(1)], groups=groups),
        dump(3, [call(1), of_b, last], groups=groups),
    ]
    found = stuck(dumps)
    assert [one.verdict for one in found] == ["unfinished", "unfinished", "missing", "missing"]
    (root,) = roots(found)
    assert (root.group, root.verdict, root.idle, root.culprits) == ("b", "missing", (2,), (2,))


def test_where_no_rank_is_at_fault_all_calls_that_wait_are_told() -> None:
    found = stuck([dump(r, [call(1), call(2, done=False)]) for r in WORLD])
    assert roots(found) == found
    assert roots([]) == []


def test_groups_of_one_name_and_other_members_are_apart() -> None:
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    dumps = [
        dump(r, [call(1, group="5")] * (r < 3), groups=(Group("5", "dp", pairs[r]),)) for r in WORLD
    ]
    (found,) = stuck(dumps)
    assert (found.sequence, found.behind) == (1, {3: 0})


def test_sends_and_receives_that_wait() -> None:
    send = call(1, done=False, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=4, collective_seq_id=0)  # fmt: skip
    groups = (Group("0", "pp", (2, 3)),)
    (found,) = stuck([dump(2, [send], groups=groups), dump(3, [], groups=groups)])
    assert (found.verdict, found.waiting, found.sequence, found.op) == ("unfinished", (2,), 4, "send 0->1")  # fmt: skip
    assert found.evidence == "rank 2 waits in send 0->1 of group '0'; rank 3 is in no call"
    (found,) = stuck([dump(2, [send, send], groups=groups)])
    assert found.no_dump == (3,)


def test_backends_that_do_not_tell_states_retire_what_ended() -> None:
    gloo = {"state": "scheduled", "retired": True, "profiling_name": "gloo:all_reduce"}
    waits = {**gloo, "retired": False}
    groups = (Group("0", "default_pg", ()),)  # Gloo does not say who is in a group
    dumps = [dump(r, [call(1, **gloo), call(2, **waits)], groups=groups) for r in (0, 1)]
    dumps.append(dump(2, [call(1, **gloo)], groups=groups))
    (found,) = stuck(dumps)
    assert (found.verdict, found.behind, found.waiting) == ("missing", {2: 1}, (0, 1))


def test_whose_a_dump_is_must_be_known() -> None:
    with pytest.raises(TraceError, match="end its name with the rank"):
        stuck([Dump("x", None, "", "", (), ())])
    with pytest.raises(TraceError, match="both of rank 1"):
        stuck([dump(1, []), dump(1, [])])


def test_many_ranks_take_no_time() -> None:
    entries = [call(n) for n in range(1, 401)]
    dumps = [dump(r, entries, tuple(range(64))) for r in range(63)]
    dumps.append(dump(63, entries[:-1], tuple(range(64))))
    (found,) = stuck(dumps)
    assert found.behind == {63: 399}


def test_any_part_may_be_odd() -> None:
    odd = [call(1, profiling_name=""), call(-5), call(2, group=""), call(3, input_sizes=(), output_sizes=((),))]  # fmt: skip
    for some in itertools.permutations(odd, 2):
        stuck([dump(0, some), dump(1, some[:1])])


def test_a_sentence_has_an_end() -> None:
    long = {"group": "g" * 5000, "group_desc": "d" * 5000, "input_sizes": ((1,) * 5000,) * 2}
    dumps = [
        dump(0, [call(1, done=False, **long)], groups=()),
        dump(1, [call(1, **long)], groups=()),
    ]
    (found,) = stuck(dumps)
    assert (
        f"call 1 of group '{'g' * 200}…' ({'d' * 200}), all_reduce 1x1x1x1x1x1x1x1x…"
        in found.evidence
    )
    assert len(found.evidence) < 1000


PIPE = (Group("0", "pp", (0, 1)),)


def message(number: int, name: str, *, done: bool = False) -> Entry:
    return call(number, done=done, profiling_name=f"nccl:{name}", is_p2p=True, collective_seq_id=0)


def test_a_half_that_ended_on_the_other_rank_blames_nobody_there() -> None:
    sent = [message(1, "send 0->1", done=True), message(2, "send 0->1", done=True)]
    got = [message(1, "recv 1<-0", done=True), message(2, "recv 1<-0")]
    (found,) = stuck([dump(0, sent, groups=PIPE), dump(1, got, groups=PIPE)])
    assert (found.verdict, found.waiting, found.ended, found.idle) == ("partial", (1,), (0,), ())
    assert found.culprits == (1,)
    assert found.evidence == (
        "rank 1 waits in recv 1<-0 of group '0'; rank 0 made the other half, send 0->1, which ended there"
    )


def test_a_half_of_another_message_is_not_the_other_half() -> None:
    sent = [message(1, "send 0->1", done=True)]
    got = [message(1, "recv 1<-0", done=True), message(2, "recv 1<-0")]
    (found,) = stuck([dump(0, sent, groups=PIPE), dump(1, got, groups=PIPE)])
    assert (found.verdict, found.ended, found.idle) == ("unfinished", (), (0,))
    later = [dataclasses.replace(one, record_id=one.record_id + 7) for one in sent]
    (found,) = stuck([dump(0, later, groups=PIPE), dump(1, got[1:], groups=PIPE)])
    assert (found.ended, found.idle) == ((), (0,))  # older calls of rank 0 are not in its dump


def test_both_halves_wait() -> None:
    found = stuck(
        [
            dump(0, [message(1, "send 0->1")], groups=PIPE),
            dump(1, [message(1, "recv 1<-0")], groups=PIPE),
        ]
    )
    assert [(one.verdict, one.at, one.idle) for one in found] == [("unfinished", {}, ())] * 2
    assert found[0].evidence.endswith("rank 1 made the other half, recv 1<-0, and waits in it")


def test_two_sends_that_cross_are_no_halves_of_each_other() -> None:
    found = stuck(
        [
            dump(0, [message(1, "send 0->1")], groups=PIPE),
            dump(1, [message(1, "send 1->0")], groups=PIPE),
        ]
    )
    assert [[*one.at] for one in found] == [[1], [0]]


def test_a_call_that_is_left_out_is_not_one_that_was_not_come_to() -> None:
    (found,) = stuck(
        [
            dump(0, [call(1), call(2, done=False)], (0, 1)),
            dump(1, [call(1), call(3, done=False, record_id=1)], (0, 1)),
        ]
    )
    assert "rank 1 has later calls, to 3, and not this one, and is in call 3" in found.evidence


class Counted(tuple[Entry, ...]):
    """Entries that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Entry]:
        self.times += 1
        return super().__iter__()


def test_many_groups_take_no_time() -> None:
    entries = Counted(call(1, done=False, group=str(n), record_id=n) for n in range(300))
    dumps = [dataclasses.replace(dump(r, [], groups=()), entries=entries) for r in (0, 1)]
    assert len(stuck(dumps)) == 300
    assert entries.times < 20  # and not once for each group
