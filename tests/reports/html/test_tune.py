"""The page of a tune: what is on it, that nothing in a record can act in it, and any record at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.records.verdict import Saved, TuneRecord, Write
from flopwise.reports.html import render_tune_html

Parsed = Callable[[str], Any]

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"
SHOWN = r"""</script><script>alert(1)</script>"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"""


def titles(root: Any) -> list[str]:
    return [next(c for c in h.children if isinstance(c, str)) for h in root.all("h2")]


def test_a_whole_tune(sample: Any, parsed: Parsed) -> None:
    root = parsed(render_tune_html(sample("tune_whole")))
    assert titles(root) == [
        "What the plan saves", "Where the step goes, before and after", "Fixes", "What the tune cost", "Go on", "Notes",
    ]  # fmt: skip
    cards = [card.text for card in root.all("div", "card")]
    assert cards[0] == "before 370.5 ms 3.60 % MFU · 33.2 k real tokens/s"
    assert cards[1] == "after 33.8 ms 39.5 % MFU · 363.6 k real tokens/s"
    assert cards[2].startswith("gain 10.96x as fast")
    assert root.all("section", "verdict")[0].text.startswith("Proven in fresh processes")
    saved = root.section("What the plan saves").rows()
    assert [row[0] for row in saved] == ["a step", "time", "energy", "money, 1,000 steps"]
    assert saved[1] == ["time", "370.5 ms", "33.8 ms", "336.7 ms", "1 h 10 min", "3 h 44 min"]
    lines = root.section("Where the step goes, before and after").rows()
    assert lines[2] == ["precision: slower dtype than 16 bit", "", "180.1 ms", "0 ns", "-180.1 ms ± 1.2", "bf16-autocast"]  # fmt: skip
    assert lines[-1] == ["step", "", "369.8 ms", "33.9 ms", "-335.9 ms", ""]
    fixes = root.section("Fixes").rows()
    assert fixes[1] == [
        "FW104 bf16-autocast", "kept", "0.4149 (0.4102 to 0.4197)", "0.5200", "216.8 ms", "lossy", "faster and within the bound",
    ]  # fmt: skip
    assert root.all("p", "command")[0].text == "flopwise run --plan runs/t1/plan.toml train_bert.py"


def test_what_there_is_not_has_no_place_and_no_claim(sample: Any, parsed: Parsed) -> None:
    root = parsed(render_tune_html(sample("tune_nothing")))
    assert "What the plan saves" not in titles(root)
    assert "Where the step goes, before and after" not in titles(root)
    assert root.all("section", "verdict")[0].text.startswith("Not proven")
    record = dataclasses.replace(sample("tune"), ledgers_reason="no time was left")
    root = parsed(render_tune_html(record))
    assert root.all("section", "verdict")[1].text == "No ledgers to compare : no time was left"


def test_a_control_that_fails_takes_the_word_proven_away(sample: Any, parsed: Parsed) -> None:
    record = sample("tune_whole")
    alarm = dataclasses.replace(record.aa, outcome="faster", ratio=0.97, ci95=(0.96, 0.98))
    root = parsed(render_tune_html(dataclasses.replace(record, aa=alarm)))
    assert root.all("section", "verdict")[0].text.startswith("Not proven")
    assert "two equal arms differ" in root.all("section", "verdict")[0].text


def test_nothing_can_be_loaded_or_run(sample: Any, parsed: Parsed) -> None:
    page = render_tune_html(sample("tune_whole"))
    policies = [m.attributes.get("content", "") for m in parsed(page).all("meta")]
    assert any(p.startswith("default-src 'none'; style-src 'unsafe-inline'") for p in policies)
    assert "://" not in page
    assert "<script" not in page


def test_text_of_a_record_is_shown_and_never_obeyed(sample: Any, parsed: Parsed) -> None:
    record = sample("tune_whole")
    trial = dataclasses.replace(
        record.trials[0], fix=HOSTILE, name=HOSTILE, verdict=HOSTILE, reason=HOSTILE, setting={HOSTILE: HOSTILE},
        parity=dataclasses.replace(record.trials[0].parity, numerics=HOSTILE),
    )  # fmt: skip
    line = dataclasses.replace(record.ledgers.lines[0], name=HOSTILE, family=HOSTILE)
    work = dataclasses.replace(record.proof.work, unit=HOSTILE, note=HOSTILE, mfu_reason=HOSTILE)
    saved = dataclasses.replace(
        record.savings, energy=HOSTILE, epoch=HOSTILE, saved=[Saved(HOSTILE, 1, 1, 1, 1)]
    )
    bad = dataclasses.replace(
        record,
        command=["flopwise", "tune", HOSTILE],
        script=HOSTILE,
        plan=HOSTILE,
        resume=HOSTILE,
        created=HOSTILE,
        flopwise=HOSTILE,
        notes=[HOSTILE],
        kept=[HOSTILE, HOSTILE],
        trials=[trial],
        writes=[Write(HOSTILE, "changed in spite of it", 1)],
        savings=saved,
        proof=dataclasses.replace(record.proof, work=work, losses=HOSTILE),
        ledgers=dataclasses.replace(
            record.ledgers, lines=[line], credits={HOSTILE: [HOSTILE]}, doubts=[HOSTILE]
        ),
    )
    page = render_tune_html(bad)
    assert "<script" not in page
    assert "<img" not in page
    assert not any(c in page for c in "\x00\x1b\u202e\ud800")
    root = parsed(page)
    assert root.section("Notes").all("li")[0].text == SHOWN
    assert root.section("Fixes").rows()[1][0] == f"{SHOWN} {SHOWN}"
    assert root.section("Where the step goes, before and after").rows()[1][-1] == SHOWN
    command = root.all("p", "command")[0].text
    assert command.startswith("flopwise run --plan '</script><script>alert(1)</script>\"'")


def test_endless_lists_are_cut(sample: Any, parsed: Parsed) -> None:
    record = sample("tune_whole")
    long = "<" * 100_000
    many = dataclasses.replace(
        record,
        notes=[long] * 300,
        trials=[dataclasses.replace(record.trials[0], reason=long)] * 300,
        ledgers=dataclasses.replace(
            record.ledgers, lines=record.ledgers.lines * 100, doubts=[long] * 300
        ),
    )
    page = render_tune_html(many)
    assert len(page) < 2_000_000
    parsed(page)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_tune_is_a_page(any_record: Any, parsed: Parsed, data: st.DataObject) -> None:
    page = render_tune_html(data.draw(any_record(TuneRecord)))
    parsed(page)
    assert "<script" not in page


@pytest.mark.parametrize("name", ["tune", "tune_nothing", "tune_whole"])
def test_the_samples_are_pages(sample: Any, parsed: Parsed, name: str) -> None:
    parsed(render_tune_html(sample(name)))
