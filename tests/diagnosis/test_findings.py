"""What is concluded from made-up records, at the limits of each cause."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flopwise.records.rank import StepRow
from flopwise.records.surroundings import CoreMask, HostRead, Switch, Threads

MS = 1_000_000


def only(found: list[Any]) -> Any:
    assert len(found) == 1, found
    return found[0]


def causes(found: list[Any]) -> list[str]:
    return [finding.cause for finding in found]


class TestInputWait:
    def test_below_the_limit_there_is_nothing(self, rank: Any, findings: Any) -> None:
        assert findings(rank([(0.4, 10.0)] * 20)) == []

    def test_without_surroundings_the_share_stands_alone(self, rank: Any, findings: Any) -> None:
        found = only(findings(rank([(5.0, 10.0)] * 20)))
        assert (found.cause, found.share_frac, found.where) == ("input-wait", 0.5, [])
        assert found.predicted_gain_frac is None

    @pytest.mark.parametrize(
        ("load", "rest", "cores", "workers", "gain"),
        [
            (10, 10, 4, 1, 0.5),  # one worker hides all of it
            (25, 10, 4, 3, 1 - 10 / 35),
            (80, 10, 4, 4, 1 - 20 / 90),  # eight would be needed, there are four cores
            (80, 10, 2, 2, 1 - 40 / 90),
            (80, 10, 1, 1, 1 - 80 / 90),
        ],
    )
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_workers_are_proposed_by_the_measured_load_and_never_above_the_cores(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any,
        load: int, rest: int, cores: int, workers: int, gain: float, device: str,
    ) -> None:  # fmt: skip
        around = surroundings(
            usable_cores=cores,
            machine_cores=cores,
            masks=[CoreMask("at attach", None, list(range(cores)))],
            loaders=[loader(0)],
        )
        found = only(findings(rank([(load, load + rest)] * 20, around, device_type=device)))
        shown = "1 core" if cores == 1 else f"{cores} cores"
        assert found.advice.startswith(f"num_workers={workers} (this process has {shown})")
        assert "their overlap is zero" in found.evidence
        if device == "cpu" and workers + 1 > cores:  # the training's own thread needs one of them
            assert found.predicted_gain_frac is None
            assert "no gain is predicted: " in found.evidence
            assert f"would take from the {shown} on which" in found.evidence
        else:
            assert found.predicted_gain_frac == pytest.approx(gain)
            assert "no gain is predicted" not in found.evidence

    def test_ranks_on_one_machine_share_its_cores(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(
            masks=[CoreMask("at attach", None, [0, 1, 2, 3])], loaders=[loader(0)]
        )
        ranks = [
            rank([(40.0, 50.0)] * 20, around, rank=n, world_size=2, pid=n + 1) for n in range(2)
        ]
        assert findings(*ranks)[0].advice.startswith("num_workers=2 (this process has 2 cores)")

    def test_too_few_workers(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        steps = [(27.0, 32.0), (0.0, 5.0), (0.0, 5.0), (0.0, 5.0)] * 10
        around = surroundings(loaders=[loader(2, 13.7)])
        found = only(findings(rank(steps, around)))
        assert "the wait comes at every 4th step" in found.evidence
        assert (
            "3 workers are needed; a larger prefetch_factor alone does not raise" in found.evidence
        )
        assert found.advice.startswith("num_workers=3, or make loading cheaper")
        assert found.predicted_gain_frac == pytest.approx(1 - 5 / 11.75)

    @pytest.mark.parametrize(("computing", "gain"), [(0.3, 1 - 5 / 11.75), (0.4, None)])
    def test_workers_that_mostly_wait_leave_the_training_its_cores(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any,
        computing: float, gain: float | None,
    ) -> None:  # fmt: skip
        steps = [(27.0, 32.0), (0.0, 5.0), (0.0, 5.0), (0.0, 5.0)] * 10
        around = surroundings(loaders=[loader(2, 13.7, computing=computing)])
        found = only(findings(rank(steps, around, cpu_threads=3)))  # three workers, four cores
        assert found.predicted_gain_frac == (gain if gain is None else pytest.approx(gain))

    def test_the_period_is_said_to_be_the_number_of_workers_where_it_is(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        steps = [(20.0, 25.0), (0.0, 5.0), (0.0, 5.0)] * 10
        found = only(findings(rank(steps, surroundings(loaders=[loader(3, 30.0)]))))
        assert "every 3rd step, the number of workers" in found.evidence

    def test_more_workers_than_cores_are_not_proposed(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(loaders=[loader(2, 100.0)])
        found = only(findings(rank([(40.0, 50.0)] * 20, around)))
        assert "10 workers are needed" in found.evidence
        assert found.advice.startswith("num_workers=4 at most (4 cores), and make loading cheaper")
        full = surroundings(loaders=[loader(4, 100.0)])
        advice = only(findings(rank([(15.0, 25.0)] * 20, full))).advice
        assert advice.startswith("make loading cheaper")

    def test_workers_that_keep_up_but_are_uneven(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        steps = [(30.0, 40.0), *[(0.0, 10.0)] * 5] * 5
        found = only(findings(rank(steps, surroundings(loaders=[loader(4, 20.0)]))))
        assert "a larger prefetch_factor bridge them" in found.advice
        assert "alone does not raise" not in found.evidence

    def test_workers_that_keep_up_and_a_slow_handing_over(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        found = only(findings(rank([(1.0, 11.0)] * 20, surroundings(loaders=[loader(2, 1.4)]))))
        assert "1 ms is what each step takes to be handed its batch" in found.evidence
        assert found.advice.startswith("hand over less")

    def test_loads_that_were_not_seen_give_no_number_of_workers(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        found = only(findings(rank([(5.0, 10.0)] * 20, surroundings(loaders=[loader(2)]))))
        assert "was not seen" in found.evidence
        assert "num_workers=" not in found.advice

    def test_a_wait_that_the_device_does_not_notice_is_none(self, rank: Any, findings: Any) -> None:
        rows = [
            StepRow(10 * MS, 10 * MS, "timed", data_ns=6 * MS, data_dry=i % 20 == 0)
            for i in range(40)
        ]
        assert findings(rank([], rows=rows)) == []


class TestInputDegrades:
    def test_a_rise_is_placed_at_its_step(self, rank: Any, findings: Any) -> None:
        steps = [(0.1, 10.0)] * 24 + [(42.0, 50.0)] * 26
        found = next(f for f in findings(rank(steps)) if f.cause == "input-degrades")
        # Rows begin with the second step: row 24 is the interval of step 26.
        assert "rose from 1 % to 84 % of a step after step 25" in found.evidence
        assert "(24 steps before, 26 after)" in found.evidence
        assert found.share_frac == pytest.approx(0.84)

    def test_a_fall_is_none(self, rank: Any, findings: Any) -> None:
        steps = [(42.0, 50.0)] * 24 + [(0.1, 10.0)] * 26
        assert "input-degrades" not in causes(findings(rank(steps)))


class TestEpochStartUp:
    def rows(
        self, start_ms: float, kind: str = "epoch_start", data_ms: float = 0.0
    ) -> list[StepRow]:
        start = StepRow(
            int(start_ms * MS), int(start_ms * MS), kind, data_ns=int(data_ms * MS)
        )  # fmt: skip
        epoch = [StepRow(10 * MS, 10 * MS, "timed", data_ns=0)] * 10
        return [*epoch, start, *epoch, start, *epoch]

    def test_seconds_and_share(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(loaders=[loader(2, 1.0)])
        found = only(findings(rank([], around, rows=self.rows(110.0))))
        assert found.evidence.startswith("200 ms in all, 100 ms at each of 2 starts of a loader")
        assert found.share_frac == pytest.approx(0.2 / 0.52)
        assert found.predicted_gain_frac == found.share_frac
        persistent = surroundings(loaders=[loader(2, 1.0, persistent_workers=True)])
        kept = only(findings(rank([], persistent, rows=self.rows(110.0))))
        assert kept.predicted_gain_frac is None
        assert "persistent_workers" not in kept.advice

    def test_short_starts_are_none(self, rank: Any, findings: Any) -> None:
        assert findings(rank([], rows=self.rows(12.0))) == []

    def test_of_an_interval_that_held_an_evaluation_only_the_wait_counts(
        self, rank: Any, findings: Any
    ) -> None:
        rows = self.rows(5000.0, "evaluation+epoch_start", 60.0)
        assert only(findings(rank([], rows=rows))).evidence.startswith(
            "120 ms in all, 60 ms at each"
        )


def threads(**more: Any) -> Threads:
    return Threads(
        **{
            "window_ns": 10**9, "runnable": 17.0, "waiting": 13.0, "busy_main": 1, "busy_worker": 4,
            "workers": 4, "libraries": ["OpenBLAS"], "variables": {}, **more,
        }
    )  # fmt: skip


class TestThreads:
    def test_ranks_times_workers_times_threads(
        self, rank: Any, surroundings: Any, findings: Any
    ) -> None:
        found = only(findings(rank([(0.0, 10.0)] * 20, surroundings(threads=threads()))))
        assert found.cause == "threads-exceed-cores"
        assert found.evidence.startswith(
            "on average 17.0 threads of this job want a core, it has 4"
        )
        assert "1 rank x 1 busy thread + 1 x 4 workers x up to 4 busy threads" in found.evidence
        assert "OpenBLAS; no variable caps them" in found.evidence
        assert found.advice.startswith("at most 1 thread a worker")

    @pytest.mark.parametrize(
        "change",
        [
            {"runnable": 4.2},  # as many as there are cores
            {"waiting": 1.0},  # they do not wait
            {"busy_worker": 1, "workers": 3, "runnable": 5.0, "waiting": 2.0},  # one each: no pool
        ],
    )
    def test_no_alarm(self, rank: Any, surroundings: Any, findings: Any, change: Any) -> None:
        around = surroundings(threads=threads(**change))
        assert findings(rank([(0.0, 10.0)] * 20, around)) == []

    def test_more_single_threaded_workers_than_cores(
        self, rank: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(threads=threads(busy_worker=1, workers=16))
        assert only(findings(rank([(0.0, 10.0)] * 20, around))).advice == "at most 4 workers a rank"

    def test_pools_of_several_ranks(self, rank: Any, surroundings: Any, findings: Any) -> None:
        own = threads(busy_worker=0, workers=0, busy_main=4, runnable=4.0, waiting=2.0)
        around = surroundings(threads=own, masks=[CoreMask("at attach", None, [0, 1, 2, 3])])
        ranks = [
            rank([(0.0, 10.0)] * 20, around, rank=n, world_size=2, pid=n + 1) for n in range(2)
        ]
        found = only(findings(*ranks))
        assert "on average 8.0 threads of this job want a core, it has 4" in found.evidence
        assert found.advice == "OMP_NUM_THREADS=2 for each rank"


class TestWorkersShareCores:
    def around(
        self, surroundings: Any, loader: Any, masks: list[CoreMask], cores: list[int]
    ) -> Any:
        return surroundings(masks=masks, loaders=[loader(4, 50.0, worker_cores=[cores] * 4)])

    def test_the_cut_is_named(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        masks = [
            CoreMask("at attach", None, [0, 1, 2, 3]),
            CoreMask("after step 2", "lib.py:7", [0]),
        ]
        found = findings(rank([(40.0, 50.0)] * 20, self.around(surroundings, loader, masks, [0])))
        shared = next(f for f in found if f.cause == "workers-share-cores")
        assert shared.where == ["lib.py:7"]
        assert shared.evidence.startswith("4 workers share 1 of 4 cores: the process began with 4")
        assert "(after step 2)" in shared.evidence

    def test_started_on_one_core(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        masks = [CoreMask("at attach", None, [2])]
        found = findings(rank([(40.0, 50.0)] * 20, self.around(surroundings, loader, masks, [2])))
        assert "the process was started with 1" in next(
            f.evidence for f in found if f.cause == "workers-share-cores"
        )

    def test_a_small_container_is_not_blamed(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        masks = [CoreMask("at attach", None, [0, 1])]
        around = self.around(surroundings, loader, masks, [0, 1])
        assert "workers-share-cores" not in causes(findings(rank([(40.0, 50.0)] * 20, around)))

    def test_without_a_wait_nobody_lacks_cores(
        self, rank: Any, loader: Any, surroundings: Any, findings: Any
    ) -> None:
        masks = [CoreMask("at attach", None, [0, 1]), CoreMask("after step 1", None, [0])]
        around = self.around(surroundings, loader, masks, [0])
        assert findings(rank([(0.0, 50.0)] * 20, around)) == []


def read(**more: Any) -> HostRead:
    return HostRead(
        **{
            "op": "aten::_local_scalar_dense", "kind": "scalar read", "where": "train.py:12",
            "caller": None, "via": "", "metric": None, "count": 1, "steps": 1, "elements": 1,
            "bytes": 4, **more,
        }
    )  # fmt: skip


class TestReads:
    def test_counts_are_of_the_steps_that_were_looked_at(
        self, rank: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(reads=[read(count=3, steps=2)], read_steps=2)
        found = only(findings(rank([(0.0, 10.0)] * 20, around)))
        assert found.evidence.startswith("1.5 reads a step: 1.5 scalar reads at train.py:12")
        assert "2 steps were looked at" in found.evidence

    def test_on_a_gpu_the_cost_is_not_measured_and_on_a_cpu_it_needs_one(
        self, rank: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(reads=[read()], read_steps=1)
        here = rank([(0.0, 10.0)] * 20, around)
        assert "needs a GPU to be measured" in only(findings(here)).evidence
        there = dataclasses.replace(here, device_type="cuda", device_name="NVIDIA H200")
        assert "cost not measured" in only(findings(there)).evidence

    def test_what_lives_on_the_host_is_no_finding(
        self, rank: Any, surroundings: Any, findings: Any
    ) -> None:
        around = surroundings(reads=[read(on_host=True, count=200)], read_steps=1)
        assert findings(rank([(0.0, 10.0)] * 20, around)) == []

    def test_a_read_in_a_package_is_put_to_the_scripts_line(
        self, rank: Any, surroundings: Any, findings: Any
    ) -> None:
        inside = read(where="/x/site-packages/lib.py:3", caller="train.py:8")
        found = only(findings(rank([(0.0, 10.0)] * 20, surroundings(reads=[inside], read_steps=1))))
        assert found.where == ["train.py:8", "/x/site-packages/lib.py:3"]
        assert "at train.py:8" in found.evidence

    def test_many_lines_are_cut(self, rank: Any, surroundings: Any, findings: Any) -> None:
        reads = [read(where=f"train.py:{n}") for n in range(9)]
        found = only(findings(rank([(0.0, 10.0)] * 20, surroundings(reads=reads, read_steps=1))))
        assert "9 reads a step" in found.evidence
        assert "and 3 more lines" in found.evidence


def test_switches_come_first_then_the_measured_by_their_share(
    rank: Any, loader: Any, surroundings: Any, findings: Any
) -> None:
    around = surroundings(
        loaders=[loader(0)],
        reads=[read()],
        read_steps=1,
        switches=[
            Switch("blocking kernel launches", "CUDA_LAUNCH_BLOCKING=1", "environment"),
            Switch("deterministic algorithms", "torch.use_deterministic_algorithms(True)", None),
        ],
    )
    found = findings(rank([(8.0, 10.0)] * 20, around))
    assert causes(found) == ["debug-switch", "input-wait", "deterministic-algorithms", "host-read"]
    assert found[0].where == ["CUDA_LAUNCH_BLOCKING (environment)"]
