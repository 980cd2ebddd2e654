"""The benchmark of the input kit with tiny sizes, and how it measures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "kit_input.py"

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("kit_input")


def run(bench, tmp_path, only, *more):
    out = tmp_path / "out.json"
    code = bench.main(["--out", str(out), "--only", only, "--tiny", "--inside", *more])
    return code, json.loads(out.read_text())


def test_every_path_brings_every_batch_and_broken_fences_are_caught(bench, tmp_path):
    code, figures = run(bench, tmp_path, "correctness", "--batches", "120")
    found = figures["correctness"]
    assert code == 0, found.get("traceback")
    expected = {"iterable, thread", "iterable, in turn", "workers", "workers, pool"}
    assert expected <= set(found["paths"])
    for path in found["paths"].values():
        assert (path["batches"], path["wrong"], path["findings"], path["complete"]) == (
            120,
            0,
            0,
            True,
        )
    assert found["broken"]["slots given back early"]["findings"] > 0
    assert found["machine"]["torch"] == torch.__version__


def test_the_link_is_measured_against_ordinary_ways_in_turns(bench, tmp_path):
    code, figures = run(bench, tmp_path, "link")
    assert code == 0, figures["link"].get("traceback")
    size = figures["link"]["sizes"]["1 MB"]
    assert {"synthetic", "loader, to", "loader, non_blocking", "ours"} <= set(size["arms"])
    assert all(len(times) == 2 for times in size["step_s"].values())
    assert size["ours_fallbacks"] == {}
    assert size["host_copies_per_byte"]["ours"] == pytest.approx(1.0)


def test_mapped_memory_gives_the_same_numbers(bench, tmp_path):
    code, figures = run(bench, tmp_path, "mapped")
    assert code == 0, figures["mapped"].get("traceback")
    assert set(figures["mapped"]["reads_s"]["1 MiB"]) == {
        "copy",
        "copy, then kernel",
        "kernel over the link",
    }
    assert figures["mapped"]["storage"]["answer"]


def test_images_and_the_tuner(bench, tmp_path):
    code, figures = run(bench, tmp_path, "images,tuner")
    assert code == 0, [f.get("traceback") for f in figures.values()]
    assert figures["images"]["arms"]["synthetic"]["ratio"] == 1.0
    assert figures["tuner"]["chosen"]["num_workers"] >= 0
    assert figures["tuner"]["trials"][0]["num_workers"] == 0


def test_a_section_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--only", "jpeg,mapped", "--tiny"]
    code = "import sys; sys.modules['torchvision'] = sys.modules['torchvision.io'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    import os

    env = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{SCRIPT.parents[2] / 'src'}",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    figures = json.loads(out.read_text())
    assert done.returncode == 1
    assert "torchvision" in figures["jpeg"]["error"]
    assert "Traceback" in figures["jpeg"]["traceback"]
    assert "error" not in figures["mapped"]
    assert "== mapped" in done.stdout


def test_when_the_time_is_up_sections_are_not_begun(bench, tmp_path):
    code, figures = run(bench, tmp_path, "mapped", "--budget-s", "-1")
    assert code == 1
    assert figures == {"mapped": {"error": "not begun: the time was up"}}


def test_unknown_sections_are_told(bench, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--out", "x", "--only", "mapped,none"])
    assert "no such section: none" in capsys.readouterr().err


def test_arms_take_turns_in_a_turning_order_and_live_through_what_they_had_queued(benchmark_module):
    turns = benchmark_module("kit_input_turns")
    log: list[str] = []

    def source(name):
        while True:
            log.append(name)
            yield name

    stepped: list[str] = []
    taken = turns.Turns({n: source(n) for n in "abc"}, stepped.append, 1, 2)
    times = taken.run(3, float("inf"))
    # One that may be queued, without the step; one to get into the pace; two that are timed.
    four = {name: 4 * name for name in "abc"}
    assert "".join(log) == "".join(four[n] for n in "abccbabca")
    assert "".join(stepped) == "".join(3 * n for n in "abccbabca")
    assert [len(v) for v in times.values()] == [3, 3, 3]
    assert taken.taken_by("a", "b") == 24
    log.clear()
    taken.start()
    assert log == list("aaabbbccc")


def test_what_is_queued_of_an_arm_is_not_timed(benchmark_module):
    """A source slower than the step, of which many batches are there already, as loaders have them in bursts."""
    turns = benchmark_module("kit_input_turns")
    queued = 8

    def slow():
        for k in itertools.count():
            if k > queued:
                time.sleep(0.01)
            yield k

    arms = {"slow": slow(), "quick": itertools.repeat(0)}
    taken = turns.Turns(arms, lambda _: None, {"slow": queued, "quick": 0}, {"slow": 6, "quick": 2})
    times = taken.run(2, 0.0)
    assert min(times["slow"]) > 0.009
    assert taken.taken_by("slow") == 2 * (queued + 3 + 6)


def test_rounds_that_would_end_too_late_are_not_begun_but_two_are(benchmark_module):
    turns = benchmark_module("kit_input_turns")
    taken = turns.Turns({"a": iter(range(99))}, lambda _: time.sleep(0.01), 0, 2)
    assert len(taken.run(9, time.monotonic() + 0.1)["a"]) in range(2, 6)
    assert len(taken.run(9, 0.0)["a"]) <= 7


def test_an_arm_is_not_timed_before_the_others_rest(benchmark_module, monkeypatch):
    """A thread of the other arm keeps a core busy for a while after the arm's first batch."""
    turns = benchmark_module("kit_input_turns")
    until = time.monotonic() + 0.5
    threads = []

    def works():
        while time.monotonic() < until:
            pass

    def busy():
        threads.append(threading.Thread(target=works))
        threads[-1].start()
        while True:
            yield 0

    arms = {"busy": busy(), "idle": itertools.repeat(0)}
    taken = turns.Turns(arms, lambda _: time.sleep(0.001), 0, 2)
    taken.start()
    taken.run(1, 0.0)
    assert time.monotonic() > until
    blocks = taken.rounds[0]
    assert blocks["idle"]["rested"]
    assert blocks["idle"]["rest_s"] > 0.2
    assert blocks["idle"]["others_cores"] < 0.5
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    until = time.monotonic() + 0.8
    arms = {"busy": busy(), "idle": itertools.repeat(0)}
    taken = turns.Turns(arms, lambda _: time.sleep(0.001), 0, 2)
    taken.start()
    taken.run(1, 0.0)
    assert not taken.rounds[0]["idle"]["rested"]  # said, not hidden
    threads[-1].join()


def test_where_the_time_went_is_told_by_round(benchmark_module):
    turns = benchmark_module("kit_input_turns")
    seen = iter([{"device_wait_s": 1.0}, {"device_wait_s": 1.5}])
    arms = {"synthetic": itertools.repeat(0), "ours": itertools.repeat(0)}
    taken = turns.Turns(
        arms, lambda _: None, 0, {"synthetic": 1, "ours": 5}, {"ours": lambda: next(seen)}
    )
    taken.run(1, 0.0)
    assert taken.rounds[0]["ours"]["device_wait_s"] == pytest.approx(0.1)
    said = turns.said(taken.rounds, "ours")
    assert "device wait 100.000" in said
    assert "rested: True" in said


def test_the_waits_of_a_prefetcher_are_read_as_sums_that_grow(benchmark_module):
    from flopwise.kit.input import Prefetcher

    turns = benchmark_module("kit_input_turns")

    def slow():
        for k in range(6):
            time.sleep(0.02)
            yield torch.ones(1) * k

    batches = Prefetcher(slow(), "cpu", measure_wait=True)
    probe = turns.probe_of(batches)
    for _ in batches:
        pass
    first, second = probe(), probe()
    assert first == second
    assert first["waited_for_workers_s"] >= 0.12
    assert first["device_wait_s"] >= 0.1


def test_gaps_between_copies_are_what_no_copy_fills(benchmark_module):
    copies = benchmark_module("kit_input_copies")
    apart = copies.gaps_between([(0.0, 10.0), (14.0, 24.0), (30.0, 40.0)], 1000)
    assert (apart["gap_us"], apart["longest_gap_us"], apart["overlapped"]) == (5.0, 6.0, 0)
    assert apart["own_bytes_per_s"] == pytest.approx(1000 / 10e-6)
    over = copies.gaps_between([(0.0, 10.0), (5.0, 20.0), (12.0, 30.0)], 1000)
    assert (over["gap_us"], over["overlapped"]) == (0.0, 2)
    assert over["own_bytes_per_s"] == pytest.approx(1000 / 10e-6)
    assert copies.gaps_between([], 1000) == {"copies": 0}


def test_ratios_are_paired_by_round(benchmark_module):
    turns = benchmark_module("kit_input_turns")
    found = turns.against({"s": [1.0, 2.0, 4.0], "x": [1.5, 2.0, 4.4]}, "s")["x"]
    assert found == {"step_s": 2.0, "ratio": pytest.approx(1.1), "lowest": 1.0, "highest": 1.5}


def test_copies_into_page_locked_memory_are_counted(benchmark_module, monkeypatch):
    arms = benchmark_module("kit_input_arms")
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: self.clone() if self.numel() > 1 else self
    )
    with arms.counted_pinning() as counts:
        torch.ones(4).pin_memory()
        torch.ones(1).pin_memory()  # as if it were page-locked already
    assert counts == {"bytes": 16, "calls": 1}


def test_workers_are_what_cores_and_shared_memory_hold(benchmark_module, monkeypatch):
    arms = benchmark_module("kit_input_arms")
    monkeypatch.setattr(arms, "usable_cores", lambda: 16)
    monkeypatch.setattr(arms, "free_shared_memory_bytes", lambda: 15 * 10**9)
    assert arms.workers_for(400_000_000, 3, 8) == 3  # 12 GB for 3 loaders x 3 batches a worker
    assert arms.workers_for(25_000_000, 3, 8) == 8
    assert arms.workers_for(1, 3, 14) == 14
    assert arms.workers_for(10**12, 3, 14) == 1
    monkeypatch.setattr(arms, "free_shared_memory_bytes", lambda: None)
    assert arms.workers_for(400_000_000, 3, 8) == 8


def figures_of(ratio=1.01, supply=2.0, bandwidth=0.97, ours=1.0, wrong=0, missed=5, decoded=3600.0):
    broken = {"slots given back early": missed, "not written before the last use": 0}
    correct = {"wrong": wrong, "findings": 0, "complete": True, "broken": broken}
    copies = {"ours": ours, "loader with pin_memory": 2.0}
    size = {
        "ours_to_synthetic": ratio,
        "supply_per_step": supply,
        "bandwidth_ratio": bandwidth,
        "host_copies_per_byte": copies,
    }
    images = {"ratio_to_synthetic": {"ours": ratio}, "supply_to_need": supply}
    return {
        "correctness": {"summary": correct},
        "link": {"summary": {"25 MB": size}},
        "images": {"summary": images},
        "jpeg": {
            "summary": {
                "alone_images_per_s": {"decoded on the workers": decoded},
                "with_step_images_per_s": {"decoded on the workers": 3600.0},
                "workers_can_images_per_s": 3500.0,
            }
        },
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"ratio": 1.03}, ["link, 25 MB: the step takes 1.030", "images: the step takes 1.030"]),
        ({"ratio": 1.5, "supply": 1.0}, []),  # the workers cannot
        ({"bandwidth": 0.94}, ["0.940 of a bare copy's bandwidth"]),
        ({"ours": 2.0}, ["2.00 host copies a byte against 2.00"]),
        ({"decoded": 4702.0}, ["4,702 images a second where workers can decode 4,200 at most"]),
        ({"wrong": 1}, ["1 wrong batches"]),
        ({"missed": 0}, ["0 findings where a fence was slots given back early"]),
    ],
)
def test_claims_are_held_against_the_figures(benchmark_module, change, said):
    claims = benchmark_module("kit_input_claims")
    found = claims.broken_claims(figures_of(**change), sizes_are_real=True)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))
    if "wrong" not in change and "missed" not in change:
        assert claims.broken_claims(figures_of(**change), sizes_are_real=False) == []
    assert claims.broken_claims({"link": {"error": "x"}}, sizes_are_real=True) == []
