"""A page of text that never is wider than it was told, whatever is written on it.

Every string that reaches the page goes through `Screen.text`. Script names, notes and device names
come from outside, so control characters, escape sequences, direction marks and lone surrogates are
shown as escapes, and markup is never read.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

NARROWEST, WIDEST = 40, 200
INDENT = "  "
WARN = "yellow"  # the style of what limits a number
LABEL_CELLS = 12  # of the label column of `Screen.flow`
TAIL_CELLS = 24  # a wrapping last column narrower than this goes below its row instead

Piece = str | tuple[str, str]  # text, or text with a style of rich ("bold", "yellow", ...)

# What the page draws itself, where the target knows ASCII only.
_ASCII = str.maketrans(
    {"·": "|", "±": "+-", "µ": "u", "°": "", "…": "..."}
    | dict.fromkeys("█▉▊▋▌", "#")
    | dict.fromkeys("▍▎▏", ".")
)
# Control, format (direction marks, joiners), surrogate, private, unassigned, line and paragraph
# separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# rich names a web font in its pictures; a picture must not load anything.
_WEB_FONTS = re.compile(r"\s*@font-face\s*\{[^}]*\}")
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    right: bool = False  # aligned to the right
    drop: int = 0  # left out when room is short, the highest number first; 0 stays
    tail: bool = False  # last column: wraps in the room that is left, or stands below its row


def visible(text: str, *, ascii_only: bool) -> str:
    """Returns `text` with all that a terminal would obey, hide or choke on shown as escapes."""
    if ascii_only:
        text = text.translate(_ASCII)
    return "".join(
        char if " " <= char <= "~" else _shown(char, ascii_only=ascii_only) for char in text
    )


def _shown(char: str, *, ascii_only: bool) -> str:
    category = unicodedata.category(char)
    if category == "Zs":
        return " "
    if ascii_only or category in _HIDDEN:
        return char.encode("unicode_escape").decode("ascii")
    return char


def bar(frac: float, cells: int) -> str:
    """Returns a bar of at most `cells` blocks for a share; anything above 0 leaves a trace."""
    eighths = round(8 * cells * min(max(0.0, frac), 1.0))
    if frac > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


class Screen:
    """Lines of at most `width` cells (40 to 200: anything else is moved to the nearer end)."""

    def __init__(self, width: int, *, ascii_only: bool = False) -> None:
        self.width = min(max(width, NARROWEST), WIDEST)
        self.ascii_only = ascii_only
        self.lines: list[Text] = []
        self._ruler = Console(file=io.StringIO(), width=self.width, color_system=None)

    def text(self, piece: Piece) -> Text:
        """Returns a piece as safe text."""
        value, style = (piece, "") if isinstance(piece, str) else piece
        # The style is a span, not the base of the text: what is appended later must not inherit it.
        return Text().append(visible(value, ascii_only=self.ascii_only), style or None)

    def blank(self) -> None:
        """Adds an empty line, never two in a row and never at the top."""
        if self.lines and self.lines[-1].plain:
            self.lines.append(Text())

    def heading(self, left: Piece, right: Sequence[Piece], *, left_lines: int = 3) -> None:
        """Adds `left` and `right`, on one line if there is room.

        `left` is cut after `left_lines` lines.
        """
        title, facts = self.text(left), self._joined(right)
        gap = self.width - title.cell_len - facts.cell_len
        if gap >= 3:
            self.lines.append(Text.assemble(title, " " * gap, facts))
            return
        wrapped = self._wrap(title, self.width)
        if len(wrapped) > left_lines:
            wrapped = wrapped[:left_lines]
            dots = self.text("…")
            wrapped[-1].truncate(self.width - dots.cell_len)
            wrapped[-1].append_text(dots)
        self.lines += wrapped + self._packed(right, self.width)

    def flow(self, label: str, items: Sequence[Piece], *, style: str = "dim") -> None:
        """Adds items side by side after a label, broken between items; no items add nothing."""
        start = len(INDENT) + LABEL_CELLS
        name = self.text((label, style))
        for line in self._packed(items, self.width - start):
            lead = Text.assemble(INDENT, name)
            lead.append(" " * (start - lead.cell_len))
            self.lines.append(lead.append_text(line))
            name = Text()

    def line(self, *pieces: Piece) -> None:
        """Adds pieces one after the other, indented; what does not fit goes on below."""
        whole = Text()
        for piece in pieces:
            whole.append_text(self.text(piece))
        self.lines += [
            Text.assemble(INDENT, line) for line in self._wrap(whole, self.width - len(INDENT))
        ]

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Piece]]) -> None:
        """Adds a table with one line of titles, unless all are empty.

        When room is short, columns that may go are dropped, and then cells wrap.
        """
        titles: list[Piece] = [(column.title, "dim") for column in columns]
        head = [titles] if any(column.title for column in columns) else []
        cells = [[self.text(cell) for cell in row] for row in [*head, *rows]]
        tail = columns[-1].tail
        kept, widths = self._fitted(columns[:-1] if tail else columns, cells)
        room = self.width - len(INDENT) - sum(widths) - 2 * len(widths)
        for row_at, row in enumerate(cells):
            blocks = [
                self._block(row[at], cells_wide, right=columns[at].right)
                for at, cells_wide in zip(kept, widths, strict=True)
            ]
            beside = tail and room >= TAIL_CELLS
            if beside:
                blocks.append(self._wrap(row[-1], room))
            self._add_row(blocks, [*widths, room])
            if tail and not beside and row_at >= len(head) and row[-1].plain:
                inner = self.width - 3 * len(INDENT)
                self.lines += [Text(3 * INDENT) + line for line in self._wrap(row[-1], inner)]

    def render(self, *, color: bool) -> str:
        """Returns the page; with `color` it carries ANSI escape sequences, and only ours."""
        target = io.StringIO()
        self._print(_console(target, self.width, color=color))
        return "".join(line.rstrip() + "\n" for line in target.getvalue().splitlines())

    def svg(self, title: str) -> str:
        """Returns the page as an SVG picture that loads nothing from elsewhere."""
        console = _console(io.StringIO(), self.width, color=True, record=True)
        self._print(console)
        safe = visible(title, ascii_only=self.ascii_only)
        picture = console.export_svg(title=safe, unique_id="flopwise")
        return _WEB_FONTS.sub("", picture) + "\n"

    def _print(self, console: Console) -> None:
        for line in self.lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)

    def _wrap(self, text: Text, cells: int) -> list[Text]:
        lines = list(text.wrap(self._ruler, cells, overflow="fold")) or [Text()]
        for line in lines:
            line.rstrip()
        return lines

    def _joined(self, items: Sequence[Piece]) -> Text:
        return self.text((" · ", "dim")).join(self.text(item) for item in items)

    def _packed(self, items: Sequence[Piece], room: int) -> list[Text]:
        lines: list[Text] = []
        dot = self.text((" · ", "dim"))
        for item in items:
            text = self.text(item)
            if lines and lines[-1].cell_len + dot.cell_len + text.cell_len <= room:
                lines[-1].append_text(dot).append_text(text)
            else:
                lines += self._wrap(text, room)
        return lines

    def _fitted(
        self, columns: Sequence[Column], cells: Sequence[Sequence[Text]]
    ) -> tuple[list[int], list[int]]:
        """Returns which columns stay, and how many cells each gets."""
        kept = list(range(len(columns)))
        room = self.width - len(INDENT)
        natural = [max(row[at].cell_len for row in cells) for at in kept]
        while sum(natural[at] + 2 for at in kept) - 2 > room:
            extra = [at for at in kept if columns[at].drop]
            if not extra:
                break
            kept.remove(max(extra, key=lambda at: columns[at].drop))
        widths = [natural[at] for at in kept]
        while sum(widths) + 2 * len(widths) - 2 > room:
            widest = widths.index(max(widths))
            widths[widest] -= 1
        return kept, widths

    def _block(self, text: Text, cells: int, *, right: bool) -> list[Text]:
        lines = self._wrap(text, cells)
        if right:
            return [Text(" " * (cells - line.cell_len)) + line for line in lines]
        return lines

    def _add_row(self, blocks: Sequence[list[Text]], widths: Sequence[int]) -> None:
        for at in range(max(len(block) for block in blocks)):
            line = Text(INDENT)
            for number, (block, cells) in enumerate(zip(blocks, widths, strict=False)):
                cell = block[at] if at < len(block) else Text()
                line.append("  " if number else "").append_text(cell)
                line.append(" " * (cells - cell.cell_len))
            line.rstrip()
            self.lines.append(line)


def _console(target: io.StringIO, width: int, *, color: bool, record: bool = False) -> Console:
    return Console(
        file=target,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        force_jupyter=False,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        record=record,
    )
