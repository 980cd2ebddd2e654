"""Figures as a report prints them: three digits, unit beside the number, never a bare NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flopwise import units

ABSURD = "out of range"  # NaN, infinity, or a size that no quantity of ours has
_LARGEST = 1e30
_SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def duration(seconds: float) -> str:
    """Returns a time: `370.5 ms`."""
    return units.duration(seconds) if abs(seconds) < _LARGEST else ABSURD


def percent(frac: float) -> str:
    """Returns a share: `4.80 %`."""
    return units.percent(frac) if abs(frac) < _LARGEST else ABSURD


def quantity(value: float, unit: str) -> str:
    """Returns a number with an SI prefix on its unit: `989.5 TFLOP/s`, `14.7 J`."""
    return f"{units.count(value)}{unit}" if abs(value) < _LARGEST else ABSURD


def number(value: float, noun: str) -> str:
    """Returns a count of things, the prefix apart from the noun: `44.2 k tokens/s`."""
    return f"{units.count(value).rstrip()} {noun}" if abs(value) < _LARGEST else ABSURD


def size(n_bytes: float) -> str:
    """Returns an amount of memory: `22.5 GB`."""
    return units.size(n_bytes) if abs(n_bytes) < _LARGEST else ABSURD


def money(usd: float) -> str:
    """Returns US dollars: `$0.34`."""
    return units.money(usd) if abs(usd) < _LARGEST else ABSURD


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """Returns a whole number with its noun in the right number: `1 step`, `41 steps`."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def whole(value: float) -> str:
    """Returns a number of things, rounded up: `12,500`."""
    return f"{math.ceil(value):,}" if abs(value) < _LARGEST else ABSURD


def few(names: Sequence[str], limit: int = 3) -> str:
    """Returns the first names of a list, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def plus_minus(mean_s: float, ci95: tuple[float, float]) -> str:
    """Returns a mean time and half its interval in the same unit: `370.5 ms ± 0.4`."""
    mean, half_s = duration(mean_s), (ci95[1] - ci95[0]) / 2
    digits, _, unit = mean.rpartition(" ")
    if mean == ABSURD or not abs(half_s) < _LARGEST:
        return f"{mean} ± {ABSURD}"
    if abs(mean_s) >= 99.95:
        return f"{mean} ± {duration(half_s)}"
    decimals = len(digits.partition(".")[2])
    return f"{mean} ± {_fixed(half_s / _SECONDS_PER_UNIT[unit], decimals)}"


def ratio(value: float, ci95: tuple[float, float] | None = None) -> str:
    """Returns t_new / t_old with four digits, and its interval: `0.7812 (0.7790 to 0.7835)`."""
    if ci95 is None:
        return _four(value)
    return f"{_four(value)} ({_four(ci95[0])} to {_four(ci95[1])})"


def speed(value: float) -> str:
    """Returns what a ratio t_new / t_old means: `1.28x as fast`, `2.41x as long`."""
    if not 1 / _LARGEST < value < _LARGEST:
        return ABSURD
    return f"{_three(1 / value)}x as fast" if value < 1 else f"{_three(value)}x as long"


def _fixed(value: float, decimals: int) -> str:
    """Returns `value` with that many decimals, or more where it would read 0 otherwise."""
    if value == 0:
        return "0"
    wanted = max(decimals, -math.floor(math.log10(abs(value))))
    return f"{value:.{wanted}f}" if wanted <= 6 else f"{value:.0e}"


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _four(value: float) -> str:
    if not abs(value) < _LARGEST:
        return ABSURD
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"
