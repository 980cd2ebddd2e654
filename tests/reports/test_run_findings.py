"""The block of findings in a run report."""

from __future__ import annotations

import dataclasses

import pytest

from flopwise.records.finding import Alternative, Finding
from flopwise.reports.run_findings import SHOWN
from flopwise.reports.terminal import render

ANOMALY = Finding(
    "D301", "debug-switch", None, ["train.py:3"], "anomaly detection is on", "switch it off", None, "seen"
)  # fmt: skip
WAIT = Finding(
    "D101", "input-wait", 0.514, ["train.py:9", "a.py:1", "b.py:2", "c.py:3"],
    "the step waits for data", "load in workers", 0.25, "measured",
)  # fmt: skip


def report(record, findings, width=100):
    shown = dataclasses.replace(record, findings=findings)
    return render(shown, width=width, color=False).splitlines()


def test_findings_stand_behind_the_results_in_the_order_of_the_record(sample):
    text = report(sample("cpu"), [ANOMALY, WAIT])
    at = text.index("  findings, most urgent first")
    assert text[at + 1 : at + 8] == [
        "  1           D301 debug-switch · cost not measured · seen · train.py:3",
        "              anomaly detection is on",
        "              do: switch it off",
        "  2           D101 input-wait · 51.4 % of the time · predicted 25 % less time without it · measured",
        "              train.py:9, a.py:1, b.py:2 and 1 more",
        "              the step waits for data",
        "              do: load in workers",
    ]
    assert at < next(n for n, line in enumerate(text) if line.startswith("  peak"))


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (0.0, None),
        (1e-16, None),
        (0.006, "predicted 0.60 % less time without it"),
        (None, None),
    ],
)
def test_of_a_gain_of_nothing_nothing_is_said(sample, gain, said):
    found = dataclasses.replace(WAIT, predicted_gain_frac=gain, where=[])
    line = next(line for line in report(sample("cpu"), [found], 160) if "D101" in line)
    assert line.split(" · ")[1:] == ["51.4 % of the time", *([said] if said else []), "measured"]


def test_another_cure_has_its_own_prediction(sample):
    other = dataclasses.replace(
        WAIT, alternatives=[Alternative("read ahead", 0.1), Alternative("read less", None)]
    )
    text = report(sample("cpu"), [other])
    at = text.index("              do: load in workers")
    assert text[at + 1 : at + 3] == [
        "              or: read ahead · predicted 10 % less time so",
        "              or: read less",
    ]


def test_no_findings_no_block(sample):
    assert report(sample("cpu"), []) == render(sample("cpu"), width=100, color=False).splitlines()


@pytest.mark.parametrize(
    ("n", "said"), [(SHOWN, None), (SHOWN + 2, "  2 more findings in the JSON")]
)
def test_a_long_list_is_cut_and_says_so(sample, n, said):
    text = report(sample("cpu"), [ANOMALY] * n)
    assert sum("D301" in line for line in text) == SHOWN
    assert ("more finding" in "\n".join(text)) == (said is not None)
    assert said is None or said in text


def test_escape_sequences_in_a_place_are_not_obeyed(sample):
    hostile = dataclasses.replace(ANOMALY, where=["\x1b[2Jx.py:1"])
    assert "\x1b" not in "\n".join(report(sample("cpu"), [hostile]))
