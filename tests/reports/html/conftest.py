"""A page as it is parsed, and records to draw."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest

from flopwise.diagnosis.ledger.build import ledger
from flopwise.records.ledger import LedgerRecord, Line

VOID = {"meta", "br", "img", "wbr"}


@dataclass
class Element:
    """One element with what is in it."""

    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it, the parts of cells apart."""
        parts = [one if isinstance(one, str) else one.text for one in self.children]
        return " ".join(" ".join(parts).split())

    def all(self, name: str = "", kind: str = "") -> list[Element]:
        """Elements within, by name and class."""
        found = []
        for one in self.children:
            if isinstance(one, Element):
                classes = one.attributes.get("class", "").split()
                if name in ("", one.name) and (not kind or kind in classes):
                    found.append(one)
                found += one.all(name, kind)
        return found

    def section(self, title: str) -> Element:
        """The section with this title."""
        (found,) = (
            s for s in self.all("section") if any(h.text.startswith(title) for h in s.all("h2"))
        )
        return found

    def rows(self) -> list[list[str]]:
        """The texts of the cells of tables, row by row."""
        return [[c.text for c in row.children if isinstance(c, Element)] for row in self.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


@pytest.fixture(scope="session")
def parsed() -> Callable[[str], Element]:
    """Returns a function from a page to its root; every element is closed, and only what we draw is there."""

    def read(page: str) -> Element:
        page.encode("utf-8")
        reader = _Reader()
        reader.feed(page)
        reader.close()
        assert reader.open == [reader.root]
        check(reader.root)
        return reader.root

    return read


ELEMENTS = """
html head meta title style body header footer section article h1 h2 h3 p b small span div code table thead tbody tr th td
ul li dl dt dd svg rect path text img
"""
ATTRIBUTES = """
class title lang charset name content http-equiv viewbox preserveaspectratio aria-hidden role x y width height d src alt
style font-size text-anchor fill colspan
"""
#: What must not reach a reader as it is: control characters, direction marks, separators, lone surrogates.
HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]"
)


def check(root: Element) -> None:
    """Nothing that loads, runs or hides is in a page."""
    for element in root.all():
        assert element.name in ELEMENTS.split()
        assert set(element.attributes) <= set(ATTRIBUTES.split()), element.attributes
        assert element.attributes.get("style", "height:1px").startswith("height:")
        assert element.attributes.get("src", "data:image/png").startswith(
            "data:image/png;base64,"
        ) or ("src" not in element.attributes)
        for value in element.attributes.values():
            assert not HIDDEN.search(value)
    (style,) = root.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    for text in texts(root):
        assert not HIDDEN.search(text), text


def texts(element: Element) -> list[str]:
    """All pieces of text."""
    return [
        piece
        for one in element.children
        for piece in ([one] if isinstance(one, str) else texts(one))
    ]


@pytest.fixture
def trace_record(training: Any) -> LedgerRecord:
    """The ledger of a trace with steps of 1 ms: its own hot kernels, heat map and partition; lines that are given."""
    made = [
        ("ideal", "useful", 2.17e-6),
        ("gemm_excess", "memory", 397.83e-6),
        ("optimizer", "optimizer", 100e-6),
        ("memory_bound", "memory", 100e-6),
        ("memory_excess", "memory", 100e-6),
        ("idle_device", "pipeline", 300e-6),
    ]
    lines = [Line(name, family, s, (s, s), s / 1e-3, s / 1e-5) for name, family, s in made]
    families: dict[str, float] = {}
    for _, family, s in made:
        families[family] = families.get(family, 0.0) + s
    found = ledger(training(4).read())
    return dataclasses.replace(
        found, lines=lines, families=families, findings=[], notes=["a note"], trusted=True, untrusted_because=[],
        step_s=1e-3, mfu=0.00217,
    )  # fmt: skip
