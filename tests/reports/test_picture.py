from __future__ import annotations

import dataclasses
import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from flopwise.reports.picture import render_svg
from flopwise.reports.terminal import render

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"


def test_picture_shows_the_report_and_loads_nothing(sample):
    svg = render_svg(sample("cpu"), title="<a> & b")
    words = " ".join(text.replace("\xa0", " ") for text in ET.fromstring(svg).itertext())
    assert "44.1 %" in words
    assert "<a> & b" in words
    assert "train_gpt.py" in words
    addresses = set(re.findall(r"https?://[^\s\"'<]+", svg))
    assert addresses == {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "font-face" not in svg


def test_picture_has_as_many_lines_as_the_report(sample):
    record = sample("unknown_gpu")
    svg = render_svg(record, width=80)
    report = render(record, width=80, color=False).splitlines()
    drawn = set(re.findall(r"clip-path=\"url\(#flopwise-line-(\d+)\)", svg))
    assert {int(n) for n in drawn} == set(range(len(report)))


def test_hostile_text_stays_text(sample):
    record = dataclasses.replace(
        sample("cpu"), notes=["<script>alert(1)</script> \x1b[2J & \udce9"]
    )
    svg = render_svg(record)
    ET.fromstring(svg)
    assert "<script" not in svg
    assert "\x1b" not in svg


def test_script_writes_the_picture(tmp_path):
    main = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))["main"]
    picture = tmp_path / "run.svg"
    assert main([str(DATA / "cpu.json"), str(picture)]) == 0
    ET.parse(picture)


def test_script_names_a_record_that_cannot_be_read(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))["main"]
    assert main([str(tmp_path / "none.json"), str(tmp_path / "run.svg")]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [40, 100])
def test_picture_is_the_same_every_time(sample, width):
    record = sample("two_ranks")
    assert render_svg(record, width=width) == render_svg(record, width=width)
