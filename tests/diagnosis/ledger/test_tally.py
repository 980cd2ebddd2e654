"""Lines of whole traces: kernels without an operator, contention, padding, and what must not depend on how a trace is written."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.build import Given, LedgerError
from flopwise.diagnosis.ledger.build import ledger as made
from flopwise.diagnosis.ledger.counted import Counted
from flopwise.diagnosis.ledger.tally import _with_dispatch
from flopwise.flops.table import RULES
from flopwise.hardware.accelerators import parse_peak
from flopwise.records.ledger import LedgerRecord
from flopwise.trace import kernels
from flopwise.trace.launches import Launches

GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
EAGER = 2 * 1024**3  # FLOPs of the fixture's product a step
REACHED = 794.5e6  # FLOPs a microsecond of an H200, bf16
PEAK = 989.5e6


def ledger(trace: Any, **given: Any) -> LedgerRecord:
    return made(trace, given=Given(**given))


def us(record: LedgerRecord) -> dict[str, float]:
    return {line.name: round(line.s * 1e6, 6) for line in record.lines}


def sums(record: LedgerRecord) -> bool:
    total = sum(line.s for line in record.lines)
    return total == pytest.approx(record.step_s) == sum(record.families.values())


def bf16(flops: float, repeated: float = 0.0) -> Counted:
    return Counted({"bf16": flops}, {"bf16": flops}, {"bf16": flops + repeated})


@pytest.fixture
def replayed(training: Any) -> Any:
    """The fixture's steps with a CUDA graph in the pause after their product and before their optimizer."""
    t = training(4)
    for i in range(4):
        host, at = 10_015 + 100 * i, 20_000 + 1000 * i
        number = t.call("cudaGraphLaunch", host, 2)
        for name, start, dur in (
            (GEMM, 700, 100),
            ("triton_poi_fused_gelu_9", 800, 50),
            ("mine", 850, 30),
        ):
            t.kernel(name, at + start, dur, correlation=number)
    return t


class TestReplays:
    def test_without_a_count_products_stay_unknown_and_the_rest_is_known(
        self, replayed: Any
    ) -> None:
        record = ledger(replayed.read())
        found = us(record)
        assert found["unattributed"] == 130  # the product and what nobody knows
        assert found["memory_unsplit"] == 50
        assert record.coverage_frac == pytest.approx(1 - 130 / 880)
        assert record.model_flops_per_step == EAGER
        assert any("their FLOPs are not known" in note for note in record.notes)
        assert sums(record)

    def test_with_a_count_the_products_share_what_operators_leave(self, replayed: Any) -> None:
        more = 4e10
        before = us(ledger(replayed.read()))
        record = ledger(replayed.read(), counted=bf16(EAGER + more))
        found = us(record)
        assert found["unattributed"] == 30
        assert found["ideal"] == pytest.approx((EAGER + more) / PEAK, abs=1e-5)
        assert found["gemm_excess"] == pytest.approx(
            before["gemm_excess"] + 100 - more / REACHED, abs=1e-5
        )
        assert record.coverage_frac == pytest.approx(1 - 30 / 880)
        assert record.model_flops_per_step == pytest.approx(EAGER + more)
        same = ("optimizer", "memory_bound", "memory_excess", "memory_unsplit", "idle_device")
        assert all(found[name] == before[name] for name in same)
        assert sums(record)

    def test_a_count_that_operators_exceed_is_said(self, replayed: Any) -> None:
        record = ledger(replayed.read(), counted=bf16(EAGER / 2))
        assert us(record)["unattributed"] == 130
        assert any("2 times the FLOPs counted in the live run" in note for note in record.notes)

    def test_recomputation_in_compiled_regions(self, replayed: Any) -> None:
        more, again = 4e10, 8e9
        plain = us(ledger(replayed.read(), counted=bf16(EAGER + more)))
        record = ledger(replayed.read(), counted=bf16(EAGER + more, again))
        found = us(record)
        assert found["recompute"] == pytest.approx(again / REACHED, abs=1e-5)
        assert found["gemm_excess"] == pytest.approx(
            plain["gemm_excess"] - again / REACHED, abs=1e-5
        )
        assert found["ideal"] == plain["ideal"]
        assert sums(record)

    def test_a_region_that_launches_kernels_of_many_operators(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            host, at = 10_015 + 100 * i, 20_000 + 1000 * i
            region = t.op("CompiledFunction", host, 8, ([8], "float"))
            t.kernel(GEMM, at + 700, 100, at=host + 1, op=region)
            t.kernel("void at::native::reduce_kernel<x>", at + 800, 50, at=host + 4, op=region)
        record = ledger(t.read(), counted=bf16(EAGER + 4e10))
        assert us(record)["memory_unsplit"] == 50
        assert record.coverage_frac == 1.0
        assert sums(record)

    def test_an_optimizer_in_a_graph(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            number = t.call("cudaGraphLaunch", 10_015 + 100 * i, 2)
            name = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<x>(x)"
            t.kernel(name, 20_700 + 1000 * i, 60, correlation=number)
        record = ledger(t.read())
        assert us(record)["optimizer"] == 160
        assert record.coverage_frac == 1.0

    def test_a_product_without_shapes_shares_the_count(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            op = t.op("aten::mm", 10_015 + 100 * i, 4)
            t.kernel(GEMM, 20_700 + 1000 * i, 100, at=10_016 + 100 * i, op=op)
        assert us(ledger(t.read()))["unattributed"] == 100
        record = ledger(t.read(), counted=bf16(EAGER + 4e10))
        assert "unattributed" not in us(record)
        assert record.coverage_frac == 1.0
        assert sums(record)

    def test_of_light_windows_that_show_no_operators_at_all(self, timeline: Any) -> None:
        """Device activities and runtime calls alone, as a whole: what the count and the names tell is enough."""
        timeline.on("NVIDIA H200")
        timeline.kernel(GEMM, 1000, 100, at=10)
        timeline.kernel("void at::native::vectorized_elementwise_kernel<x>(x)", 1100, 100, at=20)
        record = ledger(timeline.read(), counted=bf16(5e10))
        assert record.coverage_frac == 1.0
        assert record.mfu == pytest.approx(5e10 / (200e-6 * 989.5e12))
        assert us(record)["memory_unsplit"] == 100

    @pytest.mark.parametrize(
        ("pattern", "time", "line"),
        [("_GENERATED", 50, "memory_unsplit"), ("_PRODUCT", 100, "gemm_excess")],
    )
    def test_without_its_pattern_exactly_its_time_is_unattributed(
        self, replayed: Any, monkeypatch: pytest.MonkeyPatch, pattern: str, time: float, line: str
    ) -> None:
        trace = replayed.read()
        counted = bf16(EAGER + 4e10)
        before = us(ledger(trace, counted=counted))
        monkeypatch.setattr(kernels, pattern, re.compile("(?!)"))
        record = ledger(trace, counted=counted)
        after = us(record)
        assert after["unattributed"] == before["unattributed"] + time
        products = ("ideal", "precision", "hardware", "gemm_bytes", "gemm_excess")
        touched = products if line == "gemm_excess" else (line,)
        lost = sum(before.get(n, 0) for n in touched) - sum(after.get(n, 0) for n in touched)
        assert lost == pytest.approx(time, abs=1e-4)
        rest = before.keys() - {*touched, "unattributed"}
        assert {name: after[name] for name in rest} == {name: before[name] for name in rest}
        assert sums(record)

    def test_without_an_operators_rule_too(
        self, replayed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The count goes by the same rules: without one it lacks these FLOPs, too."""
        trace = replayed.read()
        before = us(ledger(trace, counted=bf16(EAGER + 4e10)))
        monkeypatch.delitem(RULES, "aten::mm")
        after = us(ledger(trace, counted=bf16(4e10)))
        assert after["unattributed"] == before["unattributed"] + 400
        rest = {"optimizer", "memory_bound", "memory_excess", "memory_unsplit", "idle_device"}
        assert {name: after[name] for name in rest} == {name: before[name] for name in rest}


class TestContention:
    def test_it_is_taken_out_of_what_was_slowed(self, training: Any) -> None:
        t = training(5)
        for event in t.events:
            if event["name"] == "relu" and event["ts"] >= 24_000:
                event["dur"] = 250
        t.kernel("ncclDevKernel_AllReduce", 24_500, 300, at=10_400, stream=9)
        record = ledger(t.read())
        found = us(record)
        # in one of four steps: 250 us against 200
        assert found["contention"] == 50 / 4
        assert found["comm_unsplit"] == 50 / 4  # what nothing hides
        assert found["memory_bound"] + found["memory_excess"] == 200
        assert record.families["communication"] == pytest.approx(25e-6)
        assert sums(record)

    def test_without_a_twin_it_is_nothing_and_said(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            t.kernel(
                "ncclDevKernel_AllReduce", 20_550 + 1000 * i, 100, at=10_020 + 100 * i, stream=9
            )
        record = ledger(t.read())
        assert "contention" not in us(record)
        assert any("0.2 ms a step of compute ran under collectives" in n for n in record.notes)


class TestPadding:
    def test_of_products_and_of_what_has_the_tokens(self, training: Any) -> None:
        t = training(4)
        t.op(
            "aten::embedding",
            9000,
            5,
            ([50, 8], "float"),
            ([1, 1000], "long int"),
            -1,
            False,
            False,
        )
        plain = us(ledger(t.read()))
        assert "padding" not in plain
        record = ledger(t.read(), padding_frac=0.25)
        found = us(record)
        assert found["padding"] == 150  # of the product's 400 us and of the ReLU's 200
        assert found["ideal"] == pytest.approx(0.75 * plain["ideal"], abs=1e-5)
        assert found["memory_bound"] == 100  # no less than the smallest kernel
        assert found["memory_excess"] == 50
        assert found["optimizer"] == plain["optimizer"]
        assert record.mfu == ledger(t.read()).mfu
        assert any("25.0% of the tokens are padding" in note for note in record.notes)
        assert sums(record)

    def test_without_an_embedding_of_products_alone(self, training: Any) -> None:
        assert us(ledger(training(4).read(), padding_frac=0.25))["padding"] == 100


class TestOptimizer:
    def test_its_floor_by_bytes(self, timeline: Any) -> None:
        t = timeline
        t.on("NVIDIA H200")
        for i in range(3):
            t.op("aten::relu", 1000 * i, 5, ([8], "float"))
            t.optimizer(1000 * i + 50, 60)
            op = t.op(
                "aten::add_", 1000 * i + 55, 10, ([24_000_000], "float"), ([24_000_000], "float"), 1
            )
            t.kernel("step", 50_000 + 1000 * i, 100, at=1000 * i + 57, op=op)
            t.kernel("fused", 50_100 + 1000 * i, 20, at=1000 * i + 70)
        record = ledger(t.read())
        assert us(record)["optimizer"] == 120
        # 192 MB at 4.8 TB/s
        said = "of 0.1 ms a step its bytes need 0.04 ms at full bandwidth, and nothing is known of 0.02 ms"
        assert any(said in note for note in record.notes)

    def test_fused_ones_by_their_operator(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            op = t.op("aten::_fused_adamw_", 10_045 + 100 * i, 2)
            t.kernel("k", 20_720 + 1000 * i, 40, at=10_046 + 100 * i, op=op)
        assert us(ledger(t.read()))["optimizer"] == 140


def test_a_given_peak_serves_a_device_that_the_table_does_not_have(training: Any) -> None:
    trace = training(4, device="NVIDIA X100").read()
    record = ledger(trace, peak=parse_peak("1P"))
    assert record.mfu == pytest.approx(EAGER / (1e-3 * 1e15))
    assert record.peak_source == "given: --peak 1P"
    assert us(record)["ideal"] == pytest.approx(EAGER / 1e9)
    assert sums(record)


when = st.integers(0, 60)
hosts = st.tuples(
    st.sampled_from(
        ["aten::mm", "aten::relu", "my::op", "CompiledFunction", "aten::embedding", "triton_poi_0", "ProfilerStep#1",
         "Optimizer.step#SGD.step", "autograd::engine::evaluate_function: X", "aten::linear"]
    ),
    when, st.integers(1, 30), st.integers(1, 2),
)  # fmt: skip
works = st.tuples(
    st.sampled_from([GEMM, "triton_poi_0", "mine", "void multi_tensor_apply_kernel", "ncclDevKernel_AllReduce", "Memcpy HtoD", "Memset"]),
    when, st.integers(1, 30), st.integers(7, 9), st.integers(0, 60), st.booleans(), st.booleans(),
)  # fmt: skip
counts = st.none() | st.builds(
    lambda a, b, c: Counted({"bf16": a, "fp32": b}, {"bf16": a / 2, "fp32": b}, {"bf16": a + c}),
    st.floats(0, 1e12), st.floats(0, 1e10), st.floats(0, 1e12),
)  # fmt: skip


def written(t: Any, host: Any, work: Any) -> Any:
    """Writes a trace in which every operator and every launch has a number of its own."""
    t.on("NVIDIA H200")
    square = ([64, 64], "c10::BFloat16")
    ids = []
    for name, ts, dur, tid in host:
        if "#" in name:
            t.add("user_annotation", name, ts, dur, (10, tid))
        else:
            ids.append(t.op(name, ts, dur, square, square, tid=tid))
    for i, (name, ts, dur, stream, at, graph, owned) in enumerate(work):
        cat = "gpu_memcpy" if "Memcpy" in name else "gpu_memset" if name == "Memset" else "kernel"
        op = ids[i % len(ids)] if owned and ids else 0
        by = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
        t.kernel(name, 100 + ts, dur, at=at + i / 100, by=by, op=op, cat=cat, stream=stream)
    return t


@settings(max_examples=150, deadline=None)
@given(
    # which of two operators of one span is the inner one only the file's order tells
    st.lists(hosts, max_size=8, unique_by=lambda one: one[1:]), st.lists(works, min_size=1, max_size=10), counts,
    st.none() | st.floats(0, 0.9), st.randoms(use_true_random=False),
)  # fmt: skip
def test_lines_sum_with_all_options_and_do_not_depend_on_how_the_trace_is_written(
    timelines: Callable[[], Any], host: Any, work: Any, counted: Counted | None, padding: float | None, coin: random.Random
) -> None:  # fmt: skip
    t = written(timelines(), host, work)
    more: Any = {"counted": counted, "padding_frac": padding, "sm_mhz": 1500.0}
    try:
        record = ledger(t.read(), **more)
    except LedgerError:
        return
    assert sums(record)
    assert 0 <= record.coverage_frac <= 1 + 1e-9
    streams, threads = list(range(7, 10)), [1, 2]
    new_streams = dict(zip(streams, coin.sample(range(20, 90), 3), strict=True))
    new_threads = dict(zip(threads, coin.sample(range(100, 190), 2), strict=True))
    for event in t.events:
        if "stream" in event["args"]:
            event["args"]["stream"] = event["tid"] = new_streams[event["args"]["stream"]]
        else:
            event["tid"] = new_threads[event["tid"]]
    coin.shuffle(t.events)
    again = ledger(t.read(), **more)
    assert us(again) == pytest.approx(us(record), abs=1e-3)
    assert again.coverage_frac == pytest.approx(record.coverage_frac)
    assert again.model_flops_per_step == pytest.approx(record.model_flops_per_step)


def test_a_forward_that_runs_again_on_a_cpu_costs_its_dispatch_too() -> None:
    start = np.array([0, 150, 400, 2_000_400, 2_000_600])
    end = np.array([100, 300, 500, 2_000_500, 2_000_700])
    rows = np.arange(5)
    work = Launches(-1, rows, start, end, rows, start, rows, np.zeros(5, bool))
    again = np.array([True, True, False, True, True])
    kept = _with_dispatch(work, again)
    assert kept.end_ns.tolist() == [150, 300, 500, 2_000_600, 2_000_700]
    far = np.array([False, False, True, True, False])  # two milliseconds apart: something else
    assert _with_dispatch(work, far).end_ns.tolist() == end.tolist()
    assert work.end_ns.tolist() == end.tolist()
