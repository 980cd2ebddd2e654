"""Findings: cost, gain, places and what to do; each of them may be missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flopwise.records.finding import Alternative, Finding
from flopwise.reports.html.findings import PLACES, SHOWN, draw
from flopwise.reports.html.markup import Html, el

WHOLE = Finding(
    "L101", "input-wait", 0.72, ["a.py:1", "b.py:2"], "seen <so>", "workers=4", 0.25, "measured"
)


def cards(parsed: Callable[[str], Any], *findings: Finding) -> Any:
    page = el("html", el("style"), draw(findings))
    return parsed(Html(page))


def test_all_of_it(parsed: Callable[[str], Any]) -> None:
    (found,) = cards(parsed, WHOLE).all("article")
    assert found.text == (
        "1 input wait L101 72 % of the time measured predicted 1.33x as fast without it seen <so> a.py:1 b.py:2 Do: workers=4"
    )


def test_what_is_not_known_is_not_drawn(parsed: Callable[[str], Any]) -> None:
    bare = Finding("D1", "odd", None, [], "", "", None, "seen")
    (found,) = cards(parsed, bare).all("article")
    assert found.text == "1 odd D1 cost not measured seen"


def test_a_replay_that_gains_nothing(parsed: Callable[[str], Any]) -> None:
    (found,) = cards(parsed, dataclasses.replace(WHOLE, predicted_gain_frac=0.001)).all("article")
    assert found.all("span", "gain") == []
    assert "without it" not in found.text


def test_other_cures(parsed: Callable[[str], Any]) -> None:
    others = [Alternative("<read> ahead", 0.5), Alternative("read less", None)]
    (found,) = cards(parsed, dataclasses.replace(WHOLE, alternatives=others)).all("article")
    assert found.text.endswith(
        "Do: workers=4 Or: <read> ahead (predicted 2.00x as fast) Or: read less"
    )


def test_the_order_is_the_records_and_long_lists_are_cut(parsed: Callable[[str], Any]) -> None:
    many = [Finding(f"C{i}", "x", None, ["p.py:1"] * 9, "", "", None, "seen") for i in range(40)]
    root = cards(parsed, *many)
    found = root.all("article")
    assert [card.all("span")[1].text for card in found] == [f"C{i}" for i in range(SHOWN)]
    assert len(found[0].all("code")) == PLACES
    assert "and 3 more" in found[0].text
    assert root.text.endswith("10 more findings in the JSON")


def test_none(parsed: Callable[[str], Any]) -> None:
    assert cards(parsed).text == "Findings Nothing was found that costs time."
