"""The input kit on a GPU: correctness, the link, images, JPEG files, mapped memory, the tuner; raw figures as JSON.

    python benchmarks/gpu/kit_input.py --out kit_input.json                     everything, about 14 minutes on 16 cores
    python benchmarks/gpu/kit_input.py --out a.json --only link,mapped          some sections
    python benchmarks/gpu/kit_input.py --out a.json --tiny                      small sizes: also on a CPU

Each section runs in a process of its own with at most --section-s seconds; one that fails is recorded with its error,
and the others go on. The file is written after each section.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from kit_input_claims import broken_claims

#: Section: the module that holds it (a function of the section's name) and what it shows.
SECTIONS = {
    "correctness": ("kit_input_correctness", "many small batches through every path, to the bit"),
    "link": ("kit_input_link", "25, 100 and 400 MB batches against four ordinary ways"),
    "images": ("kit_input_images", "decoded images with the usual CPU work"),
    "jpeg": ("kit_input_images", "JPEG files decoded on the device or on the workers"),
    "mapped": ("kit_input_mapped", "kernels that read page-locked memory; GPUDirect Storage"),
    "tuner": ("kit_input_images", "the loader's settings found by the device's wait"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", required=True, help="file for the raw figures")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no section begins after it")
    parser.add_argument("--section-s", type=float, default=175.0, help="most of one section")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--batches", type=int, default=0, help="of correctness; 0: 100,000")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(
            f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}"
        )
    return options


def machine() -> dict[str, Any]:
    """Returns what the figures were taken on."""
    import os

    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def run_inside(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a section's figures, or its error."""
    begun = time.perf_counter()
    try:
        section = getattr(importlib.import_module(SECTIONS[name][0]), name)
        found: dict[str, Any] = section(options)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {**found, "machine": machine(), "seconds": time.perf_counter() - begun}


def run_apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a section's figures from a process of its own; what ended it where it came to no end."""
    print(f"== {name}: {SECTIONS[name][1]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--out", str(part), "--only", name, "--inside"]
        command += ["--section-s", str(options.section_s), "--batches", str(options.batches)]
        command += ["--tiny"] * options.tiny
        try:
            done = subprocess.run(command, timeout=options.section_s * 1.5 + 30, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {options.section_s * 1.5 + 30:.0f} s"}
        if not part.exists():
            return {"error": f"ended with code {done.returncode} before its figures were written"}
        found: dict[str, Any] = json.loads(part.read_text())[name]
        return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections; returns 1 where one failed or a claim does not hold."""
    options = parse(arguments)
    begun = time.monotonic()
    figures: dict[str, Any] = {}
    for name in options.only.split(","):
        if time.monotonic() - begun > options.budget_s:
            figures[name] = {"error": "not begun: the time was up"}
        else:
            figures[name] = (
                run_inside(name, options) if options.inside else run_apart(name, options)
            )
        if not options.inside:
            print(json.dumps(figures[name].get("summary", figures[name].get("error"))), flush=True)
        Path(options.out).write_text(json.dumps(figures, indent=1) + "\n")
    failed = any("error" in found for found in figures.values())
    if options.inside:
        return int(failed)
    on_device = any("device" in found.get("machine", {}) for found in figures.values())
    broken = broken_claims(figures, sizes_are_real=on_device and not options.tiny)
    print("\n".join(broken) if broken else "every claim that was measured holds", flush=True)
    return int(failed or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
