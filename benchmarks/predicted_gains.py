"""Holds predicted gains against measured ones, over any number of tunes.

python benchmarks/predicted_gains.py runs/*/tune.json                                    # prints the table
python benchmarks/predicted_gains.py --add benchmarks/results/cpu/tunes.json NAME=FOLDER ...   # keeps them there, too

A path is a tune's folder or tune.json, what gpu/tune_models.py has found, or a file that --add made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwise.records.verdict import Trial
from flopwise.trials.predictions import Gain, agreement, gains
from flopwise.units import percent

#: Of a trial, what is kept.
FIELDS = ("fix", "name", "verdict", "ratio", "ci95", "predicted_ratio")
#: Where the results have tunes.
PATTERNS = ("tunes*.json", "tune_models*.json")
WANTED_ERROR, WANTED_FACTOR = 0.25, 2


def read(path: Path) -> dict[str, list[Trial]]:
    """Returns the trials of the tunes in a file, by their names.

    Raises:
        ValueError: it holds no tune.
    """
    path = path / "tune.json" if path.is_dir() else path
    data = json.loads(path.read_text("utf-8"))
    found: dict[str, Any] = {}
    if str(data.get("schema", "")).startswith("flopwise.tune/"):
        found = {path.parent.name: data}
    elif "models" in data:
        found = {name: one["tune"] for name, one in data["models"].items() if "tune" in one}
    elif "tunes" in data:
        found = data["tunes"]
    else:
        raise ValueError(f"{path}: no tune in it")
    return {name: trials_of(one) for name, one in found.items()}


def trials_of(tune: Mapping[str, Any]) -> list[Trial]:
    """Returns the trials of one tune, as it is stored."""
    return [_trial(trial) for trial in tune.get("trials") or ()]


def _trial(data: Mapping[str, Any]) -> Trial:
    ci95 = data.get("ci95")
    return Trial(
        data["fix"], data["name"], data["verdict"], "", data.get("ratio"), None if ci95 is None else (ci95[0], ci95[1]),
        predicted_ratio=data.get("predicted_ratio"),
    )  # fmt: skip


def results(folder: Path) -> dict[str, list[Trial]]:
    """Returns the trials of all tunes among the results, the device before the name."""
    paths = sorted({path for pattern in PATTERNS for path in folder.rglob(pattern)})
    return {
        f"{name}, {path.parent.name}": trials
        for path in paths
        for name, trials in read(path).items()
    }


def report(tunes: Mapping[str, Iterable[Trial]]) -> str:
    """Returns the table in Markdown, and what it comes to."""
    found = gains(tunes)
    if not found:
        return f"Of {counted(len(tunes))} no trial has a prediction and a measurement."
    rows = ["| tune | fix | verdict | predicted gain | measured gain (95 %) | error | |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    rows += [_row(gain) for gain in found]
    return "\n".join([*rows, "", summary(found, len(tunes))])


def counted(tunes: int) -> str:
    """Returns a number of tunes in words."""
    return f"{tunes} tune{'' if tunes == 1 else 's'}"


def _row(gain: Gain) -> str:
    error = "-" if gain.error_frac is None else percent(gain.error_frac)
    measured = f"{percent(gain.measured)} ({percent(gain.low)} to {percent(gain.high)})"
    said = "below half" if gain.below else "above" if gain.above else ""
    return f"| {gain.tune} | {gain.fix} {gain.name} | {gain.verdict} | {percent(gain.predicted)} | {measured} | {error} | {said} |"


def summary(found: Sequence[Gain], tunes: int) -> str:
    """Returns the median error, and the shares of predictions that are far off, in a sentence or two."""
    all_of_them = agreement(found)
    assert all_of_them is not None
    shown = all_of_them.trials
    parts = [
        f"{len(found)} trials of {counted(tunes)} have both, {shown} of them a gain for certain."
    ]
    if all_of_them.median_error_frac is not None:
        error, below = all_of_them.median_error_frac, all_of_them.pessimistic
        parts.append(
            f"Median error of these {percent(error)} (wanted: at most {percent(WANTED_ERROR)}); {below} of {shown} "
            f"({percent(below / shown)}) predicted more than {WANTED_FACTOR}x below the lower bound of the measured gain, "
            f"{all_of_them.optimistic} above its upper bound."
        )
    if all_of_them.unshown:
        parts.append(
            f"Of {all_of_them.unshown} where no gain was shown, {all_of_them.unshown_optimistic} were predicted above what "
            "can have been gained."
        )
    return " ".join(parts)


def add(path: Path, named: Mapping[str, Path]) -> None:
    """Keeps tunes in a file of results, beside those that are there."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {"tunes": {}}
    for name, source in named.items():
        source = source / "tune.json" if source.is_dir() else source
        data = json.loads(source.read_text("utf-8"))
        kept["tunes"][name] = {
            "created": data["created"],
            "speedup": data.get("speedup"),
            "aa_spread_frac": data.get("aa_spread_frac"),
            "trials": [{key: trial.get(key) for key in FIELDS} for trial in data["trials"]],
        }
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the table is printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tunes", nargs="+", metavar="[NAME=]PATH")
    parser.add_argument(
        "--add", type=Path, metavar="FILE", help="keep the tunes in this file, by their names"
    )
    args = parser.parse_args(argv)
    named: dict[str, Path] = {}
    for word in args.tunes:
        name, _, path = word.rpartition("=")
        named[name or Path(path).name] = Path(path)
    if args.add is not None:
        add(args.add, named)
    tunes: dict[str, list[Trial]] = {}
    for name, path in named.items():
        found = read(path)
        one = len(found) == 1
        tunes.update(
            {name if one else f"{name}, {inner}": trials for inner, trials in found.items()}
        )
    print(report(tunes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
