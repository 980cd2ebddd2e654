"""The heat map: its picture, the band of the mean step, and the dips."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from flopwise.records.ledger import Dip, Heat, LedgerRecord
from flopwise.reports.html import render_ledger_html
from flopwise.reports.html.heatmap import CAUSES, WORDS
from flopwise.trace.idle import CAUSES as IDLE_CAUSES

Parsed = Callable[[str], Any]
TITLE = "Device use within the step"


@pytest.fixture
def section(trace_record: LedgerRecord, parsed: Parsed) -> Callable[[Heat], Any]:
    def draw(heat: Heat) -> Any:
        record = dataclasses.replace(trace_record, heat=heat)
        return parsed(render_ledger_html(record)).section(TITLE)

    return draw


HEAT = Heat(
    bins=4,
    step_s=[1e-3, 2e-3],
    busy=[[1.0, 0.5, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]],
    mean={
        "compute": [1.0, 0.75, 0.0, 0.5],
        "idle_input": [0.0, 0.25, 1.0, 0.25],
        "idle_sync": [0.0, 0.0, 0.0, 0.25],
        "copy": [0.0] * 4,
    },
    dips=[
        Dip(0.5, 1.0, 0.75, 0.375, "input", ["train.py:<9>"]),
        Dip(0.25, 0.5, 0.25, 0.0625, "?", []),
    ],
)


def test_the_picture_has_a_row_a_step(section: Callable[[Heat], Any]) -> None:
    (image,) = section(HEAT).all("img")
    data = base64.b64decode(image.attributes["src"].partition(",")[2])
    at = data.index(b"IDAT")
    lines = zlib.decompress(data[at + 4 : data.index(b"IEND") - 8])
    assert lines == bytes([0, 255, 128, 0, 255, 0, 255, 255, 0, 0])
    assert image.attributes["alt"] == "Device use of 2 steps; the first is on top"


def test_the_band_stacks_what_is_there(section: Callable[[Heat], Any]) -> None:
    found = section(HEAT)
    band = found.all("svg", "profile")[0]
    assert band.attributes["viewbox"] == "0 0 4 100"
    paths = {path.attributes["class"]: path.attributes["d"] for path in band.all("path")}
    assert list(paths) == ["compute", "idle_sync", "idle_input"]
    assert paths["compute"] == "M0 100V0H1V25H2V100H3V50H4V100H3V100H2V100H1V100H0Z"
    assert paths["idle_sync"] == "M0 0V0H1V25H2V100H3V25H4V50H3V100H2V25H1V0H0Z"
    keys = [key.text for key in found.all("ul", "keys")[0].all("li")]
    assert keys == ["compute", WORDS["idle_sync"], WORDS["idle_input"]]


def test_each_bin_tells_its_shares(section: Callable[[Heat], Any]) -> None:
    titles = [title.text for title in section(HEAT).all("title")]
    assert titles == [
        "0 to 25 % of the step: compute 100%",
        "25 to 50 % of the step: compute 75%, idle: input 25%",
        "50 to 75 % of the step: idle: input 100%",
        "75 to 100 % of the step: compute 50%, idle: sync 25%, idle: input 25%",
    ]


def test_dips_have_marks_and_rows(section: Callable[[Heat], Any]) -> None:
    found = section(HEAT)
    assert found.rows()[1:] == [
        ["1", "50 to 100", "75.0", "37.5", "waiting for data", "train.py:<9>"],
        ["2", "25 to 50", "25.0", "6.2", "?", "-"],
    ]
    marks = [
        (rect.attributes["class"], rect.attributes["x"], rect.attributes["width"])
        for rect in found.all("svg", "marks")[0].all("rect")
    ]
    assert marks == [("idle_input", "50%", "50%"), ("idle_other", "25%", "25%")]


def test_without_places_there_is_no_column_for_them(section: Callable[[Heat], Any]) -> None:
    found = section(dataclasses.replace(HEAT, dips=[dataclasses.replace(HEAT.dips[0], where=[])]))
    assert found.rows()[1] == ["1", "50 to 100", "75.0", "37.5", "waiting for data"]


def test_no_dip_says_so(section: Callable[[Heat], Any]) -> None:
    text = section(dataclasses.replace(HEAT, dips=[])).text
    assert "No stretch of the step is idle in most steps." in text


def test_no_heat_no_section(trace_record: LedgerRecord) -> None:
    assert TITLE not in render_ledger_html(dataclasses.replace(trace_record, heat=None))
    empty = Heat(0, [], [], {}, [])
    assert TITLE not in render_ledger_html(dataclasses.replace(trace_record, heat=empty))


def test_a_record_that_does_not_fit_together_is_drawn(section: Callable[[Heat], Any]) -> None:
    nan, inf = float("nan"), float("inf")
    mean = {"compute": [0.5] * 9, "idle_sync": [nan, inf, -1.0], "mine": [1.0]}
    odd = Heat(
        3, [nan], [[nan, inf], [], [2.0] * 999], mean, [Dip(nan, inf, -1, 2, "x", ["y"] * 99)]
    )
    assert len(section(odd).all("rect", "hover")) == 9


def test_many_steps_stay_small(trace_record: LedgerRecord) -> None:
    busy = [[(i * j % 97) / 97 for j in range(100)] for i in range(64)]
    mean = {name: [1 / len(WORDS)] * 100 for name in WORDS}
    heat = Heat(100, [1e-3] * 64, busy, mean, HEAT.dips)
    assert len(render_ledger_html(dataclasses.replace(trace_record, heat=heat))) < 100_000


def test_every_cause_has_words() -> None:
    assert set(CAUSES) == set(IDLE_CAUSES)
    assert {f"idle_{cause}" for cause in CAUSES} < set(WORDS)
