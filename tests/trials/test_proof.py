"""What the runs of a final proof prove, and what they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flopwise.hardware.accelerators import Peak
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord
from flopwise.summary import Context, summarise
from flopwise.trials.proof import Conclusion, compare_losses, conclude

Arms = Callable[..., Conclusion]
CODES = ["FW101", "FW102"]
BOTH = ["applied by the plan: FW101 loader-workers, FW102 fused-optimizer"]
FIRST = [
    "planned fix FW102 fused-optimizer left out: it is fused already",
    "applied by the plan: FW101 loader-workers",
]


@pytest.fixture
def run(make_rank: Callable[..., RankRecord]) -> Callable[..., RunRecord]:
    def make(step_ms: float, notes: Sequence[str] = (), code: int = 0, **more: Any) -> RunRecord:
        rank = make_rank(step_ns=int(step_ms * 1e6), **{"steps": 40, "notes": list(notes), **more})
        peak = Peak(1e12, "fp32", "--peak", "given")
        return summarise([rank], Context([], "train.py", exit_code=code, peak=peak))

    return make


@pytest.fixture
def concluded(run: Callable[..., RunRecord]) -> Arms:
    """Returns a function that concludes from three runs an arm, ten and five ms a step; arguments are of the new arm."""

    def make(notes: Sequence[Sequence[str]] = (BOTH,) * 3, **more: Any) -> Conclusion:
        new = more.pop("new", (5.0, 5.1, 4.9))
        old = [run(ms) for ms in (10.0, 10.1, 9.9)]
        arm = [run(ms, said, **more) for ms, said in zip(new, notes, strict=True)]
        return conclude(old, arm, CODES, 40)

    return make


def test_a_gain_that_shows_again_carries_the_plan(concluded: Arms) -> None:
    found = concluded()
    assert (found.applied, found.doubt, found.notes) == (CODES, None, [])
    proof = found.proof
    assert (proof.comparison.outcome, proof.processes_per_arm) == ("faster", 3)
    assert proof.comparison.block_steps == 40


@pytest.mark.parametrize("flops", [10**9, 2 * 10**9, 0])
def test_the_mfu_of_an_arm_is_that_of_its_own_processes(concluded: Arms, flops: int) -> None:
    """1 GFLOP a step as it is against 1 TFLOP/s; what the new arm computes besides, or was not counted, is no other work."""
    proof = concluded(flops=flops).proof
    assert proof.mfu_old == pytest.approx(sum(1 / ms for ms in (10.0, 10.1, 9.9)) / 3)
    assert proof.mfu_new == pytest.approx(sum(1 / ms for ms in (5.0, 5.1, 4.9)) / 3)
    assert proof.work.unit == "samples"


def test_a_fix_that_was_left_out_is_not_proven(concluded: Arms) -> None:
    found = concluded((FIRST,) * 3)
    assert (found.applied, found.doubt) == (["FW101"], None)
    assert found.notes == [FIRST[0]]


@pytest.mark.parametrize(
    ("notes", "doubt"),
    [
        ((FIRST, BOTH, BOTH), "did not all run with the same fixes"),
        ((["applied by the plan: nothing"],) * 3, "no fix was on in every process"),
        (([],) * 3, "no fix was on in every process"),  # the plan was never applied
    ],
)
def test_processes_that_ran_something_else_carry_no_plan(
    concluded: Arms, notes: Sequence[Sequence[str]], doubt: str
) -> None:
    assert doubt in str(concluded(notes).doubt)


def test_other_exit_codes_and_no_gain_carry_no_plan(concluded: Arms) -> None:
    assert "did not end with one exit code" in str(concluded(code=1).doubt)
    assert "did not show the gain again" in str(concluded(new=(10.1, 9.9, 10.0)).doubt)


def test_processes_that_timed_fewer_steps_are_said(concluded: Arms) -> None:
    found = concluded(steps=30)
    assert found.proof.comparison.block_steps == 30
    assert found.notes[0].startswith("a process of the final proof timed 30 of the 40 steps")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([2.0, 2.0], [2.0, 2.0], "losses of step 7 identical in all processes"),
        ([2.0, 2.0], [2.002, 2.002], "differ by 1.0e-03 (relative); processes of the bare script do not"),
        ([2.0, 2.2], [2.1, 2.1], "differ by 0.0e+00 (relative); processes of the bare script differ by 9.5e-02"),
        ([2.0, None], [2.0, 2.0], None),
        ([], [], None),
    ],
)  # fmt: skip
def test_first_losses_are_compared(
    old: list[float | None], new: list[float | None], said: str | None
) -> None:
    found = compare_losses(old, new)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


def test_an_arm_is_three_runs_at_least(run: Callable[..., RunRecord]) -> None:
    one = replace(run(10.0), notes=BOTH)
    with pytest.raises(ValueError, match="3"):
        conclude([one] * 2, [one] * 2, CODES, 40)
