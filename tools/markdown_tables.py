"""Markdown tables, and figures with their errors as the documents write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def difference(ratio: float) -> str:
    """Returns how far a ratio is from 1, unsigned, in percent with three decimals."""
    return f"{100 * abs(ratio - 1):.3f} %"


def interval(ratio: dict[str, float]) -> str:
    """Returns a ratio with its interval, as differences from 1."""
    low, high = signed(ratio["low"]), signed(ratio["high"])
    return f"{signed(ratio['ratio'])} ({low} to {high})"


def signed(ratio: float) -> str:
    """Returns how far a ratio is from 1, signed, in percent with two decimals."""
    return f"{round(100 * (ratio - 1), 2) + 0.0:+.2f} %"


def with_errors(value: float, low: float, high: float, decimals: int) -> str:
    """Returns a value with its error bars: `14.15 ± 0.02`, or `1.31 (-0.89 +0.01)` where they are not alike."""
    below, above = (f"{max(0.0, part):.{decimals}f}" for part in (value - low, high - value))
    shown = f"{value + 0.0:.{decimals}f}"
    if float(shown) == 0:
        shown = f"{0:.{decimals}f}"
    alike = round(abs(float(below) - float(above)), decimals) <= 10.0**-decimals
    return f"{shown} ± {max(below, above)}" if alike else f"{shown} (-{below} +{above})"
