"""Writes the section "Measured on an H200" of docs/kit/precision.md from raw results.

    python benchmarks/gpu/precision/page.py benchmarks/results/h200/kit_precision.json [--into docs/kit/precision.md]

Prints Markdown, or puts it into the page, as its last section. Sections that were not measured are left out, and one
that missed its aim says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page(result: dict[str, Any]) -> str:
    """Returns the section as Markdown."""
    machine = result["environment"]
    parts = [
        f"One {machine['device']}, torch {machine['torch']}, arms in turns in one process "
        "(`benchmarks/gpu/kit_precision.py`, raw figures in `benchmarks/results/h200/kit_precision.json`). "
        "Changes are medians over the rounds, each of which has all arms, with intervals that hold the true median with 95 %."
    ]
    for name, write in WRITERS.items():
        section = result["sections"].get(name)
        if section is None:
            continue
        if "error" in section or "skipped" in section:
            why = section.get("error") or section["skipped"]
            parts.append(f"**{TITLES[name]}** Not measured: {why.rstrip('.')}.")
        elif "declined" in section:
            parts.append(f"**{TITLES[name]}** Declined there: {section['declined'].rstrip('.')}.")
        else:
            parts.append(f"**{TITLES[name]}** " + "\n".join(write(section)))
    return "\n\n".join(parts)


def _equal(section: dict[str, Any]) -> Iterator[str]:
    rows = section["rows"]
    same, all_ = sum(r["equal"] for r in rows), sum(r["tensors"] for r in rows)
    yield (
        f"{same} of {all_} tensors (weights, optimizer state, scales) are equal to GradScaler's to the bit after {section['steps']} "
        f"steps with overflows, in {len(rows)} set-ups of optimizer and clipping."
    )
    for row in rows:
        name = f"{row['optimizer']}{', clipped' if row['clip'] else ''}"
        if row["differ"]:
            yield f"{name}: {len(row['differ'])} differ, by up to {max(row['differ'].values()):.1e}."
        if not row["gradscaler_equals_itself"]:
            yield f"{name}: two runs of GradScaler differ, too."


def _sync(section: dict[str, Any]) -> Iterator[str]:
    yield f"Waits a step beyond those of the same step without a scaler, by a profile of {section['profiled_steps']} steps:"
    yield ""
    yield "| optimizer | GradScaler | DynamicScaler |"
    yield "|---|---|---|"
    by: dict[str, dict[str, str]] = {}
    for row in section["rows"]:
        name = row["optimizer"] + (", clipped" if row["clip"] else "")
        more = ", ".join(f"{n:g} {call}" for call, n in row["more_than_without"].items()) or "none"
        by.setdefault(name, {})[row["arm"]] = more
    for name, arms in by.items():
        yield f"| {name} | {arms['GradScaler']} | {arms['DynamicScaler']} |"


def _overhead(section: dict[str, Any]) -> Iterator[str]:
    first = section["sizes"][0]
    yield (
        "Linear layers in float16 with the scaler, against the same step with a constant in its place, AdamW fused. The cost "
        "is the difference as a share of the bfloat16 step:"
    )
    yield ""
    yield "| parameters | bfloat16 step | cost of DynamicScaler | of GradScaler | float16 without a scaler against bfloat16 | with DynamicScaler |"
    yield "|---|---|---|---|---|---|"
    for size in section["sizes"]:
        yield (
            f"| {size['parameters'] / 1e6:.1f} M | {size['step_ms']['bfloat16']:.2f} ms | {_change(size['cost'])} | "
            f"{_change(size['gradscaler_cost'])} | {_change(size['no_scaler_against_bfloat16'])} | "
            f"{_change(size['against_bfloat16'])} |"
        )
    for size in section["sizes"]:
        if "torchs_kernels_cost" not in size:  # of an earlier run
            continue
        how = "one of Triton's" if size["one_kernel"] else "torch's, too"
        yield ""
        yield (
            f"At {size['parameters'] / 1e6:.1f} M parameters that is {size['cost_us']:.0f} us a step with {how}, "
            f"{size['torchs_kernels_cost_us']:.0f} us with torch's kernels, {size['gradscaler_cost_us']:.0f} us for GradScaler."
        )
    under = [f"{n / 1e6:.1f} M" for n in section["under_limit_at_parameters"]]
    yield ""
    yield (
        f"Surely under {section['limit_frac']:.1%} are {', '.join(under) or 'none'} of these: the cost goes with the parameters, "
        f"not with the step. The same arm twice differs by {_change(first['same_twice'])}, so that much cannot be told apart."
    )
    if not all(size["device_bound"] for size in section["sizes"]):
        yield "Not in all of them was the device what took the time: the host launched too slowly."
    for row in section["unfused"]:
        yield ""
        yield (
            f"{row['optimizer']}, which is not fused: steps taken back on the device {_change(row['masked'])}, waiting "
            f"{_change(row['waits'])}, GradScaler {_change(row['GradScaler'])}."
        )


def _mixed(section: dict[str, Any]) -> Iterator[str]:
    yield "A training step of a transformer stack:"
    yield ""
    yield "| dtype | step | against float32 | FLOPs in it |"
    yield "|---|---|---|---|"
    for name, effect in section["effects"].items():
        if "declined" in effect:
            yield f"| {name} | – | declined: {effect['declined']} | – |"
            continue
        change = section["against_float32"].get(name)
        yield (
            f"| {name} | {section['step_ms'][name]:.2f} ms | {_change(change) if change else '–'} | {100 * effect['share']:.1f} % |"
        )


def _tf32(section: dict[str, Any]) -> Iterator[str]:
    error = section["relative_error"]
    yield (
        f"A product of 4096 x 4096 with its backward takes {section['step_ms']['tf32']:.2f} ms instead of "
        f"{section['step_ms']['float32']:.2f} ms; its error against float64 is {error['tf32']:.1e} instead of {error['float32']:.1e}. "
        f"Outside of the module the switch is {section['switches_outside']!r}."
    )


def _masters(section: dict[str, Any]) -> Iterator[str]:
    yield f"{section['parameters'] / 1e6:.0f} M parameters, AdamW fused, bfloat16:"
    yield ""
    names = ("weights", "masters", "gradients", "state")
    yield f"| | step | {' | '.join(names)} | peak of a step |"
    yield "|---|---|" + "---|" * (len(names) + 1)
    for arm, row in section["memory"].items():
        sizes = " | ".join(f"{row['categories'][n + '_bytes'] / 1e9:.2f} GB" for n in names)
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f} GB"
        yield f"| {arm} | {section['step_ms'][arm]:.2f} ms | {sizes} | {peak} |"
    yield ""
    same = "equal to the bit" if section["equal_state_dicts_after_4_steps"] else "NOT equal"
    yield f"With masters the step takes {_change(section['masters_against_autocast'])}; state dicts are {same} after 4 steps."


def _float8(section: dict[str, Any]) -> Iterator[str]:
    yield (
        f"A compiled stack takes {section['step_ms']['float8']:.2f} ms instead of {section['step_ms']['bfloat16']:.2f} ms in bfloat16 "
        f"({_change(section['against_bfloat16'])})."
    )


def _change(found: dict[str, float]) -> str:
    low, high = 100 * found["low_frac"], 100 * found["high_frac"]
    return f"{100 * found['frac']:+.2f} % ({low:+.2f} to {high:+.2f})"


TITLES = {
    "scaler_equal": "Equality.",
    "scaler_sync": "Waiting.",
    "scaler_overhead": "Overhead.",
    "mixed": "Dtypes.",
    "tf32": "TF32.",
    "master_weights": "Master weights.",
    "fp8": "float8.",
}
WRITERS = {
    "scaler_equal": _equal,
    "scaler_sync": _sync,
    "scaler_overhead": _overhead,
    "mixed": _mixed,
    "tf32": _tf32,
    "master_weights": _masters,
    "fp8": _float8,
}

HEADING = "## Measured on an H200"


def put_into(text: str, section: str) -> str:
    """Returns a page with the section in it: in the place of the one that it has, else at the end."""
    before, heading, after = text.partition(f"{HEADING}\n")
    _, next_heading, rest = after.partition("\n## ")
    whole = f"{before.rstrip()}\n\n{HEADING}\n\n{section.strip()}\n"
    return whole + next_heading + rest if heading else whole


def main(arguments: list[str] | None = None) -> None:
    """Prints the section of a result, or puts it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--into", type=Path, help="a page in Markdown")
    options = parser.parse_args(arguments)
    section = page(json.loads(options.result.read_text(encoding="utf-8")))
    if options.into is None:
        print(section)
    else:
        text = options.into.read_text(encoding="utf-8")
        options.into.write_text(put_into(text, section), encoding="utf-8")


if __name__ == "__main__":
    main()
