"""L113: positions are computed that hold no token."""

from __future__ import annotations

from typing import Any

import pytest

HALF = ([2048, 2048], "c10::BFloat16")


@pytest.fixture
def made(job: Any) -> Any:
    return job.steps(6, lambda: job.op("aten::mm", 300, HALF, HALF))


def test_a_run_that_counted_tokens(made: Any, scene: Any, found_in: Any) -> None:
    finding = found_in(scene(made, padding_frac=0.68))["padding"]
    assert (finding.code, finding.predicted_gain_frac) == ("L113", None)
    assert "68 % of the positions are padding" in finding.evidence


def test_a_little_of_it_or_a_trace_alone(made: Any, scene: Any, found_in: Any) -> None:
    assert found_in(scene(made, padding_frac=0.04)) == {}
    assert found_in(scene(made)) == {}
