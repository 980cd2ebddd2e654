"""What ranks did before they came to a call: a rank that comes late to the first of several buckets comes late to all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flopwise.diagnosis.ranks.arrivals import arrivals
from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import Matched, match
from flopwise.diagnosis.ranks.stragglers import caused, named
from flopwise.diagnosis.ranks.summary import PARTS
from flopwise.diagnosis.ranks.waits import waits
from flopwise.records.job import Straggler

STEP_US = 1000.0
COMPUTE = PARTS.index("compute")


def buckets(rank: Any, part: str, steps: int = 6) -> list[Any]:
    """Two ranks that compute for 600 us a step; of three buckets the gradients are there at 400, 500 and 600, and moving takes 20.

    Rank 1 has 100 of `part` in front. Rank 0 computes on under the first two, and comes to the next one as soon as one has ended.
    """
    made = []
    for r in range(2):
        calls = []
        for k in range(steps):
            at, late = STEP_US * k, 100.0 * r

            def done(compute: float, k: int = k, late: float = late) -> dict[str, float]:
                parts = {"compute": 600.0 * k + compute}
                parts[part] = parts.get(part, 0.0) + late * (k + 1)
                return parts

            if r == 0:
                rows = [(400, 520, 400, 520), (520, 620, 520, 600), (620, 720, 600, 600)]
            else:
                rows = [(500, 520, 400, 420), (600, 620, 500, 520), (700, 720, 600, 600)]
            for b, (start, end, by_start, by_end) in enumerate(rows):
                covered = [(0, by_end - by_start)] if by_end > by_start else []
                before = {"compute": 400.0, part: late} if b == 0 else {"compute": 80.0 * r}
                calls.append(
                    {
                        "start": at + start, "end": at + end, "covered": covered, "before": before,
                        "done": [done(by_start), done(by_end)], "nbytes": 8 + b,
                    }
                )  # fmt: skip
        made.append(rank(r, calls, steps=[STEP_US * k for k in range(steps + 1)]))
    return made


def straggler(ranks: list[Any]) -> Straggler:
    matched = match(ranks).matched
    found = named(caused(matched, ranks, waits(matched, ranks, Clocks({}, {}))), ranks, 6e6)
    assert [one.rank for one in found] == [1]
    return found[0]


@pytest.mark.parametrize(
    ("part", "reason"),
    [("launch", "host"), ("sync", "host"), ("input", "input"), ("device", "not known")],
)
def test_the_wait_for_later_buckets_has_the_cause_of_the_first(
    rank: Any, part: str, reason: str
) -> None:
    found = straggler(buckets(rank, part))
    assert found.reason == reason
    # What lies before the first step is not known: there the call before is all there is
    assert found.caused_s == pytest.approx(6 * 130e-6)
    assert found.reasons_s[reason] >= 5 * 130e-6 + 50e-6 - 1e-12


def test_only_waiting_that_no_compute_hides_costs_a_step(rank: Any) -> None:
    found = straggler(buckets(rank, "launch"))
    assert found.caused_s == pytest.approx(6 * (100 + 80 + 80) * 1e-6 / 2)
    assert found.delay_s == pytest.approx(80e-6)  # 20 of the 100 move the second bucket
    assert found.per_step_s == pytest.approx(40e-6)


def test_without_what_was_done_each_call_stands_for_itself(rank: Any) -> None:
    ranks = buckets(rank, "launch")
    for one in ranks:
        object.__setattr__(one.calls, "done", np.zeros((0, 2, len(PARTS)), np.int64))
    found = straggler(ranks)
    assert found.reasons_s["not known"] == pytest.approx(6 * 160e-6 / 2)


def test_a_rank_whose_waiting_others_hide_is_not_named(rank: Any) -> None:
    ranks = []
    for r in range(2):
        calls = [
            {
                "start": STEP_US * k + 100 * r, "end": STEP_US * k + 120, "nbytes": 8 + k,
                "covered": [(0, 120 - 100 * r)],
            }
            for k in range(20)
        ]  # fmt: skip
        ranks.append(rank(r, calls, steps=[STEP_US * k for k in range(21)]))
    matched = match(ranks).matched
    (found,) = caused(matched, ranks, waits(matched, ranks, Clocks({}, {})))
    assert (found.ns, found.cost_ns) == (20 * 50_000, 0)
    assert named([found], ranks, 2e7) == []


def test_behind_calls_that_nothing_overlaps_ranks_are_together(rank: Any) -> None:
    ranks = buckets(rank, "launch")
    for one in ranks:
        n = len(one.calls)
        object.__setattr__(one.calls, "covered", np.zeros((0, 2), np.int64))
        object.__setattr__(one.calls, "covered_from", np.zeros(n + 1, np.int64))
        object.__setattr__(one.calls, "exposed_ns", one.calls.end_ns - one.calls.start_ns)
    matched = match(ranks).matched
    found = arrivals(matched, ranks, waits(matched, ranks, Clocks({}, {})))
    for k, one in enumerate(matched):
        for p, i in zip(one.ranks, one.calls, strict=True):
            assert found[k][p].tolist() == ranks[p].calls.before[i].tolist()


def test_a_broadcast_brings_nobody_together(rank: Any) -> None:
    """Rank 0 sends its buffers at the start of a step and goes on: that rank 1 was late for them lies before the first bucket, too."""
    ranks = []
    for r in range(2):
        calls = []
        for k in range(3):
            at = STEP_US * k
            calls.append(
                {
                    "start": at + 200 * r, "end": at + 200 * r + 10, "op": "broadcast", "nbytes": 4,
                    "done": [{"compute": 300 * k, "launch": 200 * r * (k + 1)}] * 2, "before": {"launch": 200 * r},
                }
            )  # fmt: skip
            calls.append(
                {
                    "start": at + 200 * r + 310, "end": at + 530, "nbytes": 8,
                    "covered": [(0, 5)], "before": {"compute": 300},
                    "done": [
                        {"compute": 300 * (k + 1), "launch": 200 * r * (k + 1)},
                        {"compute": 300 * (k + 1) + 5, "launch": 200 * r * (k + 1)},
                    ],
                }
            )  # fmt: skip
        ranks.append(rank(r, calls, steps=[STEP_US * k for k in range(4)]))
    matched = [Matched((0, 1), (i, i)) for i in range(6)]
    found = arrivals(matched, ranks, waits(matched, ranks, Clocks({}, {})))
    assert dict(zip(PARTS, found[1][1].tolist(), strict=True))["launch"] == 0  # the first step
    for k in (3, 5):
        late = dict(zip(PARTS, found[k][1].tolist(), strict=True))
        usual = dict(zip(PARTS, found[k][0].tolist(), strict=True))
        assert (late["launch"], usual["launch"]) == (200_000, 0)
