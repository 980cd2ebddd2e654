"""Writes the section "Measured on an H200" of docs/kit/memory.md from the raw results of `kit_memory.py`.

    python benchmarks/gpu/kit_memory_table.py benchmarks/results/h200/kit_memory*.json [--into docs/kit/memory.md]

Prints Markdown, or puts it into the page. Of a section that was measured twice the later file's is taken; one that failed, or
was not run, is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GB, MS = 1e9, 1e-3
HEADING = "## Measured on an H200"
Found = dict[str, Any]


def measured(files: Sequence[Path]) -> Found:
    """Returns the sections of several raw files by name."""
    sections: Found = {}
    for file in files:
        for name, found in json.loads(file.read_text(encoding="utf-8"))["sections"].items():
            if "failed" not in found and "skipped" not in found:
                sections[name] = found
    return sections


def page(sections: Found) -> str:
    """Returns the section as Markdown, without its heading."""
    machines = sorted(
        {f"{found['gpu']}, torch {found['torch']}" for found in sections.values() if "gpu" in found}
    )
    parts = [
        f"One {'; '.join(machines) or 'CPU'}. Each part in a process of its own, its arms in turns; intervals are 95 %. "
        "`benchmarks/gpu/kit_memory.py` measures it; the raw figures are in `benchmarks/results/h200/kit_memory*.json`."
    ]
    for name, (title, table) in TABLES.items():
        if name in sections:
            parts.append(f"**{title}** " + "\n".join(table(sections[name])))
    return "\n\n".join(parts)


def replaced(text: str, section: str) -> str:
    """Returns a page with this section in place of the one that it has, or at its end."""
    before, found, after = text.partition(f"{HEADING}\n")
    if not found:
        return f"{text.rstrip()}\n\n{HEADING}\n\n{section}\n"
    _, other, rest = after.partition("\n## ")
    return f"{before}{HEADING}\n\n{section}\n" + (f"\n## {rest}" if other else "")


def padding(found: Found) -> Iterator[str]:
    """GPT-2 and its vocabulary."""
    arms = found["arms"]
    plain = arms["plain"]["step_s"]
    yield "Training steps of GPT-2 124M, 16 rows of 1024, bfloat16 autocast, fused AdamW."
    yield ""
    yield "| vocabulary | step ms | of the time | peak GB |"
    yield "|---|---|---|---|"
    for name, text in ARMS.items():
        peak = arms[name].get("peak_bytes")
        yield (
            f"| {text} | {arms[name]['step_s'] / MS:.1f} | {arms[name]['step_s'] / plain:.3f} | "
            f"{f'{peak / GB:.2f}' if peak else '-'} |"
        )
    same = found["equality"]["padded"]
    yield ""
    yield (
        f"On the same weights and batch, padded beside plain: loss {same['loss'][1]:.6f} and {same['loss'][0]:.6f}, gradients "
        f"apart by {same['gradients_frac']:.1%} of their size (two runs of the plain model: "
        f"{found['equality']['plain']['gradients_frac']:.1%}), the same winner for {same['same_winner_frac']:.2%} of the tokens. "
        f"The head alone: {found['decision'].partition('; ')[2]}."
    )
    if "over_ceiling_s" in found:
        apart = arms["padded"]["step_s"] - arms["ceiling"]["step_s"]
        ops = [
            f"`{op}` {s / MS:+.2f} ms"
            for op, s in found["over_ceiling_s"].items()
            if abs(s) >= 0.05 * MS
        ]
        yield ""
        yield (
            f"What padding leaves beside a vocabulary of 50304 in the model, {apart / MS:.1f} ms a step, by op on the device: "
            f"{', '.join(ops)}."
        )


ARMS = {
    "plain": "50257, as it is",
    "padded": "50257, padded to 50304 (the default)",
    "view": "50257, padded, `contiguous=False`",
    "ceiling": "50304 in the model itself: what padding could reach at best",
}


def layers(found: Found) -> Iterator[str]:
    """Single layers."""
    yield "What `pad_dimensions` decides, under bfloat16 autocast."
    yield ""
    yield "| layer | decision |"
    yield "|---|---|"
    for name, case in found["cases"].items():
        yield f"| {name} | {case['text']} |"


def checkpointing(found: Found) -> Iterator[str]:
    """Targets, predictions and what came of them."""
    n = len(found["costs"])
    yield (
        f"A Llama-like model of {n} layers, 2048 wide, 4 rows of 2048, bfloat16 autocast; without checkpoints its peak is "
        f"{found['rows'][0]['choice']['peak_before_bytes'] / GB:.2f} GB."
    )
    yield ""
    yield "| target GB | blocks | predicted GB | measured GB | reached | step time |"
    yield "|---|---|---|---|---|---|"
    for row in sorted(found["rows"], key=lambda row: -row["choice"]["target_bytes"]):
        choice, step = row["choice"], row["step"]
        target = choice["target_bytes"]
        time = f"{step['ratio']:.2f} ({step['low']:.2f} to {step['high']:.2f})" if step else "-"
        yield (
            f"| {f'{target / GB:.2f}' if target else 'as low as can be'} | {len(choice['blocks'])} of {n} | "
            f"{choice['peak_bytes'] / GB:.3f} | {row['achieved_bytes'] / GB:.3f} | "
            f"{('yes' if row['fits'] else 'no') if target else '-'} | {time} |"
        )


def channels_last(found: Found) -> Iterator[str]:
    """Models and layouts."""
    yield "Forward and backward under bfloat16 autocast; ResNet-50 on 256 images of 224, EfficientNet-B4 on 64 of 380."
    yield ""
    yield "| model | adopted | step ms before | after | of the time |"
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
    yield f"GPT-2 124M as above, at its peak, after `{found['peak']['op']}` in {found['peak']['module'] or 'the step'}."
    yield ""
    yield "| category | GB |"
    yield "|---|---|"
    for category, n_bytes in sorted(found["peak"]["by_category"].items(), key=lambda c: -c[1]):
        yield f"| {category} | {n_bytes / GB:.3f} |"
    allocator, times = found["allocator_peak_bytes"], found["times"]
    yield ""
    yield (
        f"Together {found['peak_bytes'] / GB:.3f} GB"
        + (
            f"; the allocator's own peak is {allocator / GB:.3f} GB, {allocator / found['peak_bytes'] - 1:.2%} more"
            if allocator
            else ""
        )
        + f". A step takes {times['followed']['step_s'] / times['plain']['step_s']:.1f} times as long while it is followed."
    )


def emptied(found: Found) -> Iterator[str]:
    """What emptying the cache costs."""
    cost = found["cost"]
    yield "Eight linear layers of 2048, FP32, the cache emptied in every step."
    yield ""
    yield f"Without it the step takes {_ratio(cost['step'])} of the time"
    if cost["driver_calls"]:
        (before, after), (peak, without) = cost["driver_calls"], cost["peak_reserved_bytes"]
        yield (
            f"({cost['step']['old_s'] / MS:.2f} ms with it, {cost['step']['new_s'] / MS:.2f} without); the driver is called {before:g} "
            f"times a step with it, {after:g} without; peaks of reserved memory are {peak / GB:.2f} and {without / GB:.2f} GB."
        )


def search(found: Found) -> Iterator[str]:
    """cuDNN's search."""
    yield (
        f"Three convolutions of 64 channels in FP32. Sizes that change: {found['varying']}. A step on a size that is new takes "
        f"{found['varying_step_s_off'] / MS:.1f} ms without the search and {found['varying_step_s_on'] / MS:.1f} ms with it "
        f"(medians). One size: {found['fixed']}."
    )


def pinned(found: Found) -> Iterator[str]:
    """Planned and active pinned memory."""
    active = found.get("active_bytes")
    yield found["text"] + (
        f". torch's host allocator gave {active / 2**30:.4g} GiB; {sum(found['planned_bytes']) / 2**30:.4g} were planned."
        if active is not None
        else "."
    )


def allocator(found: Found) -> Iterator[str]:
    """Settings."""
    comparison = found["comparison"]
    yield ""
    yield ""
    yield "| setting | step ms | of the time | peak allocated GB | peak reserved GB | retries |"
    yield "|---|---|---|---|---|---|"
    for name, runs in comparison["runs"].items():
        states = [run["state"] for run in runs if run["state"]]
        ratio = comparison["ratios"].get(name)
        times = sorted(run["step_s"] for run in runs)
        peaks = [
            f"{max(state[key] for state in states) / GB:.2f}" if states else "-"
            for key in ("peak_allocated_bytes", "peak_reserved_bytes")
        ]
        retries = sum(state["retries"] for state in states)
        yield (
            f"| {name} | {times[len(times) // 2] / MS:.2f} | {_ratio(ratio) if ratio else '1'} | {' | '.join(peaks)} | "
            f"{retries} |"
        )
    for name, why in {**comparison["failed"], **comparison["declined"]}.items():
        yield f"\n{name}: {why}"
    yield f"\nTo keep: {comparison['best']}."


def _ratio(ratio: Found) -> str:
    return f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


TABLES = {
    "padding": ("An odd vocabulary.", padding),
    "layers": ("Single layers.", layers),
    "checkpointing": ("Checkpointing against a target.", checkpointing),
    "channels_last": ("Channels last.", channels_last),
    "timeline": ("Memory by category.", timeline),
    "emptied": ("An emptied cache.", emptied),
    "search": ("cuDNN's search.", search),
    "pinned": ("Page-locked memory.", pinned),
    "allocator": (
        "Allocator settings, GPT-2 124M on 4 rows whose length changes in every step, 64 to 4096.",
        allocator,
    ),
    "tight": ("The same with a tenth more memory than it needs.", allocator),
    "pointer": ("An allocator of one's own, on the same.", allocator),
    "pointer_fixed": ("An allocator of one's own, on 16 rows of 1024.", allocator),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, metavar="PAGE")
    flags = parser.parse_args()
    text = page(measured(flags.raw))
    if flags.into is None:
        print(text)
    else:
        flags.into.write_text(
            replaced(flags.into.read_text(encoding="utf-8"), text), encoding="utf-8"
        )
