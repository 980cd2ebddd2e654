"""`flopwise ceilings`: what this device reaches, measured, beside what its data sheet says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import UsageError

if TYPE_CHECKING:
    from flopwise.hardware.accelerators import Match
    from flopwise.records.ceilings import CeilingsRecord, GemmCeiling

_SAID = (
    "Matrix products of random numbers, the best of several shapes. Burst: tens of milliseconds "
    "after a pause.\nSustained: the last third of 2.4 s under the power limit, with the clock and "
    "the reasons that held it down."
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "ceilings",
        help="measure what this device reaches: matrix products, copies, links, launches",
        description="Measures what this device reaches and keeps it in a cache: half a minute on "
        "a GPU, a few seconds on a CPU.",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the record as JSON (- for stdout)"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="measure again, whatever the cache has"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (by default torch's own choice)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 after printing the table.

    Raises:
        UsageError: a thread count below 1.
        HardwareError: the measurement failed.
    """
    from flopwise.hardware import accelerators, ceilings
    from flopwise.records import store

    if arguments.threads is not None and arguments.threads < 1:
        raise UsageError(f"--threads {arguments.threads}: a CPU needs at least 1 thread")
    print("looking up or measuring this device's ceilings ...", file=sys.stderr, flush=True)
    record, note = ceilings.obtain(arguments.threads, refresh=arguments.refresh)
    if str(arguments.json) == "-":
        sys.stdout.write(store.encode(record))
        return 0
    if arguments.json is not None:
        store.put_text("--json", str(arguments.json), store.encode(record))
    match = None
    if record.device_type == "cuda":
        match = accelerators.lookup(
            record.device_name,
            memory_bytes=record.memory_bytes,
            sm_count=record.sm_count,
            mig=record.mig,
            power_limit_w=record.power_limit_w,
            power_limit_default_w=record.power_limit_default_w,
        )
    print(render(record, match, note))
    return 0


def render(record: CeilingsRecord, match: Match | None, note: str | None) -> str:
    """Returns the table as plain text.

    Args:
        record: what was measured.
        match: the device in the table of accelerators; None for a CPU.
        note: where the record is from.
    """
    lines = [_title(record), *_conditions(record), "", *_gemm_lines(record, match), ""]
    lines += _rate_lines(record, match)
    lines += [f"not measured: {what} ({why})" for what, why in record.not_measured.items()]
    said = list(record.notes)
    if match is not None:
        said += [*match.warnings, f"data sheet: {match.reason}"]
    lines += [f"note: {text}" for text in (*said, *([note] if note else []))]
    return "\n".join(lines)


def _title(record: CeilingsRecord) -> str:
    parts = [f"ceilings of {record.device_name}"]
    if record.device_type == "cpu":
        threads = "1 thread" if record.threads == 1 else f"{record.threads} threads"
        parts.append(f"{threads}, {record.cores} cores")
    parts.append(f"torch {record.torch}")
    if record.driver:
        parts.append(f"driver {record.driver}")
    return " · ".join(parts)


def _conditions(record: CeilingsRecord) -> list[str]:
    parts = [f"measured {record.created} in {units.duration(record.wall_s)}"]
    if record.power_limit_w is not None:
        parts.append(f"power limit {record.power_limit_w:g} W")
    if record.sm_max_mhz is not None:
        parts.append(f"SM clock up to {record.sm_max_mhz:g} MHz")
    if record.load_1m is not None:
        parts.append(f"load average {record.load_1m:.1f}")
    return [" · ".join(parts), *([] if record.device_type == "cpu" else _SAID.splitlines())]


def _gemm_lines(record: CeilingsRecord, match: Match | None) -> list[str]:
    from flopwise.hardware.accelerators import peak_of

    if record.device_type == "cpu":
        rows = [["matrix product", "best", "shape", ""]]
        rows += [[g.dtype, _rate(g.burst_flops_per_s), g.shape, g.note or ""] for g in record.gemm]
        return _aligned(rows)
    head = ["matrix product", "burst", "sustained", "data sheet", "burst of it", "sustained of it"]
    rows = [[*head, "SM clock", "power", "held down by", "shape"]]
    for gemm in record.gemm:
        sheet = peak_of(match.row, gemm.dtype) if match and match.row else None
        sustained = gemm.sustained_flops_per_s
        rows.append(
            [
                gemm.dtype,
                _rate(gemm.burst_flops_per_s),
                _rate(sustained),
                _rate(sheet),
                _share(gemm.burst_flops_per_s, sheet),
                _share(sustained, sheet),
                *_state(gemm),
                gemm.shape,
            ]
        )
    return _aligned(rows)


def _state(gemm: GemmCeiling) -> list[str]:
    return [
        "-" if gemm.sm_mhz_end is None else f"{gemm.sm_mhz_end:g} MHz",
        "-" if gemm.power_w is None else f"{gemm.power_w:.0f} W",
        ", ".join(gemm.throttle) or "-",
    ]


def _rate_lines(record: CeilingsRecord, match: Match | None) -> list[str]:
    row = match.row if match else None
    sheet = row.bandwidth_gb_per_s * 1e9 if row and row.bandwidth_gb_per_s else None
    rows: list[list[str]] = []
    if record.copy_bytes_per_s is not None:
        share = _share(record.copy_bytes_per_s, sheet)
        of = "" if sheet is None else f"{share} of the data sheet's {units.size(sheet)}/s"
        rows.append(["copy, read plus written", f"{units.size(record.copy_bytes_per_s)}/s", of])
    if record.link is not None:
        rates = {
            "host to device, pinned": record.link.h2d_pinned,
            "device to host, pinned": record.link.d2h_pinned,
            "host to device, pageable": record.link.h2d_pageable,
            "device to host, pageable": record.link.d2h_pageable,
        }
        rows += [[what, f"{units.size(rate)}/s", ""] for what, rate in rates.items()]
    if record.dispatch_s is not None:
        rows.append(["one eager operation, host", units.duration(record.dispatch_s), ""])
    if record.launch_s is not None:
        rows.append(["one kernel in a CUDA graph", units.duration(record.launch_s), ""])
    return _aligned(rows)


def _rate(flops_per_s: float | None) -> str:
    return "-" if flops_per_s is None else f"{units.count(flops_per_s)}FLOP/s"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or whole is None else units.percent(part / whole)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Returns lines with columns two spaces apart, the first flush left."""
    if not rows:
        return []
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
