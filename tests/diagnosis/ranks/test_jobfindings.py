"""The findings of a job, from its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flopwise.diagnosis.ledger import build
from flopwise.diagnosis.ranks.jobfindings import SHOWN_FRAC, findings_of
from flopwise.records.finding import Alternative, Finding
from flopwise.records.job import (
    SCHEMA,
    CollectiveKind,
    Health,
    JobRecord,
    Links,
    RankRecord,
    Redundant,
    Straggler,
)
from flopwise.records.ledger import Line

Make = Callable[..., JobRecord]
STEP_S = 10e-3


def empty(**fields: Any) -> JobRecord:
    made: dict[str, Any] = {
        "schema": SCHEMA, "flopwise": "1.0", "sources": [], "world_size": 2, "device_name": "NVIDIA H200", "step_s": STEP_S,
        "steps": 4, "ranks": [], "lines": [], "families": {}, "lines_reason": None, "health": Health(True, [], [], {}),
        "collectives": [], "links": Links("NVLink 4", 450e9, "data sheet", 0.1, 0.5, None), "redundant": [],
        "redundant_bytes_frac": 0.0, "stragglers": [], "stragglers_reason": None, "findings": [],
    }  # fmt: skip
    return JobRecord(**made | fields)


def kind(**fields: Any) -> CollectiveKind:
    made: dict[str, Any] = {
        "op": "all_reduce", "group": "0", "group_size": 2, "ranks": [0, 1], "dtype": "bf16", "nbytes": 25_000_000,
        "calls": 4.0, "s": 3e-3, "wait_s": 1e-3, "transfer_s": 2e-3, "exposed_s": 1.5e-3,
        "algorithm_bytes_per_s": 50e9, "bus_bytes_per_s": 50e9, "of_link_frac": 50 / 450, "exposed_transfer_s": 1e-3,
    }  # fmt: skip
    return CollectiveKind(**made | fields)


LATE = Straggler(
    rank=1, caused_s=8e-3, ci95=None, share_frac=0.9, last_frac=0.5, reason="input", reasons_s={"input": 8e-3},
    evidence="it came last to 4 of 9 calls", delay_s=4e-3, per_step_s=2e-3, per_step_ci95=(1.5e-3, 2.5e-3),
)  # fmt: skip
AGAIN = Redundant(
    "accumulation", 9e6, 0.75, 3e-3, 2e-3, 6.0, "a step has 4 backward passes", "no_sync"
)


def test_a_job_without_anything_has_none() -> None:
    assert findings_of(empty()) == []


def test_a_straggler_costs_what_it_causes_in_a_step(ranks: Any) -> None:
    (found,) = findings_of(empty(stragglers=[LATE], ranks=ranks([], [])))
    assert (found.code, found.cause, found.certainty) == ("J101", "straggler", "measured")
    assert found.share_frac == pytest.approx(0.2)
    assert found.evidence == (
        "mean over 2 ranks, a rank waits 2 ms a step for rank 1: 90 % of all waiting. It came last to 4 of 9 calls"
    )
    assert "waits for its batches" in found.advice


@pytest.mark.parametrize("profiled", [True, False])
def test_how_late_a_host_is_was_recorded_with_a_profiler_on(profiled: bool) -> None:
    late = dataclasses.replace(LATE, reason="host")
    (found,) = findings_of(empty(stragglers=[late], profiled=profiled))
    assert found.certainty == "seen"
    assert "These steps were profiled" in found.evidence


def test_shares_are_of_the_steps_that_were_recorded() -> None:
    slower = empty(stragglers=[LATE], redundant=[AGAIN], recorded_step_s=2 * STEP_S)
    assert [one.share_frac for one in findings_of(slower)] == pytest.approx([0.1, 0.1])
    unknown = empty(stragglers=[LATE], step_s=None)
    assert findings_of(unknown)[0].share_frac is None


def test_redundant_traffic_costs_what_of_it_is_exposed() -> None:
    (found,) = findings_of(empty(redundant=[AGAIN]))
    assert (found.code, found.share_frac) == ("J102", pytest.approx(0.2))
    assert found.evidence.startswith("75 % of the bytes, 9 MB a step and rank in 6 calls: a step")
    assert found.advice == "no_sync"
    hidden = dataclasses.replace(AGAIN, exposed_s=0.9 * SHOWN_FRAC * STEP_S)
    assert findings_of(empty(redundant=[hidden])) == []
    unknown = dataclasses.replace(AGAIN, exposed_s=None)
    assert findings_of(empty(redundant=[unknown]))[0].share_frac == pytest.approx(0.3)


def test_a_link_that_is_not_used_costs_the_exposed_transfer() -> None:
    small = kind(nbytes=1000, transfer_s=5e-3, exposed_transfer_s=5e-3)  # bound by latency
    (found,) = findings_of(empty(collectives=[kind(), small]))
    assert (found.code, found.cause) == ("J103", "slow-link")
    assert found.share_frac == pytest.approx(0.1)
    assert "use 11.1 % of NVLink 4; the longest: all_reduce of 25 MB at 50 GB/s" in found.evidence


@pytest.mark.parametrize(
    "fields",
    [
        {"of_link_frac": 0.61},
        {"exposed_transfer_s": 0.09e-3},  # all but 1 % of the step hidden
        {"exposed_transfer_s": None, "of_link_frac": None},
        {"transfer_s": None, "of_link_frac": None, "exposed_transfer_s": None},
    ],
)
def test_a_link_that_is_used_or_hidden_or_not_known_is_no_finding(fields: dict[str, Any]) -> None:
    assert findings_of(empty(collectives=[kind(**fields)])) == []


@pytest.fixture
def ranks(training: Any) -> Callable[..., list[RankRecord]]:
    """Returns a function that makes ranks whose ledgers have these findings."""
    ledger = build.ledger(training(4).read())

    def make(*findings: list[Finding] | None) -> list[RankRecord]:
        return [
            RankRecord(
                rank=r, path=f"rank{r}.json", device_name=None, step_s=STEP_S, steps=4,
                ledger=None if of is None else dataclasses.replace(ledger, findings=of),
                ledger_reason="cut off" if of is None else None, calls=0, matched=0, communication_s=None,
                exposed_s=None, wait_s=None, clock_offset_s=None, clock_error_s=None,
            )
            for r, of in enumerate(findings)
        ]  # fmt: skip

    return make


def of_ledger(share: float | None, gain: float | None, where: str) -> Finding:
    return Finding(
        "L101", "input-wait", share, [where], f"seen at {where}", "workers", gain, "measured"
    )


def test_a_cause_of_several_ranks_is_said_once_with_its_mean(ranks: Any) -> None:
    found = ranks([of_ledger(0.1, 0.08, "a.py:1")], [of_ledger(0.5, 0.4, "b.py:2")], [], None)
    (one,) = findings_of(empty(ranks=found))
    assert (one.code, one.where, one.advice) == ("L101", ["b.py:2"], "workers")
    # of the three ranks that have a ledger one has nothing of it
    assert (one.share_frac, one.predicted_gain_frac) == (pytest.approx(0.2), pytest.approx(0.16))
    assert one.evidence == "on 2 of 3 ranks; most on rank 1: seen at b.py:2"


def test_a_rank_that_has_a_cause_twice_is_one_rank(ranks: Any) -> None:
    twice = [of_ledger(0.1, 0.1, "a.py:1"), of_ledger(0.2, 0.1, "b.py:2")]
    (one,) = findings_of(empty(ranks=ranks(twice, [])))
    assert one.evidence.startswith("on 1 of 2 ranks; most on rank 0: seen at b.py:2")
    assert one.share_frac == pytest.approx(0.15)


def test_another_cure_gains_its_mean_over_all_ranks(ranks: Any) -> None:
    few, many = (
        [Alternative("read less", 0.3)],
        [
            Alternative("read less", 0.6),
            Alternative("sleep", None),
        ],
    )
    found = ranks(
        [dataclasses.replace(of_ledger(0.1, 0.08, "a.py:1"), alternatives=few)],
        [dataclasses.replace(of_ledger(0.5, 0.4, "b.py:2"), alternatives=many)],
        [],
    )
    (one,) = findings_of(empty(ranks=found))
    assert [(x.advice, x.predicted_gain_frac) for x in one.alternatives] == [
        ("read less", pytest.approx(0.3)),
        ("sleep", None),
    ]


def test_a_cause_without_a_gain_stays_without(ranks: Any) -> None:
    (one,) = findings_of(empty(ranks=ranks([of_ledger(None, None, "a.py:1")])))
    assert (one.share_frac, one.predicted_gain_frac) == (None, None)
    assert one.evidence == "seen at a.py:1"


def lines(**shares: float) -> list[Line]:
    return [
        Line(name, "communication", share * STEP_S, (0.0, 0.0), share)
        for name, share in shares.items()
    ]


EXPOSED = Finding(
    "L116", "exposed-communication", 0.5, ["a.py:1"], "all of it", "balance the ranks", 0.3, "measured"
)  # fmt: skip


def test_time_that_a_straggler_is_blamed_for_is_not_blamed_twice(ranks: Any) -> None:
    parts = lines(comm_wait=0.3, comm_transfer=0.15, comm_unsplit=0.05)
    job = empty(ranks=ranks([EXPOSED], [EXPOSED]), stragglers=[LATE], lines=parts)
    found = {one.code: one for one in findings_of(job)}
    exposed = found["L116"]
    assert exposed.share_frac == pytest.approx(0.2)
    assert exposed.predicted_gain_frac == pytest.approx(0.2)  # no more than there is
    assert exposed.where == ["a.py:1"]
    assert exposed.evidence == (
        "50 % of the step is collectives that no compute hides, mean over ranks: 30 % waiting for other ranks, most of all for "
        "rank 1 (J101), which is not counted here; 15 % moving data; 5 % of which it is not known"
    )
    assert "balance" not in exposed.advice


def test_exposed_communication_that_is_all_waiting_is_the_stragglers(ranks: Any) -> None:
    parts = lines(comm_wait=0.3, comm_transfer=0.009)
    job = empty(ranks=ranks([EXPOSED], [EXPOSED]), stragglers=[LATE], lines=parts)
    assert [one.code for one in findings_of(job)] == ["J101"]


@pytest.mark.parametrize(
    ("late", "parts"),
    [
        ([], lines(comm_wait=0.3, comm_transfer=0.2)),  # nobody is blamed for the waiting
        ([LATE], lines(comm_unsplit=0.5)),  # the waiting is not known
    ],
)
def test_exposed_communication_stays_whole_where_no_other_finding_has_it(
    ranks: Any, late: list[Straggler], parts: list[Line]
) -> None:
    job = empty(ranks=ranks([EXPOSED], [EXPOSED]), stragglers=late, lines=parts)
    (found,) = (one for one in findings_of(job) if one.code == "L116")
    assert (found.share_frac, found.advice) == (0.5, "balance the ranks")


LAUNCHES = Finding("L103", "launch-bound", 0.7, [], "late", "compile", None, "seen")


def test_a_cause_that_others_wait_for_is_said_to_be_one(ranks: Any) -> None:
    on_host = dataclasses.replace(LATE, reason="host")
    job = empty(ranks=ranks([LAUNCHES], [LAUNCHES]), stragglers=[on_host])
    found = {one.code: one for one in findings_of(job)}
    assert found["L103"].evidence.endswith(
        "late; on rank 1 it is also what the other ranks wait for (J101): one cause, not two"
    )
    assert found["L103"].share_frac == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("reason", "first", "second"),
    [
        ("host", [LAUNCHES], []),  # the late rank does not have it
        ("kernels", [LAUNCHES], [LAUNCHES]),  # it is late for something else
        ("not known", [LAUNCHES], [LAUNCHES]),
    ],
)
def test_other_causes_stand_alone(
    ranks: Any, reason: str, first: list[Finding], second: list[Finding]
) -> None:
    late = dataclasses.replace(LATE, reason=reason)
    found = findings_of(empty(ranks=ranks(first, second), stragglers=[late]))
    (launches,) = (one for one in found if one.code == "L103")
    assert "J101" not in launches.evidence


def test_findings_of_ledgers_are_withheld_with_them(ranks: Any) -> None:
    health = Health(False, [], [], {"ledger": ["H101"]})
    found = ranks([of_ledger(0.1, 0.08, "a.py:1")])
    assert findings_of(empty(ranks=found, health=health)) == []


def test_what_is_worth_most_comes_first(ranks: Any) -> None:
    found = findings_of(
        empty(
            ranks=ranks([of_ledger(0.3, 0.15, "a.py:1")]),
            stragglers=[dataclasses.replace(LATE, per_step_s=4e-3)],
            redundant=[AGAIN],
        )
    )
    # the predicted gain of 15 %; half of the shares of 40 and 20 %
    assert [one.code for one in found] == ["J101", "L101", "J102"]
