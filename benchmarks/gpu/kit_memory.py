"""The memory room of the kit on a device: what each choice gains, predicts and costs, as raw JSON.

Each section runs in a process of its own, within its share of the time, so that one that fails takes no other with it; what
it wrote or failed with is recorded. `--tiny` runs the same code on a CPU with small shapes: does it run, not what it says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECTIONS = (
    "padding",
    "layers",
    "checkpointing",
    "channels_last",
    "timeline",
    "search",
    "emptied",
    "pinned",
    "allocator",
    "tight",
    "pointer",
    "pointer_fixed",
)
#: Most seconds of one section.
SECTION_S = 170.0


def main() -> int:
    """Runs the sections and returns 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kit_memory.json"))
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--budget-s", type=float, default=570.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.section:
        return one(flags.section, flags.tiny, flags.out)
    asked = [name for name in flags.only.split(",") if name]
    unknown = sorted(set(asked) - set(SECTIONS))
    if unknown:
        parser.error(f"no sections {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    end = time.monotonic() + flags.budget_s
    result: dict[str, Any] = {
        "device": "cpu" if flags.tiny else "cuda",
        "tiny": flags.tiny,
        "sections": {},
    }
    for name in asked:
        left = end - time.monotonic()
        if left < 10:
            result["sections"][name] = {"failed": "no time left"}
        else:
            print(f"{name} ...", flush=True)
            start = time.monotonic()
            result["sections"][name] = run(name, flags.tiny, min(left, SECTION_S))
            result["sections"][name]["wall_s"] = round(time.monotonic() - start, 1)
            told = result["sections"][name]
            print(
                f"{name}: {told.get('failed') or told.get('text') or 'done'} ({told['wall_s']} s)",
                flush=True,
            )
        flags.out.write_text(json.dumps(result, indent=1))
    failed = [name for name, found in result["sections"].items() if "failed" in found]
    print(f"written to {flags.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def run(name: str, tiny: bool, timeout_s: float) -> dict[str, Any]:
    """Returns what one section wrote in its own process, or what it failed with."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "section.json"
        words = [sys.executable, str(Path(__file__)), "--section", name, "--out", str(out)]
        try:
            done = subprocess.run(
                words + ["--tiny"] * tiny, timeout=timeout_s, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no end after {timeout_s:.0f} s"}
        if not out.exists():
            return {"failed": f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def one(name: str, tiny: bool, out: Path) -> int:
    """Runs one section here and writes what it found."""
    sys.path[:0] = [str(HERE), str(HERE / "jobs")]
    found: dict[str, Any]
    try:
        import kit_memory_sections as sections

        found = getattr(sections, name)(tiny)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    import torch

    found["torch"] = torch.__version__
    found["python"] = platform.python_version()
    found["alloc_conf"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
