"""From rank records to one run record: what is averaged, what is chosen, and what is never given out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from flopwise import summary
from flopwise.errors import NothingMeasuredError
from flopwise.hardware.accelerators import Peak
from flopwise.records import ceilings as ceilings_records
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling
from flopwise.records.rank import DeviceMetrics, FlopCount, RankRecord, StepRow, Telemetry
from flopwise.records.run import RunRecord
from flopwise.records.surroundings import CoreMask, Surroundings
from flopwise.reports.terminal import render
from flopwise.summary import Context, one_per_rank

MakeRank = Callable[..., RankRecord]

CONTEXT = Context(["flopwise", "run", "train.py"], "train.py", created="2026-01-01T00:00:00+00:00")
ONE_TERA = replace(CONTEXT, peak=Peak(1e12, "fp32", "--peak", "given"))
CPU = CeilingsRecord(
    ceilings_records.SCHEMA, "0", "2026-01-01", "cpu", "a CPU", "2.13.0+cpu", None, None, 1, 4, 1.0,
    [GemmCeiling("fp32", 4e11, "1024x1024x1024 nn"), GemmCeiling("bf16", 2e11, "1024x1024x1024 nn")],
    None, None, None, None, None,
)  # fmt: skip


def summarise(*ranks: RankRecord, context: Context = ONE_TERA) -> RunRecord:
    return summary.summarise(ranks, context)


# ---------------------------------------------------------------------- numbers


def test_one_rank(make_rank: MakeRank) -> None:
    record = summarise(make_rank())  # 20 steps of 10 ms, 1 GFLOP and 4 samples in each
    assert record.step_s.mean == pytest.approx(0.01)
    assert record.throughput.steps_per_s == pytest.approx(100)
    assert record.throughput.samples_per_s == pytest.approx(400)
    assert record.mfu.value == pytest.approx(1e9 / 0.01 / 1e12)
    assert record.mfu.achieved_flops_per_s == pytest.approx(1e11)
    assert record.phases.backward_s == pytest.approx(0.005)
    assert record.steps.timed == 20
    assert record.complete


def test_work_of_two_ranks_adds_up_and_times_are_averaged(make_rank: MakeRank) -> None:
    record = summarise(
        make_rank(world_size=2, pid=1),
        make_rank(world_size=2, pid=2, rank=1, step_ns=30_000_000, flops=3 * 10**9),
    )
    assert record.step_s.mean == pytest.approx(0.02)
    assert record.throughput.samples_per_step == 8
    assert record.throughput.samples_per_s == pytest.approx(8 / 0.02)
    assert record.mfu.model_flops_per_step == 4 * 10**9
    assert record.mfu.value == pytest.approx(4e9 / (2 * 0.02) / 1e12)
    assert [r.step_s_mean for r in record.ranks] == pytest.approx([0.01, 0.03])


def test_skipped_steps_are_time_and_no_flops(make_rank: MakeRank) -> None:
    rank = make_rank()
    rows = [replace(row, skipped=i < 5) for i, row in enumerate(rank.rows)]
    record = summarise(replace(rank, rows=rows))
    assert record.mfu.value == pytest.approx(0.75 * 0.1)
    assert record.steps.skipped_by_scaler == 5
    assert any("5 of 20 timed steps were skipped" in note for note in record.notes)


def test_where_all_steps_were_skipped_that_is_the_reason(make_rank: MakeRank) -> None:
    rank = make_rank()
    record = summarise(replace(rank, rows=[replace(row, skipped=True) for row in rank.rows]))
    assert record.mfu.value is None
    assert str(record.mfu.reason).startswith("the GradScaler skipped all timed steps")


def test_steps_that_were_only_counted_take_part_in_time_and_work(make_rank: MakeRank) -> None:
    rank = make_rank()
    brief = StepRow(20_000_000, 20_000_000, "timed", sampled=False)
    record = summarise(replace(rank, rows=[rank.rows[0], *[brief] * 19]))
    assert record.step_s.mean == pytest.approx((0.01 + 19 * 0.02) / 20)
    assert record.throughput.samples_per_step == 4
    assert record.mfu.value == pytest.approx(1e9 / record.step_s.mean / 1e12)


@pytest.mark.parametrize(("looks", "known"), [(0, False), (1, False), (7, False), (8, True)])
def test_the_work_of_several_shapes_is_told_from_several_looks(
    make_rank: MakeRank, looks: int, known: bool
) -> None:
    rank = make_rank()
    warm = replace(rank.rows[0], kind="warmup", shape="another")
    brief = StepRow(20_000_000, 20_000_000, "timed", sampled=False)
    seen = replace(rank.rows[0], kind="warmup")
    rows = [warm, seen, *rank.rows[:looks], *[brief] * 30]
    record = summarise(replace(rank, rows=rows))
    assert (record.mfu.value is not None) == known
    assert (record.throughput.samples_per_s is not None) == known
    if not known:
        said = f"several shapes, and only {looks} of {looks + 30} timed steps were looked at"
        assert said in str(record.mfu.reason)
        assert said in str(record.throughput.reason)
    assert record.throughput.steps_per_s is not None
    mixed = [replace(row, shape=f"{i % 2}") for i, row in enumerate(rank.rows[:8])]
    note = "2 input shapes: the FLOPs and samples of a step are means over the 8 of 38 timed steps that were looked at"
    assert note in summarise(replace(rank, rows=[*mixed, *[brief] * 30])).notes
    assert note not in record.notes
    # All alike, as far as was seen, or all looked at: nothing is unknown.
    alike = summarise(replace(rank, rows=rows[1:]))
    assert alike.mfu.value is not None
    granted = f"{looks} of {looks + 30} timed steps were looked at: that the inputs of the others are alike is taken"
    assert any(n.startswith(granted) for n in alike.notes) == (not known)
    assert summarise(replace(rank, rows=[warm, *rank.rows[:3]])).mfu.value is not None


def test_sizes_that_the_looks_do_not_settle_withhold_the_work(make_rank: MakeRank) -> None:
    rank = make_rank()
    brief = StepRow(20_000_000, 20_000_000, "timed", sampled=False)
    row = rank.rows[0]
    short, long = (replace(row, shape=f"{n}", samples=n, tokens=None) for n in (4, 12))
    record = summarise(replace(rank, rows=[short, long] * 4 + [brief] * 30))
    # mean 8, s = sqrt(128 / 7): 1.96 sqrt(128 / 7 / 8 (1 - 8 / 38)) / 8
    said = (
        "from the 8 of 38 timed steps that were looked at their mean size is known to ± 32.9 % only"
    )
    assert said in str(record.mfu.reason)
    assert said in str(record.throughput.reason)
    assert record.throughput.samples_per_s is None
    near = replace(short, samples=100), replace(long, samples=104)
    record = summarise(replace(rank, rows=[*near] * 4 + [brief] * 30))
    assert record.throughput.samples_per_step == pytest.approx(102)
    assert any(n.endswith("looked at (their size is known to ± 1.29 %)") for n in record.notes)
    every = summarise(replace(rank, rows=[short, long] * 19))
    assert every.throughput.samples_per_step == pytest.approx(8)


def test_what_is_in_a_step_is_known_from_the_warm_up_if_need_be(make_rank: MakeRank) -> None:
    rank = make_rank()
    warm = replace(rank.rows[0], kind="warmup", ns=90_000_000)
    brief = StepRow(20_000_000, 20_000_000, "timed", sampled=False)
    record = summarise(replace(rank, rows=[warm, *[brief] * 9]))
    assert record.step_s.mean == pytest.approx(0.02)
    assert record.throughput.samples_per_step == 4
    assert record.mfu.value == pytest.approx(1e9 / 0.02 / 1e12)
    assert record.steps.micro_batches == 1


def test_several_shapes_count_each_with_its_own_flops(make_rank: MakeRank) -> None:
    rank = make_rank()
    row, (count,) = rank.rows[0], rank.flops
    long = replace(row, ns=40_000_000, shape="9x8 float32")
    more = {"fp32": 5 * 10**9}
    both = [count, replace(count, shape=long.shape, needed=more, needed_causal=more, executed=more)]
    record = summarise(replace(rank, rows=[row, long] * 10, flops=both))
    assert record.mfu.value == pytest.approx((1e9 + 5e9) / 2 / 0.025 / 1e12)
    unknown = summarise(replace(rank, rows=[row, long] * 10))
    assert unknown.mfu.value == pytest.approx(0.1)  # of the steps whose shape was counted
    assert any("MFU stands for 10 of 20" in note for note in unknown.notes)


def test_money(make_rank: MakeRank) -> None:
    cost = summarise(make_rank(), context=replace(ONE_TERA, price_usd_per_hour=3.6)).cost
    assert cost.usd_per_1k_steps == pytest.approx(0.01)  # 10 s at 0.1 cent
    assert cost.usd_per_m_samples == pytest.approx(0.001 / 400 * 1e6)


# ---------------------------------------------------------------------- nothing to say


@pytest.mark.parametrize(
    ("seen", "kinds", "said"),
    [
        (0, [], "no training step was seen"),
        (1, [], "1 training step was seen, too few to time one"),
        (3, ["warmup", "counted"], "3 training steps were seen, too few"),
        (9, ["compile"] * 8, "intervals seen: 8 compile"),
    ],
)
def test_without_a_timed_step_there_is_no_record(
    make_rank: MakeRank, seen: int, kinds: list[str], said: str
) -> None:
    rows = [StepRow(1, 1, kind) for kind in kinds]
    with pytest.raises(NothingMeasuredError, match=said):
        summarise(make_rank(steps=0, rows=rows, steps_seen=seen))


# ---------------------------------------------------------------------- threads

SEVERAL = "several threads train at once (a at x.py:1, b at x.py:2): run each alone"


def test_of_several_threads_that_train_only_the_steps_are_given_out(make_rank: MakeRank) -> None:
    brief = StepRow(10_000_000, 10_000_000, "timed", sampled=False)
    rank = make_rank(rows=[brief] * 20)
    record = summarise(replace(rank, several=SEVERAL, boundary="any step of 2 threads"))
    assert (record.step_s.mean, record.steps.timed) == (pytest.approx(0.01), 20)
    assert (record.mfu.value, record.mfu.reason) == (None, SEVERAL)
    assert (record.mfu.model_flops_per_step, record.mfu.achieved_flops_per_s) == (None, None)
    phases = record.phases
    assert phases.other_s == pytest.approx(0.01)
    assert phases.data_s is phases.forward_s is phases.backward_s is phases.optimizer_s is None
    assert phases.data_frac is record.steps.micro_batches is record.ranks[0].data_s is None
    assert record.throughput.steps_per_s == pytest.approx(100)
    assert record.throughput.samples_per_s is None
    assert record.throughput.reason == "several threads train"
    assert record.findings == []
    text = render(record, width=100, color=False)
    assert SEVERAL.split(" (")[0] in text
    assert "samples and tokens are not given: several threads train" in text


def test_one_rank_with_several_threads_leaves_all_without_an_mfu(make_rank: MakeRank) -> None:
    other = replace(make_rank(world_size=2, rank=1, pid=2), several=SEVERAL)
    record = summarise(make_rank(world_size=2), other)
    assert (record.mfu.value, record.mfu.reason) == (None, SEVERAL)
    assert record.phases.backward_s is None
    assert [r.data_s for r in record.ranks] == [0.0, None]
    assert "a at x.py:1" in " ".join(render(record, width=100, color=False).split())


def test_several_threads_without_a_step_to_time_are_the_reason(make_rank: MakeRank) -> None:
    rank = replace(make_rank(steps=0, rows=[], steps_seen=3), several=SEVERAL)
    with pytest.raises(NothingMeasuredError, match="nothing was timed: several threads train"):
        summarise(rank)


def test_where_another_thread_draws_the_batches_the_wait_is_that_of_the_steps_looked_at(
    make_rank: MakeRank,
) -> None:
    rank = make_rank()
    close = replace(rank.rows[0], data_ns=1_000_000)
    brief = StepRow(10_000_000, 10_000_000, "timed", sampled=False)
    rank = replace(rank, rows=[close, brief, brief, brief], draws_apart=True)
    record = summarise(rank)
    assert record.phases.data_s == pytest.approx(0.001)
    assert record.ranks[0].data_s == pytest.approx(0.001)
    assert any("a thread that does not train draws the batches" in note for note in record.notes)
    assert summarise(replace(rank, draws_apart=False)).phases.data_s == pytest.approx(0.00025)


def test_a_missing_rank_is_named_and_costs_the_mfu(make_rank: MakeRank) -> None:
    record = summarise(make_rank(world_size=3), make_rank(world_size=3, rank=2, pid=2))
    assert [(r.rank, r.status) for r in record.ranks] == [
        (0, "complete"),
        (1, "missing"),
        (2, "complete"),
    ]
    assert not record.complete
    assert record.mfu.value is None
    assert record.mfu.reason == "1 of 3 ranks have no record"
    assert "1 of 3 ranks left no record" in record.notes


def test_sums_over_ranks_are_not_given_where_ranks_are_missing(make_rank: MakeRank) -> None:
    def rank(n: int, **more: Any) -> RankRecord:
        seen = Telemetry(energy_j=900.0, window_s=3.0, uuid=f"gpu{n}")
        return make_rank(world_size=3, rank=n, pid=n, device_type="cuda", telemetry=seen, **more)

    context = replace(ONE_TERA, price_usd_per_hour=3.6)
    whole = summarise(rank(0), rank(1), rank(2), context=context)
    assert whole.throughput.samples_per_s == pytest.approx(1200)
    assert (whole.energy.watts, whole.cost.devices) == (900.0, 3)
    for ranks, why in (
        ([rank(0), rank(2)], "1 of 3 ranks have no record"),
        ([rank(0), rank(2), rank(1, steps=0)], "1 of 3 ranks timed no step"),
        ([rank(0), rank(1, steps=0)], "1 of 3 ranks have no record and 1 of 3 ranks timed no step"),
    ):
        record = summarise(*ranks, context=context)
        work, energy, cost = record.throughput, record.energy, record.cost
        assert (work.samples_per_s, work.samples_per_step, work.reason) == (None, None, why)
        assert work.steps_per_s == pytest.approx(100)
        assert (energy.watts, energy.j_per_step, energy.j_per_sample) == (None, None, None)
        assert (cost.usd_per_1k_steps, cost.usd_per_m_samples, cost.devices) == (None, None, None)
        assert energy.reason == cost.reason == record.mfu.reason == why


def test_the_devices_own_counters_are_those_of_the_first_rank(make_rank: MakeRank) -> None:
    def rank(n: int, frac: float) -> RankRecord:
        seen = Telemetry(uuid=f"gpu{n}", device_metrics=DeviceMetrics(3.0, sm_busy_frac=frac))
        return make_rank(world_size=2, rank=n, pid=n, device_type="cuda", telemetry=seen)

    record = summarise(rank(1, 0.25), rank(0, 0.75), context=ONE_TERA)
    assert record.device_metrics == DeviceMetrics(3.0, sm_busy_frac=0.75)
    assert summarise(make_rank(), context=ONE_TERA).device_metrics is None


# ---------------------------------------------------------------------- ranks that share a device


def on_gpu(make_rank: MakeRank, uuid: str | None, rank: int, **more: Any) -> RankRecord:
    seen = Telemetry(energy_j=900.0 + rank, window_s=3.0 + rank, uuid=uuid)
    return make_rank(
        world_size=2, rank=rank, pid=rank, device_type="cuda", device_name="NVIDIA H200",
        telemetry=seen, **more,
    )  # fmt: skip


def test_ranks_on_one_device_count_it_once(make_rank: MakeRank) -> None:
    context = replace(ONE_TERA, price_usd_per_hour=3.6)
    one = summarise(*(on_gpu(make_rank, "a", n) for n in (0, 1)), context=context)
    assert one.mfu.value == pytest.approx(2e9 / 0.01 / 1e12)
    assert one.energy.watts == pytest.approx(901 / 4)  # of the longer window
    assert one.cost.usd_per_1k_steps == pytest.approx(0.01)
    assert one.env.gpus == ["NVIDIA H200"]
    assert any(note.startswith("ranks 0, 1 share one device") for note in one.notes)
    two = summarise(*(on_gpu(make_rank, uuid, n) for n, uuid in enumerate("ab")), context=context)
    assert two.mfu.value == pytest.approx(1e9 / 0.01 / 1e12)
    assert two.energy.watts == pytest.approx(300 + 901 / 4)
    assert (two.cost.devices, len(two.env.gpus)) == (2, 2)
    assert not any("device" in note for note in two.notes)


def test_a_uuid_is_one_of_its_host(make_rank: MakeRank) -> None:
    ranks = [on_gpu(make_rank, "a", n, host=f"host{n}") for n in (0, 1)]
    assert summarise(*ranks).mfu.value == pytest.approx(0.1)


def test_devices_that_cannot_be_told_apart_are_said(make_rank: MakeRank) -> None:
    record = summarise(*(on_gpu(make_rank, None, n) for n in (0, 1)))
    assert record.mfu.value == pytest.approx(0.1)
    assert any("which device each of the 2 ranks" in note for note in record.notes)
    apart = summarise(*(on_gpu(make_rank, None, n, host=f"host{n}") for n in (0, 1)))
    assert not any("which device" in note for note in apart.notes)


def test_on_a_cpu_hosts_are_paid_for(make_rank: MakeRank) -> None:
    context = replace(ONE_TERA, price_usd_per_hour=3.6)
    two = [make_rank(world_size=2, rank=n, pid=n) for n in (0, 1)]
    assert summarise(*two, context=context).cost.usd_per_1k_steps == pytest.approx(0.01)
    apart = [replace(r, host=f"host{r.rank}") for r in two]
    assert summarise(*apart, context=context).cost.usd_per_1k_steps == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("cores", "usable", "threads", "count", "said"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 4, 4, 1, "2 ranks with 8 threads share 4 cores"),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 4, 3, 4 / 3, "they count as 1.33 times what one"),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 2, 2, 1, "2 ranks with 4 threads share 2 cores"),  # quota
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 4, 4, 2, None),  # bound to cores of their own
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 4, 2, 2, None),
    ],
)
def test_a_cpu_is_no_more_than_its_cores(
    make_rank: MakeRank,
    cores: list[list[int]],
    usable: int,
    threads: int,
    count: float,
    said: str | None,
) -> None:
    ranks = [
        make_rank(
            world_size=2, rank=n, pid=n, cpu_threads=threads,
            surroundings=Surroundings(8, usable, [CoreMask("at attach", None, mask)]),
        )
        for n, mask in enumerate(cores)
    ]  # fmt: skip
    record = summarise(*ranks)
    assert record.mfu.value == pytest.approx(2e9 / (count * 0.01) / 1e12)
    assert any(said in note for note in record.notes) if said else "share" not in str(record.notes)


# ---------------------------------------------------------------------- phases


def test_phases_sum_to_the_mean_step_although_steps_looked_at_take_longer(
    make_rank: MakeRank,
) -> None:
    rank = make_rank()
    close = replace(
        rank.rows[0], ns=800, host_ns=800, data_ns=200, forward_ns=300, backward_ns=150,
        optimizer_ns=90,
    )  # fmt: skip
    brief = StepRow(600, 600, "timed", data_ns=60, sampled=False)
    phases = summarise(replace(rank, rows=[close, *[brief] * 9])).phases
    data_ns, host_ns = 200 + 9 * 60, 800 + 9 * 600
    left_s = (host_ns - data_ns) / 10 * 1e-9
    assert phases.data_s == pytest.approx(data_ns / 10 * 1e-9)
    assert phases.data_frac == pytest.approx(data_ns / host_ns)
    assert phases.forward_s == pytest.approx(left_s * 300 / 600)
    assert phases.backward_s == pytest.approx(left_s * 150 / 600)
    assert phases.optimizer_s == pytest.approx(left_s * 90 / 600)
    assert phases.other_s == pytest.approx(left_s * 60 / 600)


def test_phases_that_overlap_do_not_pass_the_step(make_rank: MakeRank) -> None:
    rank = make_rank()
    rows = [replace(row, forward_ns=row.ns, data_ns=row.ns // 5) for row in rank.rows]
    phases = summarise(replace(rank, rows=rows)).phases
    parts = (phases.data_s, phases.forward_s, phases.backward_s, phases.optimizer_s, phases.other_s)
    assert sum(part or 0.0 for part in parts) == pytest.approx(0.01)


def test_padding_that_mfu_counts_is_said(make_rank: MakeRank) -> None:
    rank = make_rank()
    for real, notes in (
        (75, ["25 % of the positions are padding; MFU counts what they compute, too"]),
        (100, []),
    ):
        rows = [replace(row, tokens=100, real_tokens=real) for row in rank.rows]
        record = summarise(replace(rank, rows=rows))
        assert [note for note in record.notes if "padding" in note] == notes


def test_no_flops_no_mfu_and_why(make_rank: MakeRank) -> None:
    record = summarise(make_rank(flops=0, notes=["FLOPs not counted: it compiles"]))
    assert record.mfu.value is None
    record = summarise(replace(make_rank(notes=["FLOPs not counted: it compiles"]), flops=[]))
    assert (record.mfu.value, record.mfu.reason) == (None, "FLOPs not counted: it compiles")
    assert record.step_s.mean == pytest.approx(0.01)


# ---------------------------------------------------------------------- peaks


def test_a_cpus_peak_is_what_it_was_measured_to_reach(make_rank: MakeRank) -> None:
    record = summarise(make_rank(), context=replace(CONTEXT, ceilings=CPU))
    assert record.mfu.value == pytest.approx(1e11 / 4e11)
    assert record.mfu.peak_kind == "measured"
    assert record.mfu.peak_dtype == "fp32"


@pytest.mark.parametrize(
    ("device", "ceilings", "said"),
    [
        ("cpu", None, "no peak is known for this cpu"),
        ("mps", CPU, "no peak is known for mps devices"),
    ],
)
def test_no_peak_no_mfu(make_rank: MakeRank, device: str, ceilings: Any, said: str) -> None:
    record = summarise(make_rank(device_type=device), context=replace(CONTEXT, ceilings=ceilings))
    assert record.mfu.value is None
    assert record.mfu.reason is not None
    assert record.mfu.reason.startswith(said)


def test_ranks_on_different_devices_share_no_peak(make_rank: MakeRank) -> None:
    ranks = [
        make_rank(
            world_size=2,
            rank=n,
            pid=n,
            device_type="cuda",
            device_name=name,
            device_total_bytes=size,
        )
        for n, (name, size) in enumerate(
            [("NVIDIA H200", 150 * 10**9), ("NVIDIA H100 80GB HBM3", 85 * 10**9)]
        )
    ]
    record = summarise(*ranks, context=CONTEXT)
    assert record.mfu.value is None
    assert "the ranks ran on different devices (NVIDIA H100 80GB HBM3, NVIDIA H200)" in str(
        record.mfu.reason
    )
    assert summarise(*ranks).mfu.value == pytest.approx(0.1)  # unless a peak is given
    alike = [replace(r, device_name="NVIDIA H200", device_total_bytes=150 * 10**9) for r in ranks]
    assert summarise(*alike, context=CONTEXT).mfu.value == pytest.approx(1e11 / 989.5e12)


def test_the_device_is_matched_by_more_than_its_name(make_rank: MakeRank) -> None:
    whole = make_rank(device_type="cuda", device_name="NVIDIA H200", device_total_bytes=150 * 10**9)
    assert summary.device_match(whole).row is not None
    for part in (
        replace(whole, device_total_bytes=18 * 10**9),
        replace(whole, telemetry=Telemetry(mig=True)),
        replace(whole, telemetry=Telemetry(sm_count=16)),
    ):
        assert summarise(part, context=CONTEXT).mfu.value is None


def test_a_given_peak_moves_the_peaks_of_the_other_dtypes_along(make_rank: MakeRank) -> None:
    rank = make_rank(
        device_type="cuda", device_name="NVIDIA H200", device_total_bytes=150 * 10**9,
        dtype="fp8", flops=15 * 10**11,
    )  # fmt: skip
    shown = [
        summarise(rank, context=replace(CONTEXT, peak=Peak(rate, "bf16", "--peak", "given"))).mfu
        for rate in (100e12, 50e12)  # 150 TFLOP/s in fp8 against 200 and 100
    ]
    assert shown[0].value == pytest.approx(1.5)
    assert shown[0].dtype_weighted == pytest.approx(0.75)
    assert shown[1].value is shown[1].dtype_weighted is None
    assert "MFU 3 is impossible" in str(shown[1].reason)


def test_work_in_a_faster_dtype_is_not_held_against_a_slower_ones_peak(make_rank: MakeRank) -> None:
    rank = make_rank(
        device_type="cuda", device_name="NVIDIA H200", device_total_bytes=150 * 10**9,
        dtype="bf16", flops=2 * 10**12,
    )  # fmt: skip
    context = replace(CONTEXT, peak=Peak(66.9e12, "fp32", "--peak", "given"))
    mfu = summarise(rank, context=context).mfu
    assert mfu.value is None
    assert "the peak belongs to another device or dtype" in str(mfu.reason)


def test_ranks_that_share_cores_are_said_to(make_rank: MakeRank) -> None:
    two = [make_rank(world_size=2, rank=n, pid=n, cpu_threads=4) for n in range(2)]
    assert any(
        note.startswith("2 ranks with 8 threads share 4 cores") for note in summarise(*two).notes
    )
    apart = [replace(r, host=f"host{r.rank}") for r in two]
    fewer = [replace(r, cpu_threads=2) for r in two]
    for ranks in (apart, fewer):
        assert not any("share" in note for note in summarise(*ranks).notes)


# ---------------------------------------------------------------------- several trainings in one job


def test_of_trainings_one_after_another_the_longest_is_told_and_the_rest_named(
    make_rank: MakeRank,
) -> None:
    first = make_rank(pid=1, started_ns=100, argv=["/a/pretrain.py", "x"], steps=12)
    second = make_rank(pid=2, started_ns=200, argv=["train.py"], steps=30, step_ns=20_000_000)
    third = make_rank(pid=3, started_ns=300, argv=["eval.py"], steps=15)
    tiny = make_rank(pid=4, started_ns=400, steps=0)
    for order in itertools.permutations([first, second, third, tiny]):
        record = summarise(*order)
        assert record.steps.timed == 30
        assert [note for note in record.notes if "trainings" in note] == [
            "3 trainings ran in this job. These figures are of the one that was timed longest, process 2 "
            "(train.py, 30 steps timed), and not of process 1 (pretrain.py, 12 steps timed), process 3 "
            "(eval.py, 15 steps timed)"
        ]
        assert record.complete


def test_two_launches_of_two_ranks_are_not_mixed(make_rank: MakeRank) -> None:
    def rank(n: int, pid: int, at: int, step_ns: int, launch: str = "a") -> RankRecord:
        return make_rank(
            rank=n, world_size=2, pid=pid, started_ns=at, step_ns=step_ns, launch=launch
        )

    first = [rank(0, 1, 100, 10**7), rank(1, 2, 101, 10**7)]
    second = [rank(0, 3, 200, 2 * 10**7), rank(1, 4, 201, 2 * 10**7)]
    for order in itertools.permutations([*first, *second]):
        assert one_per_rank(order) == second
    # The same, side by side, told apart by where the ranks meet.
    beside = [replace(r, launch="b", started_ns=r.started_ns - 100) for r in second]
    for order in itertools.permutations([*first, *beside]):
        assert one_per_rank(order) == beside


def test_a_restarted_launch_lets_the_longer_attempt_stand(make_rank: MakeRank) -> None:
    dead = [make_rank(rank=0, world_size=2, pid=1, started_ns=1, steps=5, launch="x 0")]
    alive = [
        make_rank(rank=n, world_size=2, pid=2 + n, started_ns=9, steps=50, launch="x 1")
        for n in (0, 1)
    ]
    record = summarise(*dead, *alive)
    assert (record.steps.timed, record.complete) == (50, True)
    assert len([note for note in record.notes if "2 trainings ran in this job" in note]) == 1


# ---------------------------------------------------------------------- whatever comes

DEVICES = [
    ("cpu", None, None),
    ("cuda", "NVIDIA H200", 150 * 10**9),
    ("cuda", "NVIDIA A100-SXM4-80GB", 85 * 10**9),
    ("cuda", "NVIDIA Z9000", 10**10),
    ("mps", None, None),
]
DTYPES = ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


def any_rows(rng: Random, shapes: list[str]) -> list[StepRow]:
    kinds = ["timed"] * 6 + ["warmup", "compile", "evaluation+checkpoint"]
    skips, briefs = rng.random() < 0.2, rng.random() < 0.3
    return [
        StepRow(
            ns=round(10 ** rng.uniform(3, 9)),
            host_ns=round(10 ** rng.uniform(3, 9)),
            kind=rng.choice(kinds),
            shape=rng.choice(shapes),
            micro_batches=rng.randrange(4),
            samples=rng.choice([None, 1, 64]),
            tokens=rng.choice([None, 4096]),
            skipped=skips and rng.random() < 0.3,
            sampled=not (briefs and rng.random() < 0.7),
            data_ns=rng.randrange(10**4),
            forward_ns=rng.choice([None, 10**3]),
        )
        for _ in range(rng.randrange(1, 8))
    ]


def any_count(rng: Random, shape: str) -> FlopCount:
    needed = {d: round(10 ** rng.uniform(0, 13)) for d in rng.sample(DTYPES, rng.randrange(1, 4))}
    return FlopCount(
        shape,
        rng.choice(["eager step", "fake tensors"]),
        needed,
        {d: round(n * rng.choice([0.5, 1.0])) for d, n in needed.items()},
        {d: round(n * rng.choice([1.0, 1.4])) for d, n in needed.items()},
        0,
        rng.choice([1.0, 0.5]),
        "op time",
        [],
        {},
        None,
    )


def any_ranks(rng: Random, make: MakeRank) -> list[RankRecord]:
    """Returns the ranks of one training, sometimes with gaps and with records of another."""
    world = rng.randrange(1, 4)
    device, name, size = rng.choice(DEVICES)
    shapes = rng.choice([["a"], ["a"], ["a", "b", ""]])
    made = []
    for pid, rank in enumerate(
        [*range(world), *rng.choices(range(world), k=rng.choice([0, 0, 2]))]
    ):
        rows = any_rows(rng, shapes)
        counted = rng.choice([["a"], ["a"], ["a", "b"], ["b"], []])
        one = make(
            rank=rank, world_size=world, rows=rows, device_type=device, device_name=name,
            device_total_bytes=size, pid=pid, started_ns=rng.randrange(3), steps_seen=len(rows) + 1,
            launch=rng.choice(["x", "x", "y"]) if world > 1 else "",
        )  # fmt: skip
        made.append(replace(one, flops=[any_count(rng, shape) for shape in counted]))
    return made if rng.random() < 0.8 else made[1:] or made


def any_context(rng: Random) -> Context:
    given = Peak(10 ** rng.uniform(9, 15), rng.choice(["fp32", "bf16"]), "--peak", "given")
    return replace(
        CONTEXT,
        peak=rng.choice([None, given]),
        ceilings=rng.choice([None, CPU]),
        price_usd_per_hour=rng.choice([None, 2.5]),
    )


def test_an_impossible_mfu_never_comes_out_and_the_order_of_ranks_is_no_matter(
    make_rank: MakeRank,
) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(400):
        rng = Random(seed)
        ranks, context = any_ranks(rng, make_rank), any_context(rng)
        try:
            record = summary.summarise(ranks, context)
        except NothingMeasuredError:
            assert not any(row.kind == "timed" for r in one_per_rank(ranks) for row in r.rows)
            continue
        rng.shuffle(ranks)
        assert summary.summarise(ranks, context) == record, seed
        check(record, seed)
        mfu = record.mfu
        outcomes[
            "shown" if mfu.value else "impossible" if "impossible" in str(mfu.reason) else "none"
        ] += 1
    assert min(outcomes.values()) >= 20, outcomes  # each was tried


def check(record: RunRecord, seed: int) -> None:
    mfu = record.mfu
    fast = "fp8" in mfu.flops_by_dtype and mfu.peak_dtype in ("bf16", "fp16")
    most = 2.0 if fast else 1.0  # an 8-bit run may pass the 16-bit peak
    for value in (mfu.value, mfu.value_causal, mfu.hfu):
        assert value is None or 0 <= value <= most, seed
    assert mfu.dtype_weighted is None or 0 <= mfu.dtype_weighted <= 1, seed
    assert mfu.value is not None or mfu.reason, seed
    if mfu.value is not None:
        assert mfu.peak_flops_per_s, seed
        assert mfu.peak_source, seed
    assert record.step_s.mean > 0
    low, high = record.step_s.ci95 or (0, 0)
    assert low <= high
    assert len(record.ranks) == len({r.rank for r in record.ranks})
