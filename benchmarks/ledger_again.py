"""What flopwise predicts today from the recorded windows of earlier runs of `ledger_jobs.py --part gains`.

python benchmarks/ledger_again.py --of ledger_gains_2.json --ceilings ceilings.json RUNS [RUNS...]

RUNS are the folders that the runs were written to (--work there), each with a folder a base; of a base in several the last counts,
and one whose windows were not kept is left out.
The savings stay those that were measured: this is no new measurement, but the predictions are those of the code as it is.
Written to results/h200/ledger_again.json, beside what it holds of other files of results.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from flopwise import summary
from flopwise.errors import FlopwiseError
from flopwise.measurement.ledgers import ledger_of
from flopwise.records import ceilings, rank, store
from flopwise.records.ceilings import CeilingsRecord
from flopwise.records.rank import RankRecord
from flopwise.records.run import SCHEMA, RunRecord

AGAIN = Path(__file__).resolve().parent / "results" / "h200" / "ledger_again.json"


def main() -> int:
    """Reads every base's windows and writes their findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--of", required=True, help="name of the file of results with the savings")
    parser.add_argument("--ceilings", type=Path, required=True, help="measured on that machine")
    parser.add_argument("--out", type=Path, default=AGAIN)
    flags = parser.parse_args()
    known = store.read(flags.ceilings, CeilingsRecord, ceilings.SCHEMA)
    every = {path.parent.name: path for runs in flags.runs for path in sorted(runs.glob("*/run"))}
    found = {}
    for base, folder in every.items():
        ranks = store.read(next((folder / "ranks").glob("*.json")), RankRecord, rank.SCHEMA)
        record = store.read(folder / "run.json", RunRecord, SCHEMA)
        context = summary.Context(command=[], script="", ceilings=known)
        try:
            ledger = ledger_of(record, ranks, folder, context)
        except FlopwiseError as error:  # its prediction stays the one that was made
            print(f"{base}: {error}")
            continue
        found[base] = [asdict(finding) for finding in ledger.findings]
        print(base, [(one["cause"], one["predicted_gain_frac"]) for one in found[base]])
    kept = json.loads(flags.out.read_text("utf-8")) if flags.out.exists() else {}
    flags.out.write_text(json.dumps({**kept, flags.of: found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
