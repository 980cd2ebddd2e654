"""Runs training scripts that others wrote, bare and under `flopwise run`, and prints how they compare.

The scripts lie outside the repository; a JSON manifest describes them (docs/foreign-scripts.md). Each runs
twice bare and once metered, unmodified, from the same clean folder. The table tells for each script whether
the steps were found (against the script's own log), MFU or the reason why there is none, and whether the
standard output, the exit code and the saved weights are those of the bare script. What the two bare runs do
not agree on cannot be compared and is marked so.

    python benchmarks/foreign_scripts.py MANIFEST [--only NAME ...] [--bare] [--out DIR]

Exit code 1 when any script differs from its bare runs or a step count is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: More steps than any script here takes: the meter never detaches, so its total is the whole run.
NEVER = 1_000_000

LAUNCHES = ("script", "module", "command", "nproc:N")


@dataclass(frozen=True)
class Script:
    """One entry of the manifest."""

    name: str
    origin: str  # owner/repo@commit and path
    cwd: str
    argv: list[str]
    launch: str  # see LAUNCHES
    steps: dict[str, Any]  # how the true number of optimizer steps is read: see true_steps
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)  # files to compare, relative to cwd
    remove: list[str] = field(default_factory=list)  # files and folders removed before each run
    drop: list[str] = field(default_factory=list)  # patterns cut out of stdout: times, rates
    unordered: bool = False  # several processes write at once: see comparable
    timeout_s: float = 300.0
    note: str = ""


@dataclass(frozen=True)
class Run:
    """What one run of a script left."""

    exit_code: int
    seconds: float
    stdout: str
    digests: dict[str, str]  # output -> digest, "missing" where it was not written


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    origin: str
    steps_found: int | None
    steps_true: int
    boundary: str
    micro_batches: float | None
    mfu: float | None
    reason: str
    coverage_frac: float | None
    stdout: str
    exit_code: str
    outputs: str
    bare_s: float
    metered_s: float
    note: str
    whole: bool  # the meter stayed to the end, so that its total can be held against the truth

    @property
    def good(self) -> bool:
        """True when nothing differs and the steps were found."""
        same = not any("DIFFERS" in text for text in (self.stdout, self.exit_code, self.outputs))
        if not self.whole:
            return same and self.steps_found is not None and self.steps_found <= self.steps_true
        return same and self.steps_found == self.steps_true


def command(script: Script, python: str, flopwise: list[str] | None) -> list[str]:
    """Returns the command line: bare, or behind `flopwise run OPTIONS` when those words are given."""
    words, launch = script.argv, script.launch
    if launch == "script":
        return [*flopwise, *words] if flopwise else [python, *words]
    if launch == "module":
        return [*flopwise, "-m", *words] if flopwise else [python, "-m", *words]
    if launch == "command":
        return [*flopwise, "--", *words] if flopwise else words
    if launch.startswith("nproc:"):
        ranks = ["--standalone", f"--nproc-per-node={launch.removeprefix('nproc:')}"]
        if flopwise:
            return [*flopwise, *ranks, *words]
        return [python, "-m", "torch.distributed.run", *ranks, *words]
    raise SystemExit(f"{script.name}: launch {launch!r} is not one of {', '.join(LAUNCHES)}")


def clean(script: Script) -> None:
    """Removes what an earlier run wrote."""
    for name in script.remove:
        path = Path(script.cwd, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def tensors(path: Path) -> list[tuple[str, bytes]]:
    """Returns the named bytes of a torch checkpoint's tensors; nothing for any other or a broken file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if re.search(r"/data/\d+$", name)]
            return [(name.split("/", 1)[1], archive.read(name)) for name in sorted(names)]
    except zipfile.BadZipFile:
        return []


def digest(path: Path) -> str:
    """Returns a digest of a file's content; of a torch checkpoint, of its tensors alone.

    A checkpoint is a zip whose members `*/data/N` are the tensors' bytes; its pickle may hold times.
    """
    if not path.exists():
        return "missing"
    total = hashlib.sha256()
    for name, content in tensors(path) or [("", path.read_bytes())]:
        total.update(name.encode() + content)
    return total.hexdigest()


def run(script: Script, words: list[str], env: dict[str, str], log: Path) -> Run:
    """Runs a script once from a clean folder, its output into LOG.out and LOG.err."""
    clean(script)
    full = {**os.environ, **env, **script.env}
    start = time.monotonic()
    with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
        child = subprocess.Popen(
            words, cwd=script.cwd, env=full, stdout=out, stderr=err, start_new_session=True
        )
        try:
            exit_code = child.wait(script.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            exit_code = child.wait()
            print(f"{script.name}: over {script.timeout_s:.0f} s, ended", file=sys.stderr)
    stdout = Path(f"{log}.out").read_text(errors="replace")
    digests = {name: digest(Path(script.cwd, name)) for name in script.outputs}
    return Run(exit_code, time.monotonic() - start, stdout, digests)


def true_steps(script: Script, stdout: str) -> int:
    """Returns the true number of optimizer steps, read off the script's own output or flags.

    `{"count": RE}` counts matching lines, `{"last": RE}` takes the group of the last match, `{"number": N}`
    is set by a flag; `plus` adds what is known not to be logged, `per_rank` divides by the ranks.
    """
    rule = script.steps
    if "number" in rule:
        return int(rule["number"])
    if "last" in rule:
        found = re.findall(rule["last"], stdout, re.MULTILINE)
        return int(found[-1]) if found else 0
    count = len(re.findall(rule["count"], stdout, re.MULTILINE))
    return count // (script.ranks if rule.get("per_rank") else 1) + int(rule.get("plus", 0))


def comparable(script: Script, stdout: str) -> list[str]:
    """Returns the output without what changes from run to run, as lines.

    Where several processes write into one stream without buffers, as under torchrun, even lines break: there the
    characters are compared, in any order.
    """
    for pattern in script.drop:
        stdout = re.sub(pattern, "", stdout, flags=re.MULTILINE)
    return sorted("".join(stdout.split())) if script.unordered else stdout.splitlines()


def compare(first: object, second: object, metered: object) -> str:
    """Returns how the metered run compares with two bare ones."""
    if first != second:
        return "bare runs differ"
    return "equal" if metered == first else "DIFFERS"


def row(
    script: Script, bare: list[Run], metered: Run, record: dict[str, Any] | None, whole: bool
) -> Row:
    """Returns the line of one script."""
    steps = (record or {}).get("steps", {})
    mfu = (record or {}).get("mfu", {})
    texts = [comparable(script, r.stdout) for r in (*bare, metered)]
    outputs = [compare(*(r.digests[name] for r in (*bare, metered))) for name in script.outputs]
    missing = [name for name in script.outputs if bare[0].digests[name] == "missing"]
    if missing:
        outputs.append(f"never written: {', '.join(missing)}")
    return Row(
        name=script.name,
        origin=script.origin,
        steps_found=steps.get("total"),
        steps_true=true_steps(script, metered.stdout),
        boundary=steps.get("boundary", ""),
        micro_batches=steps.get("micro_batches"),
        mfu=mfu.get("value"),
        reason=(mfu.get("reason") or "") if record else "no record",
        coverage_frac=mfu.get("coverage_frac"),
        stdout=compare(*texts),
        exit_code=compare(*(r.exit_code for r in (*bare, metered))) + f" ({metered.exit_code})",
        outputs=", ".join(sorted(set(outputs))) or "saves none",
        bare_s=min(r.seconds for r in bare),
        metered_s=metered.seconds,
        note=script.note,
        whole=whole,
    )


def measure(
    script: Script, python: str, flopwise: str, env: dict[str, str], out: Path, whole: bool
) -> Row:
    """Runs one script twice bare and once metered, and returns its line."""
    bare = [
        run(script, command(script, python, None), env, out / f"{script.name}-bare{i}")
        for i in (1, 2)
    ]
    path = out / f"{script.name}.json"
    path.unlink(missing_ok=True)
    folder = out / f"{script.name}-run"
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--json", str(path), "--out", str(folder)]
    if whole:
        options += ["--steps", str(NEVER)]
    words = command(script, python, [flopwise, "run", *options])
    metered = run(script, words, env, out / f"{script.name}-metered")
    record = json.loads(path.read_text()) if path.exists() else None
    return row(script, bare, metered, record, whole)


def only_bare(script: Script, python: str, env: dict[str, str], out: Path) -> str:
    """Runs one script twice bare and returns one line about it: is it repeatable, and how long does it take?"""
    first, second = (
        run(script, command(script, python, None), env, out / f"{script.name}-bare{i}")
        for i in (1, 2)
    )
    texts = [comparable(script, r.stdout) for r in (first, second)]
    return (
        f"{script.name:26} exit {first.exit_code}/{second.exit_code} "
        f"{first.seconds:5.1f} s {second.seconds:5.1f} s, {true_steps(script, first.stdout):4d} steps, "
        f"stdout {'repeats' if texts[0] == texts[1] else 'differs'}, outputs "
        + ", ".join(
            "missing" if a == "missing" else "repeat" if a == second.digests[name] else "differ"
            for name, a in first.digests.items()
        )
    )


def table(rows: list[Row]) -> str:
    """Returns the Markdown table."""
    lines = [
        "| script | steps found / true | step ends with | MFU, or why not | coverage | stdout | exit code | saved files |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        boundary = r.boundary
        if r.micro_batches is not None and abs(r.micro_batches - 1) > 0.005:
            boundary += f", {r.micro_batches:.3g} backwards"
        mfu = f"{r.mfu:.2%}" if r.mfu is not None else r.reason
        coverage = "" if r.coverage_frac is None else f"{r.coverage_frac:.1%}"
        found = "none" if r.steps_found is None else str(r.steps_found)
        found += f" / {r.steps_true}"
        if r.whole and r.steps_found != r.steps_true:
            found += " WRONG"
        cells = (r.name, found, boundary, mfu, coverage, r.stdout, r.exit_code, r.outputs)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts alone")
    parser.add_argument("--bare", action="store_true", help="two bare runs each, nothing metered")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="measure as users do: the meter leaves after its own number of steps, so totals are not compared",
    )
    parser.add_argument("--flopwise", help="default: the one beside the manifest's python")
    parser.add_argument("--out", type=Path, default=Path("foreign-runs"), help="logs and records")
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
        if arguments.bare:
            print(only_bare(script, python, env, out), flush=True)
            continue
        rows.append(measure(script, python, flopwise, env, out, not arguments.detach))
        print(f"{script.name}: {'good' if rows[-1].good else 'NOT GOOD'}", file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    if rows:
        print(table(rows))
    return 0 if all(r.good for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
