"""The memory room of the kit on a device: what each choice gains, predicts and costs, as raw JSON.

Each section runs in a process of its own, within its share of the time, so that one that fails takes no other with it; what
it wrote or failed with is recorded. `--tiny` runs the same code on a CPU with small shapes: does it run, not what it says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
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
SECTION_S = 200.0
#: Characters kept of what a section that failed has written to stderr.
TOLD = 2000


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
                *filter(None, (told.get("traceback"), told.get("stderr"))),
                sep="\n",
                flush=True,
            )
        flags.out.write_text(json.dumps(result, indent=1))
    failed = [name for name, found in result["sections"].items() if "failed" in found]
    print(f"written to {flags.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def run(name: str, tiny: bool, timeout_s: float) -> dict[str, Any]:
    """Returns what one section wrote in its own process, or what it failed with."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "section.json", Path(folder) / "errors"
        words = [sys.executable, "-X", "faulthandler", str(Path(__file__)), "--section", name]
        with errors.open("wb") as into:
            # A session of its own: the processes that it has started end with it.
            section = subprocess.Popen(
                [*words, "--out", str(out), *["--tiny"] * tiny], stderr=into, start_new_session=True
            )
        try:
            code: int | None = section.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(section.pid, signal.SIGKILL)
            section.wait()
        told = errors.read_text(encoding="utf-8", errors="replace").strip()[-TOLD:]
        if not out.exists():
            why = f"no end after {timeout_s:.0f} s" if code is None else f"exit code {code}"
            return {"failed": why, "stderr": told}
        found: dict[str, Any] = json.loads(out.read_text())
        if code:  # it has measured, and died in the end
            found["exit_code"], found["stderr"] = code, told
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
    if "--section" not in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a section ends with this
    sys.exit(main())
