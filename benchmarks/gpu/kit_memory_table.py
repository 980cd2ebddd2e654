"""Turns the raw JSON of `kit_memory.py` into the tables of docs/kit/memory.md: python kit_memory_table.py RAW.json ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GB, MS = 1e9, 1e-3
Found = dict[str, Any]


def lines(sections: Found) -> Iterator[str]:
    """Yields the page's section, of what was measured; a section that failed or was not run is left out."""
    tables = {
        "padding": padding,
        "layers": layers,
        "checkpointing": checkpointing,
        "channels_last": channels_last,
        "timeline": timeline,
        "emptied": told,
        "search": told,
        "pinned": pinned,
        "allocator": allocator,
        "tight": allocator,
        "pointer": allocator,
        "pointer_fixed": allocator,
    }
    for name, table in tables.items():
        found = sections.get(name, {"failed": True})
        if "failed" not in found and len(found) > 1:
            yield f"\n**{name}**\n"
            yield from table(found)


def padding(found: Found) -> Iterator[str]:
    """GPT-2 and its vocabulary."""
    plain = found["arms"]["plain"]["step_s"]
    yield "| vocabulary | step ms | of the time | peak GB |"
    yield "|---|---|---|---|"
    for name, arm in found["arms"].items():
        peak = arm.get("peak_bytes")
        yield (
            f"| {name} | {arm['step_s'] / MS:.1f} | {arm['step_s'] / plain:.3f} | "
            f"{peak / GB if peak else float('nan'):.1f} |"
        )
    for name, same in found["equality"].items():
        yield (
            f"\n{name}: loss {same['loss'][1]:.6f} (plain {same['loss'][0]:.6f}), gradients apart by "
            f"{same['gradients_frac']:.2g} of their size, the same winner for {same['same_winner_frac']:.4%}"
        )
    yield f"\nDecision: {found['decision']}"


def layers(found: Found) -> Iterator[str]:
    """Single layers."""
    yield "| layer | what was decided |"
    yield "|---|---|"
    for name, case in found["cases"].items():
        yield f"| {name} | {case['text']} |"


def checkpointing(found: Found) -> Iterator[str]:
    """Targets, predictions and what came of them."""
    yield "| target GB | blocks | predicted GB | measured GB | step time |"
    yield "|---|---|---|---|---|"
    for row in sorted(found["rows"], key=lambda row: -row["choice"]["target_bytes"]):
        choice, step = row["choice"], row["step"]
        time = f"{step['ratio']:.2f} ({step['low']:.2f} to {step['high']:.2f})" if step else "-"
        yield (
            f"| {choice['target_bytes'] / GB:.2f} | {len(choice['blocks'])} of {len(found['costs'])} | "
            f"{choice['peak_bytes'] / GB:.2f} | {row['achieved_bytes'] / GB:.2f} | {time} |"
        )
    yield f"\nWithout: {found['rows'][0]['choice']['peak_before_bytes'] / GB:.2f} GB."


def channels_last(found: Found) -> Iterator[str]:
    """Models and layouts."""
    yield "| model | adopted | step ms before | after | ratio |"
    yield "|---|---|---|---|---|"
    for name, model in found["models"].items():
        ratio = model["measured"]
        if ratio is None:
            yield f"| {name} | no: {model['text']} | | | |"
        else:
            yield (
                f"| {name} | {'yes' if model['adopted'] else 'no'} | {ratio['old_s'] / MS:.1f} | "
                f"{ratio['new_s'] / MS:.1f} | {ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) |"
            )


def timeline(found: Found) -> Iterator[str]:
    """The peak by category."""
    yield "| category | GB at the peak |"
    yield "|---|---|"
    for category, n_bytes in found["peak"]["by_category"].items():
        yield f"| {category} | {n_bytes / GB:.3f} |"
    allocator = found["allocator_peak_bytes"]
    times = found["times"]
    yield (
        f"\nTogether {found['peak_bytes'] / GB:.3f} GB"
        + (f"; the allocator's peak {allocator / GB:.3f} GB" if allocator else "")
        + f". A step takes {times['followed']['step_s'] / times['plain']['step_s']:.1f} times as long while it is followed."
    )


def told(found: Found) -> Iterator[str]:
    """What is told in words."""
    yield found["text"]


def pinned(found: Found) -> Iterator[str]:
    """Planned and active pinned memory."""
    active = found.get("active_bytes")
    yield found["text"] + (f". Allocated: {active / 2**30:.4g} GiB" if active is not None else "")


def allocator(found: Found) -> Iterator[str]:
    """Settings."""
    if "comparison" not in found:
        yield found["text"]
        return
    comparison = found["comparison"]
    yield "| setting | step ms | ratio | peak allocated GB | peak reserved GB | retries |"
    yield "|---|---|---|---|---|---|"
    for name, runs in comparison["runs"].items():
        states = [run["state"] for run in runs if run["state"]]
        ratio = comparison["ratios"].get(name)
        interval = (
            f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else "1"
        )
        times = sorted(run["step_s"] for run in runs)
        peaks = [
            f"{max(state[key] for state in states) / GB:.2f}" if states else "-"
            for key in ("peak_allocated_bytes", "peak_reserved_bytes")
        ]
        retries = sum(state["retries"] for state in states)
        yield f"| {name} | {times[len(times) // 2] / MS:.2f} | {interval} | {' | '.join(peaks)} | {retries} |"
    for name, why in {**comparison["failed"], **comparison["declined"]}.items():
        yield f"\n{name}: {why}"
    yield f"\nTo keep: {comparison['best']}."


if __name__ == "__main__":
    everything: Found = {}
    for path in sys.argv[1:]:
        everything.update(json.loads(Path(path).read_text())["sections"])
    print("\n".join(lines(everything)))
