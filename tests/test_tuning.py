"""What a final proof must show before a plan is written."""

from __future__ import annotations

import pytest

from flopwise.records.verdict import Proof
from flopwise.trials.compare import compare_runs
from flopwise.tuning import _doubt

OLD, FASTER, SAME = [1.00, 1.01, 0.99], [0.50, 0.51, 0.49], [1.01, 0.99, 1.00]


@pytest.mark.parametrize(
    ("new", "exit_codes_equal", "doubt"),
    [
        (FASTER, True, None),
        (FASTER, False, "did not end with one exit code"),
        (SAME, True, "did not show the gain again"),
    ],
)
def test_a_plan_needs_a_gain_and_equal_exit_codes(
    new: list[float], exit_codes_equal: bool, doubt: str | None
) -> None:
    proof = Proof(compare_runs(OLD, new, 20), 3, 2.3, 2.3, exit_codes_equal)
    found = _doubt(proof)
    assert (found is None) == (doubt is None)
    assert doubt is None or doubt in str(found)
