"""Writes the section "Measured on an H200" of docs/kit/graph.md from raw results.

    python kit_graph_page.py --merge parts_gpt2.json checks.json ... > ../results/h200/kit_graph.json
    python kit_graph_page.py ../results/h200/kit_graph.json

The first makes one result of several runs of kit_graph.py, without the paths of the machine; the second prints
Markdown. What was not measured is left out or said to be so.
"""

from __future__ import annotations

import argparse
import json
import re
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
    parts = [
        f"One {result['gpu']}, torch {result['torch']}, batches on the device, arms in turns in one process for each model "
        "(`benchmarks/gpu/kit_graph.py`, raw figures in `benchmarks/results/h200/kit_graph.json`). Compilations are cold, "
        f"with {result['compile_threads']} threads. Memory is the peak of the allocator, reserved memory included where "
        "graphs hold it. Steps to break even: the seconds of compiling and capturing over what a step gains against the same step "
        "without, by the table's own figures. An expert's `torch.compile` is the same model, batch and parts without the kit."
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
    yield "| parts | step | against bf16 alone | peak memory | compiled and captured in | steps to break even |"
    yield "|---|---|---|---|---|---|"
    plain = arms.get("eager", {}).get("step_ms")
    for name, label in ARMS.items():
        if name in arms:
            yield _row(label, arms[name], plain)
    mine, other = (arms.get(n, {}).get("step_ms") for n in ("in place together", "by hand"))
    if mine and other:
        yield ""
        yield f"All with `compile_in_place` takes {100 * mine / other:.1f} % of the time of an expert's step."


def _row(label: str, row: dict[str, Any], plain: float | None) -> str:
    problem = row.get("error") or row.get("left_out")
    if "step_ms" not in row:
        return f"| {label} | – | not measured: {_last_line(problem or 'stopped')} | – | – | – |"
    why = row.get("reason") or row.get("captured_reason")
    gain = f"{plain / row['step_ms']:.2f} x" if plain else "–"
    memory = "–"
    if "allocated_gb" in row:
        held = (
            max(row["allocated_gb"], row["reserved_gb"])
            if row.get("graphs")
            else row["allocated_gb"]
        )
        memory = f"{held:.1f} GB"
    spent = f"{row['spent_s']:.1f} s" if "spent_s" in row else "–"
    even = "–"
    if "spent_s" in row:
        even = (
            f"{row['break_even_steps']:,}".replace(",", " ") if row["break_even_steps"] else "never"
        )
    if why:
        label = f"{label} (eager: {_last_line(why)})"
    return f"| {label} | {row['step_ms']:.2f} ms | {gain} | {memory} | {spent} | {even} |"


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
