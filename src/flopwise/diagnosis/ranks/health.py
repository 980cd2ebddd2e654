"""Placeholder until the certificate is merged."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import Matching
from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.records.job import Health


def certificate(
    ranks: Sequence[RankSummary], matching: Matching, clocks: Clocks
) -> tuple[Health, dict[int, set[str]]]:
    del ranks, matching, clocks
    return Health(True, [], [], {}), {}
