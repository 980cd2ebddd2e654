"""The report of a ledger: whole, at any width, in ASCII, with hostile names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.build import ledger
from flopwise.records.ledger import FAMILIES, LedgerRecord, Live, Profiled
from flopwise.reports.ledger import WORDS, draw_live
from flopwise.reports.screen import Screen
from flopwise.reports.terminal import render

WHOLE = """\
flopwise analyze trace.json
device 0: NVIDIA H200 · 3 steps of 4, ended by the optimizer · rank 3 of 8

  MFU         0.22 % · of 989.5 TFLOP/s · data sheet
  step        1 ms · profiled · each: 1 ms, 1 ms, 1 ms
  device busy 70 %
  known cost  100 % of kernel time

  where the step goes
                                                 a step  95 %    share
  useful work                        ▏          2.17 µs         0.22 %
  hardware: what the device reaches  ▏           533 ns        0.053 %
  products: above their floor        ████████  397.3 µs         39.7 %
  optimizer                          ██          100 µs           10 %
  memory: bytes at full bandwidth    ██          100 µs           10 %
  memory: above that                 ██          100 µs           10 %
  idle: between queued kernels       ██████      300 µs           30 %
  step                                             1 ms          100 %

  by operator, the largest
  operator    calls  a step  share
  aten::mm        1  400 µs   40 %
  aten::relu      1  200 µs   20 %
  aten::add_      1  100 µs   10 %

  event span  4 ms from the first device event to the last · compute 70 %
              exposed communication 0 % · exposed copies 0 % · idle 30 %

  note        the steps were profiled: without undisturbed ones beside them, how
              much the profiler stretched them is not known; host-bound steps
              can be twice as long under it
  note        the first step is left out: the trace does not show when the
              device began it
  note        optimizer: of 0.1 ms a step its bytes need 0.1 ms at full
              bandwidth
  note        ceilings: bf16 794.5, fp8 1453.4 TFLOP/s, the best matrix products
              by stas00/ml-engineering@744d01e compute/accelerator/README.md,
              MAMF

  saved       ledger.json
"""


@pytest.fixture
def record(training: Any) -> LedgerRecord:
    t = training(4)
    t.header["distributedInfo"] = {"rank": 3, "world_size": 8}
    found = ledger(t.read())
    return dataclasses.replace(found, trace="trace.json", peak_source="data sheet")


def test_every_line_has_words() -> None:
    assert list(WORDS) == list(FAMILIES)


def test_the_whole_report(record: LedgerRecord) -> None:
    text = render(record, width=80, color=False, saved=["ledger.json"])
    assert text == WHOLE


@pytest.mark.parametrize("width", [40, 70, 100, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_never_wider_than_it_was_told(record: LedgerRecord, width: int, ascii_only: bool) -> None:
    doubted = dataclasses.replace(
        record, untrusted_because=["a long doubt " * 20], notes=["a note"], trusted=False
    )
    text = render(doubted, width=width, color=False, ascii_only=ascii_only, saved=["x.json"])
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.isascii() is ascii_only
    flat = " ".join(text.split())
    for words in ("useful work", "39.7 %", "aten::mm", "event", "not trusted", "x.json"):
        assert words in flat


def test_no_mfu_gives_its_reason(record: LedgerRecord) -> None:
    text = render(
        dataclasses.replace(record, mfu=None, mfu_reason="no peak is known"), width=100, color=False
    )
    assert "  MFU         none · no peak is known\n" in text


def test_busy_time_as_a_range(record: LedgerRecord) -> None:
    text = render(dataclasses.replace(record, busy_most_frac=0.9), width=100, color=False)
    assert "  device busy 70 % to 90 %, by how long the unusable kernels ran\n" in text
    same = render(dataclasses.replace(record, busy_most_frac=0.700001), width=100, color=False)
    assert "  device busy 70 %\n" in same


def test_a_world_of_which_the_rank_is_not_known(record: LedgerRecord) -> None:
    text = render(dataclasses.replace(record, rank=None), width=100, color=False)
    assert "rank" not in text.splitlines()[1]


def test_colour_is_only_ours(record: LedgerRecord) -> None:
    assert "\x1b[" in render(record, width=100, color=True)
    assert "\x1b" not in render(record, width=100, color=False)


HOSTILE = "\x1b[31m\x1b]0;title\x07\r\n\u202e[bold]\ud800漢"


@pytest.mark.parametrize("width", [40, 100])
def test_names_that_a_terminal_would_obey(training: Any, width: int) -> None:
    t = training(3, device=HOSTILE)
    for event in t.events:
        if event["name"] in ("aten::relu", "aten::mm", "gemm"):
            event["name"] = HOSTILE + event["name"]
    found = dataclasses.replace(ledger(t.read()), trace=HOSTILE)
    text = render(found, width=width, color=False)
    assert not set(text) & set("\x1b\x07\r\u202e\ud800")
    text.encode("utf-8")
    assert "[bold]" in "".join(text.split())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data(), width=st.integers(40, 200), ascii_only=st.booleans())
def test_any_record_can_be_drawn(
    any_record: Any, data: st.DataObject, width: int, ascii_only: bool
) -> None:
    record = data.draw(any_record(LedgerRecord))
    text = render(record, width=width, color=False, ascii_only=ascii_only)
    text.encode("utf-8")
    assert "\x1b" not in text


WINDOWS = Live(
    step_s=1e-3,
    step_s_ci95=None,
    steps=50,
    windows=[Profiled("light", 32, 1.2e-3, 0.4), Profiled("heavy", 10, None, 0.6)],
    idle_from="the light window",
    after_step_s=1.01e-3,
    after_frac=0.01,
    after_ci95=(-0.002, 0.022),
    torn_down="yes",
)


def drawn(record: LedgerRecord) -> str:
    screen = Screen(110)
    draw_live(screen, record)
    return " ".join(screen.render(color=False).split())


@pytest.fixture
def live(training: Any) -> LedgerRecord:
    record = ledger(training(4).read())
    return dataclasses.replace(record, live=WINDOWS, residual_frac=0.004, profiled=False)


def test_the_part_of_a_run_tells_of_its_windows(live: LedgerRecord) -> None:
    text = drawn(live)
    assert "where the step goes" in text
    assert "ledger trusted · residual 0.40 % · 100 % of kernel time has a known cost" in text
    assert "light: 32 steps of 1.20 ms · heavy: 10 steps ·" in text
    assert "opening, closing and writing them took 1 s, once" in text
    assert "idle time from the light window" in text
    assert "afterwards a step takes 1.01 ms · +1 % (-0.2 to +2.2, 95 %)" in text
    assert "stays attached" not in text


def test_what_is_not_known_of_a_run_is_said(live: LedgerRecord) -> None:
    changed = dataclasses.replace(
        WINDOWS,
        idle_from="the undisturbed step less the busy time of the light window: causes are estimates",
        torn_down="no: CUDA graphs are in use",
        after_ci95=None,
    )
    doubted = dataclasses.replace(live, live=changed, trusted=False, untrusted_because=["why"])
    assert "by construction" not in drawn(doubted)
    text = drawn(dataclasses.replace(doubted, residual_frac=0.0))
    assert "ledger not trusted · residual 0 %, by construction" in text
    assert "why" in text
    assert "+1 % · the profiler stays attached: CUDA graphs are in use" in text
    cut = dataclasses.replace(WINDOWS, after_step_s=None, after_frac=None, after_ci95=None)
    text = drawn(dataclasses.replace(live, live=cut))
    assert "the script ended before steps could be timed after them" in text
    assert "where the step goes" in drawn(dataclasses.replace(live, live=None))
