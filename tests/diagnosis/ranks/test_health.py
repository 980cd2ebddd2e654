"""Defects of single traces and between them, and what each withholds: exact counts on hand-made traces and summaries."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwise.diagnosis.ranks.health import (
    CALLS,
    OF_THE_JOB_WHERE_OF_ONE,
    RULES,
    TIMES,
    across,
    certificate,
    defects_of,
    named_rank,
    unreadable,
    withheld_for,
)
from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.diagnosis.ranks.summary import Calls, RankSummary, no_calls
from flopwise.records.job import CONCLUSIONS, Defect
from flopwise.trace.chrome import read
from flopwise.trace.health import sift

DOCS = Path(__file__).parents[3] / "docs" / "health.md"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def found(timeline: Any, **given: Any) -> dict[str, Defect]:
    trace = timeline.read()
    every = defects_of(trace, sift(trace.events), **given)
    assert len({one.code for one in every}) == len(every)
    return {one.code: one for one in every}


def kernels(timeline: Any, n: int = 100, dur: float = 50.0, name: str = "k") -> Any:
    """Kernels on one stream, 60 us apart, in five marked steps."""
    for i in range(n):
        if i % (n // 5) == 0:
            timeline.mark(i // (n // 5), 10_000 + 60 * i, 60 * (n // 5))
        timeline.kernel(name, 10_005 + 60 * i, dur, at=10_001 + 60 * i)
    timeline.call("cudaDeviceSynchronize", 10_000 + 60 * n, 200)
    return timeline


class TestDefectsOf:
    def test_a_sound_trace_has_none(self, timeline: Any) -> None:
        assert found(kernels(timeline)) == {}

    def test_steps_that_an_optimizer_ends_have_none(self, training: Any) -> None:
        assert found(training()) == {}

    def test_the_rank_is_the_headers_unless_it_is_given(self, timeline: Any) -> None:
        kernels(timeline).kernel("k", 12_000, -1, at=11_000)
        timeline.header["distributedInfo"] = {"rank": 5}
        assert found(timeline)["H101"].rank == 5
        assert found(timeline, rank=2)["H101"].rank == 2
        assert found(timeline)["H101"].path == str(timeline.folder / "trace.json")

    def test_few_unusable_kernels_are_only_said(self, timeline: Any) -> None:
        kernels(timeline, 500).kernel("k", 12_000, -1, at=11_000)
        one = found(timeline)["H101"]
        assert (one.count, one.withholds) == (1, [])
        assert one.share_frac == pytest.approx(1 / 501)

    def test_many_unusable_kernels_withhold_what_is_said_of_time(self, timeline: Any) -> None:
        kernels(timeline)
        for i in range(10):
            timeline.kernel("k", 0, 0, at=11_000.5 + i)
        one = found(timeline)["H101"]
        assert (one.count, {*one.withholds}) == (10, {*TIMES})

    def test_short_kernels_of_whole_microseconds_are_legal(self, timeline: Any) -> None:
        """Profilers of 2021 wrote 0 for less than one: 7 % of all kernels, and 0.07 % of the time."""
        kernels(timeline)
        for i in range(7):
            timeline.kernel("tiny", 10_056 + 60 * i, 0, at=10_002 + 60 * i)
        one = found(timeline)["H101"]
        assert (one.count, one.withholds) == (7, [])

    def test_one_unusable_collective_withholds_what_is_said_of_calls(self, timeline: Any) -> None:
        kernels(timeline, 500).kernel(NCCL, 12_000, float("nan"), at=11_000)
        one = found(timeline)["H101"]
        assert {*one.withholds} == {*TIMES, *CALLS}
        assert "1 of a duration that is no number" in one.evidence
        assert one.evidence.endswith("communication among them: 1")

    @pytest.mark.parametrize(("name", "more"), [("k", set()), (NCCL, {*CALLS})])
    def test_a_kernel_that_runs_on(self, timeline: Any, name: str, more: set[str]) -> None:
        kernels(timeline)
        timeline.kernel(name, 13_056, 1.5, at=13_000.5)
        timeline.kernel(name, 13_116, 1.5, at=13_060.5)
        timeline.kernel(name, 13_176, 2_000_000, at=13_120.5)
        one = found(timeline)["H102"]
        assert (one.count, {*one.withholds}) == (1, {"ledger", "mfu", "idle", *more})

    def test_a_collective_that_waits_for_two_seconds_is_sound(self, timeline: Any) -> None:
        """Another rank writes a checkpoint: nothing follows until it is over."""
        kernels(timeline)
        for i in range(4):
            timeline.kernel(NCCL, 16_100 + 10 * i, 5, at=16_050 + i, stream=20)
        timeline.kernel(NCCL, 16_200, 2_000_000, at=16_060, stream=20)
        timeline.kernel("k", 2_016_210, 50, at=16_070)
        timeline.call("cudaDeviceSynchronize", 16_300, 2_000_100)
        assert "H102" not in found(timeline)

    def test_a_kernel_that_fills_the_trace_is_suspicious(self, timeline: Any) -> None:
        kernels(timeline).kernel("k", 16_200, 2_000_000, at=16_060)
        timeline.call("cudaDeviceSynchronize", 16_300, 2_000_100)
        one = found(timeline)["H102"]
        assert {*one.withholds} == {"ledger", "mfu", "idle"}
        assert one.evidence.endswith("100% of the trace")

    def test_work_missing_at_the_head(self, timeline: Any) -> None:
        kernels(timeline)
        gone = [e for e in timeline.events if e["cat"] == "kernel"][:30]
        timeline.events = [e for e in timeline.events if e not in gone]
        one = found(timeline)["H104"]
        # 20 launches a step: all of the first one's and 10 of the second's
        assert (one.count, one.steps) == (30, [1, 2])
        assert one.share_frac == pytest.approx(30 / 40)
        assert one.withholds == ["ledger", "mfu", "idle", "waits"]
        assert "H103" not in found(timeline)

    def test_work_missing_at_the_end(self, timeline: Any) -> None:
        kernels(timeline)
        gone = [e for e in timeline.events if e["cat"] == "kernel"][-5:]
        timeline.events = [e for e in timeline.events if e not in gone]
        every = found(timeline)
        assert {*every["H103"].withholds} == {"ledger", "mfu", "idle", "overlap"}
        assert (every["H103"].count, "H104" in every) == (5, False)

    def test_a_single_lost_launch_is_only_said(self, timeline: Any) -> None:
        kernels(timeline, 500).call("cudaLaunchKernel", 30_000, 2)
        one = found(timeline)["H103"]
        assert (one.count, one.withholds) == (1, [])

    def test_a_lost_graph_launch_is_many_lost_kernels(self, timeline: Any) -> None:
        kernels(timeline, 500).call("cudaGraphLaunch", 30_000, 2)
        assert {*found(timeline)["H103"].withholds} == {"ledger", "mfu", "idle", "overlap"}

    def test_a_lost_call_behind_another_ends_the_matching(self, timeline: Any) -> None:
        kernels(timeline, 500).kernel(NCCL, 12_000, 40, at=11_990, stream=20)
        op = timeline.op("record_param_comms", 30_000, 10)
        timeline.call("cudaLaunchKernelExC", 30_002, 2, **{"External id": op})
        one = found(timeline)["H103"]
        assert {*one.withholds} == {*CALLS}

    def test_a_file_that_ends_early(self, timeline: Any) -> None:
        kernels(timeline)
        path = timeline.write()
        path.write_text(path.read_text("utf-8")[: len(timeline.text) * 3 // 5], "utf-8")
        trace = read(path)
        (one,) = defects_of(trace, sift(trace.events))
        assert one.code == "H105"
        assert {*one.withholds} == {*TIMES, *CALLS, "redundancy"}

    def test_damaged_events(self, timeline: Any) -> None:
        kernels(timeline)
        path = timeline.write()
        path.write_text(path.read_text("utf-8").replace('"dur": 50.0', '"dur": 50.0x', 3), "utf-8")
        trace = read(path)
        by_code = {one.code: one for one in defects_of(trace, sift(trace.events))}
        one = by_code["H106"]
        assert (one.count, {*one.withholds}) == (3, {*TIMES, *CALLS})  # 3 of 206

    def test_starts_written_over(self, timeline: Any) -> None:
        kernels(timeline)
        for event in timeline.events:
            if event["cat"] == "kernel":
                event["ts"] -= 4
        one = found(timeline)["H108"]
        assert (one.count, one.share_frac, {*one.withholds}) == (100, 1.0, {*TIMES})

    def test_dependent_launches_may_overlap_by_two_microseconds(self, timeline: Any) -> None:
        assert found(kernels(timeline, dur=62.1)) == {}

    def test_more_overlap_than_that(self, timeline: Any) -> None:
        one = found(kernels(timeline, dur=70))["H109"]
        assert (one.count, {*one.withholds}) == (99, {*TIMES})

    def test_work_before_its_launch(self, timeline: Any) -> None:
        kernels(timeline)
        for event in timeline.events:
            if event["cat"] == "kernel":
                event["ts"] -= 20
        one = found(timeline)["H110"]
        assert (one.count, {*one.withholds}) == (100, {"ledger", "idle"})

    def test_a_host_of_impossible_times(self, timeline: Any) -> None:
        kernels(timeline)
        for _ in range(5):
            timeline.op("aten::mm", 12_000, -5)
        one = found(timeline)["H111"]
        assert (one.count, {*one.withholds}) == (5, {"ledger", "idle"})

    def test_steps_without_work(self, timeline: Any) -> None:
        kernels(timeline)
        for i in range(2):
            timeline.mark(5 + i, 16_300 + 500 * i, 500)
        one = found(timeline)["H112"]
        assert (one.count, one.share_frac) == (2, pytest.approx(2 / 7))
        assert {*one.withholds} == {"ledger", "mfu", "steps", "idle"}

    def test_no_steps(self, timeline: Any) -> None:
        timeline.kernel("k", 10, 5, at=1)
        assert found(timeline)["H113"].withholds == ["steps"]

    def test_graph_replays_are_said(self, timeline: Any) -> None:
        kernels(timeline)
        number = timeline.call("cudaGraphLaunch", 15_990, 5)
        for i in range(4):
            timeline.kernel("k", 16_010 + 10 * i, 8, correlation=number)
        one = found(timeline)["H114"]
        assert (one.count, one.withholds) == (4, [])

    def test_nothing_can_be_used(self, timeline: Any) -> None:
        timeline.kernel("k", 10, -5, at=1)
        assert {*found(timeline)["H116"].withholds} == {*TIMES, *CALLS}

    def test_operators_of_a_device_that_was_not_recorded(self, timeline: Any) -> None:
        timeline.op("aten::cudnn_convolution", 10, 20)
        one = found(timeline)["H116"]
        assert {*one.withholds} == {*TIMES, *CALLS}
        assert "no job on a CPU" in one.evidence
        assert (one.count, one.what) == (1, "events")

    def test_operators_of_a_cpu(self, timeline: Any) -> None:
        timeline.op("aten::mm", 10, 20)
        assert found(timeline) == {}

    def test_nothing_at_all(self, timeline: Any) -> None:
        assert found(timeline) == {}


def calls(n: int, **columns: Any) -> Calls:
    """n calls of 100 us a millisecond apart, of all ranks."""
    start = np.arange(n) * 1_000_000
    return dataclasses.replace(
        no_calls(),
        **{
            "start_ns": start, "end_ns": start + 100_000, "nbytes": np.full(n, 4096), "group": ["0"] * n,
            "members": [(0, 1)] * n, "group_size": np.full(n, 2), "peer": np.full(n, -1), "kernel": [NCCL] * n,
            "labelled": np.ones(n, bool), "step": np.zeros(n, np.int64),
        }
        | columns,
    )  # fmt: skip


def rank(number: int | None, world: int = 2, n: int = 10, **fields: Any) -> RankSummary:
    made: dict[str, Any] = {
        "path": f"rank{number}.json", "rank": number, "world_size": world, "device": number,
        "device_name": "NVIDIA H200", "ledger": None, "reason": None,
        "bounds_ns": np.arange(5), "calls": calls(n), "defects": [],
    }  # fmt: skip
    return RankSummary(**(made | fields))


def between(*summaries: RankSummary, **given: Any) -> dict[str, Defect]:
    return {one.code: one for one in across(summaries, **given)}


class TestAcross:
    def test_ranks_that_belong_together(self) -> None:
        aligned = {"offsets": {0: (0.0, 0.0), 1: (9e4, 2e4)}, "matched": {0: 1.0, 1: 1.0}}
        assert between(rank(0), rank(1), **aligned) == {}

    def test_a_rank_alone_is_told(self) -> None:
        one = between(rank(3, 8, calls=calls(10, members=[()] * 10)))["H201"]
        assert (one.count, one.share_frac) == (7, pytest.approx(7 / 8))
        assert {*one.withholds} == {"waits", "bandwidth", "stragglers"}
        assert one.evidence.startswith(
            "1 of 8 ranks were found; missing: 0, 1, 2, 4, 5 and 2 more."
        )

    def test_groups_that_are_whole_need_no_other_rank(self) -> None:
        one = between(rank(0, 4), rank(1, 4))["H201"]
        assert (one.count, one.withholds) == (2, [])

    def test_groups_that_are_larger_than_what_was_read_need_more_ranks(self) -> None:
        # a trace need not say how many ranks there are
        one = between(*(rank(r, 0, calls=calls(9, group_size=np.full(9, 4), members=[()] * 9)) for r in (0, 1)))  # fmt: skip
        assert (one["H201"].count, {*one["H201"].withholds}) == (2, {"waits", "bandwidth", "stragglers"})  # fmt: skip

    def test_calls_of_groups_of_one_are_not_between_ranks(self) -> None:
        alone = {"group_size": np.ones(5, np.int64), "members": [()] * 5}
        found = between(*(rank(r, calls=calls(5, **alone)) for r in (0, 1)), matched={}, offsets={})
        assert [*found] == ["H211"]

    def test_a_rank_that_is_no_member_of_its_groups(self) -> None:
        # a copy of the trace of rank 0 among two that do not say whose they are
        one = between(rank(0), rank(1), rank(2, 2, path="copy.json"))["H210"]
        assert (one.rank, one.path, one.count, {*one.withholds}) == (2, "copy.json", 10, {*CALLS})
        few = calls(200, members=[(7, 8), *[(0, 1)] * 199])
        assert between(rank(0, calls=few), rank(1))["H210"].withholds == []

    def test_two_files_of_one_rank(self) -> None:
        one = between(rank(0), rank(1), rank(1, path="again.json"))["H202"]
        assert (one.rank, one.count, {*one.withholds}) == (1, 2, {*CALLS})

    def test_windows_that_begin_apart_withhold_nothing(self) -> None:
        one = between(rank(0, n=76), rank(1, n=84), matched={0: 1.0, 1: 76 / 84})["H203"]
        assert (one.count, one.what, one.withholds) == (1, "ranks", [])
        assert "76 to 84" in one.evidence

    def test_point_to_point_calls_may_differ(self) -> None:
        sends = calls(12, peer=np.asarray([-1] * 10 + [1, 1]))
        assert "H203" not in between(rank(0, calls=sends), rank(1))

    def test_a_shifted_clock_is_moved(self) -> None:
        one = between(rank(0), rank(1), offsets={0: (0.0, 0.0), 1: (5e6, 9e4)})["H204"]
        assert (one.rank, one.withholds) == (1, [])
        assert one.evidence == (
            "the clock of rank 1 is 5 ms ahead of the first rank's: its times are moved by so much, and half of its collectives "
            "then end within 90 µs of the other ranks'"
        )
        assert one.what == ""

    @pytest.mark.parametrize(
        ("offset", "said"),
        [
            ((0.0, 3e6), "half of them by 3 ms or more apart (up to 1 ms would do)"),
            ((-4e14, 9e4), "is 111 h 6 min behind the first rank's: they were not recorded"),
            ((float("nan"), 1.0), "cannot be aligned: the times of its calls cannot be true"),
            ((1.0, float("nan")), "cannot be aligned: the times of its calls cannot be true"),
        ],
    )
    def test_ends_that_stay_apart(self, offset: tuple[float, float], said: str) -> None:
        one = between(rank(0), rank(1), offsets={0: (0.0, 0.0), 1: offset})["H204"]
        assert one.withholds == ["waits", "stragglers"]
        assert said in one.evidence

    def test_ends_that_stay_apart_by_a_small_part_of_the_waiting(self) -> None:
        offsets = {0: (0.0, 0.0), 1: (0.0, 3e6)}
        assert "H204" not in between(rank(0), rank(1), offsets=offsets, apart={0: 8e7, 1: 8e7})
        assert "H204" in between(rank(0), rank(1), offsets=offsets, apart={0: 5e7, 1: 5e7})

    def test_a_clock_that_nothing_aligns(self) -> None:
        one = between(rank(0), rank(1), offsets={0: (0.0, 0.0)})["H204"]
        assert (one.rank, one.withholds) == (1, ["waits", "stragglers"])

    def test_steps_and_devices_that_differ_are_said(self) -> None:
        other = rank(1, bounds_ns=np.arange(4), device_name="NVIDIA A100")
        every = between(rank(0), other)
        assert every["H205"].evidence.startswith("the ranks have 3 to 4 steps")
        assert (every["H205"].withholds, every["H206"].withholds) == ([], [])

    @pytest.mark.parametrize("other", [rank(1, world=4), rank(2, world=2)])
    def test_files_of_different_jobs(self, other: RankSummary) -> None:
        one = between(rank(0), other)["H207"]
        assert {*one.withholds} == {*TIMES, *CALLS, "redundancy"}

    def test_a_file_of_another_name(self) -> None:
        one = between(rank(0), rank(1, path="run/rank3.json.gz"))["H208"]
        assert (one.rank, one.withholds) == (1, [])

    def test_files_without_a_rank(self) -> None:
        assert {*between(rank(None), rank(None))["H209"].withholds} == {*CALLS}
        assert "H209" not in between(rank(None, world=1))

    def test_calls_that_the_others_do_not_make(self) -> None:
        one = between(rank(0), rank(1), matched={0: 1.0, 1: 0.2})["H210"]
        assert (one.rank, one.count, {*one.withholds}) == (1, 8, {*CALLS})

    def test_a_rank_that_makes_none(self) -> None:
        one = between(rank(0), rank(1, n=0), matched={0: 0.0})["H210"]
        assert one.count == 1

    def test_no_communication_at_all(self) -> None:
        assert {*between(rank(0, n=0), rank(1, n=0))["H211"].withholds} == {*CALLS, "redundancy"}
        assert between(rank(0, world=1, n=0)) == {}

    @pytest.mark.parametrize(("dumb", "withheld"), [(1, []), (2, ["bandwidth", "redundancy"])])
    def test_calls_that_do_not_say_what_they_move(self, dumb: int, withheld: list[str]) -> None:
        labelled = np.arange(10) >= dumb
        nbytes = np.where(labelled, 4096, -1)
        one = between(rank(0), rank(1, calls=calls(10, labelled=labelled, nbytes=nbytes)))["H115"]
        assert (one.rank, one.count, one.withholds) == (1, dumb, withheld)

    def test_such_calls_before_the_steps_are_let_be(self) -> None:
        """What was launched before the recording has no operator that could say it."""
        before = calls(
            10, labelled=np.zeros(10, bool), nbytes=np.full(10, -1), step=np.full(10, -1)
        )
        assert between(rank(0, calls=before), rank(1)) == {}


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("rank3.json.gz", 3),
        ("ddp_default_rank12.json", 12),
        ("RANK_0/trace.json", 0),
        ("a/rank-07.pt.trace.json", 7),
        ("frank3.json", None),
        ("rank3-of-rank8.json", None),
        ("trace.json", None),
        ("rank1234567.json", None),
    ],
)
def test_the_rank_in_a_name(path: str, number: int | None) -> None:
    assert named_rank(path) == number


class TestCertificate:
    def test_no_defect(self) -> None:
        health = certificate([], [], [0, 1])
        assert (health.clean, health.defects, health.withheld) == (True, [], {})
        assert len(health.checked) == len(RULES)

    def test_what_is_said_and_changes_nothing_leaves_it_clean(self) -> None:
        health = certificate([defect("H107", "x", count=1, rank=0)], [], [0, 1])
        assert health.clean
        assert len(health.defects) == 1

    def test_a_ranks_defect_withholds_it_for_that_rank_and_the_job(self) -> None:
        one = defect("H102", "x", count=1, rank=1, path="rank1.json")
        health = certificate([one], [], [0, 1])
        assert health.withheld == {"ledger": ["H102"], "mfu": ["H102"], "idle": ["H102"]}
        assert withheld_for(1, health.defects) == health.withheld
        assert withheld_for(0, health.defects) == {}

    def test_redundancy_stands_while_one_rank_can_tell(self) -> None:
        cut = [defect("H105", "x", count=1, rank=number) for number in (0, 1)]
        assert "redundancy" not in certificate(cut[:1], [], [0, 1]).withheld
        assert "redundancy" in certificate(cut, [], [0, 1]).withheld

    def test_defects_between_ranks_leave_their_own_time_alone(self) -> None:
        one = defect("H207", "x", count=1)
        health = certificate([], [one], [0, 1])
        assert {*health.withheld} == {*TIMES, *CALLS, "redundancy"}
        assert {*withheld_for(0, health.defects)} == {*CALLS, "redundancy"}

    def test_steps_that_are_left_out_withhold_nothing_else(self) -> None:
        one = defect("H104", "x", count=9, rank=1, steps=[1])
        health = certificate([one], [], [0, 1])
        assert not health.clean
        assert (health.withheld, withheld_for(1, health.defects)) == ({}, {})

    def test_of_two_files_of_a_rank_each_has_its_own(self) -> None:
        defects = [defect("H105", "x", count=1, rank=1, path="a.json")]
        assert withheld_for(1, defects, "a.json")
        assert not withheld_for(1, defects, "b.json")

    def test_a_file_that_cannot_be_read(self) -> None:
        one = unreadable("rank1.json.gz", "rank1.json.gz: is a pipe", 1)
        assert (one.code, one.rank, one.path) == ("H117", 1, "rank1.json.gz")
        assert "ledger" in certificate([one], [], [0]).withheld

    def test_those_that_withhold_most_come_first(self) -> None:
        small, large = defect("H113", "x", count=1, rank=0), defect("H105", "x", count=1, rank=1)
        health = certificate([small, large], [], [0, 1])
        assert [one.code for one in health.defects] == ["H105", "H113"]


class TestDocumented:
    def rows(self) -> dict[str, list[str]]:
        found = re.findall(r"^\| (H\d+) \|(.*)\|$", DOCS.read_text("utf-8"), re.MULTILINE)
        rows = {
            code: [cell.strip() for cell in cells.split("|")] for code, cells in reversed(found)
        }
        return {code: rows[code] for code in sorted(rows)}  # of the first table that has it

    def test_the_table_is_the_rules(self) -> None:
        rows = self.rows()
        assert [*rows] == [*RULES]
        for code, (name, _, withheld, with_calls) in rows.items():
            rule = RULES[code]
            assert name == rule.defect
            assert self.named(withheld) == {*rule.withholds}, code
            assert self.named(with_calls) == {*rule.with_calls}, code

    def named(self, cell: str) -> set[str]:
        words = {one.strip() for one in cell.split(",")} - {"", "–"}
        for all_of, those in (("time", TIMES), ("calls", CALLS)):
            if all_of in words:
                words = (words - {all_of}) | {*those}
        return words

    def test_what_time_and_calls_stand_for(self) -> None:
        text = DOCS.read_text("utf-8")
        for word, those in (("time", TIMES), ("calls", CALLS)):
            assert f"**{word}**: {', '.join(those)}" in text

    def test_rules_name_conclusions(self) -> None:
        for rule in RULES.values():
            assert {*rule.withholds, *rule.with_calls} <= {*CONCLUSIONS}
            assert not {*rule.withholds} & {*rule.with_calls}
        assert {*OF_THE_JOB_WHERE_OF_ONE} == {*CONCLUSIONS} - {"redundancy"}
