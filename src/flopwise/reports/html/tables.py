"""The tables of the terminal's reports, on a page."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.reports.html.markup import Html, el, pieces
from flopwise.reports.screen import Column, Piece

CSS = ".names td:nth-child(-n+2),.names th{overflow-wrap:normal}\n"


def draw(columns: Sequence[Column], rows: Sequence[Sequence[Piece]]) -> Html:
    """Returns a table with all of its columns; cells beyond them are left out."""
    kinds = [".num" if column.right else "" for column in columns]
    top = [el(f"th{kind}", column.title) for kind, column in zip(kinds, columns, strict=True)]
    body = [
        el("tr", [el(f"td{kind}", pieces([cell])) for kind, cell in zip(kinds, row, strict=False)])
        for row in rows
    ]
    return el("div.wide", el("table.small.names", el("thead", el("tr", top)), el("tbody", body)))
