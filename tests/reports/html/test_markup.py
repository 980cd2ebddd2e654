"""Markup: escaping is the default."""

from __future__ import annotations

import html

from hypothesis import given
from hypothesis import strategies as st

from flopwise.reports.html.markup import Html, el, number, pieces, share, text, trusted
from flopwise.reports.screen import WARN


def test_text_is_escaped_and_markup_is_not() -> None:
    assert el("p", "a < b", el("b", "&")) == "<p>a &lt; b<b>&amp;</b></p>"
    assert el("p", trusted("<i></i>")) == "<p><i></i></p>"
    assert isinstance(el("p"), Html)


def test_classes_attributes_and_what_is_left_out() -> None:
    made = el(
        "td.num.err", None, ["x", ["y"]], title='"<', width=1.5, height=None, aria_hidden="true"
    )
    assert made == '<td class="num err" title="&quot;&lt;" width="1.5" aria-hidden="true">xy</td>'
    assert el("br") == "<br>"


def test_what_would_mislead_is_shown() -> None:
    assert text("a\x00\x1b[1m\u202eb\ud800\r\n") == r"a\x00\x1b[1m\u202eb\ud800\r\n"


def test_long_text_is_cut() -> None:
    assert text("x" * 10**6, 5) == "xxxxx…"
    assert len(el("p", "&" * 10**6)) < 4000


@given(st.text(st.characters()))
def test_any_text_is_only_text(value: str) -> None:
    made = text(value)
    made.encode("utf-8")
    assert not set(made) & set("<>\"'")
    assert html.escape(html.unescape(made), quote=True) == made


def test_numbers_are_coordinates() -> None:
    shown = [number(v) for v in (1, 0.12345, -2.50, float("nan"), float("inf"), 1e300, 10)]
    assert shown == ["1", "0.123", "-2.5", "0", "0", "0", "10"]


@given(st.floats())
def test_a_share_is_one(value: float) -> None:
    assert 0 <= share(value) <= 1


def test_pieces_keep_their_weight() -> None:
    made = pieces(["a<", ("b", WARN), ("c", "bold")])
    dot = '<span class="dot"> · </span>'
    assert made == f'<span>a&lt;</span>{dot}<span class="warn">b</span>{dot}<b>c</b>'
