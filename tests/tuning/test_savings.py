"""What a plan saves: exact figures, and nothing where nothing is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flopwise.records.rank import RankRecord
from flopwise.records.run import Cost, RunRecord
from flopwise.records.surroundings import LoaderFacts, Surroundings
from flopwise.records.verdict import Comparison, Proof, Saved
from flopwise.summary import Context, summarise
from flopwise.tuning.savings import savings, steps_of_epoch

FOUND = Comparison("faster", 0.25, (0.24, 0.26), 3, 40, 0.4, 0.1, 0.01, 0.01)
PROOF = Proof(FOUND, 3, None, None, True, j_old=200.0, j_new=50.0, energy="GPU boards only")
PRICED = Cost(3.6, None, None, None, "--price", 2)  # two devices: 0.002 dollars a second
NONE = Cost(None, None, None, None, "no price given")
LOADER = LoaderFacts("train.py:3", 0, None, False, False, 4, 1000, 1)


def test_time_energy_and_money_of_a_step_an_epoch_and_the_run() -> None:
    found = savings(
        PROOF, PRICED, (500.0, "how"), warmup_s=20.0, steps_remaining=10_000, tune_s=600.0
    )
    assert (found.old_s, found.new_s, found.old_j, found.new_j) == (0.4, 0.1, 200.0, 50.0)
    assert (found.old_usd, found.new_usd) == (pytest.approx(0.0008), pytest.approx(0.0002))
    step, epoch, run = found.saved
    assert (step.scope, step.steps, step.s, step.j) == ("step", 1, pytest.approx(0.3), 150.0)
    assert (epoch.scope, epoch.steps, epoch.s, epoch.j) == ("epoch", 500, pytest.approx(150), 75e3)
    assert (run.steps, run.s, run.j) == (10_000, pytest.approx(2980), 1.5e6)  # less the warm-up
    assert run.usd == pytest.approx(2980 * 0.002)
    assert found.tune_usd == pytest.approx(1.2)
    assert found.tune_steps == pytest.approx(620 / 0.3)


def test_no_price_no_counter_and_no_length_are_no_figures() -> None:
    proof = dataclasses.replace(PROOF, j_new=None, energy="not measured: no NVML device")
    found = savings(proof, NONE, (None, "why"), warmup_s=0.0, steps_remaining=None, tune_s=600.0)
    assert found.saved == [Saved("step", 1.0, pytest.approx(0.3), None, None)]
    assert (found.old_usd, found.tune_usd, found.energy, found.epoch) == (
        None, None, "not measured: no NVML device", "why",
    )  # fmt: skip
    missing = dataclasses.replace(PRICED, devices=None, reason="rank 1 is missing")
    assert savings(PROOF, missing, (None, ""), warmup_s=0, steps_remaining=1, tune_s=1).new_usd is None  # fmt: skip


@pytest.fixture
def seen(make_rank: Callable[..., RankRecord]) -> Callable[..., Any]:
    def make(*loaders: LoaderFacts, each: float | None = 1.0) -> tuple[float | None, str]:
        rank = make_rank(surroundings=Surroundings(4, 4, loaders=list(loaders)))
        record: RunRecord = summarise([rank], Context([], "train.py"))
        steps = dataclasses.replace(record.steps, micro_batches=each)
        return steps_of_epoch(dataclasses.replace(record, steps=steps), [rank])

    return make


def test_an_epoch_is_as_long_as_its_loader(seen: Any) -> None:
    assert seen(LOADER) == (1000, "the loader has 1,000 batches")
    assert seen(LOADER, each=4.0) == (250, "the loader has 1,000 batches, 4 a step")
    assert seen(LOADER, LOADER)[0] == 1000  # one that is made anew each epoch


@pytest.mark.parametrize(
    ("loaders", "each", "why"),
    [
        ([], 1.0, "no loader was seen"),
        ([dataclasses.replace(LOADER, batches=None)], 1.0, "the loader has no length"),
        ([LOADER, dataclasses.replace(LOADER, batches=7)], 1.0, "2 loaders of different lengths"),
        ([LOADER], None, "how many batches a step takes was not seen"),
    ],
)
def test_why_an_epoch_is_not_known(seen: Any, loaders: Any, each: Any, why: str) -> None:
    steps, said = seen(*loaders, each=each)
    assert steps is None
    assert said.startswith(why)
