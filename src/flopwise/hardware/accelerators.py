"""The table of accelerators: which row a device name means, and the peak of its MFU.

A name matches exactly (after case, spaces and the vendor's prefix) or not at all: a part of a
name is never enough, because A10 is not A100, H20 is not H200 and PCIe is not SXM. Whatever
contradicts the row refuses it.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
import sys
from dataclasses import dataclass, field, fields
from typing import Any

from flopwise.errors import HardwareError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")

# Reported memory over the nominal figure. Vendors mean GB or GiB and reserve some: 0.98 (24 GB L4
# with ECC) to 1.074 (288 GiB MI355X) have been seen; the nearest two sizes of one device are
# 80 and 94 GB, 1.18 apart.
_MEMORY_RANGE = (0.9, 1.1)

_VENDORS = ("nvidia ", "amd ", "google ", "intel ", "huawei ", "aws ")
_STANDS = "MFU is left out; step time and throughput stand"
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_RATE = re.compile(
    r"\s*(?:(?P<dtype>\w+)\s*=)?\s*"
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:E[+-]?\d+)?)\s*"
    r"(?P<prefix>[KMGTPE]?)(?:FLOPS?(?:/S)?)?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Accelerator:
    """One row: a device as torch shows it."""

    id: str
    vendor: str
    name: str
    device_names: list[str]  # as torch and the driver give them
    dense_tflops: dict[str, float]  # dtype -> TFLOP/s without sparsity; also "fp64_matrix"
    source: str
    date: str  # when the source was looked up
    confidence: str  # "high" | "medium" | "low"
    form: str | None = None
    arch: str | None = None
    aliases: list[str] = field(default_factory=list)  # what people call it
    sm_count: int | None = None  # of one torch device; compute units on AMD
    peak_clock_mhz: float | None = None  # the clock that the dense 16-bit peak is stated at
    flop_per_sm_clk: int | None = None  # dense 16-bit
    memory_gb: float | None = None
    bandwidth_gb_per_s: float | None = None
    link: str | None = None
    link_gb_per_s: float | None = None  # one direction
    tdp_w: float | None = None
    disputed: bool = False
    notes: str | None = None
    # dtype -> the fastest matrix products that someone measured, TFLOP/s; clocks not stated
    reached_tflops: dict[str, float] = field(default_factory=dict)
    reached_source: str | None = None


@dataclass(frozen=True)
class Match:
    """What the table says about a device."""

    device: str  # the name that was looked up
    row: Accelerator | None
    reason: str  # how it was matched, or why there is no row or no peak
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Peak:
    """A rate that MFU is measured against."""

    flops_per_s: float
    dtype: str  # "unstated" where a user gave a bare rate
    source: str
    kind: str  # "datasheet" | "measured" | "given"


def lookup(
    device_name: str,
    *,
    memory_bytes: int | None = None,
    sm_count: int | None = None,
    mig: bool = False,
    power_limit_w: float | None = None,
    power_limit_default_w: float | None = None,
) -> Match:
    """Returns the row that a device name means, or none with the reason in words.

    Args:
        device_name: as torch or the driver gives it.
        memory_bytes: the device's whole memory; a row of another size is refused.
        sm_count: streaming multiprocessors (compute units on AMD); another count is refused.
        mig: the device is a MIG slice, whatever its name.
        power_limit_w: the limit in force; below the default it is a warning, not a refusal.
        power_limit_default_w: the board's default limit.
    """
    name = normalised(device_name)
    if mig or "mig" in re.split(r"[ \-/]", name):
        reason = (
            f'"{device_name}" is a MIG slice, and the table has whole devices only: {_STANDS}. '
            "Give the slice's own peak with --peak"
        )
        return Match(device_name, None, reason)
    row = _by_name().get(name)
    if row is None:
        reason = (
            f'no bf16 peak known for "{device_name}": {_STANDS}. '
            "Add a row with its source (docs/hardware.md) or give --peak"
        )
        return Match(device_name, None, reason)
    contradiction = _contradiction(row, memory_bytes, sm_count)
    if contradiction:
        reason = (
            f'"{device_name}" has {contradiction}: another variant, a slice or a virtual device. '
            f"{_STANDS}. Give its peak with --peak"
        )
        return Match(device_name, None, reason)
    reason = f"exact name of {row.id} in the table of accelerators ({row.confidence} confidence)"
    if _unusable(row):
        reason = (
            f'the peak of "{device_name}" is disputed ({row.notes or row.source}): {_STANDS}. '
            "`flopwise ceilings` measures what the device reaches; or give --peak"
        )
    return Match(device_name, row, reason, _power_warnings(power_limit_w, power_limit_default_w))


def reference_peak(match: Match) -> Peak | None:
    """Returns the peak that MFU on this device is measured against; None: `match.reason` says why.

    It is the fastest dense 16-bit rate, bf16 where the device has it, else fp16 (V100, T4), fixed
    per device and never per run, so that a run before and after tuning share one scale.
    """
    if match.row is None:
        return None
    for dtype in ("bf16", "fp16"):
        flops_per_s = peak_of(match.row, dtype)
        if flops_per_s is not None:
            source = f"data sheet, dense, by {match.row.source}"
            return Peak(flops_per_s, dtype, source, "datasheet")
    return None


def peak_of(row: Accelerator, dtype: str) -> float | None:
    """Returns the dense peak of one dtype in FLOP/s; None: not in the table, or disputed.

    For fp64 it is the faster of the vector and the matrix units: a matrix product runs on those.
    """
    if _unusable(row):
        return None
    keys = (dtype, f"{dtype}_matrix")
    rates = [row.dense_tflops[key] for key in keys if key in row.dense_tflops]
    return max(rates) * 1e12 if rates else None


def parse_peak(text: str) -> Peak:
    """Returns the peak that a user gave: `989.5e12`, `989.5T`, `989.5 TFLOP/s`, `bf16=989.5T`.

    Raises:
        UsageError: not such a number, of an unknown dtype, or outside 1e8 to 1e18 FLOP/s.
    """
    found = _RATE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--peak {text!r} is not a rate. Write FLOP/s as 989.5T, 989.5e12 or bf16=989.5T"
        )
    dtype = (found["dtype"] or "unstated").lower()
    if found["dtype"] and dtype not in DTYPES:
        raise UsageError(f"--peak {text!r}: unknown dtype; known are {', '.join(DTYPES)}")
    flops_per_s = float(found["number"]) * _PREFIXES[found["prefix"].upper()]
    if not (math.isfinite(flops_per_s) and 1e8 <= flops_per_s <= 1e18):
        raise UsageError(
            f"--peak {text!r} is {flops_per_s:g} FLOP/s; a device has 1e8 to 1e18. "
            "Give the rate of one device without sparsity, e.g. 989.5T"
        )
    return Peak(flops_per_s, dtype, f"given: --peak {text.strip()}", "given")


def normalised(name: str) -> str:
    """Returns a device name without case, surplus spaces, trade marks and the vendor's prefix."""
    plain = " ".join(re.sub(r"\((?:tm|r)\)|[™®]", " ", name.casefold()).split())
    for vendor in _VENDORS:
        plain = plain.removeprefix(vendor)
    return plain


def rows() -> list[Accelerator]:
    """Returns the table, in the order of the file.

    Raises:
        HardwareError: the file is damaged or breaks its own rules; the message names the row.
    """
    return list(_table())


def parse_table(text: str) -> list[Accelerator]:
    """Returns the rows of a table in TOML.

    Raises:
        HardwareError: not TOML, a field unknown, missing or of a wrong type, a name in two rows.
    """
    import msgspec

    try:
        entries: list[dict[str, Any]] = tomllib.loads(text)["accelerator"]
        table = [msgspec.convert(entry, Accelerator) for entry in entries]
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise HardwareError(
            f"accelerators.toml cannot be read ({error}). Repair it, or reinstall flopwise"
        ) from error
    known = {f.name for f in fields(Accelerator)}
    rates = {*DTYPES, "fp64_matrix"}
    seen: dict[str, str] = {}
    for entry, row in zip(entries, table, strict=True):
        named = {*row.dense_tflops, *row.reached_tflops}
        for wrong in sorted((set(entry) - known) | (named - rates)):
            raise HardwareError(f"accelerators.toml, row {row.id}: unknown field {wrong!r}")
        for name in map(normalised, (*row.device_names, *row.aliases)):
            other = seen.setdefault(name, row.id)
            if other != row.id:
                raise HardwareError(f"accelerators.toml: {name!r} is in rows {other} and {row.id}")
    return table


@functools.cache
def _table() -> tuple[Accelerator, ...]:
    file = importlib.resources.files("flopwise.hardware").joinpath("accelerators.toml")
    return tuple(parse_table(file.read_text("utf-8")))


@functools.cache
def _by_name() -> dict[str, Accelerator]:
    return {normalised(n): row for row in _table() for n in (*row.device_names, *row.aliases)}


def _unusable(row: Accelerator) -> bool:
    return row.disputed or row.confidence == "low"


def _contradiction(row: Accelerator, memory_bytes: int | None, sm_count: int | None) -> str | None:
    if memory_bytes is not None and row.memory_gb is not None:
        ratio = memory_bytes / (row.memory_gb * 1e9)
        if not _MEMORY_RANGE[0] <= ratio <= _MEMORY_RANGE[1]:
            return f"{memory_bytes / 1e9:.1f} GB of memory where {row.id} has {row.memory_gb:g} GB"
    if sm_count is not None and row.sm_count is not None and sm_count != row.sm_count:
        return f"{sm_count} SMs where {row.id} has {row.sm_count}"
    return None


def _power_warnings(limit_w: float | None, default_w: float | None) -> list[str]:
    if limit_w is None or default_w is None or limit_w > default_w - 0.5:
        return []
    return [
        f"power is capped at {limit_w:g} W, below the default {default_w:g} W: the peak is that "
        "of the uncapped device, so MFU is lower than the same code would show without the cap"
    ]
