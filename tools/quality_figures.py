"""The table of times to a target quality, from benchmarks/results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flopwise.trials.interval import FEWEST_RUNS, independent_ratio

sys.path.insert(0, str(Path(__file__).resolve().parent))

from markdown_tables import table

HEAD = [
    "script", "arm", "runs at the target", "steps to it", "from the first step", "from the start",
    "time, arm / naive (95 %)", "quality at the end",
]  # fmt: skip


def time_to_quality(results: Path) -> str:
    """Returns a table a device and kind of it, with the arms that are none and why below it."""
    parts = []
    for path in sorted(results.glob("*/time_to_quality.json")):
        data = json.loads(path.read_text("utf-8"))
        where = f"{data['device']}, {data['cores']} cores"
        if data["threads"]:
            where += f", OMP_NUM_THREADS={data['threads']}"
        what = "a CPU, not a GPU" if data["kind"] == "cpu" else "a GPU"
        parts.append(f"**On {what}**: {where}, torch {data['torch']}.{_busy(data)}\n")
        parts.append(
            table(HEAD, (row for name in data["jobs"] for row in _rows(name, data["jobs"][name])))
        )
        parts += [f"\n{_about(name, job)}" for name, job in data["jobs"].items()]
    return "\n".join(parts)


def _busy(data: dict[str, Any]) -> str:
    """Returns what must be said of a machine on which other programs ran, nothing where it was quiet."""
    loads = [run["load"] for job in data["jobs"].values() for run in job["runs"]]
    if not loads or fmean(loads) <= data["cores"]:
        return ""
    return (
        f" Other programs ran: its load was {min(loads):.1f} to {max(loads):.1f} on {data['cores']} cores, so times scatter, and "
        "ratios with them; losses and steps do not depend on it."
    )


def _rows(name: str, job: dict[str, Any]) -> Iterator[list[str]]:
    naive = {run["seed"]: run for run in job["runs"] if run["arm"] == "naive"}
    for arm in job["arms"]:
        runs = sorted(
            (run for run in job["runs"] if run["arm"] == arm), key=lambda run: run["seed"]
        )
        if not runs:
            continue
        hit = [run for run in runs if run["target_step"] is not None]
        ends = [run["evaluations"][-1][1] for run in runs if run["evaluations"]]
        yield [
            name,
            arm if arm == "naive" else f"{arm}: {_fixes(job, arm)}",
            f"{len(hit)} of {len(runs)}",
            _each([run["target_step"] for run in hit], "{:.0f}"),
            _each([run["from_first_step_s"] for run in hit], "{:.1f} s"),
            _each([run["from_start_s"] for run in hit], "{:.1f} s"),
            "" if arm == "naive" else _ratio(naive, hit),
            f"{fmean(ends):.4f} ± {stdev(ends):.4f}" if len(ends) > 1 else "",
        ]


def _fixes(job: dict[str, Any], arm: str) -> str:
    """Returns what was on in the runs of an arm, as they say themselves."""
    said = {note for run in job["runs"] if run["arm"] == arm for note in run["notes"]}
    on = sorted(
        note.removeprefix("applied by the plan: ") for note in said if note.startswith("applied")
    )
    return " or ".join(on) or "nothing"


def _each(values: list[float], form: str) -> str:
    """Returns the mean of values, and the least and the largest."""
    if not values:
        return "-"
    low, mean, high = (form.format(x) for x in (min(values), fmean(values), max(values)))
    return f"{mean} ({low} to {high})"


def _ratio(naive: dict[int, Any], hit: list[dict[str, Any]]) -> str:
    """Returns the ratio of the times from the first step, over pairs of runs with one seed."""
    pairs = [
        (naive[run["seed"]]["from_first_step_s"], run["from_first_step_s"])
        for run in hit
        if naive.get(run["seed"], {}).get("from_first_step_s") is not None
    ]
    if len(pairs) < FEWEST_RUNS:
        return "fewer than three pairs came to it"
    found = independent_ratio([a for a, _ in pairs], [b for _, b in pairs])
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def _about(name: str, job: dict[str, Any]) -> str:
    """Returns a job's target, its command, and the arms that are none."""
    sign = "at least" if job["higher"] else "at most"
    words = f"`{name}`: `{job['script']} {' '.join(job['arguments'])}`, target: {job['metric']} {sign} {job['target']:g}."
    plan = job["plan"]
    if plan is not None and plan["ratio"] is not None:
        low, high = plan["ci95"]
        words += f" Its plan ({', '.join(plan['fixes'])}): t_new / t_old of a step {plan['ratio']:.3f} ({low:.3f} to {high:.3f})."
    for arm, why in job["left_out"].items():
        words += f" No {arm}: {why}."
    return f"- {words}"


TABLES = {"time_to_quality": time_to_quality}
