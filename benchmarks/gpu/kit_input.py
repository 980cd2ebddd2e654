"""The input kit on a GPU: correctness, the link, images, JPEG files, mapped memory, the tuner; raw figures as JSON.

    python benchmarks/gpu/kit_input.py --out kit_input.json                     everything, about 9 minutes on 16 cores
    python benchmarks/gpu/kit_input.py --out a.json --only link,mapped          some sections
    python benchmarks/gpu/kit_input.py --out a.json --tiny                      small sizes: also on a CPU

Each section runs in a process of its own and keeps to its seconds; one that fails is recorded with its error, and the
others go on. The file is written after each section.
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

#: Section: the module that holds it (a function of the section's name), its seconds, and what it shows.
SECTIONS = {
    "correctness": (
        "kit_input_correctness",
        215,
        "many small batches through every path, to the bit",
    ),
    "link": ("kit_input_link", 88, "25, 100 and 400 MB batches against four ordinary ways"),
    "images": ("kit_input_images", 75, "decoded images with the usual CPU work"),
    "jpeg": ("kit_input_images", 75, "JPEG files decoded on the device or on the workers"),
    "mapped": ("kit_input_mapped", 15, "kernels that read page-locked memory; GPUDirect Storage"),
    "tuner": ("kit_input_images", 45, "the loader's settings found by the device's wait"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", required=True, help="file for the raw figures")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no section begins after it")
    parser.add_argument("--section-s", type=float, default=0.0, help="of each; 0: its own")
    parser.add_argument("--add", action="store_true", help="keep what the file has of others")
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


def write(out: str, figures: dict[str, Any]) -> None:
    """Writes the figures so far."""
    Path(out).write_text(json.dumps(figures, indent=1) + "\n")


def run_inside(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a section's figures, or its error."""
    begun = time.perf_counter()
    try:
        told = argparse.Namespace(**vars(options))
        told.section_s = options.section_s or SECTIONS[name][1]
        told.keep = lambda so_far: write(options.out, {name: so_far | {"ended": False}})
        section = getattr(importlib.import_module(SECTIONS[name][0]), name)
        found: dict[str, Any] = section(told)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {**found, "machine": machine(), "seconds": time.perf_counter() - begun}


def run_apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a section's figures from a process of its own; what ended it where it came to no end."""
    print(f"== {name}: {SECTIONS[name][2]}", flush=True)
    most_s = (options.section_s or SECTIONS[name][1]) * 1.4 + 20
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--out", str(part), "--only", name, "--inside"]
        command += ["--section-s", str(options.section_s), "--batches", str(options.batches)]
        command += ["--tiny"] * options.tiny
        try:
            code = subprocess.run(command, timeout=most_s, check=False).returncode
            said = f"ended with code {code} before its figures were written"
        except subprocess.TimeoutExpired:
            said = f"did not end within {most_s:.0f} s"
        found: dict[str, Any] = json.loads(part.read_text())[name] if part.exists() else {}
        if found.pop("ended", True) and found:
            return found
        return {**found, "error": said}  # and what it had written by then


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections; returns 1 where one failed or a claim does not hold."""
    options = parse(arguments)
    begun = time.monotonic()
    figures: dict[str, Any] = {}
    there = Path(options.out)
    others = json.loads(there.read_text()) if options.add and there.exists() else {}
    for name in options.only.split(","):
        if time.monotonic() - begun > options.budget_s:
            figures[name] = {"error": "not begun: the time was up"}
        else:
            figures[name] = (
                run_inside(name, options) if options.inside else run_apart(name, options)
            )
        if not options.inside:
            print(json.dumps(figures[name].get("summary", figures[name].get("error"))), flush=True)
        write(options.out, {**others, **figures})
    failed = any("error" in found for found in figures.values())
    if options.inside:
        return int(failed)
    on_device = any("device" in found.get("machine", {}) for found in figures.values())
    broken = broken_claims(figures, sizes_are_real=on_device and not options.tiny)
    print("\n".join(broken) if broken else "every claim that was measured holds", flush=True)
    return int(failed or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
