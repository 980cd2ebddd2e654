"""Tables of what ledgers were held against: known faults, raw traces, measured savings.

Each function takes the folder of results and returns Markdown. What failed or was not run has its row, with the reason.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flopwise import units

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from ledger_compare import LINE_LIMIT_FRAC, Gain, put_prediction
from ledger_jobs import bases, table_jobs
from ledger_lines import Program, programs
from markdown_tables import signed, table, with_errors

UNKNOWN = ("cause", "predicted_frac", "saved_frac", "overstated_frac")
LINES_HEAD = [
    "program",
    "truth, ms",
    "moved, ms",
    "lines that moved, ms",
    "all others, ms",
    "the runs, ms",
    "ratio (95 %)",
    "first finding",
    "gain predicted",
    "true",
    "verdict",
]


def lines(results: Path) -> str:
    """Returns the table of lines against known faults, a row a program, by the run that counts."""
    runs = _line_runs(results)
    return table(LINES_HEAD, (_line_row(p, _counted(runs[p.name])) for p in programs()))


def earlier_lines(results: Path) -> str:
    """Returns the same table of the runs that do not count, since the program was measured again."""
    rows = []
    runs = _line_runs(results)
    for program in programs():
        every = [run for run in runs[program.name] if run["row"]["verdict"] != "not run"]
        counted = _counted(runs[program.name])
        for run in every:
            if run is not counted:
                cells = _line_row(program, run)
                rows.append([f"{cells[0]}{_other_size(run, counted)}", *cells[1:]])
    return table(LINES_HEAD, rows)


def jobs(results: Path) -> str:
    """Returns the table of what the ledgers of well-known jobs rest on, and the jobs that were not run."""
    rows = [
        [
            name,
            f"{job['figures']['step_ms']:.2f} ms",
            units.percent(job["record"]["mfu"]["value"]),
            units.percent(job["figures"]["busy_frac"]),
            signed(job["busy_ratio"]),
            _residual(job),
            units.percent(job["figures"]["unattributed_frac"]),
            units.percent(job["figures"]["idle_frac"]),
            "yes" if job["figures"]["trusted"] else "; ".join(job["figures"]["untrusted_because"]),
        ]
        for name, job in _ledgers(results).items()
    ]
    head = ["job", "step", "MFU", "device busy", "against the raw trace", "residual"]
    head += ["unattributed", "idle", "trusted"]
    return f"{table(head, rows)}\n\nNot run: {', '.join(_jobs_not_run(results))}."


def job_lines(results: Path) -> str:
    """Returns all lines of these ledgers, in ms with 95 % error bars."""
    found = _ledgers(results)
    ledgers = {name: job["record"]["ledger"] for name, job in found.items()}
    order = list(dict.fromkeys(line["name"] for one in ledgers.values() for line in one["lines"]))
    last = ["idle_input", "idle_sync", "idle_launch", "idle_device", "idle_other", "residual"]
    order = [*(n for n in order if n not in last), *(n for n in last if n in order)]
    rows = []
    for name in order:
        cells = []
        for ledger in ledgers.values():
            line = next((one for one in ledger["lines"] if one["name"] == name), None)
            cells.append("" if line is None else _ms(line["s"], line["ci95"], ledger["step_s"]))
        rows.append([f"`{name}`", *cells])
    steps = [
        _ms(job["record"]["step_s"]["mean"], job["record"]["step_s"]["ci95"], ledger["step_s"])
        for job, ledger in zip(found.values(), ledgers.values(), strict=True)
    ]
    return table(["line, ms", *ledgers], [*rows, ["step", *steps]])


def gains(results: Path) -> str:
    """Returns the table of predicted gains against measured savings, all pairs; unmeasured ones with their reason."""
    head = ["job", "fix", "finding", "predicted", "when measured", "saved (95 %)", "overstated"]
    return table([*head, "verdict"], (_gain_row(*pair) for pair in _gains(results)))


def key(results: Path) -> str:
    """Returns the result of all of these in a few sentences."""
    runs = _line_runs(results)
    rows = [_counted(runs[p.name])["row"] for p in programs() if p.causes]
    passed = [row for row in rows if row["verdict"] == "pass"]
    sure = [
        row
        for row in passed
        if max(abs(row["ratio_low"] - 1), abs(row["ratio_high"] - 1)) <= LINE_LIMIT_FRAC
    ]
    found = _ledgers(results)
    busy = max(abs(job["busy_ratio"] - 1) for job in found.values())
    failing = [job for job in found.values() if not _by_construction(job)]
    residual = max(abs(job["figures"]["residual_frac"]) for job in failing)
    judged = [(x, then) for x, then in _gains(results) if x["overstated_frac"] is not None]
    over = [x["overstated_frac"] for x, _ in judged]
    below = [-part for part in over if part <= 0]
    above_then = sum(then is not None and then > x["saved_frac"] for x, then in judged)
    return (
        f"Of {len(rows)} scripts with one known fault, in {len(passed)} the ledger's lines moved within 15 % of what the fault costs "
        f"and the first finding named it; in {len(sure)} of them the whole 95 % interval is within 15 %, too. In {len(found)} ledgers of "
        f"well-known jobs the device was busy as long as the raw trace says, within {100 * busy:.2f} %; the residual was at most "
        f"{100 * residual:.1f} % of the step in the {len(failing)} where it is not 0 by construction. Of {len(over)} gains, as they are "
        f"predicted today from the windows recorded then, {len(below)} are below the measured saving, by {100 * min(below):.0f} to "
        f"{100 * max(below):.0f} % of it, and {len(over) - len(below)} above; as they were predicted before it was measured, {above_then} "
        "were above."
    )


def _line_runs(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns each program's runs in their order: its row, and the two records where there are any."""
    runs: dict[str, list[dict[str, Any]]] = {program.name: [] for program in programs()}
    for path in sorted((results / "h200").glob("ledger_lines_*.json")):
        data = json.loads(path.read_text("utf-8"))
        for row in data["rows"]:
            runs[row["name"]].append({"row": row, "raw": data["raw"].get(row["name"], {})})
    return runs


def _counted(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the run that counts: the later one, unless it did not finish and another did."""
    finished = [run for run in runs if run["row"]["trusted"]]
    tried = [run for run in runs if run["row"]["verdict"] != "not run"]
    none: dict[str, Any] = {
        "row": {"verdict": "not run", "reasons": [], "truth_s": None, "trusted": {}},
        "raw": {},
    }
    return (finished or tried or runs or [none])[-1]


def _line_row(program: Program, run: dict[str, Any]) -> list[str]:
    row = run["row"]
    verdict = row["verdict"]
    if verdict == "FAIL" and not row["trusted"]:
        verdict = "not finished"
    if row["reasons"]:
        verdict += f": {_why(row)}"
    for arm, because in (row["untrusted_because"] if row["trusted"] else {}).items():
        if because:
            verdict += f"; with the fault {arm} not trusted: {'; '.join(because)}"
    truth, true = "" if program.causes else "no fault", ""
    if row["truth_s"] is not None:
        low, high = row["truth_ci95"]
        truth = f"{1e3 * row['truth_s']:.2f} ± {5e2 * (high - low):.2f}"
        true = units.percent(row["true_gain_frac"])
    if not row["trusted"]:
        return [program.name, truth, *[""] * 7, true, verdict]
    by_line = row["by_line_s"].items()
    moved = ", ".join(f"`{name}` {1e3 * s:.2f}" for name, s in by_line if round(1e3 * s, 2))
    first = row["first"] or "none"
    if row["ratio"] is None:  # without a fault nothing moves: what of the step is idle
        return [program.name, truth, "", f"idle: {moved}", "", "", "", first, "", "", verdict]
    ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    gain = row["predicted_gain_frac"]
    predicted = "none" if gain is None else units.percent(gain)
    total, rest, runs = (f"{1e3 * row[n]:.2f}" for n in ("moved_s", "rest_s", "runs_moved_s"))
    numbers = [total, moved, rest, runs, ratio]
    return [program.name, truth, *numbers, first, predicted, true, verdict]


def _why(one: dict[str, Any]) -> str:
    """Returns the reasons of a row or pair in words."""
    reasons = one["reasons"] if "reasons" in one else [one["reason"]]
    return "; ".join(re.sub(r"^\w+Error: ", "", reason).rstrip(": ") for reason in reasons)


def _other_size(run: dict[str, Any], counted: dict[str, Any]) -> str:
    sizes = [
        one["raw"].get("on", {}).get("throughput", {}).get("samples_per_step")
        for one in (run, counted)
    ]
    if None in sizes or sizes[0] == sizes[1]:
        return ""
    return f", {sizes[0]:g} samples a step instead of {sizes[1]:g}"


def _files(results: Path, part: str) -> dict[str, list[dict[str, Any]]]:
    """Returns what came of jobs by the file of results, in the order in which they were measured."""
    paths = sorted((results / "h200").glob(f"ledger_{part}.json"))
    paths += sorted((results / "h200").glob(f"ledger_{part}_*.json"))
    return {path.name: json.loads(path.read_text("utf-8"))["outcomes"] for path in paths}


def _outcomes(results: Path, part: str) -> list[dict[str, Any]]:
    return [one for outcomes in _files(results, part).values() for one in outcomes]


def _ledgers(results: Path) -> dict[str, dict[str, Any]]:
    """Returns all jobs that have a ledger, each by its last run: those of the table, and the bases of the gains."""
    every = [*_outcomes(results, "table"), *_outcomes(results, "gains")]
    return {job["name"]: job for job in every if (job["record"] or {}).get("ledger")}


def _jobs_not_run(results: Path) -> Iterator[str]:
    """Yields the jobs and bases without a ledger, with the reason where there is one."""
    reasons = {
        job["name"]: _why(job)
        for part in ("table", "gains")
        for job in _outcomes(results, part)
        if job["reasons"]
    }
    have = _ledgers(results)
    names = [*(job.name for job in table_jobs()), *(base.job.name for base in bases())]
    for name in dict.fromkeys(names):
        if name not in have:
            yield f"{name} ({reasons[name]})" if name in reasons else name


def _by_construction(job: dict[str, Any]) -> bool:
    """Returns whether the residual of a ledger could not but be 0: its idle time is the step less the busy time."""
    from_what: str = job["record"]["ledger"]["live"]["idle_from"]
    return from_what.startswith("the undisturbed step less") and not job["figures"]["residual_frac"]


def _residual(job: dict[str, Any]) -> str:
    if _by_construction(job):
        return "0 by construction"
    return f"{100 * job['figures']['residual_frac']:+.2f} %"


def _ms(s: float, ci95: list[float], step_s: float) -> str:
    low, high = ci95
    return with_errors(1e3 * s, 1e3 * low, 1e3 * high, 3 if step_s < 0.01 else 2)


def _gains(results: Path) -> Iterator[tuple[dict[str, Any], float | None]]:
    """Yields all pairs, in the order of the bases, each with what was predicted when its saving was measured.

    The prediction of a pair is what flopwise says today of the recorded windows of its run, where that was read again. One that
    nobody tried has the reason of its base.
    """
    again = _again(results)
    tried: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
    reasons: dict[str, str] = {}
    for file, outcomes in _files(results, "gains").items():
        for one in outcomes:
            reasons[one["name"]] = _why(one)
            for gain in one["gains"]:
                if gain["saved_frac"] is not None or (one["name"], gain["fix"]) not in tried:
                    tried[one["name"], gain["fix"]] = gain, file
    for base in bases():
        for fix in base.fixes:
            none: dict[str, Any] = dict.fromkeys(UNKNOWN)
            none |= {"base": base.job.name, "fix": fix.name, "verdict": "not run"}
            none["reason"] = reasons.get(base.job.name, "")
            gain, file = tried.get((base.job.name, fix.name), (none, ""))
            findings = again.get(file, {}).get(base.job.name, [])
            read_again = any(finding["cause"] in fix.causes for finding in findings)
            if not read_again or gain["saved_frac"] is None:
                yield gain, gain["predicted_frac"]
                continue
            now = Gain(gain["base"], gain["fix"], list(fix.causes))
            now.saved_frac, now.saved_low = gain["saved_frac"], gain["saved_low"]
            now.saved_high = gain["saved_high"]
            put_prediction(now, {"findings": findings}, fix.advice)
            yield asdict(now), gain["predicted_frac"]


def _again(results: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns the findings of today's flopwise on recorded windows, by file of results and base."""
    path = results / "h200" / "ledger_again.json"
    found: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(path.read_text("utf-8"))
    return found


def _gain_row(gain: dict[str, Any], when_measured: float | None) -> list[str]:
    verdict = gain["verdict"]
    if gain["reason"]:
        verdict += f": {_why({'reason': gain['reason']})}"
    over = gain["overstated_frac"]
    shown = (
        "" if over is None else "nothing was saved" if math.isinf(over) else f"{100 * over:+.0f} %"
    )
    return [
        gain["base"],
        gain["fix"],
        gain["cause"] or "",
        *("" if x is None else units.percent(x) for x in (gain["predicted_frac"], when_measured)),
        "" if gain["saved_frac"] is None else _saved(gain),
        shown,
        verdict,
    ]


def _saved(gain: dict[str, Any]) -> str:
    saved, low, high = (100 * gain[name] for name in ("saved_frac", "saved_low", "saved_high"))
    return f"{saved:.2f} % ({low:.2f} to {high:.2f})"


TABLES = {
    "ledger_key": key,
    "ledger_lines": lines,
    "ledger_lines_earlier": earlier_lines,
    "ledger_jobs": jobs,
    "ledger_job_lines": job_lines,
    "ledger_gains": gains,
}
