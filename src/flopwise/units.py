"""Suffix types and formatting of quantities.

Units stand at the end of names: `step_s`, `ts_ns`, `peak_flops_per_s`, `alloc_bytes`; shares are `_frac` in 0..1
and become percent only in a report. FLOPs are a count, FLOP/s a rate; they never share a name.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000


def duration(seconds: float) -> str:
    """Returns a duration with three digits and the unit that suits it: `370.5 ms`, `12.4 s`, `3 min 5 s`."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def count(value: float) -> str:
    """Returns a count with an SI prefix: `44.2 k`, `875 G`, `8`."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {prefix}"
    return _digits(value) + " "


def size(n_bytes: float) -> str:
    """Returns a size in decimal units, as memory vendors count: `22.5 GB`."""
    return f"{count(n_bytes)}B" if abs(n_bytes) >= 999.5 else f"{n_bytes:.0f} B"


def percent(frac: float) -> str:
    """Returns a share as percent with three digits: `41.7 %`, `0.31 %`."""
    return f"{_digits(100 * frac)} %"


def money(usd: float) -> str:
    """Returns US dollars with at least two significant digits: `$0.34`, `$0.0031`, `$1,250`."""
    if abs(usd) >= 100:
        return f"${usd:,.0f}"
    if abs(usd) >= 0.1 or usd == 0:
        return f"${usd:.2f}"
    return f"${usd:.2g}"


def _digits(value: float) -> str:
    """Returns three significant digits without exponent, whole numbers without a point."""
    if abs(value) >= 1000:
        return f"{value:.0f}"
    decimals = 1 if abs(value) >= 10 else 2
    rounded = round(value, decimals)
    if rounded == int(rounded) and (rounded or not value):
        return str(int(rounded))
    return f"{rounded:.{decimals}f}" if abs(value) >= 0.1 else f"{value:.2g}"
