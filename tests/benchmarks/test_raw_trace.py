"""The independent reading of a trace, on traces whose answer is known."""

from __future__ import annotations

import gzip
import json

import pytest


@pytest.fixture
def raw(benchmark_module):
    return benchmark_module("raw_trace")


def trace(steps: int = 6, step_us: float = 100.0, first_us: float = 0.0):
    """Each step: two kernels of 30 us that overlap by 10, a copy of 20 after a gap; 70 us busy of 100."""
    events = [{"ph": "M", "name": "process_name"}]
    for k in range(steps):
        at = first_us + k * step_us
        for name, category, start, length in (
            ("gemm", "kernel", 0, 30),
            ("gemm2", "kernel", 20, 30),
            ("Memcpy HtoD", "gpu_memcpy", 60, 20),
            ("aten::mm", "cpu_op", 0, 95),
        ):
            events.append(
                {"ph": "X", "cat": category, "name": name, "ts": at + start, "dur": length}
            )
    return {"traceEvents": events}


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_busy_time_is_that_of_the_union_a_step(raw, tmp_path, ending):
    path = tmp_path / f"rank0-light.{ending}"
    text = json.dumps(trace()).encode()
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    found = raw.busy(path, steps=6, lead=2)
    assert found == {"busy_s": pytest.approx(70e-6), "step_s": pytest.approx(100e-6), "steps": 4}


def test_leading_steps_and_a_cut_first_step_do_not_count(raw, tmp_path):
    data = trace()
    data["traceEvents"] = [
        e for e in data["traceEvents"] if e["ph"] == "M" or e["ts"] >= 10 or e["name"] != "gemm"
    ]  # the first kernel of the first step is missing
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    assert raw.busy(path, steps=6, lead=1)["busy_s"] == pytest.approx(70e-6)


def test_its_steps_end_where_the_scripts_do(raw, tmp_path):
    # The copy of step 3 is longer by 10; it is the third of the four steps behind the lead.
    data = trace()
    copies = [e for e in data["traceEvents"] if e["name"] == "Memcpy HtoD"]
    copies[2]["dur"] += 10
    (tmp_path / "t.json").write_text(json.dumps(data))
    assert raw.busy(tmp_path / "t.json", steps=6, lead=2)["busy_s"] == pytest.approx(72.5e-6)


def test_as_many_in_all_is_not_yet_once_a_step(raw, tmp_path):
    data = trace()
    for k in range(6):  # all in the last step, and after all others
        data["traceEvents"].append(
            {"ph": "X", "cat": "kernel", "name": "save", "ts": 590 + k, "dur": 1}
        )
    (tmp_path / "t.json").write_text(json.dumps(data))
    found = raw.busy(tmp_path / "t.json", steps=6, lead=2)
    assert found == {"busy_s": pytest.approx(70e-6), "step_s": pytest.approx(100e-6), "steps": 4}


def test_kernels_that_run_once_a_step_take_turns(raw):
    assert raw.take_turns([0, 10, 20], [1, 11, 21])
    assert raw.take_turns([1, 11, 21], [0, 10, 20])
    assert raw.take_turns([0, 10], [0, 10])
    assert not raw.take_turns([0, 10, 20], [11, 12, 21])
    assert not raw.take_turns([0, 10, 20], [1, 2, 3])


def test_nothing_periodic_is_an_error(raw, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace()))
    with pytest.raises(LookupError, match=r"no kernel in .* runs 9 times"):
        raw.busy(path, steps=9)


def test_nested_and_touching_spans_count_once(raw):
    assert raw.union([(0, 10), (2, 5), (10, 12), (20, 21)]) == 13
    assert raw.union([]) == 0
