from __future__ import annotations

import threading

import pytest

from flopwise.errors import ConsistencyError
from flopwise.kit.input.findings import UNSENT, Judge, Stamp

MS = 10**6


def judge_of(count: int, raising: bool = False) -> tuple[Judge, list[Stamp]]:
    judge = Judge(raising)
    stamps = [Stamp(k, 1000 + k * MS, 100 + k) for k in range(count)]
    for stamp in stamps:
        judge.sent(stamp)
    return judge, stamps


def said(judge: Judge) -> list[str]:
    return [str(f) for f in judge.found]


def test_what_was_sent_is_what_arrives() -> None:
    judge, stamps = judge_of(3)
    for k, stamp in enumerate(stamps):
        judge.order(k, 0, k, k)
        judge.arrived(k, 0, stamp, stamp, stamp.checksum)
        judge.kept(k, 0, stamp, stamp, stamp.checksum)
    assert judge.found == []
    assert judge.checked == 6


def test_a_buffer_written_early_names_the_batch_that_is_in_it() -> None:
    judge, stamps = judge_of(6)
    judge.arrived(2, 1, stamps[2], stamps[5], 105)
    assert said(judge) == [
        "step 2, buffer 1: overwritten: it held batch 5, sent +3.000 ms from batch 2, already when this step read it"
    ]


def test_a_buffer_whose_copy_has_not_come_holds_the_batch_before() -> None:
    judge, stamps = judge_of(6)
    judge.order(2, 0, 2, 2)
    judge.arrived(5, 2, stamps[5], stamps[2], 102)
    judge.arrived(5, 2, stamps[5], stamps[3], 103)
    assert [f.kind for f in judge.found] == ["duplicated", "out of order"]
    assert (
        judge.found[0].said
        == "it still held batch 2, sent -3.000 ms from batch 5, when this step read it: the copy was not waited for"
    )


def test_the_same_number_of_an_earlier_epoch_is_not_taken_for_it() -> None:
    judge, stamps = judge_of(2)
    judge.arrived(1, 0, Stamp(1, 5000 + MS, 101), stamps[1], 101)
    assert judge.found[0].kind == "out of order"


def test_a_slot_that_a_worker_filled_again_is_told() -> None:
    judge, stamps = judge_of(1)
    judge.arrived(0, 7, stamps[0], Stamp(UNSENT, 9 * MS, 0), 3)
    assert said(judge) == [
        "step 0, buffer 7: overwritten: a worker had filled its slot again before this step read it"
    ]


def test_bytes_that_are_of_several_batches_are_told_from_those_of_another() -> None:
    judge, stamps = judge_of(4)
    judge.arrived(1, 0, stamps[1], stamps[1], 103)
    judge.arrived(1, 0, stamps[1], stamps[1], -1)
    judge.kept(1, 0, stamps[1], stamps[1], 103)
    assert [f.kind for f in judge.found] == ["overwritten"] * 3
    assert judge.found[0].said == "it holds batch 3, sent +2.000 ms from batch 1"
    assert (
        judge.found[1].said
        == "checksum ffffffffffffffff, sent as 0000000000000065: parts of several batches"
    )
    assert judge.found[2].said.startswith(
        "its bytes changed while the step used it; it holds batch 3"
    )


@pytest.mark.parametrize(("number", "kind"), [(3, "lost"), (1, "out of order"), (0, "duplicated")])
def test_a_batch_out_of_its_turn_is_told(number: int, kind: str) -> None:
    judge, _ = judge_of(5)
    judge.order(0, 0, 0, 0)
    judge.order(1, 0, number, 2)
    assert said(judge) == [
        f"step 1, buffer 0: {kind}: batch {number} was handed over where batch 2 was to come"
    ]


def test_a_new_pass_counts_from_the_beginning() -> None:
    judge, _ = judge_of(3)
    judge.order(0, 0, 0, 0)
    judge.begin()
    judge.order(1, 0, 0, 0)
    assert judge.found == []


def test_findings_are_raised_once_and_all_of_them() -> None:
    judge, stamps = judge_of(3, raising=True)
    judge.raise_new()
    judge.arrived(0, 0, stamps[0], stamps[0], 7)
    judge.arrived(1, 0, stamps[1], stamps[1], 7)
    with pytest.raises(
        ConsistencyError, match=r"step 0.*\(and 1 more\)\. The results of this step and later ones"
    ):
        judge.raise_new()
    judge.raise_new()
    quiet, stamps = judge_of(1)
    quiet.arrived(0, 0, stamps[0], stamps[0], 7)
    quiet.raise_new()
    assert len(quiet.found) == 1


def test_sending_and_judging_go_on_in_two_threads() -> None:
    judge, stamps = judge_of(64)
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            judge.sent(stamps[0])

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for _ in range(2000):
            judge.arrived(1, 0, stamps[1], stamps[1], -5)
    finally:
        stop.set()
        thread.join()
    assert len(judge.found) == 2000
