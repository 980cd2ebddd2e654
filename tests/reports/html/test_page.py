"""Whole pages: what is on them, what is not, and any record at all."""

from __future__ import annotations

import dataclasses
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord, Live, Profiled
from flopwise.records.rank import DeviceMetrics
from flopwise.records.run import RunRecord
from flopwise.reports.figures import percent
from flopwise.reports.html import render_html, render_ledger_html

DATA = Path(__file__).parents[1] / "data"
Parsed = Callable[[str], Any]


@pytest.fixture
def live(trace_record: LedgerRecord) -> LedgerRecord:
    """The same ledger as a run would have it."""
    windows = [Profiled("light", 4, 1.1e-3, 0.5), Profiled("heavy", 2, None, 2.0)]
    beside = Live(
        1e-3,
        (0.99e-3, 1.01e-3),
        41,
        windows,
        "the light window",
        1.001e-3,
        0.001,
        (-0.002, 0.004),
        "no: graphs",
    )
    return dataclasses.replace(trace_record, live=beside, residual_frac=0.003, profiled=False)


def titles(root: Any) -> list[str]:
    return [next(c for c in h.children if isinstance(c, str)) for h in root.all("h2")]


def test_a_run_with_its_ledger(sample: Any, live: LedgerRecord, parsed: Parsed) -> None:
    finding = Finding("L104", "slow-dtype", 0.5, ["a.py:3"], "seen", "use bf16", 0.5, "measured")
    record = dataclasses.replace(
        sample("two_ranks"),
        ledger=dataclasses.replace(live, findings=[finding]),
        ledger_reason=None,
    )
    root = parsed(render_html(record))
    assert titles(root) == [
        "Where the step goes", "By family", "Device use within the step", "Kernels that take most", "Findings",
        "Where the host spends the step", "By input shape", "By rank", "Surroundings", "By operator", "Notes",
        "What this stands on",
    ]  # fmt: skip
    (head,) = root.all("h1")
    assert head.text == "flopwise run --nproc-per-node 2 train_varlen.py --seed 1"
    facts = root.all("p", "facts")[0].text
    assert facts.startswith(
        "2 x NVIDIA H200 · torch 2.11.0+cu130 · 2 ranks · 80 steps timed of 120"
    )
    assert [b.text for b in root.all("p", "banner")] == ["the script ended with exit code 1"]
    cards = [card.text for card in root.all("div", "card")]
    assert cards[0].startswith("MFU 24.2 % attention counted full")
    assert cards[1].startswith("step 257.9 ms ± 18.8 median 212.2 ms")
    assert cards[2].startswith("throughput 248.1 samples/s")
    assert cards[3].startswith("energy 4.85 J/sample")
    (verdict,) = root.all("section", "verdict")
    assert verdict.text == (
        "Ledger trusted : 100 % of kernel time has a known cost · residual 0.30 % against undisturbed steps"
    )
    (found,) = root.all("article")
    assert found.text == (
        "1 slow dtype L104 50 % of the time measured predicted 2.00x as fast without it seen a.py:3 Do: use bf16"
    )
    stands = root.section("What this stands on")
    assert stands.rows() == [
        ["window", "steps", "mean step", "cost, once"],
        ["undisturbed", "41", "1 ms", "-"],
        ["light", "4", "1.10 ms", "500 ms"],
        ["heavy", "2", "not read", "2 s"],
    ]
    assert "of 989.5 TFLOP/s" not in stands.text
    assert stands.text.endswith(
        "idle time from the light window · afterwards a step takes 1 ms, +0.1 % (-0.2 to +0.4, 95 %) · "
        "the profiler stays attached: graphs"
    )
    said = root.section("Where the step goes").all("small")[0].text
    assert said == "mean of 3 undisturbed steps, in ms"


def test_the_devices_own_counters_stand_beside_the_busy_share(
    sample: Any, live: LedgerRecord, parsed: Parsed
) -> None:
    read = DeviceMetrics(window_s=5.0, sm_busy_frac=0.5, tensor_frac=0.25)
    record = dataclasses.replace(
        sample("two_ranks"), ledger=live, ledger_reason=None, device_metrics=read
    )
    root = parsed(render_html(record))
    said = "SM busy 50 % · tensor cores 25 % · NVML GPM, over 5 s"
    (beside,) = root.section("Device use within the step").all("p", "read")
    assert beside.text == (
        f"By the ledger the device is busy for {percent(live.busy_frac)} of the step. By its own counters: {said}"
    )
    (around,) = root.section("Where the host spends the step").all("dl")
    assert around.text.endswith(f"device {said}")
    none = dataclasses.replace(record, device_metrics=DeviceMetrics(reason="NVML GPM: <none>"))
    (around,) = parsed(render_html(none)).section("Where the host spends the step").all("dl")
    assert around.text.endswith("device not read: NVML GPM: <none>")


def test_a_run_without_a_ledger_has_all_else_and_the_reason(sample: Any, parsed: Parsed) -> None:
    record = dataclasses.replace(sample("cpu"), ledger=None, ledger_reason="--no-profile was given")
    root = parsed(render_html(record))
    assert root.all("section", "verdict")[0].text == "No ledger : --no-profile was given"
    assert titles(root) == [
        "Findings", "Where the host spends the step", "Surroundings", "What this stands on",
    ]  # fmt: skip
    assert root.section("Where the host spends the step").rows()[1:3] == [
        ["data wait", "", "0.5", "0.1"],
        ["forward", "", "131.2", "35.4"],
    ]
    stored = parsed(render_html(dataclasses.replace(record, ledger_reason=None)))
    assert stored.all("section", "verdict")[0].text == "No ledger : this run has none"


def test_no_mfu_and_no_energy_give_their_reasons(sample: Any, parsed: Parsed) -> None:
    cards = [card.text for card in parsed(render_html(sample("unknown_gpu"))).all("div", "card")]
    reason = sample("unknown_gpu").mfu.reason
    assert cards[0].startswith(f"MFU none not given: {reason}")


def test_a_ledger(trace_record: LedgerRecord, parsed: Parsed) -> None:
    record = dataclasses.replace(trace_record, trace="trace.json")
    root = parsed(render_ledger_html(record))
    assert titles(root) == [
        "Where the step goes", "By family", "Device use within the step", "Kernels that take most", "Findings",
        "By operator", "Notes", "What this stands on",
    ]  # fmt: skip
    assert root.all("title")[0].text == "flopwise analyze trace.json"
    cards = [card.text for card in root.all("div", "card")]
    assert cards[0] == "MFU 0.22 % of profiled steps · of 989.5 TFLOP/s a device"
    assert cards[1] == "step 1 ms profiled · each: 1 ms, 1 ms, 1 ms"
    assert cards[2] == "device busy 70 % compute, communication or a copy runs"
    assert root.section("Where the step goes").all("small")[0].text == (
        "mean of 3 profiled steps, in ms"
    )


def test_doubts_are_listed(trace_record: LedgerRecord, parsed: Parsed) -> None:
    record = dataclasses.replace(trace_record, trusted=False, untrusted_because=["<b>one", "two"])
    (verdict,) = parsed(render_ledger_html(record)).all("section", "verdict")
    assert verdict.text.startswith("Ledger not trusted : read its lines with care.")
    assert [doubt.text for doubt in verdict.all("li")] == ["<b>one", "two"]


def test_a_residual_that_cannot_fail_says_so(live: LedgerRecord, parsed: Parsed) -> None:
    assert live.live is not None
    guessed = dataclasses.replace(live.live, idle_from="the rest: causes are estimates")
    page = render_ledger_html(dataclasses.replace(live, live=guessed, residual_frac=0.0))
    assert parsed(page).all("section", "verdict")[0].text.endswith("residual 0 % by construction")


def test_nothing_can_be_loaded_or_run(trace_record: LedgerRecord, parsed: Parsed) -> None:
    page = render_ledger_html(trace_record)
    head = parsed(page).all("head")[0]
    policies = [m.attributes["content"] for m in head.all("meta") if "http-equiv" in m.attributes]
    (policy,) = policies
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"


def test_names_that_a_page_would_obey(
    training: Any, sample: Any, any_record: Any, parsed: Parsed
) -> None:
    from flopwise.diagnosis.ledger.build import ledger

    t = training(3, device=HOSTILE)
    for event in t.events:
        if event["name"] in ("aten::relu", "gemm", "relu"):
            event["name"] = HOSTILE + event["name"]
    record = dataclasses.replace(ledger(t.read()), trace=HOSTILE, notes=[HOSTILE])
    shown = r"""</script><script>alert(1)</script>"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"""
    root = parsed(render_ledger_html(record))
    assert root.all("h1")[0].text == f"flopwise analyze {shown}"
    assert root.section("Notes").all("li")[0].text == shown
    assert f"{shown}relu" in [code.text for code in root.all("code")]
    run = dataclasses.replace(
        sample("cpu"),
        command=[HOSTILE],
        script=HOSTILE,
        notes=[HOSTILE],
        ledger=record,
        plan=HOSTILE,
    )
    root = parsed(render_html(run))
    assert root.section("Notes").all("li")[0].text == shown


def test_endless_names_and_lists_are_cut(trace_record: LedgerRecord, parsed: Parsed) -> None:
    long = "<" * 1_000_000
    record = dataclasses.replace(
        trace_record,
        trace=long,
        notes=[long] * 300,
        untrusted_because=[long],
        trusted=False,
        operators=[dataclasses.replace(trace_record.operators[0], name=long)] * 300,
        hot=[dataclasses.replace(trace_record.hot[0], kernel=long, operator=long)] * 300,
        findings=[Finding(long, long, None, [long] * 300, long, long, None, long)] * 300,
    )
    page = render_ledger_html(record)
    assert len(page) < 2_000_000
    parsed(page)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_ledger_is_a_page(any_record: Any, parsed: Parsed, data: st.DataObject) -> None:
    parsed(render_ledger_html(data.draw(any_record(LedgerRecord))))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_run_is_a_page(any_record: Any, parsed: Parsed, data: st.DataObject) -> None:
    parsed(render_html(data.draw(any_record(RunRecord))))


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_has_nothing_to_complain_about(
    trace_record: LedgerRecord, sample: Any, tmp_path: Path
) -> None:
    record = dataclasses.replace(sample("two_ranks"), ledger=trace_record)
    long = "averyveryverylongnamewithoutanyplacetobreak" * 12
    kernels = [dataclasses.replace(one, kernel=long, operator=long) for one in trace_record.hot]
    wide = dataclasses.replace(trace_record, trace=long, notes=[long], hot=kernels)
    good = render_html(record)
    bad = good.replace("<body>", '<body><div style="width:900px">x</div><script>1</script>')
    pages = {"run": good, "wide": render_ledger_html(wide), "bad": bad}
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, "utf-8")
    frames = "".join(
        f'<iframe src="{name}.html" style="width:390px;height:200px;border:0"></iframe>'
        for name in pages
    )
    # the pages run no script: one around them tells by how much they are wider than a phone
    measure = (
        "onload=()=>{document.title=[...document.querySelectorAll('iframe')].map(f=>{"
        "const d=f.contentDocument.documentElement;return d.scrollWidth-d.clientWidth}).join(' ');}"
    )
    (tmp_path / "around.html").write_text(
        f"<!doctype html><title></title>{frames}<script>{measure}</script>", "utf-8"
    )
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,500",
            "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "around.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    over = done.stdout.partition("<title>")[2].partition("</title>")[0].split()
    assert over[:2] == ["0", "0"]
    assert int(over[2]) > 400  # so a page that is too wide would show
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(said) == 1, said  # of the bad page: its script was refused
    assert "bad.html" in said[0]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("scheme", ["0", "1"])
def test_a_browser_draws_it(trace_record: LedgerRecord, tmp_path: Path, scheme: str) -> None:
    (tmp_path / "page.html").write_text(render_ledger_html(trace_record), "utf-8")
    picture = tmp_path / "page.png"
    subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=800,600", f"--screenshot={picture}", (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (800, 600)
    assert len(data) > 10_000  # not one colour
