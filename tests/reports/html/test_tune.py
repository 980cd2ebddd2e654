"""The page of a tune: what the terminal shows, the losses of longer runs as curves, and nothing that acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.records.quality import Curve, Gap, Quality
from flopwise.records.verdict import TuneRecord
from flopwise.reports.html import render_tune_html

Parsed = Callable[[str], Any]


@pytest.fixture
def found() -> Quality:
    old = Curve(0, [10, 20], [3.0, 1.0], [1.0, 2.0])
    new = Curve(0, [10, 20], [2.0, None], [0.5, 1.0])
    gap = Gap("worse", 1.0, 2.0, 1.0, 0.5, 1.5, 0.1, 5)
    return Quality("worse", "the loss is higher", 20, 20, 3, "so and so", ["FW104 x"], gap, old=[old], new=[new])  # fmt: skip


def test_before_after_proof_and_every_fix_are_on_the_page(sample: Any, parsed: Parsed) -> None:
    record = sample("tune")
    page = parsed(render_tune_html(record))
    cards = [card.text for card in page.all("div", "card")]
    assert [text.split()[0] for text in cards] == ["before", "after"]
    assert "fresh processes an arm" in page.text
    rows = page.section("Fixes").rows()
    assert [row[0] for row in rows[1:]] == [f"{t.fix} {t.name}" for t in record.trials]
    assert not any("Loss" in h.text for h in page.all("h2"))


def test_curves_are_drawn_by_steps_and_by_time(sample: Any, parsed: Parsed, found: Quality) -> None:
    page = parsed(render_tune_html(dataclasses.replace(sample("tune"), quality=found)))
    section = page.section("Loss with the plan and without")
    assert [h.text for h in section.all("h3")] == ["by steps", "by time"]
    assert section.all("div", "bad")[0].text.startswith("Quality worse · the loss is higher")
    by_step, by_time = section.all("svg")
    assert [path.attributes["d"] for path in by_step.all("path")] == [
        "M500,0 L1000,320",
        "M500,160",
    ]
    assert [path.attributes["d"] for path in by_time.all("path")] == [
        "M500,0 L1000,320",
        "M250,160",
    ]
    assert [key.text for key in section.all("li")] == ["as it is", "with the plan"]


def test_without_a_loss_there_are_no_curves(sample: Any, parsed: Parsed, found: Quality) -> None:
    blind = dataclasses.replace(found, old=[Curve(0, [10], [None], [])], new=[], equal_steps=None)
    page = parsed(render_tune_html(dataclasses.replace(sample("tune"), quality=blind)))
    assert not page.section("Loss").all("svg")


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
    max_examples=25,
)
@given(data=st.data())
def test_anything_in_a_record_is_shown_and_does_nothing(
    any_record: Any, parsed: Parsed, data: Any
) -> None:
    page = parsed(render_tune_html(data.draw(any_record(TuneRecord))))
    assert len(page.all("footer")) == 1
