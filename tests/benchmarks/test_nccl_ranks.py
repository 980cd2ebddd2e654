"""What measures several ranks: its arithmetic, and that it runs on CPU processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def judge(benchmark_module):
    return benchmark_module("nccl_ranks_judge")


@pytest.fixture
def ranks(benchmark_module):
    return benchmark_module("nccl_ranks")


def test_timed_rows_lie_on_the_truths_intervals(judge):
    step_ms = [50.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    rows = [
        {"ns": int(ms * 1e6), "kind": "timed" if k > 1 else "warmup"}
        for k, ms in enumerate(step_ms)
    ]
    truth = {"step_ms": step_ms}
    # Behind the last one flopwise opens its windows
    assert judge.timed({"rows": rows, "steps_seen": 7}, truth) == {2: 2, 3: 3, 4: 4}
    led = {"rows": [rows[0], *rows], "steps_seen": 7}
    assert judge.timed(led, truth) == {3: 2, 4: 3, 5: 4}
    assert judge.timed_rows(led) == {3: 11.0, 4: 12.0, 5: 13.0, 6: 14.0}
    with pytest.raises(LookupError, match="no step"):
        judge.timed({"rows": rows[:2], "steps_seen": 3}, truth)
    with pytest.raises(LookupError, match="rows 2 to 5 have no truth"):
        judge.timed({"rows": rows, "steps_seen": 7}, {"step_ms": step_ms[:4]})
    assert judge.mean_of([0, 1, 2, 3], [0, 2], ahead=1) == 2


def test_blocks_in_turns_have_a_difference_and_its_interval(judge):
    found = judge.in_turns({"arms_ms": {"off": [10.0, 12.0], "on": [15.0, 18.0]}})
    assert found["ms"] == 5.5
    assert found["off_ms"] == 11
    assert found["high_ms"] - 5.5 == pytest.approx(12.7062 * 0.5, rel=1e-4)
    assert judge.in_turns({"arms_ms": {"off": [], "on": []}}) is None
    assert judge.in_turns({}) is None


def figures(rank=0, **changed):
    usual = {
        "rank": rank,
        "step_ratio": 1.001,
        "of_rows_ratio": 1.0,
        "identity_error_frac": 1e-12,
        "residual_frac": 0.004,
        "unattributed_frac": 0.001,
        "matched": [8, 8],
        "exposed_ms": 1.9,
        "tail_without_copies_ms": 1.7,
        "in_turns": {"ms": 2.4, "low_ms": 2.3, "high_ms": 2.5},
        "fault_ms": 10.1 if rank == 1 else None,
        "lines_ms": {"comm_wait": 0.1, "comm_transfer": 1.8},
    }
    return {**usual, **changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"of_rows_ratio": 0.99}, "not the mean of the timed ones"),
        ({"step_ratio": 0.99}, "0.9900 of the true one"),
        ({"identity_error_frac": -2e-6}, "but for -2.0e-06"),
        ({"residual_frac": -0.03}, "the residual is -3.00%"),
        ({"unattributed_frac": 0.06}, "6.00% is unattributed"),
        ({"matched": [7, 8]}, "7 of 8 calls are matched"),
        ({"exposed_ms": 1.2}, "and the tail alone is 1.70"),
        ({"exposed_ms": 1.3}, ""),
        ({"exposed_ms": 3.2}, "without any 2.40 less"),
        ({"exposed_ms": 3.0}, ""),
    ],
)
def test_what_a_ledger_of_a_rank_must_show(judge, changed, said):
    wrong = judge.judge_ledger([figures(), figures(1, **changed)])
    assert len(wrong) == bool(said)
    assert all(one.startswith("rank 1: ") and said in one for one in wrong)


def job(rank=1, reason="host", delay_ms=10.4, transfer_ms=5.0):
    named = {"rank": rank, "reason": reason, "per_step_ms": delay_ms / 2, "delay_ms": delay_ms}
    return {
        "stragglers": [] if rank is None else [named],
        "stragglers_reason": "nobody does",
        "transfer_ms": transfer_ms,
        "findings": [["J101", "straggler", 0.2, "", ""]],
    }


@pytest.mark.parametrize(
    ("kind", "of_job", "wait_ms", "exposed_ms", "said"),
    [
        ("host", {}, 10.5, 12.2, []),
        ("host", {}, 8.0, 12.2, []),  # what moves while the others wait was hidden before
        ("host", {"rank": 0}, 10.5, 12.2, ["rank 1 is not named"]),
        ("host", {"rank": None}, 10.5, 12.2, ["nobody does"]),
        ("host", {"reason": "work"}, 10.5, 12.2, ["the reason is work"]),
        ("matmul", {"reason": "work"}, 10.5, 12.2, []),
        ("host", {}, 3.5, 12.2, ["others wait 3.40 ms a step longer, true are 10.30"]),
        ("host", {}, 12.2, 12.2, ["others wait 12.10 ms a step longer"]),
        ("host", {}, 8.0, 9.5, ["others have 7.60 ms more of communication, true are 10.30"]),
        ("host", {"delay_ms": 25.0}, 10.5, 12.2, ["said to delay by 25.00 ms, true are 10.30"]),
        ("host", {"transfer_ms": 6.1}, 10.5, 12.2, ["for 6.10 ms a step, and 5.00 without"]),
    ],
)
def test_what_a_slow_rank_must_show(judge, kind, of_job, wait_ms, exposed_ms, said):
    turns = {"ms": 10.3, "low_ms": 10.2, "high_ms": 10.4}
    lines = {"comm_wait": wait_ms, "comm_transfer": exposed_ms - wait_ms}
    both = [
        figures(0, in_turns=turns, lines_ms=lines, exposed_ms=exposed_ms),
        figures(1, in_turns=turns),
    ]
    base = {"job": {"transfer_ms": 5.0}, "ranks": [figures(0), figures(1)]}
    found, wrong = judge.judge_fault(kind, 1, job(**of_job), both, base)
    assert found["injected_ms"] == 10.1
    assert found["wait_ratio"] == pytest.approx((wait_ms - 0.1) / 10.3)
    assert len(wrong) == len(said)
    assert all(part in one for part, one in zip(said, wrong, strict=True))


def test_overhead_is_a_ratio_of_pairs_with_equal_codes_and_output(judge):
    def arm(ms, code=0, stdout="step 0\n"):
        return {"step_ms": ms, "all_ms": 2 * ms, "code": code, "stdout": stdout}

    pairs = [(arm(10.0), arm(10.01)), (arm(11.0), arm(11.02)), (arm(10.0), arm(10.0))]
    found, wrong = judge.judge_overhead(pairs)
    assert wrong == []
    assert 1 < found["step_ms"]["ratio"] < 1.002
    assert found["step_ms"]["low"] < 1 < found["step_ms"]["high"]
    assert judge.judge_overhead(pairs[:2])[1] == ["2 pairs, and 3 are needed"]
    slower = [(arm(10.0), arm(10.0 + x)) for x in (0.3, 0.31, 0.32)]
    assert judge.judge_overhead(slower)[1] == ["steps take +3.10%"]
    assert "exit codes" in judge.judge_overhead([*pairs[:2], (arm(10), arm(10, code=1))])[1][0]
    assert "prints" in judge.judge_overhead([*pairs[:2], (arm(10), arm(10, stdout="x"))])[1][0]


def test_bandwidth_is_judged_by_the_time_of_a_call(judge):
    from types import SimpleNamespace

    def read(transfer_ms, bus=True):
        nbytes = 25 << 20
        rate = nbytes / transfer_ms * 1e3
        one = SimpleNamespace(
            op="all_reduce", nbytes=nbytes, calls=5.0, s=5e-3 * transfer_ms, wait_s=0.0, of_link_frac=None,
            algorithm_bytes_per_s=rate, bus_bytes_per_s=1.5 * rate if bus else None,
        )  # fmt: skip
        truth = {"ms": {str(nbytes): [0.113, 0.2, 0.113]}}
        (row,), wrong = judge.judge_bandwidth(SimpleNamespace(collectives=[one]), [truth], 4)
        assert row["true_bus_bytes_per_s"] == pytest.approx(nbytes / 0.113e-3 * 1.5)
        assert row["transfer_ms"] == pytest.approx(transfer_ms)
        assert row["bus_is_told"] == bus
        return wrong

    assert read(0.1) == []
    assert read(0.128, bus=False) == []
    assert read(0.13) == ["25 MiB: 0.869 of the true bandwidth"]
    nothing = judge.judge_bandwidth(
        SimpleNamespace(collectives=[]), [{"ms": {"1048576": [1.0]}}], 2
    )
    assert nothing[1] == ["1 MiB: none of the true bandwidth"]


def test_what_is_withheld_is_said(judge):
    said = judge.withheld({"withheld": {"waits": ["H204"], "stragglers": ["H204", "H211"]}})
    assert said == ["waits is withheld by H204", "stragglers is withheld by H204, H211"]


def test_every_part_has_its_work(ranks):
    assert set(ranks.WORK) == set(ranks.PARTS)


def test_bandwidth_of_two_cpu_processes_by_traces_and_by_their_clock(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, GPU / "nccl_ranks.py", "--tiny", "--only", "bandwidth"]
    done = subprocess.run(
        [*argv, "--out", tmp_path / "out.json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    part = json.loads((tmp_path / "out.json").read_text())["parts"]["bandwidth"]
    assert part["measured"]
    assert [one["nbytes"] for one in part["sizes"]] == [1 << 20, 4 << 20]
    for one in part["sizes"]:
        assert one["calls"] == 5
        assert 0.1 < one["ratio"] < 10
        assert one["true_bus_bytes_per_s"] == pytest.approx(one["nbytes"] / one["true_ms"] * 1e3)


def test_the_job_writes_its_truth_and_leaves_no_process_behind(ranks, tmp_path):
    size = ranks.Size(True, 6, 3, "1,1", 0.02, "1")
    bench = ranks.Bench(tmp_path, size, 2, 90)
    done, _ = bench.launch("job", "ddp.py", bench.words("gpt2", "host"), run=False, rounds="1,2")
    assert done.code == 0, done.tail
    assert done.stdout.splitlines()[1:] == ["6 steps done"]
    slow = done.truths[1]
    assert [one["rank"] for one in done.truths] == [0, 1]
    assert len(slow["step_ms"]) == 5
    assert len(slow["tail_ms"]) == len(slow["fault_ms"]) == 6
    assert done.truths[0]["fault_ms"] == []
    assert min(slow["fault_ms"]) >= 20
    assert {arm: len(ms) for arm, ms in slow["arms_ms"].items()} == {"off": 2, "on": 2}


def test_a_job_over_its_time_is_ended_with_its_workers(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "LEAST_S", 4.0)
    bench = ranks.Bench(tmp_path, ranks.Size(True, 10**6, 3, "0,1", 0.02, "1"), 2, 6)
    done, _ = bench.launch("job", "ddp.py", bench.words("gpt2"), run=False)
    assert done.code is None
    time.sleep(0.2)
    mark = f"{ranks.MARK}={bench.id}".encode()
    left = [p for p in Path("/proc").glob("[0-9]*/environ") if _has(p, mark)]
    assert left == []
    with pytest.raises(RuntimeError, match="no time left"):
        bench.launch("other", "ddp.py", [], run=False)


def _has(path: Path, mark: bytes) -> bool:
    try:
        return mark in path.read_bytes()
    except OSError:
        return False
