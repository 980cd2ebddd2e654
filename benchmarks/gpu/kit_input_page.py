"""Writes the sections "Measured on an H200" of the pages of kit.input from raw results.

    python benchmarks/gpu/kit_input_page.py benchmarks/results/h200/kit_input.json            docs/kit/input.md
    python benchmarks/gpu/kit_input_page.py benchmarks/results/h200/kit_input.json images     docs/kit/input-images.md

Prints Markdown. Sections that were not measured are left out; one that came to no end says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit_input_claims import LEAST_BANDWIDTH, MOST_RATIO

Writer = Callable[[dict[str, Any]], Iterator[str]]


def page(result: dict[str, Any], which: str = "input") -> str:
    """Returns the section of one page as Markdown; "" where nothing of it was measured."""
    parts = []
    for name, (title, write) in PAGES[which].items():
        found = result.get(name)
        if found is None:
            continue
        if "error" in found:
            parts.append(f"**{title}.** Not measured: {found['error'].rstrip('.')}.")
        else:
            parts.append(f"**{title}.** " + "\n".join(write(found)))
    if not parts:
        return ""
    machines = {
        (found["machine"]["device"], found["machine"]["torch"])
        for found in result.values()
        if "machine" in found
    }
    on = " and ".join(f"one {device}, torch {torch}" for device, torch in sorted(machines))
    head = (
        f"{on[0].upper()}{on[1:]}, arms in turns in one process a part (`benchmarks/gpu/kit_input.py`, raw figures in "
        "`benchmarks/results/h200/kit_input.json`)."
    )
    return "\n\n".join([head, *parts])


def _correctness(found: dict[str, Any]) -> Iterator[str]:
    short, paths = found["summary"], found["paths"]
    checks = sum(p["checks"] for p in paths.values())
    yield (
        f"{short['batches']:,} small batches under random delays through {len(paths)} paths, "
        f"{short['fewest_of_a_path']:,} or more through each: {short['wrong']} were other than what was sent, and "
        f"{checks:,} checks on the device found {short['findings']}. Fences broken on purpose, checks that failed:"
    )
    yield ""
    yield "| what is broken | broken | whole |"
    yield "|---|---|---|"
    for name, told in found["broken"].items():
        if name.startswith("not "):
            continue
        whole = found["broken"].get(f"not {name}")
        yield f"| {name} | {_of(told)} | {_of(whole) if whole else '–'} |"


def _of(told: dict[str, Any]) -> str:
    return f"{told['findings']:,} of {told['checks']:,}"


def _link(found: dict[str, Any]) -> Iterator[str]:
    sizes = found["sizes"]
    if all("arms" in one for one in sizes.values()):
        yield from _steps(sizes)
    else:
        yield "Step times are not measured yet. Bandwidth:"
    yield ""
    for size, one in sizes.items():
        rates = {
            n: sorted(v)[len(v) // 2] / 1e9 for n, v in one["bandwidth"]["bytes_per_s"].items()
        }
        copies = one["host_copies_per_byte"]
        short = found["summary"][size]
        line = (
            f"- {size}: {rates['ours']:.1f} GB/s alone against {rates['bare']:.1f} of a bare `cudaMemcpyAsync`, "
            f"{one['bandwidth']['ratio']:.1%}; {copies['ours']:.2f} host copies a byte against "
            f"{copies['loader with pin_memory']:.2f}"
        )
        if "supply_per_step" in short:
            line += f"; {one['workers']} workers, whose supply is {short['supply_per_step']:.1f} batches a step"
        missed = []
        if one["bandwidth"]["ratio"] < LEAST_BANDWIDTH:
            missed.append(f"{LEAST_BANDWIDTH:.0%} of the bandwidth")
        if short.get("ours_to_synthetic", 0.0) > MOST_RATIO:
            missed.append(f"{MOST_RATIO:.2f} times the step")
        yield f"{line}." + (f" **Missed: {' and '.join(missed)}.**" if missed else "")


def _steps(sizes: dict[str, Any]) -> Iterator[str]:
    arms = ["synthetic", "ours", "loader, to", "loader, non_blocking", "stream prefetcher"]
    yield (
        "Milliseconds a step, and times the step on data that is there already (median, lowest and highest of the rounds):"
    )
    yield ""
    yield "| batch | there already | ours | `pin_memory`, `.to` | `non_blocking` | stream prefetcher |"
    yield "|---|---|---|---|---|---|"
    for size, one in sizes.items():
        row = [f"{1e3 * one['arms']['synthetic']['step_s']:.2f}"]
        row += [_arm(one["arms"][name]) for name in arms[1:]]
        yield f"| {size} | {' | '.join(row)} |"


def _arm(arm: dict[str, float]) -> str:
    return f"{1e3 * arm['step_s']:.2f}, {arm['ratio']:.3f} ({arm['lowest']:.3f} to {arm['highest']:.3f})"


def _mapped(found: dict[str, Any]) -> Iterator[str]:
    by_size = {n.replace(" MB", " MiB"): r for n, r in found["reads_s"].items()}  # as they were
    largest = list(by_size)[-1]
    reads = by_size[largest]
    times = {n: r["kernel over the link"] / r["copy, then kernel"] for n, r in by_size.items()}
    smaller = ", ".join(f"{n}: {t:.2f}" for n, t in list(times.items())[:-1])
    slower = times[largest] > 1
    yield (
        f"{'Declined' if slower else 'Not declined'}: bytes brought over and scaled take "
        f"{1e3 * reads['copy, then kernel']:.2f} ms by a copy and a kernel and {1e3 * reads['kernel over the link']:.2f} ms "
        f"by a kernel that reads page-locked memory where it lies ({largest}: {times[largest]:.2f} times; {smaller})."
    )
    beside = found["beside_s"]
    alone = beside["alone"]
    yield (
        f"Matrix products of {1e3 * alone:.2f} ms take {beside['beside a copy'] / alone - 1:.1%} longer beside a copy and "
        f"{beside['beside a kernel over the link'] / alone - 1:.1%} longer beside such a kernel, which holds processors while it "
        f"waits for the link; the copy engine needs none. {'So batches are copied.' if slower else ''}".rstrip()
    )
    storage = found["storage"]
    yield ""
    if storage["answer"] == "works":
        yield "**GPUDirect Storage.** It is there, and not measured."
    else:
        yield (
            f"**GPUDirect Storage.** Declined: its driver is {'there' if storage['driver'] else 'not there'}, and "
            f"`torch.cuda.gds` answered `{storage['answer']}`. What cannot be measured is not built upon."
        )


def _images(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['step']}; images of 256 x 256 cropped, resized and mirrored by {found['workers']} workers, whose supply "
        f"is {found['summary']['supply_to_need']:.1f} times what the step takes. Ours sends bytes and normalises on the device:"
    )
    yield ""
    yield "| way | step | times the step on data that is there already |"
    yield "|---|---|---|"
    for name, arm in found["arms"].items():
        yield (
            f"| {name} | {1e3 * arm['step_s']:.1f} ms | {arm['ratio']:.3f} ({arm['lowest']:.3f} to {arm['highest']:.3f}) |"
        )


def _jpeg(found: dict[str, Any]) -> Iterator[str]:
    alone, both = found["summary"]["alone_images_per_s"], found["summary"]["with_step_images_per_s"]
    yield (
        f"Files of {found['file_bytes'] / 1e3:.0f} kB to normalised batches, images a second; {found['workers']} workers "
        f"decode (one process alone {found['worker_images_per_s']:,.0f} a second), or {found['workers_for_files']} read files. "
        f"The step is {found['step']}:"
    )
    yield ""
    yield "| way | alone | with the step |"
    yield "|---|---|---|"
    for name, rate in both.items():
        yield f"| {name} | {f'{alone[name]:,.0f}' if name in alone else '–'} | {rate:,.0f} |"


def _tuner(found: dict[str, Any]) -> Iterator[str]:
    held = found["summary"]["held"]
    yield f"{found['step']}:"
    yield ""
    yield "```text"
    yield found["table"]
    yield "```"
    yield ""
    yield (
        f"In turns afterwards, the step with the loader chosen takes {held['ratio']:.2f} times the one with the loader given "
        f"({held['lowest']:.2f} to {held['highest']:.2f})."
    )


PAGES: dict[str, dict[str, tuple[str, Writer]]] = {
    "input": {
        "link": ("Steps and the link", _link),
        "correctness": ("Every batch", _correctness),
        "mapped": ("Kernels that read over the link", _mapped),
    },
    "images": {
        "images": ("Decoded images", _images),
        "jpeg": ("JPEG files", _jpeg),
        "tuner": ("The tuner", _tuner),
    },
}

if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), *sys.argv[2:]))
