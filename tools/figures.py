"""Writes the tables of measured figures into the documents, from benchmarks/results, so that no figure is typed by hand.

python tools/figures.py            writes them between their marks
python tools/figures.py --check    exit code 1 if a document does not hold what the results say

In a document a table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwise import units

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import counter_figures
import ledger_figures
import predicted_gains
import quality_figures
from markdown_tables import difference, interval, table
from overhead_verdict import fit, pooled, together, verdict

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "overhead.md",
    ROOT / "docs" / "ledger.md",
    ROOT / "docs" / "ledger-truth.md",
    ROOT / "docs" / "report.md",
    ROOT / "docs" / "tune-report.md",
    ROOT / "docs" / "time-to-quality.md",
)
_MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the tables are written, or with --check if they are current."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    check = options.parse_args(argv).check
    old = []
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            old.append(page.name)
            if not check:
                page.write_text(after, encoding="utf-8")
    if check and old:
        print(
            f"not what benchmarks/results says: {', '.join(old)}. Run tools/figures.py",
            file=sys.stderr,
        )
        return 1
    return 0


def filled(text: str) -> str:
    """Returns a document with its tables as the results have them."""
    return _MARKED.sub(lambda m: f"{m[1]}{made(m[2])}\n{m[3]}", text)


def made(name: str) -> str:
    """Returns what stands between the marks of this name."""
    if name in TABLES:
        return TABLES[name]()
    tables = {**ledger_figures.TABLES, **counter_figures.TABLES, **quality_figures.TABLES}
    return tables[name](RESULTS)


def step_truth() -> str:
    """Returns the table of our step time and MFU against the truth on an H200."""
    jobs: dict[str, dict[str, Any]] = {}
    for path in sorted((RESULTS / "h200").glob("step_truth*.json")):
        jobs.update(
            {job["name"]: job for job in json.loads(path.read_text("utf-8")) if job["timed"]}
        )
    head = ["job", "step", "by CUDA events", "differs by", "MFU", "by hand", "differs by"]
    return table(
        head,
        (
            [
                name,
                f"{job['ours_ms']:.2f} ms",
                f"{job['truth_ms']:.2f} ms",
                difference(job["step_ratio"]),
                units.percent(job["mfu"]),
                units.percent(job["mfu_by_hand"]),
                difference(job["mfu_ratio"]),
            ]
            for name, job in sorted(jobs.items())
        ),
    )


def overhead() -> str:
    """Returns the table of what the meter costs, one row a device and length of step; several runs are pooled."""
    files = {p: json.loads(p.read_text("utf-8")) for p in sorted(RESULTS.rglob("overhead*.json"))}
    passing = next(data["passing"] for data in files.values() if "passing" in data)
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    after: list[list[str]] = []
    for data in files.values():
        where = f"{data['device']}, torch {data['torch']}"
        for case in data["cases"]:
            found.setdefault((where, case["case_ms"], case["waits"]), []).append(case)
        if detached := data.get("detached"):
            step = f"{detached['case_ms']:g} ms, after detaching"
            shown = detached["verdict"].split(":")[-1].strip()
            after.append([where, step, "1", interval(detached["detached"]), "", "", shown])
    rows = []
    for (where, _, waits), every in found.items():
        cases = [case for case in every if fit(case["control"])] or every
        total = pooled([together(case, passing) for case in cases])
        control = pooled([case["control"] for case in cases])
        limit = cases[0]["limit_frac"]
        step = " and ".join(f"{case['step_ms']:.1f}" for case in cases)
        rows.append(
            [
                where,
                f"{step} ms{'' if waits == 'nothing' else f', the {waits} waits'}",
                f"{len(cases)} of {len(every)}",
                interval(total),
                interval(control),
                units.percent(max(case["own_frac"] for case in cases)),
                f"{units.percent(limit)}: {verdict(total, limit, control)}",
            ]
        )
    head = ["device", "step", "runs", "cost (95 %)", "control (95 %)", "by the meter's own clock"]
    head.append("limit")
    return table(head, rows + after)


def predictions() -> str:
    """Returns predicted against measured gains of all tunes among the results."""
    return predicted_gains.report(predicted_gains.results(RESULTS))


TABLES = {"step_truth": step_truth, "overhead": overhead, "predicted_gains": predictions}

if __name__ == "__main__":
    sys.exit(main())
