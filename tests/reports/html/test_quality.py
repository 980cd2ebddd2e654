"""Losses of longer runs as curves on a page, and nothing that acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.records.quality import Curve, Gap, Quality
from flopwise.records.verdict import TuneRecord
from flopwise.reports.html import quality, tables
from flopwise.reports.html.page import foot, page

Parsed = Callable[[str], Any]


@pytest.fixture
def found() -> Quality:
    old = Curve(0, [10, 20], [3.0, 1.0], [1.0, 2.0])
    new = Curve(0, [10, 20], [2.0, None], [0.5, 1.0])
    gap = Gap("worse", 1.0, 2.0, 1.0, 0.5, 1.5, 0.1, 5)
    return Quality("worse", "the loss is higher", 20, 20, 3, "so and so", ["FW104 x"], gap, old=[old], new=[new])  # fmt: skip


def drawn(record: TuneRecord) -> str:
    return page("x", [*quality.draw(record), foot("so")], tables.CSS + quality.CSS)


def test_curves_are_drawn_by_steps_and_by_time(sample: Any, parsed: Parsed, found: Quality) -> None:
    root = parsed(drawn(dataclasses.replace(sample("tune"), quality=found)))
    section = root.section("Loss with the plan and without")
    assert [h.text for h in section.all("h3")] == ["by steps", "by time"]
    assert section.all("div", "bad")[0].text.startswith("Quality worse · the loss is higher")
    by_step, by_time = section.all("svg")
    lines = [path.attributes["d"] for path in by_step.all("path")]
    assert lines == ["M500,0 L1000,320", "M500,160"]
    lines = [path.attributes["d"] for path in by_time.all("path")]
    assert lines == ["M500,0 L1000,320", "M250,160"]
    assert [key.text for key in section.all("li")] == ["as it is", "with the plan"]


def test_fixes_that_were_taken_out_have_a_section_of_their_own(
    sample: Any, parsed: Parsed, found: Quality
) -> None:
    root = parsed(drawn(dataclasses.replace(sample("tune"), quality=found, worse=found)))
    assert len(root.all("section")) == 2
    assert root.section("At first, with fixes that were taken out").all("svg")


def test_without_longer_runs_there_is_nothing(sample: Any) -> None:
    assert quality.draw(sample("tune")) == []


def test_without_a_loss_there_are_no_curves(sample: Any, parsed: Parsed, found: Quality) -> None:
    blind = dataclasses.replace(found, old=[Curve(0, [10], [None], [])], new=[], equal_steps=None)
    root = parsed(drawn(dataclasses.replace(sample("tune"), quality=blind)))
    assert not root.section("Loss").all("svg")


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
    max_examples=25,
)
@given(data=st.data())
def test_anything_in_a_record_is_shown_and_does_nothing(
    any_record: Any, parsed: Parsed, data: Any
) -> None:
    root = parsed(drawn(data.draw(any_record(TuneRecord))))
    assert len(root.all("footer")) == 1
