"""Writes the section "Measured on an H200" of docs/kit/graph.md from raw results.

    python kit_graph_page.py --merge parts_gpt2.json checks.json ... > ../results/h200/kit_graph.json
    python kit_graph_page.py ../results/h200/kit_graph.json

The first makes one result of several runs of kit_graph.py, without the paths of the machine; the second prints
Markdown. What was not measured is left out or said to be so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = {
    "resnet18": "ResNet-18", "resnet50": "ResNet-50", "efficientnet_b4": "EfficientNet-B4", "bert_large": "BERT-large",
    "gpt2": "GPT-2 124M", "llama_1b": "Llama-like 1.3B",
}  # fmt: skip
#: The arms of a table, in its order; those called "all" have bf16, fused optimizer and, for images, channels last.
ARMS = {
    "TF32": "TF32 instead of bf16",
    "attention by hand": "bf16, attention written out",
    "eager": "bf16",
    "channels last": "bf16, channels last",
    "fused": "bf16, fused optimizer",
    "eager together": "all, eager",
    "captured": "all, `CapturedStep`",
    "captured together": "all, `CapturedStep`",
    "in place": "bf16, `compile_in_place`",
    "regional together": "all, `compile_regions`",
    "in place together": "all, `compile_in_place`",
    "in place captured": "all, `compile_in_place` and `CapturedStep`",
    "by hand": "all, an expert's `torch.compile`",
}
#: What compiling may take by default. Source: flopwise/kit/graph/compiled_calls.py.
DEADLINE_S = 120.0
_PATH = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.+<>-]+\.py\b)")


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one result with the sections of several runs, of which later ones win; machine paths are taken out."""
    found = {**results[0], "sections": {}}
    for result in results:
        for name in ("torch", "gpu", "tiny"):
            if result.get(name) != found.get(name):
                raise ValueError(f"{name} differs between the runs")
        found["sections"] |= result["sections"]
    scrubbed: dict[str, Any] = json.loads(_PATH.sub("", json.dumps(found)))
    return scrubbed


def page(result: dict[str, Any]) -> str:
    """Returns the section as Markdown."""
    sections = result["sections"]
    cached = "An expert's"
    if any("cold" not in row for row in _regional(sections)):
        cached = "`compile_regions` and an expert's"
    parts = [
        f"One {result['gpu']}, torch {result['torch']}, batches on the device, arms in turns in one process for each model "
        "(`benchmarks/gpu/kit_graph.py`, raw figures in `benchmarks/results/h200/kit_graph.json`). A step is the median of the "
        "rounds (lowest to highest). Rounds scatter where the host launches a step kernel by kernel and is hardly faster than the device; "
        "a captured step is launched at once and they do not. Memory is the peak of what is allocated; what graphs hold is "
        'not counted as allocated, so what the allocator reserved for them is added. "Ready after" is what the first '
        "steps took beyond as many later ones, some tenths of a second of which are the measurement's own, compiled from an "
        f"empty cache with {result['compile_threads']} threads; steps to break even are those seconds over what a step gains "
        'against the same without ("all, eager" for images, else the fused optimizer, or bf16 alone). An expert\'s '
        f"`torch.compile` is the same model, batch and parts without the kit. {cached} compilation found in the cache what "
        "`compile_in_place` had left there, so what it takes is not shown. A compilation said to be abandoned was given only "
        "the time that was left of the run."
    ]
    for name, title in MODELS.items():
        section = sections.get(f"parts {name}")
        if section is not None:
            parts.append("\n".join(_table(title, section)))
    for name, write in WRITERS.items():
        section = sections.get(name)
        if section is None:
            continue
        problem = section.get("error") or section.get("left_out")
        if problem:
            parts.append(f"**{TITLES[name]}** Not measured: {_last_line(problem)}.")
        else:
            parts.append(f"**{TITLES[name]}** " + "\n".join(write(section)))
    return "\n\n".join(parts)


def _table(title: str, section: dict[str, Any]) -> Iterator[str]:
    arms = section.get("arms")
    if not arms:
        yield f"**{title}.** Not measured: {_last_line(section.get('error') or section.get('left_out') or '')}."
        return
    source = {"own": "written out here"}.get(section["source"], section["source"])
    shape = " x ".join(map(str, section["batch"][0]))
    yield f"**{title}** ({source}), batch {shape}:"
    yield ""
    yield "| parts | step | against bf16 alone | peak memory | ready after | steps to break even |"
    yield "|---|---|---|---|---|---|"
    plain = arms.get("eager", {}).get("step_ms")
    for name, label in ARMS.items():
        if name in arms:
            yield _row(label, arms, name, plain)
    first_s = arms.get("in place together", {}).get("first_s", 0.0)
    if first_s > DEADLINE_S:
        yield ""
        yield (
            f"The first step took {first_s:.0f} s, which is more than `deadline_s` allows by default ({DEADLINE_S:.0f} s): it was "
            "given more here."
        )
    mine, other = (arms.get(n, {}).get("step_s") for n in ("in place together", "by hand"))
    if mine and other:
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        yield ""
        yield (
            f"All with `compile_in_place` takes {statistics.median(ratios):.3f} times as long as an expert's step "
            f"({min(ratios):.3f} to {max(ratios):.3f} by rounds)."
        )


def _regional(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the measured rows of compiled regions."""
    arms = [s.get("arms", {}).get("regional together", {}) for s in sections.values()]
    return [row for row in arms if "step_s" in row]


def spent_s(arms: dict[str, dict[str, Any]], name: str) -> float | None:
    """Returns what the first steps of an arm took beyond as many later ones, seconds.

    None where it has no "base" that it would have to pay for, or did not compile from an empty cache.
    """
    row = arms[name]
    if "base" not in row or (name == "regional together" and "cold" not in row):
        return None
    runs = row.get("set_up_steps", 18 if "capture_s" in row else 4)
    spent = float(row["set_up_s"] - runs * row["step_ms"] / 1e3)
    if row.get("first_s", 0.0) > row["set_up_s"]:  # the code is an earlier arm's
        spent += row["first_s"]
    return max(0.0, spent)


def _row(label: str, arms: dict[str, dict[str, Any]], name: str, plain: float | None) -> str:
    row = arms[name]
    if "step_ms" not in row:
        problem = f": {_last_line(row['error'])}" if "error" in row else ""
        return f"| {label} | not measured{problem} | – | – | – | – |"
    why = row.get("reason") or row.get("captured_reason")
    if why:
        label = f"{label} (eager: {_last_line(why)})"
    times = [1e3 * s for s in row["step_s"]]
    step = f"{row['step_ms']:.2f} ms ({min(times):.2f} to {max(times):.2f})"
    gain = f"{plain / row['step_ms']:.2f} x" if plain else "–"
    memory = "–"
    if "allocated_gb" in row:
        memory = f"{row['allocated_gb'] + row.get('graph_gb', 0.0):.1f} GB"
    spent, even = spent_s(arms, name), "–"
    if spent is not None:
        gained_s = (arms[row["base"]]["step_ms"] - row["step_ms"]) / 1e3
        even = f"{math.ceil(spent / gained_s):,}" if gained_s > 0 else "never"
    return f"| {label} | {step} | {gain} | {memory} | {'–' if spent is None else f'{spent:.1f} s'} | {even} |"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[-1].rstrip(".").replace("|", "/") if lines else "no reason is recorded"


def _equal(section: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{section['steps']} steps in float32 with deterministic algorithms and dropout {section['dropout']}, captured against eager:"
    )
    yield ""
    yield "| optimizer | losses | weights, moments, buffers | random numbers | replays | eager | captured |"
    yield "|---|---|---|---|---|---|---|"
    for name, row in section.items():
        if isinstance(row, dict):
            same = [
                "equal to the bit" if row[f"{n}_equal"] else "NOT equal"
                for n in ("losses", "state", "generators")
            ]
            yield f"| {name} | {' | '.join(same)} | {row['replays']} | {row['eager_ms']:.3g} ms | {row['captured_ms']:.3g} ms |"


def _fold(section: dict[str, Any]) -> Iterator[str]:
    shape = " x ".join(map(str, section["batch"]))
    yield f"ResNet-50 in evaluation ({section['source']}), batch {shape}:"
    yield ""
    yield "| dtype and layout | nodes | kernels | a call | error against float64 |"
    yield "|---|---|---|---|---|"
    for name, row in section.items():
        if isinstance(row, dict):
            before = "–" if row["error_before"] is None else f"{row['error_before']:.1e}"
            yield (
                f"| {name} | {row['nodes_before']} to {row['nodes_after']} | {row['kernels_before']} to {row['kernels_after']} | "
                f"{1e3 * row['before_s']:.2f} ms to {1e3 * row['after_s']:.2f} ms | {before} to {row['error_after']:.1e} |"
            )


def _forms(section: dict[str, Any]) -> Iterator[str]:
    yield "An update (AdamW for language models, SGD with momentum for images):"
    yield ""
    yield "| model | parameters | fused | foreach | for-loop | chosen |"
    yield "|---|---|---|---|---|---|"
    for name, row in section.items():
        if not isinstance(row, dict):
            continue
        if "error" in row:
            yield f"| {MODELS[name]} | – | not measured: {_last_line(row['error'])} | – | – | – |"
            continue
        times = [
            f"{1e3 * row['times_s'][form]:.2f} ms" if form in row["times_s"] else "–"
            for form in ("fused", "foreach", "for-loop")
        ]
        yield f"| {MODELS[name]} | {row['parameters'] / 1e6:.0f} M | {' | '.join(times)} | {row['form']} |"


def _fusion(section: dict[str, Any]) -> Iterator[str]:
    launches = ""
    if section["launches_before"] is not None:
        launches = f"{section['launches_before']} launches to {section['launches_after']}, "
    yield (
        f"Forward and backward of GPT-2: {section['kernels_before']} operations to {section['kernels_after']} kernels in the code, "
        f"{launches}{section['bytes_before'] / 1e9:.1f} GB to {section['bytes_after'] / 1e9:.1f} GB moved (counted from shapes)."
    )


TITLES = {
    "captured_equal": "Equality.",
    "fold": "Folding.",
    "optimizer_forms": "Optimizers.",
    "fusion": "Fusion.",
}
WRITERS = {
    "captured_equal": _equal,
    "fold": _fold,
    "optimizer_forms": _forms,
    "fusion": _fusion,
}


def main() -> None:
    """Merges results, or prints the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--merge", action="store_true")
    flags = parser.parse_args()
    results = [json.loads(file.read_text(encoding="utf-8")) for file in flags.files]
    print(json.dumps(merged(results), indent=1) if flags.merge else page(results[0]))


if __name__ == "__main__":
    main()
