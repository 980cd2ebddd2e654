"""The lines and calls of ranks as columns, for tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopwise.diagnosis.ranks.summary import PARTS, RankSummary


def lines(ranks: Sequence[RankSummary]) -> dict[str, list[Any]]:
    """Returns the ledger's lines of every recorded step that counts: `rank`, `step`, `name`, `ns`; zeros are left out."""
    found = [
        (one.rank, step, name, float(ns))
        for one in ranks
        for step, of in enumerate(one.lines_ns)
        for name, ns in of.items()
        if ns
    ]
    return {
        name: [row[k] for row in found] for k, name in enumerate(("rank", "step", "name", "ns"))
    }


def calls(ranks: Sequence[RankSummary]) -> dict[str, list[Any]]:
    """Returns the collectives and point-to-point calls of all ranks, as `summary.Calls` describes them, and each one's rank."""
    out: dict[str, list[Any]] = {"rank": []}
    plain = ("op", "dtype", "group", "kernel", "place")
    numbers = (
        "start_ns", "end_ns", "launched_ns", "stream", "nbytes", "group_size", "sequence", "peer", "exposed_ns", "step",
        "backward_pass",
    )  # fmt: skip
    for name in (*plain, *numbers, "members", *(f"before_{part}_ns" for part in PARTS)):
        out[name] = []
    for one in ranks:
        of = one.calls
        out["rank"] += [one.rank] * len(of)
        for name in plain:
            out[name] += getattr(of, name)
        for name in numbers:
            out[name] += getattr(of, name).tolist()
        out["members"] += [list(members) for members in of.members]
        for k, part in enumerate(PARTS):
            out[f"before_{part}_ns"] += of.before[:, k].tolist()
    return out
