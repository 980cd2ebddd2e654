"""What it costs a process to run apart from the user's files: each of Python's file functions, as it is and as a trial has it.

Both are called in one process in short blocks, one after the other in random order, before anything was written and
after. Calls are on a file of the working folder, six folders deep.

    python benchmarks/apart.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

BLOCKS, CALLS = 60, 300


def measured() -> dict[str, dict[str, list[float]]]:
    """Returns, by state and call, the seconds of a call as it is and as it is here; in a process that runs apart."""
    import io

    open_, stat_, listdir_ = io.open, os.stat, os.listdir
    calls = {
        "open and close, to read": lambda f: f("data.txt").close(),
        "open and close, to write": lambda f: f("out.txt", "w").close(),
        "os.stat": lambda f: f("data.txt"),
        "os.stat of a temporary file": lambda f: f(tempfile.gettempdir()),
        "os.listdir": lambda f: f("."),
    }
    functions = dict(zip(calls, (open_, open_, stat_, stat_, listdir_), strict=True))
    found: dict[str, dict[str, list[float]]] = {}
    for state in ("nothing written yet", "after a write"):
        found[state] = {}
        for name, call in calls.items():
            ours = functions[name]
            bare = ours.__wrapped__  # type: ignore[attr-defined]
            if "write" in name:
                if state == "nothing written yet":
                    continue
                target = Path(tempfile.mkdtemp()) / "out.txt"
                arms = (lambda b=bare, t=target: b(t, "w").close(), lambda c=call, o=ours: c(o))
            else:
                arms = (lambda c=call, b=bare: c(b), lambda c=call, o=ours: c(o))
            found[state][name] = interleaved(arms)
        open_("out.txt", "w").close()
    return found


def interleaved(arms: tuple) -> list[float]:
    """Returns the median seconds of a call of each arm."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(BLOCKS):
        for arm in random.sample((0, 1), 2):
            began = time.perf_counter()
            for _ in range(CALLS):
                arms[arm]()
            times[arm].append((time.perf_counter() - began) / CALLS)
    return [median(times[0]), median(times[1])]


def main() -> int:
    """Runs it in a process apart, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    from flopwise.launch import command
    from flopwise.launch.apart import Apart

    run = Path(tempfile.mkdtemp())
    project = run.parent / f"{run.name}-a" / "b" / "c" / "project"
    project.mkdir(parents=True)
    (project / "data.txt").write_text("x")
    back = os.getcwd()
    os.chdir(project)
    apart = Apart(run, run)
    code = f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r}); import apart; print(json.dumps(apart.measured()))"
    with apart.process(command.environment(run)) as (env, first):
        env[command.DISABLE] = "1"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, preexec_fn=first, capture_output=True, text=True, check=True,
        )  # fmt: skip
        starts = start_s(env, first)
    os.chdir(back)
    found = json.loads(done.stdout)
    print("| call | state | as it is | apart | more |\n|---|---|---|---|---|")
    for state, calls in found.items():
        for name, (bare, ours) in calls.items():
            print(f"| {name} | {state} | {1e6 * bare:.1f} µs | {1e6 * ours:.1f} µs | {1e6 * (ours - bare):.1f} µs |")  # fmt: skip
    print(f"| start of an interpreter | | {1e3 * starts[0]:.0f} ms | {1e3 * starts[1]:.0f} ms | {1e3 * (starts[1] - starts[0]):.0f} ms |")  # fmt: skip
    if options.json:
        content = {"python": platform.python_version(), "machine": platform.machine(), "calls": found, "start_s": starts}  # fmt: skip
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def start_s(env: dict[str, str], first: object) -> list[float]:
    """Returns the median seconds in which an interpreter starts and ends, as it is and apart."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(15):
        for arm in random.sample((0, 1), 2):
            began = time.perf_counter()
            how = {"env": env, "preexec_fn": first} if arm else {}
            subprocess.run([sys.executable, "-c", ""], check=True, **how)  # type: ignore[call-overload]
            times[arm].append(time.perf_counter() - began)
    return [median(times[0]), median(times[1])]


if __name__ == "__main__":
    sys.exit(main())
