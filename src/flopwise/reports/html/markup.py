"""Building a page: every text is escaped and cut, and what would act in a page or mislead its reader is shown as an escape.

Names of scripts, kernels and operators come from outside. Only `el` makes markup; `trusted` marks what is ours.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from flopwise.reports.screen import WARN, Piece, visible

LONGEST = 600  # characters of one text; more is cut
MOST = 200  # entries of one list that come from a record; more are not drawn
_DOT = '<span class="dot"> · </span>'
_VOID = frozenset(("meta", "br", "img", "wbr"))


class Html(str):
    """Markup: text that `el` does not escape again."""

    __slots__ = ()


Child = str | None | Iterable["Child"]


def trusted(markup: str) -> Html:
    """Returns markup of our own as it is."""
    return Html(markup)


def text(value: str, longest: int = LONGEST) -> Html:
    """Returns text as markup that shows it, cut after `longest` characters."""
    if len(value) > longest:
        value = value[:longest] + "…"
    return Html(html.escape(visible(value, ascii_only=False), quote=True))


def el(selector: str, *children: Child, **attributes: str | float | None) -> Html:
    """Returns an element: `el("td.num", "4.8 %", title="...")` is a `td` of class `num`.

    Children and the values of attributes are escaped unless they are markup; None is left out. In the names of
    attributes an underscore stands for a hyphen.
    """
    name, *classes = selector.split(".")
    words = [name]
    if classes:
        words.append(f'class="{" ".join(classes)}"')
    for key, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, (int, float)) else _escaped(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    inner = "".join(_flat(children))
    return Html(f"<{' '.join(words)}>" + ("" if name in _VOID else f"{inner}</{name}>"))


def number(value: float) -> str:
    """Returns a coordinate with at most three decimals; what is no number, or larger than any page, is 0."""
    if not math.isfinite(value) or abs(value) > 1e6:
        return "0"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def share(value: float) -> float:
    """Returns a share as 0..1, whatever a record holds."""
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def pieces(items: Sequence[Piece]) -> Html:
    """Returns the pieces of a report side by side, what limits a figure in the colour of a warning."""
    return Html(_DOT.join(_piece(item) for item in items))


def _piece(item: Piece) -> Html:
    value, style = (item, "") if isinstance(item, str) else item
    words = style.split()
    if WARN in words or "red" in words:
        return el("span.warn", value)
    return el("b", value) if "bold" in words else el("span", value)


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            yield _escaped(child)
        else:
            yield from _flat(child)


def _escaped(value: str) -> Html:
    return value if isinstance(value, Html) else text(value)
