"""Measures `flopwise.kit.precision` on this machine's device and writes raw JSON.

    python benchmarks/gpu/kit_precision.py --out precision.json [--only scaler_sync,mixed] [--budget-s 500] [--tiny]

A section that fails is recorded as such, and the others go on. `--keep` keeps the sections of an earlier run that the
file has, where machine and versions are the same. `--tiny` makes all of it small enough for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that repeat to the bit

import torch
from precision import dtypes, scaling

from flopwise.errors import PrecisionWarning

SECTIONS = {
    "scaler_equal": scaling.equal,
    "scaler_sync": scaling.sync,
    "scaler_overhead": scaling.overhead,
    "mixed": dtypes.mixed,
    "tf32": dtypes.tf32,
    "master_weights": dtypes.master_weights,
    "fp8": dtypes.float8,
}
#: Of a section, whatever the budget.
MOST_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections that are asked for; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--budget-s", type=float, default=500.0, help="seconds in all (default 500)"
    )
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--keep", action="store_true", help="keep what --out has of other sections")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    options = parser.parse_args(arguments)
    chosen = [name for name in options.only.split(",") if name] or list(SECTIONS)
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    # What the scaler says of waiting optimizers is part of what is measured, not of the output.
    warnings.simplefilter("ignore", PrecisionWarning)
    result: dict[str, Any] = {"environment": environment(), "tiny": options.tiny, "sections": {}}
    if options.keep and options.out.exists():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))
        same = all(
            earlier["environment"][k] == v for k, v in result["environment"].items() if k != "time"
        )
        if not same or earlier["tiny"] != options.tiny:
            parser.error(f"--keep: {options.out} is of another machine: {earlier['environment']}")
        result["sections"] = earlier["sections"]
    end = time.monotonic() + options.budget_s
    for name in chosen:
        found = section(name, options.tiny, end)
        if "skipped" not in found or name not in result["sections"]:
            result["sections"][name] = found
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in s for s in result["sections"].values()))


def section(name: str, tiny: bool, end: float) -> dict[str, Any]:
    """Runs one section; returns its result, or the error that ended it."""
    start = time.monotonic()
    if start > end:
        print(f"{name}: left out, the budget is spent", flush=True)
        return {"skipped": "the budget was spent"}
    print(f"{name} ...", flush=True)
    try:
        found = SECTIONS[name](tiny, min(end, start + MOST_S))
    except Exception as error:
        traceback.print_exc()
        said = re.sub(
            r"(/[\w.+@-]+)+/", "", str(error)
        )  # folders of a machine are of no use elsewhere
        found = {"error": f"{type(error).__name__}: {said}"}
    found["took_s"] = round(time.monotonic() - start, 1)
    words = (
        found.get("error")
        or found.get("skipped")
        or {True: "ok", False: "NOT ok"}.get(found.get("ok"), "done")
    )
    print(f"{name}: {words} ({found['took_s']} s)", flush=True)
    return found


def environment() -> dict[str, Any]:
    """Returns what the figures depend on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    sys.exit(main())
