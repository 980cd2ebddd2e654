"""Tunes training scripts that others wrote, unmodified, and prints what came of it.

The scripts and their manifest are those of `foreign_scripts.py`. Each is tuned from its clean folder; then, where a plan
was written, it runs twice bare and once with the plan. The table tells what was kept and proven, whether any file of
the script's folder was changed by the tune, whether the exit codes are equal, and how far what the script saves lies
from the bare run's (beside how far two bare runs lie apart).

    python benchmarks/foreign_tunes.py MANIFEST [--only NAME ...] [--budget 180s] [--out DIR] [--json FILE]

Exit code 1 when a tune fails, a file was changed, or an exit code differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foreign_scripts import Script, clean, command, run

#: A gain that counts: the lower bound of 1 - t_new / t_old.
GAIN = 0.03


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    origin: str
    exit_code: int
    tune_s: float
    kept: list[str]
    ratio: float | None  # of the proof
    ci95: list[float] | None
    changed: list[str]  # files of its folder that are not as they were
    exit_codes: str
    apart: str  # how far saved tensors lie apart
    note: str

    @property
    def good(self) -> bool:
        """Whether nothing came to harm."""
        return self.exit_code == 0 and not self.changed and "DIFFER" not in self.exit_codes

    @property
    def gains(self) -> bool:
        """Whether a gain above the limit is proven."""
        return self.ci95 is not None and self.ci95[1] < 1 - GAIN


def files_of(folder: Path) -> dict[str, str]:
    """Returns a digest of every file below a folder, caches of the interpreter left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Returns the files that came, went or changed."""
    return sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))


def tuned(
    script: Script, python: str, flopwise: str, env: dict[str, str], out: Path, budget: str
) -> tuple[int, float, dict[str, Any] | None, list[str]]:
    """Returns the exit code of a tune, how long it took, its record, and the files that it changed."""
    clean(script)
    path, folder = out / f"{script.name}-tune.json", out / f"{script.name}-tune"
    path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    before, began = files_of(Path(script.cwd)), time.monotonic()
    options = ["--json", str(path), "--out", str(folder), "--budget", budget]
    words = command(script, python, [flopwise, "tune", *options])
    with open(out / f"{script.name}-tune.txt", "wb") as log:
        done = subprocess.run(
            words, cwd=script.cwd, env={**os.environ, **env, **script.env}, stdout=log, stderr=log
        )
    record = json.loads(path.read_text()) if path.exists() else None
    took_s = time.monotonic() - began
    return done.returncode, took_s, record, changes(before, files_of(Path(script.cwd)))


def distance(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Returns ||a - b|| / ||b|| over all tensors that two runs saved; None where they cannot be compared."""
    import torch

    apart = total = 0.0
    for name, tensor in other.items():
        mine = one.get(name)
        if mine is None or mine.shape != tensor.shape:
            return None
        if tensor.is_floating_point():
            a, b = mine.to(torch.float64), tensor.to(torch.float64)
            apart += float((a - b).square().sum())
            total += float(b.square().sum())
    return (apart / total) ** 0.5 if total else None


def saved(script: Script) -> dict[str, Any]:
    """Returns the tensors that a script has just saved, by file and name."""
    import torch

    found: dict[str, Any] = {}

    def walk(thing: Any, name: str) -> None:
        if isinstance(thing, torch.Tensor):
            found[name] = thing
        elif isinstance(thing, dict):
            for key, value in thing.items():
                walk(value, f"{name}/{key}")

    for output in script.outputs:
        path = Path(script.cwd, output)
        try:
            walk(torch.load(path, map_location="cpu", weights_only=True), output)
        except Exception as error:  # not a checkpoint, or one with objects in it
            print(f"{script.name}: {output} is not compared ({type(error).__name__})", flush=True)
    return found


def with_plan(
    script: Script, python: str, flopwise: str, env: dict[str, str], out: Path, plan: str
) -> tuple[str, str]:
    """Returns how exit codes and saved tensors of a run with the plan compare with two bare ones."""
    runs, tensors = [], []
    for k in (1, 2):
        runs.append(run(script, command(script, python, None), env, out / f"{script.name}-bare{k}"))
        tensors.append(saved(script))
    options = ["--plan", plan, "--out", str(out / f"{script.name}-planned")]
    shutil.rmtree(out / f"{script.name}-planned", ignore_errors=True)
    words = command(script, python, [flopwise, "run", *options])
    runs.append(run(script, words, env, out / f"{script.name}-planned"))
    tensors.append(saved(script))
    codes = [r.exit_code for r in runs]
    equal = f"equal ({codes[0]})" if len(set(codes)) == 1 else f"DIFFER {codes}"
    bare, planned = distance(tensors[1], tensors[0]), distance(tensors[2], tensors[0])
    if bare is None or planned is None:
        return equal, "saves none" if not script.outputs else "not comparable"
    return equal, f"{planned:.2g} (bare runs {bare:.2g})"


def row(
    script: Script, python: str, flopwise: str, env: dict[str, str], out: Path, budget: str
) -> Row:
    """Tunes one script and returns its line."""
    code, took_s, record, changed = tuned(script, python, flopwise, env, out, budget)
    record = record or {}
    speedup = record.get("speedup") or {}
    plan, codes, apart = record.get("plan"), "no plan", ""
    if plan:
        codes, apart = with_plan(script, python, flopwise, env, out, plan)
    notes = record.get("notes") or []
    return Row(
        name=script.name,
        origin=script.origin,
        exit_code=code,
        tune_s=took_s,
        kept=list(record.get("kept") or []),
        ratio=speedup.get("ratio"),
        ci95=speedup.get("ci95"),
        changed=changed,
        exit_codes=codes,
        apart=apart,
        note=str(notes[0])[:200] if notes and not plan else "",
    )


def table(rows: list[Row]) -> str:
    """Returns the Markdown table."""
    lines = [
        "| script | kept | t_new / t_old (95 %) | exit codes | saved tensors apart from a bare run's | files changed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        kept = ", ".join(r.kept) or r.note or "nothing"
        ratio = f"{r.ratio:.3f} ({r.ci95[0]:.3f} to {r.ci95[1]:.3f})" if r.ratio and r.ci95 else ""
        changed = ", ".join(r.changed) or "none"
        cells = (r.name, kept, ratio, r.exit_codes, r.apart, changed)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts alone")
    parser.add_argument("--budget", default="180s", help="of each tune (default: 180s)")
    parser.add_argument("--flopwise", help="default: the one beside the manifest's python")
    parser.add_argument("--out", type=Path, default=Path("foreign-tunes"), help="logs and records")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    arguments = parser.parse_args()
    manifest = json.loads(arguments.manifest.read_text())
    python = manifest["python"]
    flopwise = arguments.flopwise or str(Path(python).parent / "flopwise")
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**manifest.get("env", {}), "PATH": path}
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    scripts = [Script(**entry) for entry in manifest["scripts"]]
    if arguments.only:
        unknown = set(arguments.only) - {s.name for s in scripts}
        if unknown:
            raise SystemExit(f"not in {arguments.manifest}: {', '.join(sorted(unknown))}")
        scripts = [s for s in scripts if s.name in arguments.only]
    rows = []
    for script in scripts:
        rows.append(row(script, python, flopwise, env, out, arguments.budget))
        last = rows[-1]
        print(
            f"{script.name}: {'good' if last.good else 'NOT GOOD'}, {last.tune_s:.0f} s, kept "
            f"{', '.join(last.kept) or 'nothing'} {last.ratio or ''}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    print(table(rows))
    print(f"{sum(r.gains for r in rows)} of {len(rows)} gain more than {GAIN:.0%} for certain")
    return 0 if all(r.good for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
