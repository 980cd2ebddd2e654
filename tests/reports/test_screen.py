from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.reports.screen import Column, Screen, bar, visible


def page(screen: Screen) -> list[str]:
    return screen.render(color=False).splitlines()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain / text [b]", "plain / text [b]"),
        ("\x1b[31m", r"\x1b[31m"),
        ("a\nb\tc\r\x07\x7f\x9b", r"a\nb\tc\r\x07\x7f\x9b"),
        ("\u202e\u200b\u2066\ufeff", r"\u202e\u200b\u2066\ufeff"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\udce9", r"\udce9"),
        ("\xa0\u3000", "  "),
        ("é漢µ±█", "é漢µ±█"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text, shown):
    assert visible(text, ascii_only=False) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("37 µs ± 1 · 61 °C…", "37 us +- 1 | 61 C..."), ("██▌", "###"), ("█▏", "#."), ("é", r"\xe9")],
)
def test_ascii_has_its_own_signs_and_escapes_the_rest(text, shown):
    assert visible(text, ascii_only=True) == shown


@pytest.mark.parametrize(
    ("frac", "drawn"),
    [(0.0, ""), (1e-9, "▏"), (0.5, "█████"), (0.55, "█████▌"), (1.0, "█" * 10), (7.0, "█" * 10)]
    + [(-1.0, ""), (float("nan"), ""), (float("inf"), "█" * 10)],
)
def test_bar_is_in_proportion_and_leaves_a_trace(frac, drawn):
    assert bar(frac, 10) == drawn


def test_flow_breaks_between_items_and_keeps_the_label_column():
    screen = Screen(40)
    screen.flow("step", ["370.5 ms", "median 370.1 ms", "host clock"])
    screen.flow("none", [])
    assert page(screen) == [
        "  step        370.5 ms · median 370.1 ms",
        "              host clock",
    ]


def test_heading_stands_on_one_line_where_there_is_room():
    wide, narrow = Screen(60), Screen(40)
    for screen in (wide, narrow):
        screen.heading("flopwise run train.py", ["1 x H200", "torch 2.11"])
    assert page(wide) == ["flopwise run train.py" + " " * 18 + "1 x H200 · torch 2.11"]
    assert page(narrow) == ["flopwise run train.py", "1 x H200 · torch 2.11"]


def test_heading_cuts_a_command_that_would_fill_the_screen():
    screen = Screen(40)
    screen.heading("x" * 1000, ["facts"])
    assert page(screen) == ["x" * 40, "x" * 40, "x" * 39 + "…", "facts"]


COLUMNS = [
    Column("rank", right=True),
    Column("host", drop=2),
    Column("device", drop=1),
    Column("status", tail=True),
]
ROWS = [["0", "node-with-a-name", "cuda:0 NVIDIA H200", "complete"], ["12", "b", "cpu", "partial"]]


def test_table_drops_columns_before_it_wraps_and_moves_the_tail_below():
    wide, narrow = Screen(80), Screen(40)
    for screen in (wide, narrow):
        screen.table(COLUMNS, ROWS)
    assert page(wide) == [
        "  rank  host              device              status",
        "     0  node-with-a-name  cuda:0 NVIDIA H200  complete",
        "    12  b                 cpu                 partial",
    ]
    assert page(narrow) == [
        "  rank  device",
        "     0  cuda:0 NVIDIA H200",
        "      complete",
        "    12  cpu",
        "      partial",
    ]


def test_table_without_titles_has_no_title_line():
    screen = Screen(40)
    screen.table([Column(""), Column("", right=True)], [["a", "1"], ["bb", "22"]])
    assert page(screen) == ["  a    1", "  bb  22"]


def test_blank_lines_never_double_and_never_lead():
    screen = Screen(40)
    screen.blank()
    screen.line("a")
    screen.blank()
    screen.blank()
    screen.line("b")
    assert page(screen) == ["  a", "", "  b"]


@given(
    rows=st.lists(st.tuples(*[st.text(st.characters(), max_size=60)] * 4), min_size=1, max_size=4),
    width=st.integers(40, 200),
)
def test_table_never_is_wider_than_the_page(rows, width):
    screen = Screen(width)
    screen.table(COLUMNS, rows)
    assert max(cell_len(line) for line in page(screen)) <= width


def test_the_style_of_an_item_ends_with_the_item():
    screen = Screen(60)
    screen.flow("MFU", [("44 %", "bold"), "full", ("low", "yellow")], style="")
    dot = "\x1b[2m · \x1b[0m"
    assert screen.render(color=True) == (
        f"  MFU         \x1b[1m44 %\x1b[0m{dot}full{dot}\x1b[33mlow\x1b[0m\n"
    )


def test_colour_is_ours_alone():
    screen = Screen(40)
    screen.line(("warn \x1b[32m", "red"))
    assert screen.render(color=True) == "  \x1b[31mwarn \\x1b[32m\x1b[0m\n"
